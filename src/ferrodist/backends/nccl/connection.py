"""A group's communicator: made by its ranks together when the first work comes, and ended once."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

from ferrodist.backends.call import MAX_PAYLOAD, Call
from ferrodist.backends.nccl.communicator import NcclError
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable, DistributedError, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from ferrodist.backends.base import Backend
    from ferrodist.backends.nccl.communicator import Communicator, Library

__all__ = ["Connection", "pauses"]

_NUM_QUICK_LOOKS = 100
_FIRST_PAUSE_SECONDS = 20e-6
_LONGEST_PAUSE_SECONDS = 1e-3
_ABORT_SECONDS = 2.0
"""How long the end of a group waits for a thread that is launching, which sees the end by itself."""

_FINALIZE_SECONDS = 5.0
"""How long closing a group waits for other ranks to take what this one sends; then it lets go all the same."""


class Connection:
    """What NCCL knows of a group. Who asks it for anything holds ``lock``: it bears one thread at a time.

    Making a group takes no memory of a GPU: the communicator is made by the first work, on the GPU that it is for.

    Args:
        group: The group.
        library: Gives NCCL, or raises BackendUnavailable.
    """

    def __init__(self, group: Backend, library: Callable[[], Library]) -> None:
        self._group = group
        self._library = library
        self.lock = threading.RLock()
        self.device: torch.device | None = None
        self._communicator: Communicator | None = None
        self._process = os.getpid()

    @property
    def communicator(self) -> Communicator:
        """The communicator, which has been begun."""
        assert self._communicator is not None
        return self._communicator

    @property
    def is_of_parent(self) -> bool:
        """Whether this is a forked child, where neither NCCL nor CUDA works."""
        return self._process != os.getpid()

    def begin(self, device: torch.device, call: Call, deadline: Deadline) -> None:
        """Begin to make it, with the other ranks, whose ``call`` is compared with this one's first.

        Raises:
            BackendUnavailable: On all ranks, when one has no NCCL. The group stays good.
        """
        group = self._group
        library, reason, unique_id = None, "", b""
        try:
            library = self._library()
            if group.rank == 0:
                unique_id = library.unique_id()
        except DistributedError as error:
            reason = describe_error(error)
        half = MAX_PAYLOAD - 1
        head = b"\0" + reason.encode()[:half] if reason else b"\1" + unique_id[:half]
        said = self._share(call.operation, head, deadline.remaining(), what="on GPUs")
        without = [rank for rank, answer in enumerate(said) if answer[:1] != b"\1"]
        if without:
            raise BackendUnavailable(
                f"{call} on group {group.name!r}: rank {without[0]} has no NCCL:"
                f" {reason or said[without[0]][1:].decode(errors='replace')}",
                ranks=tuple(without),
            )
        rest = self._share("unique id of NCCL", unique_id[half:], deadline.remaining())
        assert library is not None
        communicator = library.open(said[0][1:] + rest[0], group.rank, group.world_size, device)
        self._communicator, self.device = communicator, device
        self._finalizer = weakref.finalize(self, _abort, communicator, self._process)
        self._finalizer.atexit = False

    def _share(self, operation: str, payload: bytes, timeout: float, *, what: str = "") -> list[bytes]:
        """As `Collectives.share`, by what compares the calls of the group's host."""
        engine = self._group.collectives
        if engine is None:
            return self._group.agreement.reach(Call(operation=operation, reduce_op=what, payload=payload), timeout)
        name = f"{operation} {what}" if what else operation
        shared: list[bytes] = engine.share(name, payload, timeout=timeout, sequence=engine.reserve())
        return shared

    def is_ready(self) -> bool:
        """Whether all that was begun is on its stream; never again when it was aborted.

        Raises:
            NcclError: It has failed.
        """
        communicator = self._communicator
        return communicator is not None and communicator.is_ready()

    def find_error(self) -> NcclError | None:
        """What it has failed with, as far as that can be asked now: who holds the lock asks, too."""
        if not self.lock.acquire(blocking=False):
            return None
        try:
            self.is_ready()
        except NcclError as error:
            return error
        finally:
            self.lock.release()
        return None

    def abort(self) -> None:
        """Let go of it at once, so that what waits on the GPU for other ranks ends; the group has failed."""
        has_lock = self.lock.acquire(timeout=_ABORT_SECONDS)
        try:
            communicator = self._take()
            if communicator is not None:
                _abort(communicator, self._process)
        finally:
            if has_lock:
                self.lock.release()

    def release(self) -> None:
        """Let go of it when what it sends has been taken, or was not in time."""
        with self.lock:
            communicator = self._take()
            if communicator is None or self.is_of_parent:
                return
            if _finalize(communicator):
                communicator.destroy()
            else:
                _abort(communicator, self._process)

    def _take(self) -> Communicator | None:
        """The communicator, for who ends it: once."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._finalizer.detach()
        return communicator


def _abort(communicator: Communicator, process: int) -> None:
    """Abort it, but not in a child of its process, whose threads the child has not."""
    if process == os.getpid():
        with contextlib.suppress(NcclError, RuntimeError):  # of a GPU that is lost: there is nothing that could be done
            communicator.abort()


def _finalize(communicator: Communicator) -> bool:
    deadline = Deadline(_FINALIZE_SECONDS)
    try:
        communicator.finalize()
        for pause in pauses():
            if communicator.is_ready():
                return True
            if deadline.expired:
                break
            time.sleep(pause)
    except NcclError:
        pass
    return False


def pauses() -> Iterator[float]:
    """Seconds between looks at what no thread can wait for: none at first, then more and more."""
    pause = _FIRST_PAUSE_SECONDS
    for _ in range(_NUM_QUICK_LOOKS):
        yield 0.0
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
