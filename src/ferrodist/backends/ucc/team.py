"""A group's UCC team: made with the other ranks by an out-of-band allgather, and the transfers on it."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from contextlib import contextmanager
from ctypes import byref, c_int, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.backends.ucc import bindings as ucc
from ferrodist.backends.ucc.bindings import Library, UccError, open_teams
from ferrodist.errors import RendezvousError, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.interfaces import Block
    from ferrodist.backends.request import Request
    from ferrodist.deadline import Deadline

_FIRST_TAG_NUMBER = 1 << 55
"""Tag numbers from here on are not reached by collectives, whose data travels on the same channel."""


@dataclass(slots=True, eq=False)
class Exchange:
    """An allgather in progress: the data by rank, the pending messages, and the address for the result."""

    payloads: list[bytearray]
    pending: list[Request]
    target: int = 0
    is_done: bool = False


class OobAllgather:
    """UCC's out-of-band allgather, by the control group's messages. Ranks begin them in the same order."""

    def __init__(self, control: Backend, deadline: Deadline) -> None:
        self._control = control
        self._deadline = deadline
        self._tag_numbers = itertools.count(_FIRST_TAG_NUMBER)

    def begin(self, data: bytes) -> Exchange:
        """Begin to exchange ``data``, which has the same size on all ranks."""
        control = self._control
        tag = channel_tag(Channel.DATA, next(self._tag_numbers))
        payloads = [
            bytearray(data) if rank == control.rank else bytearray(len(data)) for rank in range(control.world_size)
        ]
        peers = [rank for rank in range(control.world_size) if rank != control.rank]
        pending = [control.irecv(payloads[rank], rank, tag=tag) for rank in peers]
        pending += [control.isend(data, rank, tag=tag) for rank in peers]
        return Exchange(payloads, pending)

    def poll(self, exchange: Exchange) -> bool:
        """Return whether all data has come, which is then copied to the target; RendezvousError at the deadline."""
        pending = exchange.pending
        while pending and pending[-1].done():
            pending.pop().wait(0)
        if not pending:
            data = b"".join(exchange.payloads)
            ctypes.memmove(exchange.target, data, len(data))
            exchange.is_done = True
            return True
        if self._deadline.expired:
            ranks = tuple(sorted({request.peer for request in pending if not request.done()}))
            for request in pending:
                request.cancel()
            raise RendezvousError(
                f"group {self._control.name!r}: {ranks_text(ranks)} did not exchange UCC's addresses within"
                f" {self._deadline.timeout:g} s. Look at what is going on there, or pass a larger timeout.",
                ranks=ranks,
            )
        return False


@dataclass(slots=True, eq=False)
class Transfer:
    """A collective in progress."""

    handle: c_void_p
    kept: tuple[Any, ...]  # everything that UCC reads and writes

    @property
    def status(self) -> int:
        """OK, IN_PROGRESS, or an error: the field that ucc_collective_test reads."""
        return c_int.from_address(self.handle.value or 0).value


class Team:
    """A group's UCC team, in a context of its own. One thread at a time may call it.

    It lives until UCC has ended it, even without other references, and so does every transfer that it has started.

    The context is made without an out-of-band allgather, the team with one. So UCC ends a context without waiting for
    other ranks, and lets a process live when another one dies: see `ucc_tl_ucp_connect_ep` in UCC.

    Raises:
        UccError: UCC refuses.
    """

    def __init__(self, library: Library, rank: int, world_size: int, oob: OobAllgather) -> None:
        self.library = library
        self._rank = rank
        self._world_size = world_size
        self._oob = oob
        self._error: BaseException | None = None
        self._exchanges: dict[int, Exchange] = {}
        self._num_exchanges = 0
        self._transfers: set[Transfer] = set()
        self._callbacks = (
            ucc.AllgatherCallback(self._on_allgather),
            ucc.RequestCallback(self._on_test),
            ucc.RequestCallback(self._on_free),
        )
        self._instance, self._context, self._team = c_void_p(), c_void_p(), c_void_p()
        self.process = os.getpid()
        open_teams.add(self)
        with _quiet():
            self._open_library()
        self._open_context()
        self._post_team()

    def _open_library(self) -> None:
        library, config = self.library, c_void_p()
        library.call("ucc_lib_config_read", None, None, byref(config))
        try:
            params = ucc.LibraryParams(mask=ucc.LIB_THREAD_MODE, thread_mode=ucc.THREAD_MULTIPLE)
            major, minor = library.version[:2]
            library.call("ucc_init_version", major, minor, byref(params), config, byref(self._instance))
        finally:
            library.release("ucc_lib_config_release", config)
        attributes = ucc.LibraryParams(mask=ucc.LIB_THREAD_MODE)
        library.call("ucc_lib_get_attr", self._instance, byref(attributes))
        if attributes.thread_mode < ucc.THREAD_MULTIPLE:
            raise UccError(f"{library} does not let several threads call it (UCC_THREAD_MULTIPLE)")

    def _open_context(self) -> None:
        library, config = self.library, c_void_p()
        library.call("ucc_context_config_read", self._instance, None, byref(config))
        try:
            library.call("ucc_context_create", self._instance, byref(ucc.ContextParams()), config, byref(self._context))
        finally:
            library.release("ucc_context_config_release", config)

    def _post_team(self) -> None:
        oob = ucc.OutOfBand(*self._callbacks, None, self._world_size, self._rank)
        mask = ucc.TEAM_EP | ucc.TEAM_EP_RANGE | ucc.TEAM_OOB
        params = ucc.TeamParams(mask=mask, ep=self._rank, oob=oob)
        self._checked("ucc_team_create_post", byref(self._context), 1, byref(params), byref(self._team))

    def is_ready(self) -> bool:
        """Go on making the team; whether it is made. Raises the error because of which it can't be."""
        for exchange in self._exchanges.values():  # not in UCC's callbacks, which no exception can pass through
            if not exchange.is_done and not self._oob.poll(exchange):
                return False
        return self._checked("ucc_team_create_test", self._team) == ucc.OK

    def _checked(self, name: str, *args: Any) -> int:
        """Call a function that may begin an exchange; raises the exchange's error in place of UCC's."""
        try:
            return self.library.call(name, *args)
        except UccError:
            if self._error is not None:
                raise self._error from None
            raise

    # UCC's callbacks.

    def _on_allgather(self, source: int, target: int, size: int, _info: int, request: Any) -> int:
        try:
            exchange = self._oob.begin(ctypes.string_at(source, size))
        except BaseException as error:  # noqa: BLE001 - raised by _checked
            self._error = error
            return ucc.ERR_NO_MESSAGE
        exchange.target = target
        self._num_exchanges += 1
        self._exchanges[self._num_exchanges] = exchange
        request[0] = self._num_exchanges
        return ucc.OK

    def _on_test(self, request: int) -> int:
        return ucc.OK if self._exchanges[request].is_done else ucc.IN_PROGRESS

    def _on_free(self, request: int) -> int:
        self._exchanges.pop(request, None)
        return ucc.OK

    # Collectives of bytes.

    def progress(self) -> None:
        """Let UCC move data."""
        status = self.library.progress(self._context)
        if status < 0:
            raise self.library.error("ucc_context_progress", status)

    def all_to_all(
        self, out: memoryview, incoming: Sequence[Block], source: memoryview, outgoing: Sequence[Block]
    ) -> Transfer:
        """Start to send block r of ``source`` to rank r, and to receive rank r's into block r of ``out``."""
        source_counts, source_displacements, source_table = _counts_of(outgoing)
        counts, displacements, table = _counts_of(incoming)
        args = _args(ucc.ALLTOALLV, ucc.COUNTS_64BIT | ucc.DISPLACEMENTS_64BIT)
        args.src.info_v = ucc.BufferInfoV(_address(source), source_counts, source_displacements, ucc.UINT8, 0)
        args.dst.info_v = ucc.BufferInfoV(_address(out), counts, displacements, ucc.UINT8, 0)
        return self._start(args, (out, source, table, source_table))

    def broadcast(self, data: memoryview, root: int) -> Transfer:
        """Start to copy the root's ``data`` to all ranks."""
        args = _args(ucc.BROADCAST, 0)
        args.src.info = ucc.BufferInfo(_address(data), len(data), ucc.UINT8, 0)
        args.root = root
        return self._start(args, (data,))

    def _start(self, args: ucc.CollectiveArgs, kept: tuple[Any, ...]) -> Transfer:
        transfer = Transfer(c_void_p(), (args, *kept))
        self._transfers.add(transfer)
        self.library.call("ucc_collective_init", byref(args), byref(transfer.handle), self._team)
        self.library.call("ucc_collective_post", transfer.handle)
        return transfer

    def finish(self, transfer: Transfer) -> None:
        """Release a transfer that has ended."""
        self.library.call("ucc_collective_finalize", transfer.handle)
        self._transfers.remove(transfer)

    @property
    def is_busy(self) -> bool:
        """True if some transfer was started and not finished, so that UCC can't be ended."""
        return bool(self._transfers)

    def destroy_team(self) -> bool:
        """Go on destroying the team, which is not busy; whether that is done."""
        return self.library.call("ucc_team_destroy", self._team) == ucc.OK

    def destroy_context(self) -> None:
        """Destroy the rest, after the team. This gives this rank's data to the network first."""
        self.library.call("ucc_context_destroy", self._context)
        self.library.call("ucc_finalize", self._instance)
        open_teams.remove(self)


_LOG_VARIABLE = "UCC_TL_UCP_LOG_LEVEL"

_environment_lock = threading.Lock()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep UCC from logging a connection reset for each connection that another rank closes first; nothing is lost.

    This takes an environment variable, which is read when a library is opened. A user's own setting has precedence.
    """
    with _environment_lock:
        if _LOG_VARIABLE in os.environ or "UCC_LOG_LEVEL" in os.environ:
            yield
            return
        os.environ[_LOG_VARIABLE] = "fatal"
        try:
            yield
        finally:
            del os.environ[_LOG_VARIABLE]


def _args(kind: int, flags: int) -> ucc.CollectiveArgs:
    return ucc.CollectiveArgs(mask=ucc.ARGS_FLAGS if flags else 0, coll_type=kind, flags=flags)


def _counts_of(blocks: Sequence[Block]) -> tuple[int, int, Any]:
    """The addresses of the blocks' counts and displacements, and the array that owns them."""
    table = np.array([[size for _, size in blocks], [offset for offset, _ in blocks]], np.uint64)
    start = int(table.ctypes.data)
    return start, start + table.strides[0], table


def _address(data: memoryview) -> int | None:
    return int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else None
