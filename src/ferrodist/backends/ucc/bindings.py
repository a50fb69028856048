"""The C interface of UCC, as far as it is used here, by ctypes; loading the library.

The structures are those of ucc.h of UCC 1.8. Those of older 1.x versions are shorter at the end, which these versions
don't read.
"""

from __future__ import annotations

import ctypes
import os
import threading
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
from typing import Any

from ferrodist.errors import BackendUnavailable, DistributedError

OK = 0
IN_PROGRESS = 1
ERR_NO_MESSAGE = -6  # without further meaning

THREAD_MULTIPLE = 2

LIB_THREAD_MODE = 1 << 0
TEAM_EP, TEAM_EP_RANGE, TEAM_OOB = 1 << 2, 1 << 4, 1 << 7

ALLTOALLV, BROADCAST = 1 << 4, 1 << 6
ARGS_FLAGS = 1 << 0
COUNTS_64BIT, DISPLACEMENTS_64BIT = 1 << 2, 1 << 3
UINT8 = 5 << 3  # UCC_PREDEFINED_DT(5)

AllgatherCallback = CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_void_p, POINTER(c_void_p))
RequestCallback = CFUNCTYPE(c_int, c_void_p)


class LibraryParams(Structure):
    """ucc_lib_params_t and ucc_lib_attr_t."""

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
        ("allgather", AllgatherCallback),
        ("req_test", RequestCallback),
        ("req_free", RequestCallback),
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


class BufferInfo(Structure):
    """ucc_coll_buffer_info_t."""

    _fields_ = (("buffer", c_void_p), ("count", c_uint64), ("datatype", c_uint64), ("mem_type", c_int))


class BufferInfoV(Structure):
    """ucc_coll_buffer_info_v_t."""

    _fields_ = (
        ("buffer", c_void_p),
        ("counts", c_void_p),
        ("displacements", c_void_p),
        ("datatype", c_uint64),
        ("mem_type", c_int),
    )


class _BufferUnion(Union):
    _fields_ = (("info", BufferInfo), ("info_v", BufferInfoV))


class CollectiveArgs(Structure):
    """ucc_coll_args_t."""

    _fields_ = (
        ("mask", c_uint64),
        ("coll_type", c_int),
        ("src", _BufferUnion),
        ("dst", _BufferUnion),
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
    """A function of UCC failed."""


class Library:
    """A loaded UCC library; raises OSError if ``path`` can't be loaded, AttributeError if it is not UCC."""

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
        """Call a function of UCC and return its status; UccError if that is an error."""
        status: int = getattr(self._library, name)(*args)
        if status < 0:
            raise self.error(name, status)
        return status

    def release(self, name: str, handle: c_void_p) -> None:
        """Call a function that can't fail."""
        getattr(self._library, name)(handle)

    def progress(self, context: c_void_p) -> int:
        """Call ucc_context_progress, on the hot path; returns its status."""
        status: int = self._library.ucc_context_progress(context)
        return status

    def error(self, name: str, status: int) -> UccError:
        """The error of a function's status."""
        text = (self._library.ucc_status_string(status) or b"?").decode(errors="replace")
        return UccError(
            f"{self} failed in {name}: {text} ({status}). UCC's and UCX's own messages"
            " on standard error may say more; UCC_LOG_LEVEL=info and UCX_LOG_LEVEL=info ask for them."
        )


# Loading.

open_teams: set[Any] = set()
"""The teams that UCC has not ended, with everything it may read, write or call. Failed ones stay."""

_VARIABLE = "FERRODIST_UCC_LIBRARY"
_DEFAULT = "libucc.so.1"
_MAJOR = 1

_loading = threading.Lock()
_loaded: dict[str, Library | str] = {}  # by path: the library, or the reason why it can't be loaded


def load() -> Library:
    """Load the UCC library that FERRODIST_UCC_LIBRARY names or else the dynamic linker finds; starts nothing.

    Raises BackendUnavailable if no UCC library of version 1 is found, or this process was forked from one with open
    teams, whose UCX state it has, but not the threads.
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
    if any(team.process != os.getpid() for team in open_teams):
        raise BackendUnavailable(
            "UCC can't be used here: the process that this one was forked from has a group over it. Fork before a group"
            " is made or after all are closed, or start a new process instead (multiprocessing's 'spawn')"
        )
    return found


def _try(path: str) -> Library | str:
    try:
        library = Library(path)
    except Exception as error:  # noqa: BLE001 - the user may have named any file
        return " ".join(str(error).split()) or type(error).__name__
    if library.version[0] != _MAJOR:
        return f"{path} is {library}, and version {_MAJOR} is needed"
    return library


def is_ucc_available() -> bool:
    """Return whether a UCC library can be loaded here; this loads it, and starts nothing."""
    return why_no_ucc() is None


def why_no_ucc() -> str | None:
    """The reason why no UCC library can be loaded, or None if one can."""
    try:
        load()
    except BackendUnavailable as error:
        return error.message
    return None
