"""The C interface of UCC, as much of it as is used here; nothing else knows ctypes.

The structures are those of ucc.h of UCC 1.8; older ones of version 1 are shorter at the end, and read as many fields.

The UCC library of this machine, or why there is none.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import contextmanager
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    Union,
    byref,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_size_t,
    c_uint,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ferrodist.errors import BackendUnavailable, DistributedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

if TYPE_CHECKING:
    Block = tuple[int, int]


OK = 0
IN_PROGRESS = 1
_FAILED = -6  # UCC_ERR_NO_MESSAGE: without further meaning

_MULTIPLE = 2  # UCC_THREAD_MULTIPLE

_LIB_THREAD_MODE = 1 << 0
_TEAM_EP, _TEAM_EP_RANGE, _TEAM_OOB = 1 << 2, 1 << 4, 1 << 7

_ALL_TO_ALL_V, _BROADCAST = 1 << 4, 1 << 6
_ARGS_FLAGS = 1 << 0
_COUNTS_64, _PLACES_64 = 1 << 2, 1 << 3
_UINT8 = 5 << 3  # UCC_PREDEFINED_DT(5)

_LOG_VARIABLE = "UCC_TL_UCP_LOG_LEVEL"

_environment = threading.Lock()

_open_teams: set[Team] = set()
"""Teams that UCC has not ended, with all that it may read, write or call. They stay when something has failed."""

_ALLGATHER = CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_void_p, POINTER(c_void_p))
_REQUEST = CFUNCTYPE(c_int, c_void_p)


class LibraryParams(Structure):
    """ucc_lib_params_t, and ucc_lib_attr_t too."""

    _fields_ = (
        ("mask", c_uint64),
        ("thread_mode", c_int),
        ("coll_types", c_uint64),
        ("reduction_types", c_uint64),
        ("sync_type", c_int),
    )


class OutOfBand(Structure):
    """ucc_oob_coll_t."""

    _fields_ = (
        ("allgather", _ALLGATHER),
        ("req_test", _REQUEST),
        ("req_free", _REQUEST),
        ("coll_info", c_void_p),
        ("n_oob_eps", c_uint32),
        ("oob_ep", c_uint32),
    )


class ContextParams(Structure):
    """ucc_context_params_t."""

    _fields_ = (
        ("mask", c_uint64),
        ("type", c_int),
        ("sync_type", c_int),
        ("oob", OutOfBand),
        ("ctx_id", c_uint64),
        ("mem_params", c_void_p * 2),
    )


class TeamParams(Structure):
    """ucc_team_params_t."""

    _fields_ = (
        ("mask", c_uint64),
        ("flags", c_uint64),
        ("ordering", c_int),
        ("outstanding_colls", c_uint64),
        ("ep", c_uint64),
        ("ep_list", c_void_p),
        ("ep_range", c_int),
        ("team_size", c_uint64),
        ("sync_type", c_int),
        ("oob", OutOfBand),
        ("p2p_conn", c_void_p * 5),
        ("mem_params", c_void_p * 2),
        ("ep_map", c_uint64 * 4),
        ("id", c_uint64),
    )


class _Info(Structure):
    _fields_ = (("buffer", c_void_p), ("count", c_uint64), ("datatype", c_uint64), ("mem_type", c_int))


class _InfoV(Structure):
    _fields_ = (
        ("buffer", c_void_p),
        ("counts", c_void_p),
        ("displacements", c_void_p),
        ("datatype", c_uint64),
        ("mem_type", c_int),
    )


class _Side(Union):
    _fields_ = (("info", _Info), ("info_v", _InfoV))


class CollectiveArgs(Structure):
    """ucc_coll_args_t."""

    _fields_ = (
        ("mask", c_uint64),
        ("coll_type", c_int),
        ("src", _Side),
        ("dst", _Side),
        ("op", c_int),
        ("flags", c_uint64),
        ("root", c_uint64),
        ("error_type", c_int),
        ("tag", c_uint16),
        ("global_work_buffer", c_void_p),
        ("cb", c_void_p * 2),
        ("timeout", c_double),
        ("active_set_start", c_uint64),
        ("active_set_stride", c_int64),
        ("active_set_size", c_uint64),
        ("src_memh", c_void_p),
        ("dst_memh", c_void_p),
    )


_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "ucc_get_version": (POINTER(c_uint), POINTER(c_uint), POINTER(c_uint)),
    "ucc_lib_config_read": (c_char_p, c_char_p, POINTER(c_void_p)),
    "ucc_lib_config_release": (c_void_p,),
    "ucc_init_version": (c_uint, c_uint, POINTER(LibraryParams), c_void_p, POINTER(c_void_p)),
    "ucc_lib_get_attr": (c_void_p, POINTER(LibraryParams)),
    "ucc_finalize": (c_void_p,),
    "ucc_context_config_read": (c_void_p, c_char_p, POINTER(c_void_p)),
    "ucc_context_config_release": (c_void_p,),
    "ucc_context_create": (c_void_p, POINTER(ContextParams), c_void_p, POINTER(c_void_p)),
    "ucc_context_progress": (c_void_p,),
    "ucc_context_destroy": (c_void_p,),
    "ucc_team_create_post": (POINTER(c_void_p), c_uint32, POINTER(TeamParams), POINTER(c_void_p)),
    "ucc_team_create_test": (c_void_p,),
    "ucc_team_destroy": (c_void_p,),
    "ucc_collective_init": (POINTER(CollectiveArgs), POINTER(c_void_p), c_void_p),
    "ucc_collective_post": (c_void_p,),
    "ucc_collective_finalize": (c_void_p,),
    "ucc_status_string": (c_int,),
}

_WITHOUT_STATUS = {"ucc_get_version", "ucc_lib_config_release", "ucc_context_config_release"}


class UccError(DistributedError):
    """A function of UCC's failed."""


class Exchange(Protocol):
    """Gives every rank a few bytes of each, while UCC's ranks don't know each other."""

    def begin(self, data: bytes) -> object:
        """Start; returns what the other two take. Raises DistributedError."""

    def is_done(self, under_way: Any) -> bool:
        """Whether all have come. Raises DistributedError when they won't; is not called again once they have."""

    def result(self, under_way: Any) -> bytes:
        """What the ranks gave, one after the other."""


class Library:
    """A UCC library that has been loaded.

    Args:
        path: What the dynamic linker shall load.

    Raises:
        OSError: It can't.
        AttributeError: It is no UCC.
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        for name, types in _PROTOTYPES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, None if name in _WITHOUT_STATUS else c_int
        self._library.ucc_status_string.restype = c_char_p
        numbers = [c_uint() for _ in range(3)]
        self._library.ucc_get_version(*map(byref, numbers))
        self.version: tuple[int, ...] = tuple(number.value for number in numbers)

    def __str__(self) -> str:
        return f"UCC {'.'.join(map(str, self.version))}"

    def call(self, name: str, *args: Any) -> int:
        """Call a function of UCC's and return its status, which is no error's.

        Raises:
            UccError: It is.
        """
        status: int = getattr(self._library, name)(*args)
        if status < 0:
            raise self.error(name, status)
        return status

    def release(self, name: str, handle: c_void_p) -> None:
        """Call one of the functions that can't fail."""
        getattr(self._library, name)(handle)

    def progress(self, context: c_void_p) -> int:
        """ucc_context_progress, which is called all the time."""
        status: int = self._library.ucc_context_progress(context)
        return status

    def error(self, name: str, status: int) -> UccError:
        """A status in our terms."""
        text = (self._library.ucc_status_string(status) or b"?").decode(errors="replace")
        return UccError(
            f"{self} failed in {name}: {text} ({status}). UCC's and UCX's own messages"
            " on standard error may say more; UCC_LOG_LEVEL=info and UCX_LOG_LEVEL=info ask for them."
        )


@dataclass(slots=True, eq=False)
class Transfer:
    """A collective under way.

    Args:
        handle: UCC's.
        kept: What UCC reads and writes.
    """

    handle: c_void_p
    kept: tuple[Any, ...]

    @property
    def status(self) -> int:
        """OK, IN_PROGRESS, or an error: what ucc_collective_test reads."""
        return c_int.from_address(self.handle.value or 0).value


@dataclass(slots=True, eq=False)
class _UnderWay:
    """An exchange that UCC has asked for, and where its result goes."""

    exchange: Any
    target: int
    is_done: bool = False


class Team:
    """The ranks of a group in UCC, in a context of their own. One thread at a time may call it.

    It lives until UCC has ended it, also when nobody else has it any more, and so does every transfer it has begun.

    The context is made without an out-of-band exchange, the team with one. So UCC ends a context without waiting for
    other ranks, and lets a process live when another one dies: see `ucc_tl_ucp_connect_ep` in UCC.

    Attributes:
        process: Where it was made.

    Args:
        library: UCC.
        rank: This rank.
        world_size: Number of ranks.
        exchange: What they tell each other by.

    Raises:
        UccError: UCC refuses.
    """

    def __init__(self, library: Library, rank: int, world_size: int, exchange: Exchange) -> None:
        self.library = library
        self._rank = rank
        self._world_size = world_size
        self._exchange = exchange
        self._error: BaseException | None = None
        self._exchanges: dict[int, _UnderWay] = {}
        self._num_exchanges = 0
        self._transfers: set[Transfer] = set()
        self._callbacks = (_ALLGATHER(self._on_allgather), _REQUEST(self._on_test), _REQUEST(self._on_free))
        self._instance, self._context, self._team = c_void_p(), c_void_p(), c_void_p()
        self.process = os.getpid()
        _open_teams.add(self)
        with _quiet():
            self._open_library()
        self._open_context()
        self._post_team()

    def _open_library(self) -> None:
        library, config = self.library, c_void_p()
        library.call("ucc_lib_config_read", None, None, byref(config))
        try:
            params = LibraryParams(mask=_LIB_THREAD_MODE, thread_mode=_MULTIPLE)
            major, minor = library.version[:2]
            library.call("ucc_init_version", major, minor, byref(params), config, byref(self._instance))
        finally:
            library.release("ucc_lib_config_release", config)
        attributes = LibraryParams(mask=_LIB_THREAD_MODE)
        library.call("ucc_lib_get_attr", self._instance, byref(attributes))
        if attributes.thread_mode < _MULTIPLE:
            raise UccError(f"{library} does not let several threads call it (UCC_THREAD_MULTIPLE)")

    def _open_context(self) -> None:
        library, config = self.library, c_void_p()
        library.call("ucc_context_config_read", self._instance, None, byref(config))
        try:
            library.call("ucc_context_create", self._instance, byref(ContextParams()), config, byref(self._context))
        finally:
            library.release("ucc_context_config_release", config)

    def _post_team(self) -> None:
        oob = OutOfBand(*self._callbacks, None, self._world_size, self._rank)
        mask = _TEAM_EP | _TEAM_EP_RANGE | _TEAM_OOB
        params = TeamParams(mask=mask, ep=self._rank, oob=oob)
        self._checked("ucc_team_create_post", byref(self._context), 1, byref(params), byref(self._team))

    def is_ready(self) -> bool:
        """Go on with making it; whether it is made. Raises when it can't be."""
        for under_way in self._exchanges.values():  # not in UCC's calls, which no exception can pass through
            if not under_way.is_done:
                if not self._exchange.is_done(under_way.exchange):
                    return False
                data = self._exchange.result(under_way.exchange)
                ctypes.memmove(under_way.target, data, len(data))
                under_way.is_done = True
        return self._checked("ucc_team_create_test", self._team) == OK

    def _checked(self, name: str, *args: Any) -> int:
        """Call UCC, which may begin an exchange: what that raised is the reason of UCC's failure."""
        try:
            return self.library.call(name, *args)
        except UccError:
            if self._error is not None:
                raise self._error from None
            raise

    # What UCC calls.

    def _on_allgather(self, source: int, target: int, size: int, _info: int, request: Any) -> int:
        try:
            under_way = _UnderWay(self._exchange.begin(ctypes.string_at(source, size)), target)
        except BaseException as error:  # noqa: BLE001 - raised by _checked
            self._error = error
            return _FAILED
        self._num_exchanges += 1
        self._exchanges[self._num_exchanges] = under_way
        request[0] = self._num_exchanges
        return OK

    def _on_test(self, request: int) -> int:
        return OK if self._exchanges[request].is_done else IN_PROGRESS

    def _on_free(self, request: int) -> int:
        self._exchanges.pop(request, None)
        return OK

    # Collectives of bytes.

    def progress(self) -> None:
        """Move what can be moved."""
        status = self.library.progress(self._context)
        if status < 0:
            raise self.library.error("ucc_context_progress", status)

    def all_to_all(
        self, out: memoryview, incoming: Sequence[Block], source: memoryview, outgoing: Sequence[Block]
    ) -> Transfer:
        """Send block r of ``source``, which is where it begins and its size, to rank r; take rank r's into ``out``."""
        to_counts, to_places, to_kept = _divided(outgoing)
        counts, places, kept = _divided(incoming)
        args = _args(_ALL_TO_ALL_V, _COUNTS_64 | _PLACES_64)
        args.src.info_v = _InfoV(_address(source), to_counts, to_places, _UINT8, 0)
        args.dst.info_v = _InfoV(_address(out), counts, places, _UINT8, 0)
        return self._start(args, (out, source, kept, to_kept))

    def broadcast(self, data: memoryview, root: int) -> Transfer:
        """Copy the root's ``data`` to all."""
        args = _args(_BROADCAST, 0)
        args.src.info = _Info(_address(data), len(data), _UINT8, 0)
        args.root = root
        return self._start(args, (data,))

    def _start(self, args: CollectiveArgs, kept: tuple[Any, ...]) -> Transfer:
        transfer = Transfer(c_void_p(), (args, *kept))
        self._transfers.add(transfer)
        self.library.call("ucc_collective_init", byref(args), byref(transfer.handle), self._team)
        self.library.call("ucc_collective_post", transfer.handle)
        return transfer

    def finish(self, transfer: Transfer) -> None:
        """Release what has ended."""
        self.library.call("ucc_collective_finalize", transfer.handle)
        self._transfers.remove(transfer)

    @property
    def is_busy(self) -> bool:
        """Whether something has been begun and not finished, so that UCC can't be ended."""
        return bool(self._transfers)

    def destroy_team(self) -> bool:
        """Go on with ending it, when nothing is under way; whether it has ended."""
        return self.library.call("ucc_team_destroy", self._team) == OK

    def destroy_context(self) -> None:
        """The rest, once the team has ended. What this rank has sent is given to the network before."""
        self.library.call("ucc_context_destroy", self._context)
        self.library.call("ucc_finalize", self._instance)
        _open_teams.remove(self)


def is_of_parent() -> bool:
    """Whether this process was forked from one that had a team: UCX's state came along, its threads did not."""
    return any(team.process != os.getpid() for team in _open_teams)


@contextmanager
def _quiet() -> Iterator[None]:
    """Have UCC not say that a connection was reset, for each that another rank has closed first; nothing is lost then.

    Its variables are the only way to ask, and are read when a library is opened. A user's come first.
    """
    with _environment:
        if _LOG_VARIABLE in os.environ or "UCC_LOG_LEVEL" in os.environ:
            yield
            return
        os.environ[_LOG_VARIABLE] = "fatal"
        try:
            yield
        finally:
            del os.environ[_LOG_VARIABLE]


def _args(kind: int, flags: int) -> CollectiveArgs:
    return CollectiveArgs(mask=_ARGS_FLAGS if flags else 0, coll_type=kind, flags=flags)


def _divided(blocks: Sequence[Block]) -> tuple[int, int, Any]:
    """Addresses of the sizes and of the places of blocks, and what keeps them."""
    table = np.array([[size for _, size in blocks], [place for place, _ in blocks]], np.uint64)
    start = int(table.ctypes.data)
    return start, start + table.strides[0], table


def _address(data: memoryview) -> int | None:
    return int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else None


_VARIABLE = "FERRODIST_UCC_LIBRARY"
_DEFAULT = "libucc.so.1"
_MAJOR = 1

_loading = threading.Lock()
_loaded: dict[str, Library | str] = {}
"""By path: the library, or why it can't be loaded."""


def load() -> Library:
    """UCC, as the variable FERRODIST_UCC_LIBRARY or else the dynamic linker finds it. Loading starts nothing.

    Raises:
        BackendUnavailable: There is none, or not of version 1, or the process that this one was forked from uses it.
    """
    path = os.environ.get(_VARIABLE) or _DEFAULT
    with _loading:
        if path not in _loaded:
            _loaded[path] = _try(path)
        found = _loaded[path]
    if isinstance(found, str):
        raise BackendUnavailable(
            f"there is no UCC here ({found}): install it, with the UCX it was built with; {_VARIABLE} names the library"
            f" where the dynamic linker does not find {_DEFAULT}"
        )
    if is_of_parent():
        raise BackendUnavailable(
            "UCC can't be used here: the process that this one was forked from has a group over it. Fork before a group"
            " is made or after all are closed, or start a new process instead (multiprocessing's 'spawn')"
        )
    return found


def _try(path: str) -> Library | str:
    try:
        library = Library(path)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a file that somebody has named
        return " ".join(str(error).split()) or type(error).__name__
    if library.version[0] != _MAJOR:
        return f"{path} is {library}, and version {_MAJOR} is needed"
    return library


def is_ucc_available() -> bool:
    """Whether a UCC library can be loaded here; it looks, which loads it, and starts nothing."""
    return why_no_ucc() is None


def why_no_ucc() -> str | None:
    """Why no UCC library can be loaded, or None if one can."""
    try:
        load()
    except BackendUnavailable as error:
        return error.message
    return None
