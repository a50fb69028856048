"""What a run leaves: figures, and all that it takes to judge them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from ferrodist.bench.machine import Machine  # noqa: TC001 - msgspec reads the annotation
from ferrodist.bench.peers import LIMITS, OURS, Peer
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FORMAT = 2


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One peer in one case. Values are seconds for one call, or for an overlap a ratio of times.

    Args:
        peer: Its name on the command line.
        median: Over the batches.
        p10: A tenth of the batches were below.
        p99: A hundredth of the batches were above; with few batches, close to the highest.
        calls_per_batch: Calls that were timed together; for an overlap, products of matrices.
        batches: Each batch's value, in the order in which they ran.
        parts: By name: what went into each batch's value, in seconds.
    """

    peer: str
    median: float
    p10: float
    p99: float
    calls_per_batch: int
    batches: list[float]
    parts: dict[str, list[float]] = msgspec.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        peer: str,
        *,
        values: Sequence[float],
        calls_per_batch: int,
        parts: Mapping[str, Sequence[float]] | None = None,
    ) -> Measurement:
        """The statistics of a peer's batches."""
        return cls(
            peer=peer,
            median=percentile(values, 50),
            p10=percentile(values, 10),
            p99=percentile(values, 99),
            calls_per_batch=calls_per_batch,
            batches=list(values),
            parts={name: list(times) for name, times in (parts or {}).items()},
        )


class CaseReport(msgspec.Struct, kw_only=True):
    """One case.

    Args:
        suite: Whose case it is.
        operation: Its name.
        dtype: Name of the type.
        num_ranks: Ranks.
        num_hosts: Hosts that they are spread over.
        size_bytes: Of a rank's larger tensor, as asked for; 0 where the operation has no size.
        num_elements: Of the same, rounded up so that ranks have equal parts.
        measurements: By peer, those that were measured.
        not_offered: By peer: why it was not measured.
        failures: By peer: what went wrong.
    """

    suite: str
    operation: str
    dtype: str
    num_ranks: int
    num_hosts: int
    size_bytes: int
    num_elements: int
    measurements: list[Measurement] = msgspec.field(default_factory=list)
    not_offered: dict[str, str] = msgspec.field(default_factory=dict)
    failures: dict[str, str] = msgspec.field(default_factory=dict)

    def of(self, peer: Peer) -> Measurement | None:
        """A peer's figures, if it was measured."""
        return next((measured for measured in self.measurements if measured.peer == peer.value), None)

    @property
    def ours(self) -> Measurement | None:
        """What the others are compared with: ferrodist's first backend that was measured."""
        return next((measured for peer in OURS if (measured := self.of(peer)) is not None), None)

    def ratio_to_ours(self, measured: Measurement) -> float | None:
        """How many times as long as ferrodist a peer takes; below 1 it is faster than ferrodist."""
        return None if self.ours is None else _ratio(measured.median, self.ours.median)

    def ratio_to_limit(self, measured: Measurement) -> float | None:
        """How many times as long as moving the bytes, and nothing else, a peer takes."""
        limit = next((found for peer in LIMITS if (found := self.of(peer)) is not None), None)
        return None if limit is None else _ratio(measured.median, limit.median)

    @property
    def faster_peers(self) -> list[Measurement]:
        """The peers whose median is below ours."""
        others = [one for one in self.measurements if Peer(one.peer) not in {*LIMITS, *OURS}]
        return [one for one in others if (ratio := self.ratio_to_ours(one)) is not None and ratio < 1]


class PeerReport(msgspec.Struct, kw_only=True):
    """A peer on a number of ranks.

    Args:
        peer: Its name on the command line.
        num_ranks: Ranks.
        num_hosts: Hosts that they are spread over.
        versions: Of what it consists of, and the thread level that an MPI gave.
        command: What started it, or its first rank, without the paths and options of the run.
        reason: Why it was not measured, if it was not.
    """

    peer: str
    num_ranks: int
    num_hosts: int = 1
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    command: str = ""
    reason: str | None = None


class Report(msgspec.Struct, kw_only=True):
    """A run.

    Args:
        started: When, as an ISO date and time with its zone.
        machine: Where.
        settings: The options of the command that shape the figures.
        ferrodist: The version measured.
        peers: Those that were asked for.
        cases: Those that were measured.
        left_out: Cases that were not, and why.
        seconds: What the run took.
        is_complete: Whether it came to its end.
        format: Of this file.
    """

    started: str
    machine: Machine
    settings: dict[str, str]
    ferrodist: str
    peers: list[PeerReport] = msgspec.field(default_factory=list)
    cases: list[CaseReport] = msgspec.field(default_factory=list)
    left_out: list[str] = msgspec.field(default_factory=list)
    seconds: float = 0.0
    is_complete: bool = False
    format: int = FORMAT

    @property
    def failures(self) -> list[str]:
        """What went wrong in cases, a line each."""
        return [
            f"{case.operation} of {case.size_bytes} bytes ({case.dtype}) on {counted(case.num_ranks, 'rank')}"
            f"{f' of {case.num_hosts} hosts' if case.num_hosts > 1 else ''}, {name}: {reason}"
            for case in self.cases
            for name, reason in case.failures.items()
        ]


def write_report(path: Path, report: Report) -> None:
    """Write a report as JSON that people can read."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def read_report(path: Path) -> Report:
    """Read what `write_report` has written.

    Raises:
        ValueError: The file holds something else.
    """
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no report of ferrodist bench: {error}") from None
    if report.format != FORMAT:
        raise ValueError(f"{path} has format {report.format}, and this version reads {FORMAT}")
    return report


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of the values lie, between two of them in proportion."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _ratio(value: float, unit: float) -> float | None:
    return value / unit if unit > 0 else None
