"""Run the tests in parts, some side by side, with one summary at the end: ``make test``.

::

    python tools/run_tests.py                  # all parts but "programs"
    python tools/run_tests.py --part tensor    # one part
    python tools/run_tests.py --part programs  # ``make test-programs``

A test waits for threads and processes to wake for much of its time, so five parts at once fill two cores. Each part is
a pytest run of its own, with its output in build/tests/PART.log. The parts start in the order of the table, those that
take longest first. A file that no part names belongs to "others", so that nothing is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "tests"
PARTS = {
    "others": (),
    "torch_backend": ("tests/torch_backend", "tests/unit/torch_backend"),
    "collectives": ("tests/unit/collectives",),
    "checkpoint": ("tests/unit/checkpoint",),
    "rpc": ("tests/unit/rpc",),
    "fsdp": ("tests/unit/parallel/fsdp", "tests/unit/parallel/ddp"),
    "rendezvous": ("tests/unit/rendezvous", "tests/unit/launch", "tests/unit/mesh", "tests/unit/testing"),
    "tensor": ("tests/unit/tensor",),
    "backends": ("tests/unit/backends",),
    "processes": ("tests/multiprocess",),
    "tensor_parallel": ("tests/unit/parallel/tensor_parallel",),
    "faults": ("tests/faults", "tests/stress"),
    "pipeline": ("tests/unit/parallel/pipeline", "tests/unit/parallel/context_parallel"),
    "programs": ("tests/programs",),
}
"""The files and folders of each part; "others" has all that the other parts leave."""

RUN_ALONE = "programs"
"""The part that runs only by its name: examples, demo, benchmark, MPI, Hugging Face's models, torch's own suite, and
what torch's compiler compiles."""

_NUM_AT_ONCE = 5
_POLL_INTERVAL_SECONDS = 0.5
_REPORT_INTERVAL_SECONDS = 60.0
_EXIT_TIMEOUT_SECONDS = 30.0
_NUM_SLOWEST = 10
_LOG_LINES = 40
_TEST_FILE = re.compile(r'/test_\w+\.py"')
_PERCENTAGE = re.compile(r"\[\s*(\d+)%\]")


@dataclass
class Results:
    """The results of all parts.

    Args:
        counts: Number of tests by outcome: passed, failed, error, skipped.
        durations: Seconds and name of each test.
        skips: Number of skipped tests by reason.
        failures: Name and traceback of each failure.
        crashes: Parts that failed without a failed test, each with what its log says of that.
    """

    counts: Counter[str] = field(default_factory=Counter)
    durations: list[tuple[float, str]] = field(default_factory=list)
    skips: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    crashes: list[tuple[str, str]] = field(default_factory=list)

    def add(self, part: Part) -> None:
        """Add the results of a finished part."""
        num_failures = len(self.failures)
        with contextlib.suppress(FileNotFoundError, ET.ParseError):
            for case in ET.parse(part.report).iter("testcase"):  # noqa: S314 - pytest wrote it
                self._add_case(case)
        if part.process.returncode != 0 and len(self.failures) == num_failures:
            end = _end_of(part.log.read_text(errors="replace"))
            self.crashes.append((f"{part.name} ended with exit code {part.process.returncode}", end))

    def _add_case(self, case: ET.Element) -> None:
        name = f"{case.get('file', case.get('classname', ''))}::{case.get('name')}"
        self.durations.append((float(case.get("time", 0)), name))
        outcomes = [child for child in case if child.tag in {"failure", "error", "skipped"}]
        for outcome in outcomes:
            self.counts[{"failure": "failed"}.get(outcome.tag, outcome.tag)] += 1
            if outcome.tag == "skipped":
                self.skips[outcome.get("message", "")] += 1
            else:
                self.failures.append((name, outcome.text or outcome.get("message") or ""))
        if not outcomes:
            self.counts["passed"] += 1

    @property
    def is_success(self) -> bool:
        """Whether all tests have passed."""
        return not self.failures and not self.crashes

    def summary(self) -> str:
        """The text at the end: slowest tests, skipped tests, failures, counts."""
        lines = ["", f"Slowest {_NUM_SLOWEST} tests"]
        lines += [
            f"  {seconds:6.1f} s  {name}" for seconds, name in sorted(self.durations, reverse=True)[:_NUM_SLOWEST]
        ]
        if self.skips:
            lines += ["", "Skipped", *(f"  {number:4}  {reason}" for reason, number in sorted(self.skips.items()))]
        for name, text in (*self.failures, *self.crashes):
            lines += ["", f"--- {name}", text.rstrip()]
        if not self.is_success:
            lines += ["", "Failures", *(f"  {name}" for name, _ in (*self.failures, *self.crashes))]
        counts = ", ".join(
            f"{self.counts[outcome]} {outcome}"
            for outcome in ("failed", "error", "passed", "skipped")
            if self.counts[outcome] or outcome == "passed"
        )
        return "\n".join([*lines, "", counts])


class Part:
    """A running pytest.

    Args:
        name: The name of the part.
        arguments: The files and folders to run, and pytest's options.
    """

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self.log, self.report = FOLDER / f"{name}.log", FOLDER / f"{name}.xml"
        self.report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-o", "junit_family=xunit1", f"--junitxml={self.report}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def progress(self) -> str:
        """The last percentage of the log."""
        found = _PERCENTAGE.findall(self.log.read_text(errors="replace"))
        return f"{self.name} {found[-1] if found else 0}%"

    def stop(self) -> None:
        """End the run as Ctrl-C would, or kill it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(_EXIT_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def arguments_of(name: str) -> list[str]:
    """Pytest's arguments for a part: its files, or for "others" all but those of the other parts."""
    return list(PARTS[name]) or [f"--ignore={path}" for paths in PARTS.values() for path in paths]


def run_parts(names: Sequence[str]) -> Results:
    """Run the parts, a few at a time, and print how far they are."""
    results, begin = Results(), time.monotonic()
    waiting, running, reported = list(names), list[Part](), begin
    try:
        while waiting or running:
            while waiting and len(running) < _NUM_AT_ONCE:
                running.append(Part(waiting[0], arguments_of(waiting.pop(0))))
            time.sleep(_POLL_INTERVAL_SECONDS)
            for part in list(running):
                used = _children_seconds()
                if part.process.poll() is None:
                    continue
                used = _children_seconds() - used  # of all processes that the part has waited for
                running.remove(part)
                results.add(part)
                print(
                    f"{_elapsed(begin)}  {part.name} has ended: {_last_line(part.log)}, {used:.0f} s of processors",
                    flush=True,
                )
            if running and time.monotonic() - reported > _REPORT_INTERVAL_SECONDS:
                reported = time.monotonic()
                print(f"{_elapsed(begin)}  {', '.join(part.progress for part in running)}", flush=True)
    finally:
        for part in running:
            part.stop()
    return results


def _end_of(log: str) -> str:
    """The last lines, or of a crashed interpreter the stack of the thread that crashed and the tests in the others'."""
    found = log.rfind("Fatal Python error")
    if found == -1:
        return "\n".join(log.splitlines()[-_LOG_LINES:])
    title, *threads = log[found:].split("\n\n")
    crashed = next((stack for stack in threads if stack.startswith("Current thread")), "It has no thread of Python's.")
    tests = [line for stack in threads if stack != crashed for line in stack.splitlines() if _TEST_FILE.search(line)]
    return "\n".join([title, *crashed.splitlines()[:_LOG_LINES], "Tests in the other threads:", *tests])


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _elapsed(begin: float) -> str:
    minutes, seconds = divmod(round(time.monotonic() - begin), 60)
    return f"{minutes:2}:{seconds:02}"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip(" =") for line in reversed(lines) if line.strip()), "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; returns 0 if all tests have passed."""
    parser = argparse.ArgumentParser(prog="python tools/run_tests.py", description="Run the tests.")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    FOLDER.mkdir(parents=True, exist_ok=True)
    names = parser.parse_args(arguments).part or [name for name in PARTS if name != RUN_ALONE]
    try:
        results = run_parts(names)
    except KeyboardInterrupt:
        return 130
    print(results.summary())
    return 0 if results.is_success else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
