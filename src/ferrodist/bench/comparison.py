"""A run: for each number of ranks and hosts the peers are started, and all cases measured."""

from __future__ import annotations

import contextlib
import importlib.metadata
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.bench.hosts import EmulatedHosts, HostsUnavailableError
from ferrodist.bench.link import LinkContestant
from ferrodist.bench.machine import available_bytes, describe_machine
from ferrodist.bench.peers import Peer
from ferrodist.bench.plan import Plan, stages_of
from ferrodist.bench.quantities import format_bytes
from ferrodist.bench.rank_group import PeerFailedError, RankGroup
from ferrodist.bench.report import PeerReport, Report
from ferrodist.bench.rounds import measure_case
from ferrodist.bench.runners import PeerContestant
from ferrodist.bench.table import case_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.bench.cases import Case
    from ferrodist.bench.display import Display
    from ferrodist.bench.plan import Chapter, Stage
    from ferrodist.bench.runners import Contestant

_START_SECONDS = 90.0
_MEMORY_SHARE = 0.7
_LONGEST_FOLDER = 70  # a Unix socket's path has 107 characters, and ours lies below


class RequiredPeerError(Exception):
    """Who had to be measured can't be; the message says why."""


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

    Raises:
        RequiredPeerError: The plan requires a peer that can't be started.
    """
    begin = time.monotonic()
    comparison = _Comparison(plan, report, display)
    try:
        for stage in stages_of(plan):
            comparison.run_stage(stage)
        report.is_complete = True
    finally:
        report.seconds = round(time.monotonic() - begin, 1)


class _Comparison:
    """A run: what it does, and where it tells of it."""

    def __init__(self, plan: Plan, report: Report, display: Display) -> None:
        self._plan, self._report, self._display = plan, report, display

    def run_stage(self, stage: Stage) -> None:
        """Start the peers of a stage, measure its cases, end the peers."""
        with contextlib.ExitStack() as stack:
            try:
                hosts = stack.enter_context(EmulatedHosts()) if stage.num_hosts > 1 else None
            except HostsUnavailableError as error:
                self._leave_out(f"{stage.title}: {error}")
                return
            contestants = self._start_peers(stage, hosts, stack)
            for chapter, case in stage.cases():
                self._measure(chapter, case, [contestants[peer] for peer in chapter.peers if peer in contestants])

    def _start_peers(
        self, stage: Stage, hosts: EmulatedHosts | None, stack: contextlib.ExitStack
    ) -> dict[Peer, Contestant]:
        """The peers of a stage that can be had, which ``stack`` ends; the report says why others can't."""
        folder = Path(stack.enter_context(_short_folder()))
        contestants: dict[Peer, Contestant] = {}
        required = self._plan.required
        for peer in sorted(stage.peers, key=lambda peer: peer is not required):
            facts = PeerReport(peer=peer.value, num_ranks=stage.num_ranks, num_hosts=stage.num_hosts)
            self._report.peers.append(facts)
            title = f"{peer.title} on {stage.title}"
            try:
                started: RankGroup | LinkContestant
                if peer is Peer.IPERF3:
                    assert hosts is not None, "only suites of several hosts have this peer"
                    contestants[peer] = started = stack.enter_context(LinkContestant(hosts))
                else:
                    started = stack.enter_context(self._start_ranks(peer, stage, folder / peer.value, hosts))
                    contestants[peer] = PeerContestant(started, self._plan.rounds.seconds)
            except PeerFailedError as error:
                facts.reason = str(error)
                if peer is required:
                    raise RequiredPeerError(f"{peer.value} can't be measured on {stage.title}: {error}") from None
                self._display.say([f"{title} is left out: {error}"])
                continue
            facts.versions, facts.command = started.versions, _shown(started.command)
            self._display.say([f"{title}: {', '.join(' '.join(item) for item in started.versions.items())}"])
        return contestants

    def _start_ranks(self, peer: Peer, stage: Stage, folder: Path, hosts: EmulatedHosts | None) -> RankGroup:
        folder.mkdir()
        return RankGroup(
            peer,
            stage.num_ranks,
            folder=folder,
            timeout=_START_SECONDS,
            tell=lambda line: self._display.say([f"{line} ..."]),
            hosts=hosts,
        )

    def _measure(self, chapter: Chapter, case: Case, contestants: Sequence[Contestant]) -> None:
        size = f" of {format_bytes(case.size_bytes)}" if case.operation.has_size else ""
        title = f"{case.operation.value}{size} on {case.num_ranks} ranks"
        self._display.begin(title, self._plan.rounds.num_rounds)
        elements = case.input_elements + case.output_elements
        needed = elements * case.dtype.size_bytes * case.num_ranks * len(contestants)
        available = available_bytes()
        if available and needed > _MEMORY_SHARE * available:
            self._leave_out(
                f"{title}: all peers' ranks together need {format_bytes(needed)},"
                f" and {format_bytes(available)} are free"
            )
            return
        measured = measure_case(chapter.suite, case, contestants, self._plan.rounds, self._display.show_round)
        self._report.cases.append(measured)
        self._display.say(["", *case_lines(measured)])

    def _leave_out(self, what: str) -> None:
        self._report.left_out.append(f"left out, {what}")
        self._display.say([self._report.left_out[-1]])


def _shown(command: Sequence[str]) -> str:
    """A command without this machine's paths and this run's options."""
    end = command.index("--socket") if "--socket" in command else len(command)
    return " ".join(Path(word).name if word.startswith("/") else word for word in command[:end])


def _short_folder() -> tempfile.TemporaryDirectory[str]:
    base = tempfile.gettempdir()
    return tempfile.TemporaryDirectory(prefix="ferrodist-bench-", dir=base if len(base) < _LONGEST_FOLDER else "/tmp")  # noqa: S108 - with a name that nobody knows
