"""What one rank of a test does, whether it is a thread or a process: meet, run the function, wait for the rest, close.

A group is closed only when every rank's function has ended, or its own has failed: a rank that is done early is still
there for the others, so a test of lateness sees a late rank and not a lost one.
"""

from __future__ import annotations

import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.errors import (
    DistributedError,
    GroupAbortedError,
    PeerLostError,
    describe_error,
    describe_failed_program,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

__all__ = ["Channel", "Outcome", "RankProgram", "failed_outcome", "is_own_frame"]


_HERE = Path(__file__).parent
_OUTER_FILES = {
    "pytest_plugin.py",
    "process_ranks.py",
    "rank_child.py",
    "rank_program.py",
    "ranks.py",
    "thread_ranks.py",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the function of one rank ended.

    Args:
        rank: The rank.
        time: When it ended, on the clock that all processes of a host share.
        result: What the function returned.
        error: What it raised, or None. A process rank whose error does not pickle has a stand-in here.
        report: Traceback or other text about a failure; empty when there was none.
        summary: The failure in one line.
        secondary: Whether the failure is another rank's, seen from this one.
    """

    rank: int
    time: float
    result: Any = None
    error: BaseException | None = None
    report: str = ""
    summary: str = ""
    secondary: bool = False

    @property
    def failed(self) -> bool:
        """Whether the rank did not end as it should."""
        return bool(self.summary)


class Channel(Protocol):
    """How a rank speaks with whoever runs it."""

    def ended(self, outcome: Outcome) -> None:
        """Tell that the function has ended."""

    def await_close(self) -> None:
        """Block until the functions of all ranks have ended."""

    def closed(self, outcome: Outcome | None) -> None:
        """Tell that the group is closed; ``outcome`` is a failure to close it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """The work of every rank.

    Args:
        open_group: Makes the group of a rank; may block until the others do the same.
        body: Called with the group.
    """

    open_group: Callable[[int], Backend]
    body: Callable[[Backend], Any]

    def run(self, rank: int, channel: Channel) -> None:
        """Do all that ``rank`` has to do. Nothing is raised: what happens goes to ``channel``."""
        group: Backend | None = None
        try:
            group = self.open_group(rank)
            outcome = Outcome(rank=rank, result=self._call(group), time=time.monotonic())
        except BaseException as error:  # noqa: BLE001 - a test's failure, skip or exit belongs to whoever runs the ranks
            outcome = failed_outcome(rank, error)
            if group is not None:
                _abort(group, error)
        channel.ended(outcome)
        if not outcome.failed:
            # A rank that failed closes at once: that wakes also those who wait for it in a sub-group.
            channel.await_close()
        channel.closed(_close(group, rank))

    def _call(self, group: Backend) -> Any:
        # Imported late: the plugin loads this package at every start of pytest.
        from ferrodist.backends.process_group import use_group  # noqa: PLC0415

        with use_group(group):
            return self.body(group)


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


def is_own_frame(path: str) -> bool:
    """Whether a source file is one that every rank passes through on the way to the test's function."""
    return Path(path).parent == _HERE and Path(path).name in _OUTER_FILES


def _abort(group: Backend, error: BaseException) -> None:
    # What fails here (a backend under test may do anything) must not hide the failure that is being reported.
    with suppress(Exception):
        group.abort(describe_failed_program(error))


def _close(group: Backend | None, rank: int) -> Outcome | None:
    if group is None:
        return None
    already_failed = group.failure is not None
    try:
        group.close()
    except DistributedError as error:
        # A group that has failed may say so once more when it is closed: that is not news.
        return None if already_failed else replace(failed_outcome(rank, error), secondary=False)
    except Exception as error:  # noqa: BLE001 - reported as this rank's failure
        return failed_outcome(rank, error)
    return None
