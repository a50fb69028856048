"""One case: all peers in turn, round after round, so that what disturbs the machine disturbs all alike."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrodist.bench.adapters import NotOfferedError
from ferrodist.bench.rank_group import PeerFailedError
from ferrodist.bench.report import CaseReport, Measurement
from ferrodist.bench.runners import WrongResultError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ferrodist.bench.cases import Case
    from ferrodist.bench.runners import Contestant, Runner
    from ferrodist.bench.suites import Suite


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


def measure_case(
    suite: Suite,
    case: Case,
    contestants: Sequence[Contestant],
    settings: RoundSettings,
    tell: Callable[[int], None],
) -> CaseReport:
    """Measure the peers that offer a case.

    Args:
        suite: Whose case it is.
        case: What to measure.
        contestants: The peers.
        settings: How long.
        tell: Called with the number of the round that is done.

    Returns:
        The figures, and the reasons why peers have none.
    """
    report = CaseReport(
        suite=suite.value,
        operation=case.operation.value,
        dtype=case.dtype.value,
        num_ranks=case.num_ranks,
        num_hosts=case.num_hosts,
        size_bytes=case.size_bytes,
        num_elements=case.num_elements,
    )
    runners: dict[Contestant, Runner] = {}
    for contestant in contestants:
        with _recording(contestant, report):
            runners[contestant] = contestant.open_runner(case)
    begin = time.monotonic()
    for number in range(settings.num_rounds):
        turn = number % max(1, len(runners))
        order = list(runners)
        for contestant in (*order[turn:], *order[:turn]):
            with _recording(contestant, report):
                runners[contestant].measure()
            if contestant.peer.value in report.failures:
                del runners[contestant]
        tell(number + 1)
        if not runners or (number + 1 >= settings.min_rounds and time.monotonic() - begin > settings.seconds):
            break
    for contestant, runner in runners.items():
        report.measurements.append(
            Measurement.of(
                contestant.peer.value, values=runner.values, calls_per_batch=runner.num_calls, parts=runner.parts
            )
        )
    for contestant in contestants:
        with contextlib.suppress(PeerFailedError):  # the next case says so
            contestant.release()
    return report


@contextlib.contextmanager
def _recording(contestant: Contestant, report: CaseReport) -> Iterator[None]:
    """Let what a peer lacks, and what fails, go into the report."""
    try:
        yield
    except NotOfferedError as error:
        report.not_offered[contestant.peer.value] = str(error)
    except (PeerFailedError, WrongResultError) as error:
        report.failures[contestant.peer.value] = str(error)
