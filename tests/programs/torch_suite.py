"""The tests of backends that torch ships, run on ferrodist: ``python torch_suite.py WORLD_SIZE RESULTS [TEST...]``.

They are `torch.testing._internal.distributed.distributed_test`, as torch runs them for gloo: for each test a process a
rank, which meet in a file. Those processes are forked from this one, which has loaded everything and computes nothing.

What is for gloo, or for MPI, is run, too. The tests are torch's, unchanged; what is changed around them:

- `BACKEND` is "gloo" while the decorators look at it. While tests run it is ferrodist's name, which says that it
  equals "gloo" where a test asks for that.
- The mark of tests that are for MPI only is taken off.
- What is for no fewer than 8 ranks, or MPI, needs 3.
- What needs GPUs is skipped here, and not in processes.
- The ranks' barrier between tests, which is one of files and pauses, is one of `multiprocessing`.

RESULTS gets a line of JSON for each test: its name, what came of it, the reason or the traceback, and seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch.testing._internal import common_distributed

import ferrodist
import ferrodist.torch_backend.registration_impl

NEEDS_MORE_RANKS = "needs 3 ranks"
"""Why some tests are skipped with 2."""

_fork = torch.multiprocessing.get_context("fork")


class Name(str):
    """The name of a backend, which also equals that of the one whose place it takes."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def suite_for(world_size: int) -> type[unittest.TestCase]:
    """The tests, as a class."""
    os.environ.update(
        BACKEND="gloo", WORLD_SIZE=str(world_size), TEMP_DIR="/nonexistent", INIT_METHOD="file:///nonexistent"
    )
    common_distributed.skip_if_no_gpu = unittest.skip("needs GPUs")
    common_distributed.skip_if_lt_x_gpu = lambda _number, **_: common_distributed.skip_if_no_gpu
    common_distributed.skip_if_small_worldsize = unittest.skipIf(world_size < 3, NEEDS_MORE_RANKS)
    from torch.testing._internal.distributed import distributed_test  # noqa: PLC0415 - it looks at what was set

    os.environ["BACKEND"] = "ferrodist"
    distributed_test.BACKEND = Name("ferrodist")

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        meeting: Any

        def setUp(self) -> None:
            super().setUp()
            distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]
            Suite.meeting = _fork.Barrier(world_size)
            self._start_processes(_fork.Process)

        def _barrier(self, wait_for: int | None = None, timeout: float = 10) -> None:
            assert wait_for in (None, world_size)
            self.meeting.wait(max(timeout, 30))

    for name in dir(Suite):
        method = getattr(Suite, name)
        if getattr(method, "__unittest_skip_why__", "").startswith("Only MPI supports"):
            # This mark is over the other one.
            method.__unittest_skip_why__ = NEEDS_MORE_RANKS
            method.__unittest_skip__ = world_size < 3 and hasattr(method, "__wrapped__")
    return Suite


class Results(unittest.TestResult):
    """Writes what comes of each test."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("w", buffering=1)
        self._begin = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        self._begin = time.monotonic()
        super().startTest(test)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._write(test, "passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._write(test, "skipped", reason)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._write(test, "failed", self._exc_info_to_string(err, test))

    addFailure = addError

    def _write(self, test: unittest.TestCase, outcome: str, detail: str) -> None:
        seconds = round(time.monotonic() - self._begin, 2)
        row = {"test": test._testMethodName, "outcome": outcome, "detail": detail, "seconds": seconds}
        self._file.write(json.dumps(row) + "\n")


def main(world_size: str, path: str, *names: str) -> None:
    """Run the tests of these names, or all."""
    for name in ferrodist.__all__:
        getattr(ferrodist, name)  # loads what ranks would
    suite = suite_for(int(world_size))
    results = Results(Path(path))
    for name in names or unittest.defaultTestLoader.getTestCaseNames(suite):
        suite(name).run(results)


if __name__ == "__main__":
    main(*sys.argv[1:])
