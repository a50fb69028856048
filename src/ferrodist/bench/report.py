"""The report of a run: statistics and all facts needed to judge them; as JSON, and as text for terminals."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import statistics
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ferrodist.bench.cases import LIMITS, OURS, Case, DataType, Operation, Peer, Suite, format_ranks
from ferrodist.bench.model import Constants, predict
from ferrodist.installation import installed_version

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMAT = 2
LOSS_MARK = "<- faster than ferrodist"
_BUSY_LOAD = 0.3  # of a processor; above, other processes took so much time that the figures can't be trusted
_FASTER_GROWTH = 1.25  # measured growth over the model's; more is listed


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A computer, as it was when the run began; ``load`` is the number of runnable processes over a minute."""

    processor: str
    num_processors: int  # that this process may use
    caches: dict[str, str]  # size by name, such as "L3" and "32768K"
    memory_bytes: int
    huge_pages: str  # the kernel's policy, such as "madvise"
    system: str  # kernel and architecture
    python: str
    load: float


def describe_machine() -> Machine:
    """Describe this machine, now; facts that the system does not offer are empty or 0."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    policy = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled"))
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind = {"Data": "d", "Instruction": "i"}.get(_read(index / "type"), "")
        caches[f"L{_read(index / 'level')}{kind}"] = _read(index / "size")
    return Machine(
        processor=found[1].strip() if found else platform.processor() or platform.machine(),
        num_processors=len(os.sched_getaffinity(0)),
        caches=caches,
        memory_bytes=read_meminfo("MemTotal"),
        huge_pages=policy[1] if policy else "",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        load=os.getloadavg()[0],
    )


def read_meminfo(name: str) -> int:
    """A line of /proc/meminfo, such as "MemAvailable", in bytes; 0 where the system does not say."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _read(path: str | Path) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""


class Measurement(msgspec.Struct, frozen=True):
    """One peer in one case. Values are seconds for one call, or for an overlap a ratio of times."""

    peer: Peer
    median: float
    p10: float  # a tenth of the batches were below
    p99: float  # a hundredth of the batches were above; with few batches it is close to the highest
    calls_per_batch: int  # of an overlap: products of matrices
    batches: list[float]
    parts: dict[str, list[float]]  # the components of each batch's value in seconds, by name

    @classmethod
    def from_batches(
        cls, peer: Peer, values: list[float], calls_per_batch: int, parts: dict[str, list[float]]
    ) -> Measurement:
        """Compute the statistics of a peer's batches."""
        p10, median, p99 = np.percentile(values, (10, 50, 99)).tolist()
        return cls(peer, median, p10, p99, calls_per_batch, values, parts)

    def format_parts(self) -> str:
        """Return "alone 5 ms, computing 5 ms, together 8 ms"; "" for a plain time."""
        return ", ".join(f"{name} {format_seconds(statistics.median(times))}" for name, times in self.parts.items())


class CaseReport(msgspec.Struct, kw_only=True):
    """One case; ``not_offered`` and ``failures`` say, by peer, why a peer has no figures."""

    suite: Suite
    operation: Operation
    dtype: DataType
    num_ranks: int
    num_hosts: int
    size_bytes: int  # the requested size of a rank's larger tensor, 0 where the operation has no size
    num_elements: int  # of that tensor, rounded up so that ranks have equal parts
    measurements: list[Measurement] = []
    not_offered: dict[Peer, str] = {}
    failures: dict[Peer, str] = {}

    def measurement(self, *peers: Peer) -> Measurement | None:
        """The figures of the first of some peers that was measured."""
        found = {measured.peer: measured for measured in self.measurements}
        return next((found[peer] for peer in peers if peer in found), None)

    @property
    def ours(self) -> Measurement | None:
        """The figures to compare with: those of ferrodist's first backend that was measured."""
        return self.measurement(*OURS)

    def ratio(self, measured: Measurement, peers: Sequence[Peer]) -> float | None:
        """A peer's median over that of the first of others that was measured: ferrodist's backends, or the limits."""
        unit = self.measurement(*peers)
        return None if unit is None or unit.median <= 0 else measured.median / unit.median

    @property
    def faster_peers(self) -> list[Measurement]:
        """The peers whose median is below ours."""
        others = [one for one in self.measurements if one.peer not in {*LIMITS, *OURS}]
        return [one for one in others if (ratio := self.ratio(one, OURS)) is not None and ratio < 1]

    @property
    def case(self) -> Case:
        """What was measured."""
        return Case(self.operation, self.num_ranks, self.num_hosts, self.dtype, self.size_bytes)

    @property
    def title(self) -> str:
        """Return "allreduce, 2 ranks, float32, 16 KiB"."""
        size = [self.dtype.value, format_bytes(self.size_bytes)] if self.size_bytes else []
        return ", ".join([self.operation.value, format_ranks(self.num_ranks, self.num_hosts), *size])

    def format_value(self, value: float) -> str:
        """A value for people: a time, or for an overlap a ratio of times."""
        return format_ratio(value) if self.operation is Operation.OVERLAP else format_seconds(value)


class PeerReport(msgspec.Struct, kw_only=True):
    """A peer on a number of ranks."""

    peer: Peer
    num_ranks: int
    num_hosts: int = 1
    versions: dict[str, str] = {}  # of its components, and the thread level that an MPI gave
    command: str = ""  # that started it, or its first rank, without the paths and options of the run
    reason: str | None = None  # why it was not measured


class Report(msgspec.Struct, kw_only=True):
    """A run, by default one that begins now on this machine; ``settings`` are the options that shape the figures."""

    started: str = msgspec.field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    machine: Machine = msgspec.field(default_factory=describe_machine)
    settings: dict[str, str]
    ferrodist: str = msgspec.field(default_factory=lambda: installed_version() or "source tree")
    peers: list[PeerReport] = []
    cases: list[CaseReport] = []
    constants: Constants | None = None  # of the model, in a run with several numbers of ranks
    left_out: list[str] = []  # the cases that were not measured, with the reasons
    seconds: float = 0.0
    is_complete: bool = False  # whether the run was not interrupted
    format: int = FORMAT

    @property
    def failures(self) -> list[str]:
        """The failures of all cases, a line each."""
        return [
            f"{case.operation.value} of {case.size_bytes} bytes ({case.dtype.value}) on"
            f" {format_ranks(case.num_ranks, case.num_hosts, 'of')}, {peer.value}: {reason}"
            for case in self.cases
            for peer, reason in case.failures.items()
        ]

    def predict(self, case: CaseReport) -> float | None:
        """The model's time for ferrodist's native engine in a case; None if it says nothing of it."""
        return None if self.constants is None else predict(case.case, self.constants)


def write_report(path: Path, report: Report) -> None:
    """Write a report as JSON that people can read."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def case_lines(case: CaseReport, predicted: float | None = None) -> list[str]:
    """The figures of one case, a line for each peer, and the model's time; a peer faster than ferrodist is marked."""
    lines = [case.title, _row("", ("median", "p10", "p99", "/ours", "/limit"))]
    for measured in case.measurements:
        to_ours = None if measured.peer in LIMITS else case.ratio(measured, OURS)
        cells = [case.format_value(value) for value in (measured.median, measured.p10, measured.p99)]
        cells += [format_ratio(ratio) for ratio in (to_ours, case.ratio(measured, LIMITS))]
        notes = [measured.format_parts(), LOSS_MARK if measured in case.faster_peers else ""]
        lines.append("  ".join([_row(measured.peer.title, cells), *filter(None, notes)]))
    if predicted is not None and (native := case.measurement(Peer.NATIVE)):
        cells = [format_seconds(predicted), "", "", format_ratio(predicted / native.median)]
        lines.append(_row("model of ferrodist", cells))
    for peer, reason in (*case.not_offered.items(), *case.failures.items()):
        lines.append(f"{_row(peer.title, ())}{'FAILED: ' if peer in case.failures else '-  '}{reason}")
    return lines


def _row(title: str, cells: Sequence[str]) -> str:
    return f"  {title:<22}" + "".join(f"{cell:>9}" for cell in cells)


def summary_lines(report: Report) -> list[str]:
    """The summary of the run: missing peers, failures, and the cases where ferrodist was slower."""
    lines = [
        f"{peer.peer.title} was not measured on {format_ranks(peer.num_ranks, peer.num_hosts)}: {peer.reason}"
        for peer in report.peers
        if peer.reason is not None
    ]
    lines += report.left_out
    lines += [f"FAILED: {failure}" for failure in report.failures]
    compared = [case for case in report.cases if case.ours is not None and len(case.measurements) > 1]
    lost = [(case, ours, case.faster_peers) for case in compared if case.faster_peers and (ours := case.ours)]
    lines.append(f"ferrodist was slower than a peer in {len(lost)} of {len(compared)} cases{':' if lost else '.'}")
    for case, ours, faster in lost:
        best = min(faster, key=lambda measured: measured.median)
        values = f"{best.peer.title} {case.format_value(best.median)}, ferrodist {case.format_value(ours.median)}"
        lines.append(f"  {case.title}: {values}")
    lines += growth_lines(report)
    if report.machine.load > _BUSY_LOAD * report.machine.num_processors:
        lines.append(
            f"The machine was busy when the run began (load {report.machine.load:.1f} on"
            f" {report.machine.num_processors} processors): these figures say little."
        )
    return lines


def growth_groups(report: Report) -> dict[tuple[Operation, int, DataType, int], list[CaseReport]]:
    """The cases that the model speaks of by operation, hosts, type and size; each with two numbers of ranks or more."""
    groups: dict[tuple[Operation, int, DataType, int], list[CaseReport]] = {}
    for case in report.cases:
        if case.measurement(Peer.NATIVE) and report.predict(case) is not None:
            groups.setdefault((case.operation, case.num_hosts, case.dtype, case.size_bytes), []).append(case)
    ordered = {key: sorted(cases, key=lambda case: case.num_ranks) for key, cases in groups.items()}
    return {key: cases for key, cases in ordered.items() if cases[0].num_ranks < cases[-1].num_ranks}


def growth_lines(report: Report) -> list[str]:
    """The cases in which time grew faster over the ranks than the model says, from the fewest to the most."""
    lines = []
    groups = growth_groups(report)
    for cases in groups.values():
        first, last = cases[0], cases[-1]
        measured = [one.median for case in (first, last) if (one := case.measurement(Peer.NATIVE))]
        predicted = [seconds for case in (first, last) if (seconds := report.predict(case))]
        times, model_times = measured[1] / measured[0], predicted[1] / predicted[0]
        if times > _FASTER_GROWTH * model_times:
            grown = f"{format_ratio(times)} times the time of {first.num_ranks} ranks, by the model"
            lines.append(f"  {last.title}: {grown} {format_ratio(model_times)}")
    if groups:
        count = f"{len(lines)} of {len(groups)} cases{':' if lines else '.'}"
        lines.insert(0, f"ferrodist's time grew over the ranks by a quarter more than the model says in {count}")
    return lines


def format_bytes(size: int) -> str:
    """Return "16 KiB", for 16384."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{_three_digits(size / factor)} {unit}"
    return f"{size} B"


def format_seconds(seconds: float) -> str:
    """Return "12.3 us", for 1.23e-5."""
    # Just below a unit's end, rounding to three digits would reach the next one.
    for unit, factor in (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * factor:
            return f"{_three_digits(seconds / factor)} {unit}"
    return f"{_three_digits(seconds)} s"


def format_ratio(ratio: float | None) -> str:
    """Return "0.0012", "1.23", "45.6", "789" or "-"."""
    if ratio is None:
        return "-"
    return f"{ratio:.2g}" if 0 < ratio < 0.095 else _three_digits(ratio, always=True)


def _three_digits(value: float, *, always: bool = False) -> str:
    """Three digits, or fewer for an integer unless ``always``."""
    if value == int(value) and not always:
        return f"{value:.0f}"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
