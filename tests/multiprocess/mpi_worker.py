"""What the ranks of `test_mpi.py` run, started by an MPI's own mpiexec: python mpi_worker.py task folder [arguments]."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import mmap
import os
import pickle
import struct
import sys
import time
import traceback
import faulthandler
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

import ferrodist as fd
from ferrodist.backends.mpi import world
from ferrodist.backends.mpi.waiting import wait_until
from ferrodist.backends.process_group import use_group
from ferrodist.deadline import Deadline
from ferrodist.testing import BACKEND_CHECKS
from ferrodist.testing.backend_checks import deadlines, endings, harness
from ferrodist.testing.collective_conformance import COLLECTIVE_CHECKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrodist.backends.base import Backend

_PATIENCE = 60.0
_RECORD = struct.Struct("d")


class SharedNumber:
    """A number that processes of this host share by the name of a file; stands in for multiprocessing's, which need a
    fork."""

    def __init__(self, path: Path, value: float = 0) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with self.get_lock():
            if os.fstat(self._file).st_size == 0:
                os.write(self._file, _RECORD.pack(value))
        self._memory = mmap.mmap(self._file, _RECORD.size)

    @contextlib.contextmanager
    def get_lock(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        yield
        fcntl.lockf(self._file, fcntl.LOCK_UN)

    @property
    def value(self) -> float:
        return _RECORD.unpack_from(self._memory)[0]

    @value.setter
    def value(self, value: float) -> None:
        _RECORD.pack_into(self._memory, 0, value)

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
    """Runs programs on the first ranks of the MPI job: every rank of which runs the same checks with its own."""

    def __init__(self) -> None:
        self._mpi = world.start()
        self._all = self._mpi.COMM_WORLD.Dup()
        self._communicators = {}
        for size in range(1, self._all.Get_size() + 1):
            members = self._all.Split(0 if self._all.Get_rank() < size else 1, 0)
            self._communicators[size] = members if self._all.Get_rank() < size else None

    @property
    def rank(self) -> int:
        return self._all.Get_rank()

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


def conform(folder: Path, sizes: str, *names: str) -> dict[str, Any]:
    """Run both suites, or what of them is named; returns what failed, and how long each took."""
    runner = MpiRunner()
    things = SharedThings(folder)
    for module in (harness, deadlines, endings):
        module.multiprocessing = things
    failures: dict[str, str] = {}
    seconds: dict[str, float] = {}

    def attempt(name: str, check: Callable[[], object]) -> None:
        if names and name.partition("-")[0] not in names:
            return
        start = time.monotonic()
        (folder / f'now-{runner.rank}').write_text(name)
        try:
            check()
        except Exception:
            failures[name] = traceback.format_exc()
        seconds[name] = time.monotonic() - start

    for size in map(int, sizes.split(",")):
        for check in BACKEND_CHECKS:
            if runner.is_member(max(size, 3 if check.__name__ in () else size)):
                attempt(f"{check.__name__}-{size}", functools.partial(check, _Raised(runner), size))
        for collective in COLLECTIVE_CHECKS:
            if runner.is_member(size):
                attempt(f"{collective.__name__}-{size}", functools.partial(runner.run, size, collective))
    runner.finish()
    return {"failures": failures, "seconds": seconds}


class _Raised:
    """A runner that leaves out the ranks that a check has no use for."""

    def __init__(self, runner: MpiRunner) -> None:
        self._runner = runner

    def run(self, world_size: int, fn: Callable[[Backend], Any]) -> list[Any]:
        return self._runner.run(world_size, fn)


def main() -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(100)
    task, folder, *arguments = sys.argv[1:]
    tasks = {"conform": conform}
    answer = tasks[task](Path(folder), *arguments)
    rank = world.start().COMM_WORLD.Get_rank()
    (Path(folder) / f"answer-{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
