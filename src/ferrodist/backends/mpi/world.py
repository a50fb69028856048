"""Starting MPI, meeting its other ranks within a deadline, and ending it.

MPI's start and end are once in a process's life, and `life.py`'s. All else is asked of MPI without waiting for it.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrodist.backends.moving.polling import wait_until
from ferrodist.backends.mpi.kept import keep_for_ever, num_kept
from ferrodist.backends.mpi.library import library_version, load
from ferrodist.backends.mpi.life import Life
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable, DistributedError, RendezvousError, ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class Open(Protocol):
        """A group that uses MPI."""

        def close(self) -> None:
            """Leave it."""

        def has_parted(self, patience: float) -> bool:
            """Wait until all ranks have left it; whether they have, ``patience`` seconds after a failure."""


__all__ = ["duplicate", "forget", "start", "translate", "use"]

_MEETING_TAG = 32_767
"""The largest that every MPI allows."""

_ANSWER_GRACE_SECONDS = 0.5
"""How long past its deadline a rank waits for rank 0 to say which rank is missing."""

_PARTING_SECONDS = 5.0
"""How long a process that ends waits, after a failure, for the goodbyes of the others, and for MPI's end."""

_open: set[Open] = set()
_starting = threading.Lock()
_life: Life | None = None
_process: int | None = None
"""The process that has asked for MPI."""
_has_lost = False
"""Whether a group has ended here in which something had failed."""


def start(deadline: Deadline) -> Any:
    """Start MPI, unless the program has; returns the module ``mpi4py.MPI``.

    Raises:
        BackendUnavailable: There is no MPI, it has ended, it is the parent's of a forked process, or it does not let
            several threads call it.
        RendezvousError: It has not started by the deadline, which it does when all ranks of the job start it.
    """
    global _life, _process  # noqa: PLW0603 - a process has one MPI
    mpi = load()
    if _process not in (None, os.getpid()):
        raise BackendUnavailable(
            "MPI is that of the process that this one was forked from: fork before the first group, or let mpiexec"
            " start all ranks"
        )
    with _starting:
        _process = os.getpid()
        if mpi.Is_finalized():
            raise BackendUnavailable("MPI has ended in this process, and can't be started again: end it last")
        if _life is None and not mpi.Is_initialized():
            _life = Life(mpi)
            atexit.register(_end, _life)
    if _life is not None:
        _begin(_life, deadline)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise BackendUnavailable(
            f"{library_version()} does not let several threads call it (MPI_THREAD_MULTIPLE), as ferrodist needs:"
            " start MPI with MPI.Init_thread(MPI.THREAD_MULTIPLE), or not at all and leave that to ferrodist; or"
            " use a library that is built for it"
        )
    return mpi


def _begin(life: Life, deadline: Deadline) -> None:
    try:
        has_begun = life.begin(deadline)
    except RuntimeError as error:
        raise BackendUnavailable(f"{library_version()} can't be started: {error}") from None
    if not has_begun:
        raise RendezvousError(
            f"{library_version()} has not started within {deadline.timeout:.3g} s: it waits until all ranks that its"
            " mpiexec has started make a group too. Look at what they do, or pass a larger timeout."
        )


def use(group: Open) -> None:
    """Close ``group``, if nobody has, before MPI ends."""
    _open.add(group)


def forget(group: Open, *, has_failed: bool) -> None:
    """All ranks have left a group."""
    global _has_lost  # noqa: PLW0603 - a process has one MPI
    _has_lost = _has_lost or has_failed
    _open.discard(group)


def _end(life: Life) -> None:
    """End MPI once every rank has left every group: its end waits for all ranks.

    While no group has failed this waits as MPI does, without limit: for mpiexec ends the job when a process has ended
    and has not ended MPI. After a failure others may never come, and that is what mpiexec is left to do.
    """
    groups = list(_open)
    for group in groups:
        group.close()
    if load().Is_finalized() or not all(group.has_parted(_PARTING_SECONDS) for group in groups):
        return
    # What failed groups have left under way keeps neither MPICH nor Open MPI from ending; the death of a rank may.
    life.end(_PARTING_SECONDS if _has_lost or num_kept() else None)


def translate(mpi: Any, error: Exception) -> DistributedError:
    """What MPI raised, in our terms."""
    text = error.Get_error_string() if isinstance(error, mpi.Exception) else str(error)
    return DistributedError(f"{library_version()} failed: {text}")


def duplicate(mpi: Any, parent: Any, name: str, deadline: Deadline) -> tuple[Any, Any]:
    """Two communicators of ``parent``'s ranks, all of which call this.

    Args:
        mpi: The module.
        parent: A communicator.
        name: Of the group that is made.
        deadline: When all must have met.

    Raises:
        RendezvousError: Some rank did not come; it is named.
    """
    try:
        _meet(mpi, parent, name, deadline)
        copies = []
        for _ in range(2):
            copy, request = parent.Idup()
            if not wait_until(request.Test, deadline):
                keep_for_ever(request)
                raise RendezvousError(
                    f"group {name!r}: all ranks are there, but {library_version()} made no communicator within"
                    f" {deadline.timeout:.3g} s"
                )
            copy.Set_errhandler(mpi.ERRORS_RETURN)
            copies.append(copy)
    except mpi.Exception as error:
        raise RendezvousError(f"group {name!r} can't be made: {translate(mpi, error).message}") from error
    return copies[0], copies[1]


def _meet(mpi: Any, parent: Any, name: str, deadline: Deadline) -> None:
    """Tell rank 0 that this rank is there; it tells all who is not."""
    rank, size = parent.Get_rank(), parent.Get_size()
    if size == 1:
        return
    missing = np.zeros(size, np.uint8)
    if rank == 0:
        here = {peer: parent.Irecv([np.zeros(1, np.uint8), 1, mpi.BYTE], peer, _MEETING_TAG) for peer in range(1, size)}
        if not wait_until(lambda: all(request.Test() for request in here.values()), deadline):
            for peer, request in here.items():
                missing[peer] = not request.Test()
        answers = [parent.Isend([missing, size, mpi.BYTE], peer, _MEETING_TAG) for peer in here if not missing[peer]]
        _finish(answers, Deadline(_ANSWER_GRACE_SECONDS))
        for peer, request in here.items():
            if missing[peer]:
                keep_for_ever(request)
    else:
        hello = parent.Isend([np.ones(1, np.uint8), 1, mpi.BYTE], 0, _MEETING_TAG)
        answer = parent.Irecv([missing, size, mpi.BYTE], 0, _MEETING_TAG)
        came = wait_until(answer.Test, Deadline(deadline.remaining() + _ANSWER_GRACE_SECONDS))
        _finish([hello] if came else [hello, answer], Deadline(0))
        if not came:
            missing[0] = 1
    ranks = tuple(int(peer) for peer in np.flatnonzero(missing))
    if ranks:
        raise RendezvousError(
            f"{ranks_text(ranks)} did not come to group {name!r} within {deadline.timeout:.3g} s: every rank of the MPI"
            " job makes it. Look at what is going on there, or pass a larger timeout; MPI's ranks can't meet again"
            " after this.",
            ranks=ranks,
        )


def _finish(requests: list[Any], deadline: Deadline) -> None:
    for request in requests:
        if not wait_until(request.Test, deadline):
            keep_for_ever(request)


def call_safely(mpi: Any, action: Callable[[], Any]) -> Any:
    """The result of ``action()``, or None where MPI refuses it."""
    try:
        return action()
    except (mpi.Exception, NotImplementedError):
        return None


def in_thread(action: Callable[[], Any], deadline: Deadline) -> Any:
    """What a call of MPI's that blocks returns or raises, or None if it does not by the deadline, and goes on.

    For Open MPI 5.0's MPIX_Comm_ishrink, which would not block, ends with an internal error.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(action())
        except Exception as error:  # noqa: BLE001 - it is the outcome
            outcome.append(error)

    thread = threading.Thread(target=run, name="ferrodist-mpi-call", daemon=True)
    thread.start()
    thread.join(deadline.remaining())
    return outcome[0] if outcome else None
