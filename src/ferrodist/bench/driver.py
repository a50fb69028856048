"""The run: for each number of ranks and hosts it starts the peers, and measures case after case.

In a case all peers alternate, round after round, so that a disturbance of the machine meets all alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from ferrodist.bench.adapters.base import UnsupportedError
from ferrodist.bench.calibration import measure_constants, measure_network
from ferrodist.bench.cases import Peer, format_ranks, plan_stages
from ferrodist.bench.environments import EmulatedHosts, PeerFailedError
from ferrodist.bench.model import MODELLED
from ferrodist.bench.report import CaseReport, Measurement, PeerReport, case_lines, format_bytes, read_meminfo
from ferrodist.bench.targets import Iperf3, RankGroup
from ferrodist.errors import DistributedError
from ferrodist.progress import Bars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ferrodist.bench.cases import BenchOptions, Case, Suite, SuitePlan
    from ferrodist.bench.report import Report
    from ferrodist.bench.targets import Runner, Target

MIN_ROUNDS = 5  # a case has at least this many rounds, whatever they take
_MEMORY_SHARE = 0.7
_MAX_FOLDER_CHARACTERS = 70  # a Unix socket's path has at most 107 characters, and ours are in folders below


class RequiredPeerError(DistributedError):
    """The required peer can't be measured; the message says why."""


class RunDisplay(Bars):
    """Lines that stay, and on a terminal a bar below them; a context. The console is standard output by default."""

    def __init__(self, num_cases: int, console: Console | None = None) -> None:
        super().__init__(
            console or Console(),
            TextColumn("{task.fields[title]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("case {task.fields[number]} of {task.total}"),
            TimeElapsedColumn(),
            # A thread that redraws would take a processor from the ranks while they are timed.
            auto_refresh=False,
        )
        self._num_begun, self._task = 0, self.add_task("", total=num_cases, title="starting", number=0)

    def begin_case(self, title: str) -> None:
        """Show the next case."""
        self._num_begun += 1
        self.update(self._task, title=title, number=self._num_begun)
        self.show_done(0)

    def show_done(self, share: float) -> None:
        """Show the finished share of the case."""
        self.update(self._task, completed=self._num_begun - 1 + share, refresh=True)

    def print_lines(self, *lines: str) -> None:
        """Print lines that stay."""
        self.console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
        self.refresh()


def run_suites(options: BenchOptions, report: Report, display: RunDisplay) -> None:
    """Measure all cases of the suites; ``report`` receives the figures as they come."""
    begin = time.monotonic()
    stages = plan_stages(options.suites)
    try:
        _calibrate(report, display, stages)
        for (num_hosts, num_ranks), cases in stages.items():
            title = format_ranks(num_ranks, num_hosts)
            _Run(options, report, display, num_hosts, num_ranks, title).measure(cases)
        report.is_complete = True
    finally:
        report.seconds = round(time.monotonic() - begin, 1)


def _calibrate(
    report: Report, display: RunDisplay, stages: Mapping[tuple[int, int], Sequence[tuple[SuitePlan, Case]]]
) -> None:
    """Measure the model's constants for a run of its operations with several numbers of ranks."""
    modelled = [
        case
        for cases in stages.values()
        for plan, case in cases
        if case.operation in MODELLED and Peer.NATIVE in plan.peers
    ]
    if len({case.num_ranks for case in modelled}) < 2:
        return
    try:
        with _temporary_folder() as folder:
            report.constants = measure_constants(folder / "alone", display.print_lines)
        if any(case.num_hosts > 1 for case in modelled):
            with EmulatedHosts() as hosts:
                report.constants = measure_network(report.constants, hosts)
    except PeerFailedError as error:
        report.left_out.append(f"without the model, or that between hosts: {error}")
        display.print_lines(report.left_out[-1])


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A folder for the sockets of peers, whose paths must be short."""
    base = tempfile.gettempdir()
    base = base if len(base) < _MAX_FOLDER_CHARACTERS else "/tmp"  # noqa: S108 - the name can't be guessed
    with tempfile.TemporaryDirectory(prefix="ferrodist-bench-", dir=base) as folder:
        yield Path(folder)


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """The cases of one number of ranks on one number of hosts, which share running peers."""

    options: BenchOptions
    report: Report
    display: RunDisplay
    num_hosts: int
    num_ranks: int
    title: str

    def measure(self, cases: Sequence[tuple[SuitePlan, Case]]) -> None:
        """Start the peers, measure the cases, end the peers."""
        with contextlib.ExitStack() as stack:
            try:
                hosts = stack.enter_context(EmulatedHosts(self.num_hosts)) if self.num_hosts > 1 else None
            except PeerFailedError as error:
                self._skip(f"{self.title}: {error}")
                return
            folder = stack.enter_context(_temporary_folder())
            # In the order of the tables, but a missing required peer is to end the run before others start.
            peers = dict.fromkeys(peer for plan, _ in cases for peer in plan.peers)
            targets: dict[Peer, Target] = {}
            for peer in sorted(peers, key=lambda peer: peer is not self.options.required):
                if (target := self._start_peer(peer, Path(folder, peer.value), hosts)) is not None:
                    stack.callback(target.close)
                    targets[peer] = target
            for plan, case in cases:
                self._measure_case(plan.suite, case, [targets[peer] for peer in plan.peers if peer in targets])

    def _start_peer(self, peer: Peer, folder: Path, hosts: EmulatedHosts | None) -> Target | None:
        """Start a peer; without one, the report says why."""
        facts = PeerReport(peer=peer, num_ranks=self.num_ranks, num_hosts=self.num_hosts)
        self.report.peers.append(facts)
        seconds, log = self.options.seconds, lambda line: self.display.print_lines(f"{line} ...")
        try:
            if peer is Peer.IPERF3 and hosts is not None:
                target: Target = Iperf3(hosts)
            else:
                target = RankGroup(peer, self.num_ranks, folder=folder, max_seconds=seconds, log=log, hosts=hosts)
        except PeerFailedError as error:
            facts.reason = str(error)
            if peer is self.options.required:
                raise RequiredPeerError(f"{peer.value} can't be measured on {self.title}: {error}") from None
            self.display.print_lines(f"{peer.title} on {self.title} is left out: {error}")
            return None
        # Without this machine's paths and this run's options.
        command = itertools.takewhile(lambda word: word != "--folder", target.command)
        facts.command = " ".join(Path(word).name if word.startswith("/") else word for word in command)
        facts.versions = target.versions
        versions = ", ".join(" ".join(item) for item in target.versions.items())
        self.display.print_lines(f"{peer.title} on {self.title}: {versions}")
        return target

    def _measure_case(self, suite: Suite, case: Case, targets: Sequence[Target]) -> None:
        size = f" of {format_bytes(case.size_bytes)}" if case.size_bytes else ""
        title = f"{case.operation.value}{size} on {self.title}"
        self.display.begin_case(title)
        elements, free = case.input_elements + case.output_elements, read_meminfo("MemAvailable")
        needed = elements * case.dtype.size_bytes * case.num_ranks * len(targets)
        if free and needed > _MEMORY_SHARE * free:
            need = f"all peers' ranks together need {format_bytes(needed)}, and {format_bytes(free)} are free"
            self._skip(f"{title}: {need}")
            return
        measured = measure_case(suite, case, targets, self.options, self.display.show_done)
        self.report.cases.append(measured)
        self.display.print_lines("", *case_lines(measured, self.report.predict(measured)))

    def _skip(self, reason: str) -> None:
        self.report.left_out.append(f"left out, {reason}")
        self.display.print_lines(self.report.left_out[-1])


def measure_case(
    suite: Suite, case: Case, targets: Sequence[Target], options: BenchOptions, on_round: Callable[[float], None]
) -> CaseReport:
    """Measure all peers that support a case, and note why others don't; ``on_round`` gets the share of rounds done."""
    report = CaseReport(suite=suite, num_elements=case.num_elements, **dataclasses.asdict(case))
    runners: dict[Peer, Runner] = {}
    for target in targets:
        with _record_errors(target.peer, report):
            runners[target.peer] = target.open_runner(case)
    begin = time.monotonic()
    for index in range(options.num_rounds):
        first = index % max(1, len(runners))
        order = list(runners.items())
        for peer, runner in (*order[first:], *order[:first]):
            with _record_errors(peer, report):
                runner.values.append(runner.run(runner.num_calls))
            if peer in report.failures:
                del runners[peer]
        on_round((index + 1) / options.num_rounds)
        if not runners or (index + 1 >= MIN_ROUNDS and time.monotonic() - begin > options.seconds):
            break
    report.measurements = [
        Measurement.from_batches(peer, runner.values, runner.num_calls, runner.parts)
        for peer, runner in runners.items()
    ]
    for target in targets:
        with contextlib.suppress(PeerFailedError):  # the next case reports it
            target.release()
    return report


@contextlib.contextmanager
def _record_errors(peer: Peer, report: CaseReport) -> Iterator[None]:
    """Put a peer's unsupported operations and failures into the report."""
    try:
        yield
    except UnsupportedError as error:
        report.not_offered[peer] = str(error)
    except PeerFailedError as error:
        report.failures[peer] = str(error)
