"""Supervises a test's ranks, threads or processes: waits for events, finds the first failure, stops the rest.

`RankProgram` is the work of one rank: open the group, run the function, wait for the others, close. A group is closed
only when every rank's function has ended, or its own has failed. So a rank that is done early is still there for the
others, and a test of stragglers sees a late rank, not a lost one.

`supervise` waits until all ranks have ended, one has failed, or the time is up; `RankSet` hides whether they are
threads or processes. `rank_failed_error` turns the ranks' failures into one error for people.
"""

from __future__ import annotations

import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.deadline import Deadline
from ferrodist.errors import (
    DistributedError,
    GroupAbortedError,
    PeerLostError,
    RankFailedError,
    describe_error,
    describe_failed_program,
    ranks_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ferrodist.backends.base import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one rank's function."""

    rank: int
    time: float  # of its end, on the clock that all processes of a host share
    result: Any = None
    error: BaseException | None = None  # a stand-in for one that does not pickle
    report: str = ""  # a traceback or other text about a failure
    summary: str = ""  # the failure in one line
    secondary: bool = False  # whether the failure is another rank's, seen from this one

    @property
    def failed(self) -> bool:
        """Return whether the rank has failed."""
        return bool(self.summary)


class Stage(Enum):
    """A stage that a rank has completed: ``ENDED`` its function, ``CLOSED`` its group as well."""

    ENDED = "ended"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A rank has completed a stage; ``outcome`` is set for ``ENDED``, and for a failed ``CLOSED``."""

    rank: int
    stage: Stage
    outcome: Outcome | None


class RankSet(Protocol):
    """Started ranks: threads or processes."""

    notes: Sequence[str] = ()  # for the error when a rank is stuck

    def next_event(self, timeout: float) -> Event | None:
        """Wait for the next event; None when ``timeout`` seconds have passed."""

    def stack(self, rank: int) -> str:
        """The stack of ``rank``, as text."""

    def stop(self, ranks: Iterable[int]) -> None:
        """Stop ranks that do not end by themselves. They send no more events."""

    def release(self) -> None:
        """Let all ranks close their groups."""

    def dispose(self) -> None:
        """Stop the remaining ranks and free the resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """The work of a rank: to open its group, which may block until the others do, and the function on it."""

    open_group: Callable[[int], Backend]
    body: Callable[[Backend], Any]

    def run(self, rank: int, report: Callable[[Event], object], await_close: Callable[[], object]) -> None:
        """Run as ``rank``. Nothing is raised: results and errors go to ``report``.

        ``await_close`` blocks until the functions of all ranks have ended.
        """
        group: Backend | None = None
        try:
            group = self.open_group(rank)
            # Imported late: the plugin loads this package at every start of pytest.
            from ferrodist.backends.process_group import use_group  # noqa: PLC0415

            with use_group(group):
                outcome = Outcome(rank=rank, result=self.body(group), time=time.monotonic())
        except BaseException as error:  # noqa: BLE001 - a test's failure, skip or exit belongs to whoever runs the ranks
            outcome = failed_outcome(rank, error)
            if group is not None:
                # A second failure (a backend under test may do anything) must not hide the one that is being reported.
                with suppress(Exception):
                    group.abort(describe_failed_program(error))
        report(Event(rank=rank, stage=Stage.ENDED, outcome=outcome))
        if not outcome.failed:
            # A rank that failed closes at once: that also wakes ranks that wait for it in a sub-group.
            await_close()
        report(Event(rank=rank, stage=Stage.CLOSED, outcome=_close(group, rank)))


def failed_outcome(rank: int, error: BaseException) -> Outcome:
    """The outcome of a function that raised ``error``; called while it is handled."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and is_own_frame(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    report = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    return Outcome(
        rank=rank,
        time=time.monotonic(),
        error=error,
        report=report,
        summary=describe_error(error),
        secondary=isinstance(error, (PeerLostError, GroupAbortedError)) and rank not in error.ranks,
    )


def _close(group: Backend | None, rank: int) -> Outcome | None:
    if group is None:
        return None
    already_failed = group.failure is not None
    try:
        group.close()
    except DistributedError as error:
        # A group that has failed may raise once more when it is closed: that adds nothing.
        return None if already_failed else replace(failed_outcome(rank, error), secondary=False)
    except Exception as error:  # noqa: BLE001 - reported as this rank's failure
        return failed_outcome(rank, error)
    return None


_HERE = Path(__file__).parent
# When one of these files is renamed, rename it here too.
_OUTER_FILES = {"pytest_plugin.py", "process_ranks.py", "ranks.py", "supervisor.py"}


def is_own_frame(path: str) -> bool:
    """Return whether a source file belongs to the frames between a rank's start and the test's function."""
    return Path(path).parent == _HERE and Path(path).name in _OUTER_FILES


_STOP_TIMEOUT = 3.0  # seconds for ranks to end by themselves after one has failed and aborted the group

_CLOSE_TIMEOUT = 2.0  # seconds, at least, for ranks to close their groups


def supervise(ranks: RankSet, world_size: int, timeout: float) -> list[Any]:
    """Wait for all ranks, ``timeout`` seconds, and return their results in rank order; RankFailedError if one fails."""
    supervision = _Supervision(ranks, world_size, Deadline(timeout))
    try:
        stuck = supervision.collect_results()
        supervision.collect_closings()
        outcomes = [*supervision.ended.values(), *supervision.close_failures]
        if any(outcome.failed for outcome in outcomes):
            raise rank_failed_error(outcomes, world_size, ranks.notes if stuck else ())
        return [supervision.ended[rank].result for rank in range(world_size)]
    finally:
        ranks.dispose()


class _Supervision:
    """The state of each rank."""

    def __init__(self, ranks: RankSet, world_size: int, deadline: Deadline) -> None:
        self._ranks = ranks
        self._world_size = world_size
        self._deadline = deadline
        self._open = set(range(world_size))
        self.ended: dict[int, Outcome] = {}
        self.close_failures: list[Outcome] = []

    def collect_results(self) -> set[int]:
        """Wait until every rank's function has ended, stop those that take too long, and return these."""
        grace: Deadline | None = None
        while len(self.ended) < self._world_size:
            limit = self._deadline.remaining()
            if not self._next_event(limit if grace is None else min(limit, grace.remaining())):
                break
            if grace is None and self._failed:
                grace = Deadline(_STOP_TIMEOUT)
        stuck = set(range(self._world_size)) - self.ended.keys()
        timed_out = grace is None or self._deadline.expired
        for rank in sorted(stuck):
            stack = self._ranks.stack(rank)
            self.ended[rank] = _stuck(rank, stack, self._deadline.timeout if timed_out else None)
        self._ranks.stop(stuck)
        self._open -= stuck
        return stuck

    def collect_closings(self) -> None:
        """Have the groups closed, all at once, and note what goes wrong with that."""
        failed = self._failed
        limit = Deadline(_CLOSE_TIMEOUT if failed else max(_CLOSE_TIMEOUT, self._deadline.remaining()))
        self._ranks.release()
        while self._open and self._next_event(limit.remaining()):
            pass
        for rank in sorted(self._open):
            summary = f"its group was not closed after {limit.timeout:.1f} s"
            report = f"{summary}; it was here:\n{self._ranks.stack(rank)}"
            self.close_failures.append(
                Outcome(rank=rank, time=time.monotonic(), summary=summary, report=report, secondary=failed)
            )

    @property
    def _failed(self) -> bool:
        return any(outcome.failed for outcome in self.ended.values())

    def _next_event(self, timeout: float) -> bool:
        event = self._ranks.next_event(timeout)
        if event is None:
            return False
        if event.stage is Stage.CLOSED:
            self._open.discard(event.rank)
            if event.outcome is not None:
                self.close_failures.append(event.outcome)
        elif event.outcome is not None and event.rank not in self.ended:
            self.ended[event.rank] = event.outcome
        return True


def _stuck(rank: int, stack: str, timeout: float | None) -> Outcome:
    if timeout is None:
        frames = [line.strip() for line in stack.splitlines() if line.lstrip().startswith("File ")]
        place = frames[-1] if frames else "an unknown place"
        summary = f"was still running {_STOP_TIMEOUT:g} s after the failure and was stopped, at {place}"
        return Outcome(rank=rank, time=time.monotonic(), summary=summary, secondary=True)
    summary = f"not done after {timeout:g} s (the timeout of run_ranks), and stopped"
    return Outcome(rank=rank, time=time.monotonic(), summary=summary, report=f"{summary}; it was here:\n{stack}")


_RULE = "-" * 8


def rank_failed_error(outcomes: Sequence[Outcome], world_size: int, notes: Sequence[str] = ()) -> RankFailedError:
    """Build the error for a run in which at least one of ``outcomes``, in any order, is a failure.

    The primary failures come first in time order, each with its whole report (once, where ranks raised the same);
    secondary failures, which other ranks raised because of them, follow in one line each, and ``notes`` at the end.
    """
    failures = sorted((outcome for outcome in outcomes if outcome.failed), key=lambda outcome: outcome.time)
    first = [outcome for outcome in failures if not outcome.secondary] or failures[:1]
    others = [outcome for outcome in failures if outcome not in first]
    ranks = tuple(dict.fromkeys(outcome.rank for outcome in first))
    parts = [f"{ranks_text(ranks)} of {world_size} failed: {first[0].summary}"]
    said: dict[tuple[str, str], Outcome] = {}
    for outcome in first:
        # One exception on all ranks is reported once, though each rank has its own traceback; two stuck ranks are
        # reported as one only if their stacks are equal.
        where = "" if outcome.error is not None else outcome.report
        twin = said.setdefault((outcome.summary, where), outcome)
        if twin is outcome:
            parts.append(f"\n{_RULE} rank {outcome.rank} {_RULE}\n{outcome.report or outcome.summary}")
        else:
            parts.append(f"\n{_RULE} rank {outcome.rank}: the same as rank {twin.rank} {_RULE}")
    if others:
        parts.append("\nas a consequence:")
        parts.extend(f"  rank {outcome.rank}: {outcome.summary}" for outcome in others)
    parts.extend(f"\nnote: {note}" for note in notes)
    error = RankFailedError("\n".join(parts), ranks=ranks)
    error.__cause__ = next((outcome.error for outcome in first if outcome.error is not None), None)
    return error
