"""The program of the ranks of `test_mpi.py`, started by mpiexec: python mpi_worker.py TASK FOLDER [ARGUMENTS]."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import mmap
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

import ferrodist as fd
from ferrodist.backends.mpi import data_plane, runtime
from ferrodist.backends.polling import wait_until
from ferrodist.backends.process_group import use_group
from ferrodist.deadline import Deadline
from ferrodist.testing import BACKEND_CHECKS
from ferrodist.testing.conformance import harness
from ferrodist.testing.conformance.backend import deadlines, subgroups
from ferrodist.testing.conformance.backend import failures as backend_failures
from ferrodist.testing.conformance.backend import messages as backend_messages
from ferrodist.testing.conformance.collectives import data_movement, p2p, reductions
from ferrodist.testing.conformance.collectives.suite import COLLECTIVE_CHECKS
from ferrodist.testing.conformance.harness import public_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrodist.backends.base import Backend

_PATIENCE = 60.0
_RECORD = struct.Struct("d")


class SharedNumber:
    """A number that processes of this host share by a file's name; stands in for multiprocessing's, which need a
    fork."""

    def __init__(self, path: Path, value: float = 0) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with self.get_lock():
            if os.fstat(self._file).st_size == 0:
                os.write(self._file, _RECORD.pack(value))
        # As elements: struct would write byte by byte, and others would read what is half written.
        self._memory = memoryview(mmap.mmap(self._file, _RECORD.size)).cast("d")

    @contextlib.contextmanager
    def get_lock(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        yield
        fcntl.lockf(self._file, fcntl.LOCK_UN)

    @property
    def value(self) -> float:
        return self._memory[0]

    @value.setter
    def value(self, value: float) -> None:
        self._memory[0] = value

    def set(self) -> None:
        self.value = 1

    def wait(self, timeout: float) -> bool:
        return wait_until(lambda: self.value > 0, Deadline(timeout))

    def release(self) -> None:
        with self.get_lock():
            self.value += 1

    def acquire(self, timeout: float) -> bool:
        return wait_until(self._take, Deadline(timeout))

    def _take(self) -> bool:
        if self.value < 1:
            return False
        with self.get_lock():
            is_there = self.value >= 1
            self.value -= is_there
        return is_there


class SharedThings:
    """In place of `multiprocessing` in the suite: all ranks make the same things in the same order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_made = 0

    def get_context(self, _method: str) -> SimpleNamespace:
        return SimpleNamespace(Event=self._make, Semaphore=self._make, Value=lambda _type, value: self._make(value))

    def _make(self, value: float = 0) -> SharedNumber:
        self._num_made += 1
        return SharedNumber(self._folder / f"shared-{self._num_made}", value)


class MpiRunner:
    """Runs programs on the first ranks of the MPI job, every rank of which runs the same checks."""

    def __init__(self) -> None:
        self._mpi = runtime.start(Deadline(_PATIENCE))
        self._all = self._mpi.COMM_WORLD.Dup()
        self._communicators = {}
        for size in range(1, self._all.Get_size() + 1):
            members = self._all.Split(0 if self._all.Get_rank() < size else 1, 0)
            self._communicators[size] = members if self._all.Get_rank() < size else None

    @property
    def num_ranks(self) -> int:
        return self._all.Get_size()

    def meet(self, communicator: Any) -> None:
        """A barrier that takes no processor."""
        assert wait_until(communicator.Ibarrier().Test, Deadline(_PATIENCE)), "a rank is missing"

    def is_member(self, world_size: int) -> bool:
        return self._communicators[world_size] is not None

    def run(self, world_size: int, fn: Callable[[Backend], Any]) -> list[Any]:
        """See `RankRunner`."""
        communicator = self._communicators[world_size]
        group = fd.MpiBackend(communicator, timeout=_PATIENCE)
        error, result = None, None
        try:
            with use_group(group):
                result = fn(group)
        except Exception as raised:
            error = f"rank {group.rank}: {''.join(traceback.format_exception(raised))}"
            group.abort(f"its program failed with {raised!r}")
            group.close()
        self.meet(communicator)
        group.close()
        outcomes = [pickle.loads(data) for data in communicator.allgather(pickle.dumps((error, result)))]
        errors = [error for error, _ in outcomes if error]
        assert not errors, "\n".join(errors)
        return [result for _, result in outcomes]

    def finish(self) -> None:
        self.meet(self._all)


def conform(folder: Path, extent: str) -> dict[str, Any]:
    """Run both suites: whole, that of collectives with two ranks and some of it in pieces, or what MPI has a part in,
    all with three."""
    runner = MpiRunner()
    things = SharedThings(folder)
    harness.multiprocessing = things
    harness.SLACK_SECONDS = 5.0  # the ranks of some MPIs poll all the time, and share processors with other tests
    failures: dict[str, str] = {}

    def attempt(name: str, check: Callable[[], object]) -> None:
        try:
            check()
        except Exception:
            failures[name] = traceback.format_exc()

    for check in BACKEND_CHECKS if extent == "whole" else _OF_BACKENDS:
        attempt(check.__name__, functools.partial(check, runner, 3))
    if extent == "whole":
        rounds = [(2, data_plane.MAX_COLLECTIVE_BYTES, check) for check in COLLECTIVE_CHECKS]
        rounds += [(2, _FEW_BYTES, check) for check in _IN_PIECES]
    else:
        rounds = [(3, data_plane.MAX_COLLECTIVE_BYTES, check) for check in _OF_COLLECTIVES]
    for size, most, check in rounds:
        if runner.is_member(size):
            data_plane.MAX_COLLECTIVE_BYTES, data_plane.MAX_MESSAGE_BYTES = most, most // 2
            attempt(f"{check.__name__} of {size} ranks, at most {most} bytes", lambda: runner.run(size, check))  # noqa: B023
    runner.finish()
    return {"failures": failures, "num_ranks": runner.num_ranks}


_FEW_BYTES = 10_000
"""A limit in place of MPI's own, between the checks' large and small inputs."""

_IN_PIECES = [
    check
    for check in COLLECTIVE_CHECKS
    if check.__name__
    in {"reductions_of_every_size", "movement_of_every_size", "movement_from_every_root", "uneven_exchange"}
]

# What is refused or compared before any MPI is called is the same over all of them.
_OF_BACKENDS = [
    *public_functions(backend_messages),
    deadlines.a_late_rank_is_named_by_all,
    *public_functions(backend_failures),
    *public_functions(subgroups),
]
_OF_COLLECTIVES = [check for module in (reductions, data_movement, p2p) for check in public_functions(module)]


def kill(_folder: Path) -> dict[str, Any]:
    """Rank 1 is killed in an allreduce; the others record their errors, and continue in a group of their own."""
    group = fd.init_process_group("mpi", timeout=_PATIENCE)
    pair, survivors = fd.new_group([0, 1]), fd.new_group([0, 2])
    tensor = torch.ones(300_000)
    struck_at = torch.zeros(1, dtype=torch.float64)
    try:
        while True:
            if group.rank == 1:
                struck_at[0] = time.monotonic()
            fd.broadcast(struck_at, 1, out=struck_at)
            if group.rank == 1 and tensor[0] > 3:
                os.kill(os.getpid(), signal.SIGKILL)
            fd.allreduce(tensor, out=tensor)
    except fd.PeerLostError as error:
        answer = {"ranks": error.ranks, "seconds": time.monotonic() - float(struck_at)}
    for name, subgroup in (("pair", pair), ("survivors", survivors)):
        if subgroup.is_member:
            try:
                answer[name] = fd.allreduce(torch.ones(2), group=subgroup).tolist()
            except fd.PeerLostError as error:
                answer[name] = type(error).__name__
    rest = group.shrink(timeout=_PATIENCE, name="rest")
    answer["rest"] = fd.allreduce(torch.full((100_000,), group.rank + 1.0), group=rest)[-1].item()
    rest.close()
    return answer


def _leave_slowly(group: fd.MpiBackend) -> None:
    """Rank 1 closes the group last and slowly; all ranks' threads may end only then."""
    leave = group._leave_groups

    def leave_slowly() -> None:
        if group._progress.join(0.2):
            sys.exit("the thread ended, and freed the communicators, before the goodbye")
        leave()

    if group.rank == 1:
        assert wait_until(lambda: len(group._gone) == 2, Deadline(_PATIENCE)), "the others have not left"
        group._leave_groups = leave_slowly
    group.close()
    if not group._progress.join(_PATIENCE):
        os._exit(1)  # or this process would wait for the goodbye


def _start_late(folder: Path) -> str:
    """Rank 1 starts MPI when the others have given up; they record their errors, and MPI starts all the same."""
    message, num_tired = "", SharedNumber(folder / "tired")
    if _launched_rank() == 1:
        assert num_tired.acquire(_PATIENCE), "rank 0 waits"
        assert num_tired.acquire(_PATIENCE), "rank 2 waits"
    else:
        try:
            fd.init_process_group("mpi", timeout=0.3)
        except fd.RendezvousError as error:
            message = error.message
        num_tired.release()
    runtime.start(Deadline(_PATIENCE))
    return message


def _launched_rank() -> int:
    """This rank's number in MPI, from the launcher's variables."""
    return int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])


def meet(folder: Path) -> dict[str, Any]:
    """Rank 1 is late at MPI's start, slow to leave a group and does not come to the next one; the others tell what they
    see."""
    early = _start_late(folder)
    communicator = runtime.start(Deadline(_PATIENCE)).COMM_WORLD.Dup()
    _leave_slowly(fd.MpiBackend(communicator, timeout=_PATIENCE))
    found: dict[str, Any] = {"early": early}
    if communicator.Get_rank() != 1:
        try:
            fd.init_process_group("mpi", timeout=0.3)
        except fd.RendezvousError as error:
            found |= {"ranks": error.ranks, "message": error.message}
    assert wait_until(communicator.Ibarrier().Test, Deadline(_PATIENCE)), "a rank is missing"
    return found


def main() -> None:
    torch.set_num_threads(1)
    task, folder = sys.argv[1], Path(sys.argv[2])
    answer = {"conform": conform, "kill": kill, "meet": meet}[task](folder, *sys.argv[3:])
    rank = runtime.start(Deadline(_PATIENCE)).COMM_WORLD.Get_rank()
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
