"""Watching ranks from outside: until all have ended, one has failed, or the time is up.

What differs between threads and processes is behind `RankSet`; the order of events is here, once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.deadline import Deadline
from ferrodist.testing.rank_failures import rank_failed_error
from ferrodist.testing.rank_program import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Event", "RankSet", "Stage", "supervise"]

_STOP_SECONDS = 3.0
"""How long ranks have to end by themselves once one has failed and aborted the group."""

_CLOSE_SECONDS = 2.0
"""How long ranks have, at least, to close their groups."""


class Stage(Enum):
    """What a rank has come through: ``ENDED`` its function, ``CLOSED`` its group as well."""

    ENDED = "ended"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A rank has come through a stage; ``outcome`` is always there for ``ENDED``, and for a failed ``CLOSED``."""

    rank: int
    stage: Stage
    outcome: Outcome | None


class RankSet(Protocol):
    """Ranks that have been started."""

    def next_event(self, timeout: float) -> Event | None:
        """Wait for the next event; None when ``timeout`` seconds have passed."""

    def stack(self, rank: int) -> str:
        """Where ``rank`` is in its program, as text."""

    def stop(self, ranks: Iterable[int]) -> None:
        """End ranks that do not end by themselves. They send no more events."""

    def release(self) -> None:
        """Let all ranks close their groups."""

    def dispose(self) -> None:
        """End what is left and free what belongs to this process."""

    def notes(self) -> list[str]:
        """Circumstances worth knowing when a rank is stuck."""


def supervise(ranks: RankSet, world_size: int, timeout: float) -> list[Any]:
    """Wait for all ranks and return their results in rank order.

    Raises:
        RankFailedError: A rank raised, died or was not done after ``timeout`` seconds.
    """
    watch = _Watch(ranks, world_size, Deadline(timeout))
    try:
        stuck = watch.collect_results()
        watch.collect_closings()
        outcomes = [*watch.ended.values(), *watch.close_failures]
        if any(outcome.failed for outcome in outcomes):
            raise rank_failed_error(outcomes, world_size, ranks.notes() if stuck else ())
        return [watch.ended[rank].result for rank in range(world_size)]
    finally:
        ranks.dispose()


class _Watch:
    """What is known of each rank."""

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
                grace = Deadline(_STOP_SECONDS)
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
        limit = Deadline(_CLOSE_SECONDS if failed else max(_CLOSE_SECONDS, self._deadline.remaining()))
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
        summary = f"was still running {_STOP_SECONDS:g} s after the failure and was stopped, at {_innermost(stack)}"
        return Outcome(rank=rank, time=time.monotonic(), summary=summary, secondary=True)
    summary = f"not done after {timeout:g} s (the timeout of run_ranks), and stopped"
    return Outcome(rank=rank, time=time.monotonic(), summary=summary, report=f"{summary}; it was here:\n{stack}")


def _innermost(stack: str) -> str:
    lines = [line.strip() for line in stack.splitlines() if line.lstrip().startswith("File ")]
    return lines[-1] if lines else "an unknown place"
