"""A run: for each number of ranks the peers are started, and all cases measured."""

from __future__ import annotations

import contextlib
import importlib.metadata
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.bench.cases import Case, Collective, DataType
from ferrodist.bench.machine import available_bytes, describe_machine
from ferrodist.bench.quantities import format_bytes
from ferrodist.bench.rank_group import PeerFailedError, RankGroup
from ferrodist.bench.report import PeerReport, Report
from ferrodist.bench.rounds import RoundSettings, measure_case
from ferrodist.bench.table import case_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.bench.display import Display
    from ferrodist.bench.peers import Peer

__all__ = ["Plan", "begin_report", "cases_of", "run_comparison"]

_START_SECONDS = 90.0
_MEMORY_SHARE = 0.7
_LONGEST_FOLDER = 70  # a Unix socket's path has 107 characters, and ours lies below


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure: every combination of these.

    Args:
        collectives: Operations; a barrier is measured once for each number of ranks.
        ranks: Numbers of ranks.
        dtypes: Types.
        sizes: Bytes.
        peers: Who, in the order of the tables.
        rounds: How long.
    """

    collectives: Sequence[Collective]
    ranks: Sequence[int]
    dtypes: Sequence[DataType]
    sizes: Sequence[int]
    peers: Sequence[Peer]
    rounds: RoundSettings


def cases_of(plan: Plan, num_ranks: int) -> list[Case]:
    """The cases of a plan on a number of ranks, in order."""
    cases = []
    for collective in plan.collectives:
        if collective is Collective.BARRIER:
            cases.append(Case(collective=collective, num_ranks=num_ranks))
            continue
        cases += [
            Case(collective=collective, num_ranks=num_ranks, dtype=dtype, size_bytes=size)
            for dtype in plan.dtypes
            for size in plan.sizes
        ]
    return cases


def begin_report(plan: Plan) -> Report:
    """A report without figures, of this machine and now."""
    return Report(
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=describe_machine(),
        settings={
            "rounds": str(plan.rounds.num_rounds),
            "seconds for a case": f"{plan.rounds.seconds:g}",
            "threads of a rank": "1",
        },
        ferrodist=importlib.metadata.version("ferrodist"),
    )


def run_comparison(plan: Plan, report: Report, display: Display) -> None:
    """Measure all cases of a plan.

    Args:
        plan: What to measure.
        report: Gets the figures as they come: what it holds after an interruption was measured.
        display: Told of all.
    """
    begin = time.monotonic()
    try:
        for num_ranks in plan.ranks:
            with contextlib.ExitStack() as stack:
                folder = Path(stack.enter_context(_short_folder()))
                groups = []
                for peer in plan.peers:
                    facts = PeerReport(peer=peer.value, num_ranks=num_ranks)
                    report.peers.append(facts)
                    group = _start_peer(peer, num_ranks, folder / peer.value, facts, display)
                    if group is not None:
                        groups.append(stack.enter_context(group))
                for case in cases_of(plan, num_ranks):
                    _measure(case, groups, plan.rounds, report, display)
        report.is_complete = True
    finally:
        report.seconds = round(time.monotonic() - begin, 1)


def _start_peer(peer: Peer, num_ranks: int, folder: Path, facts: PeerReport, display: Display) -> RankGroup | None:
    """A peer's ranks, which the caller ends; None, and the reason in ``facts``, when they can't be had."""
    folder.mkdir()
    try:
        group = RankGroup(
            peer, num_ranks, folder=folder, timeout=_START_SECONDS, tell=lambda line: display.say([f"{line} ..."])
        )
    except PeerFailedError as error:
        facts.reason = str(error)
        display.say([f"{peer.title} on {num_ranks} ranks is left out: {error}"])
        return None
    facts.versions, facts.command = group.versions, _shown(group.command)
    versions = ", ".join(" ".join(item) for item in group.versions.items())
    display.say([f"{peer.title} on {num_ranks} ranks: {versions}"])
    return group


def _measure(case: Case, groups: Sequence[RankGroup], rounds: RoundSettings, report: Report, display: Display) -> None:
    needed = (case.input_elements + case.output_elements) * case.dtype.size_bytes * case.num_ranks * len(groups)
    available = available_bytes()
    title = f"{case.collective.value} of {format_bytes(case.size_bytes)} on {case.num_ranks} ranks"
    display.begin(title, rounds.num_rounds)
    if available and needed > _MEMORY_SHARE * available:
        report.left_out.append(
            f"{title} was left out: all peers' ranks together need {format_bytes(needed)},"
            f" and {format_bytes(available)} are free"
        )
        display.say([report.left_out[-1]])
        return
    measured = measure_case(case, groups, rounds, display.show_round)
    report.cases.append(measured)
    display.say(["", *case_lines(measured)])


def _shown(command: Sequence[str]) -> str:
    """A command without this machine's paths and this run's options."""
    end = command.index("--socket")
    return " ".join(Path(word).name if word.startswith("/") else word for word in command[:end])


def _short_folder() -> tempfile.TemporaryDirectory[str]:
    base = tempfile.gettempdir()
    return tempfile.TemporaryDirectory(prefix="ferrodist-bench-", dir=base if len(base) < _LONGEST_FOLDER else "/tmp")  # noqa: S108 - with a name that nobody knows
