"""One case: all peers in turn, round after round, so that what disturbs the machine disturbs all alike.

A batch is some calls timed together; its value is the slowest rank's time for one call. Small operations get as many
calls as make a batch long enough for the clock and for the ranks' unequal starts not to show.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ferrodist.bench.peers import Peer
from ferrodist.bench.rank_group import PeerFailedError
from ferrodist.bench.report import CaseReport, Measurement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.bench.cases import Case
    from ferrodist.bench.rank_group import RankGroup

__all__ = ["RoundSettings", "measure_case"]

_BATCH_SECONDS = 1e-3
_MAX_CALLS = 1000
_FIRST_CALLS = (1, 3)  # before the rounds: they touch the memory first, open connections, and say how long a call takes
_ANSWER_SECONDS = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
    """How long a case is measured.

    Args:
        num_rounds: Batches of each peer.
        min_rounds: Those that are measured whatever they take.
        seconds: A case ends after this time, if it has had ``min_rounds``.
    """

    num_rounds: int
    min_rounds: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class _Runner:
    """One peer in one case."""

    group: RankGroup
    max_calls: int
    num_calls: int = 1
    num_batches: int = 0
    seconds: list[float] = field(default_factory=list)

    def run(self, num_calls: int) -> float:
        """One batch; returns the time of a call. Raises ValueError for a wrong result."""
        self.num_batches += 1
        message = {"do": "batch", "num_calls": num_calls, "batch": self.num_batches}
        answers = self.group.ask(message, _ANSWER_SECONDS)
        wrong = [answer["wrong"] for answer in answers if answer["wrong"]]
        if wrong:
            raise ValueError(f"wrong result: {wrong[0]}")
        # Copies don't wait for each other: ranks that share a processor may copy one after the other. All processes
        # read the same clock.
        begins = [answer["begin"] for answer in answers]
        starts = [min(begins)] * len(begins) if self.group.peer is Peer.LIMIT else begins
        slowest: int = max(answer["end"] - start for answer, start in zip(answers, starts, strict=True))
        return slowest / num_calls / 1e9


def measure_case(
    case: Case, groups: Sequence[RankGroup], settings: RoundSettings, tell: Callable[[int], None]
) -> CaseReport:
    """Measure the peers that offer a case.

    Args:
        case: What to measure.
        groups: The peers' ranks.
        settings: How long.
        tell: Called with the number of the round that is done.

    Returns:
        The figures, and the reasons why peers have none.
    """
    report = CaseReport(
        collective=case.collective.value,
        dtype=case.dtype.value,
        num_ranks=case.num_ranks,
        size_bytes=case.size_bytes,
        num_elements=case.num_elements,
    )
    runners = [runner for group in groups if (runner := _prepare(group, case, report)) is not None]
    runners = [runner for runner in runners if _attempt(runner, report, _calibrate)]
    begin = time.monotonic()
    for number in range(settings.num_rounds):
        turn = number % max(1, len(runners))
        for runner in (*runners[turn:], *runners[:turn]):
            if not _attempt(runner, report, lambda runner: runner.seconds.append(runner.run(runner.num_calls))):
                runners.remove(runner)
        tell(number + 1)
        if not runners or (number + 1 >= settings.min_rounds and time.monotonic() - begin > settings.seconds):
            break
    for runner in runners:
        report.measurements.append(
            Measurement.of(runner.group.peer.value, seconds=runner.seconds, calls_per_batch=runner.num_calls)
        )
    for group in groups:
        _release(group)
    return report


def _prepare(group: RankGroup, case: Case, report: CaseReport) -> _Runner | None:
    """Let a peer allocate what the case needs; None when it does not offer it."""
    if not group.is_alive:
        report.not_offered[group.peer.value] = "it failed in an earlier case"
        return None
    message = {
        "do": "prepare",
        "collective": case.collective.value,
        "dtype": case.dtype.value,
        "size_bytes": case.size_bytes,
    }
    try:
        answers = group.ask(message, _ANSWER_SECONDS)
    except PeerFailedError as error:
        report.failures[group.peer.value] = str(error)
        return None
    refusals = [answer["not_offered"] for answer in answers if "not_offered" in answer]
    if refusals:
        report.not_offered[group.peer.value] = refusals[0]
        return None
    return _Runner(group=group, max_calls=min(answer["max_calls"] for answer in answers))


def _calibrate(runner: _Runner) -> None:
    seconds = _BATCH_SECONDS
    for num_calls in _FIRST_CALLS:
        seconds = runner.run(min(num_calls, runner.max_calls))
    wanted = min(_MAX_CALLS, runner.max_calls, round(_BATCH_SECONDS / max(seconds, 1e-9)))
    if wanted > _FIRST_CALLS[-1]:  # the first calls were slow ones: look again, with what may still be too few
        seconds = min(seconds, runner.run(wanted))
    runner.num_calls = max(1, min(_MAX_CALLS, runner.max_calls, round(_BATCH_SECONDS / max(seconds, 1e-9))))


def _attempt(runner: _Runner, report: CaseReport, action: Callable[[_Runner], None]) -> bool:
    """Whether an action of a peer went well; if not, why goes into the report."""
    try:
        action(runner)
    except (PeerFailedError, ValueError) as error:
        report.failures[runner.group.peer.value] = str(error)
        return False
    return True


def _release(group: RankGroup) -> None:
    """Let a peer free its memory; one that has failed has none."""
    if group.is_alive:
        try:
            group.ask({"do": "release"}, _ANSWER_SECONDS)
        except PeerFailedError:
            return  # the next case says so
