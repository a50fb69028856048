"""What a run leaves: figures, and all that it takes to judge them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from ferrodist.bench.machine import Machine  # noqa: TC001 - msgspec reads the annotation
from ferrodist.bench.peers import OURS, Peer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["CaseReport", "Measurement", "PeerReport", "Report", "percentile", "read_report", "write_report"]

FORMAT = 1


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One peer in one case. Times are seconds for one call.

    Args:
        peer: Its name on the command line.
        median: Over the batches.
        p10: A tenth of the batches were faster.
        p99: A hundredth of the batches were slower; with few batches, close to the slowest.
        calls_per_batch: Calls that were timed together.
        batches: Each batch's value, in the order in which they ran.
    """

    peer: str
    median: float
    p10: float
    p99: float
    calls_per_batch: int
    batches: list[float]

    @classmethod
    def of(cls, peer: str, *, seconds: Sequence[float], calls_per_batch: int) -> Measurement:
        """The statistics of a peer's batches."""
        return cls(
            peer=peer,
            median=percentile(seconds, 50),
            p10=percentile(seconds, 10),
            p99=percentile(seconds, 99),
            calls_per_batch=calls_per_batch,
            batches=list(seconds),
        )


class CaseReport(msgspec.Struct, kw_only=True):
    """One case.

    Args:
        collective: Its name.
        dtype: Name of the type.
        num_ranks: Ranks.
        size_bytes: Of a rank's larger tensor, as asked for.
        num_elements: Of the same, rounded up so that ranks have equal parts.
        measurements: By peer, those that were measured.
        not_offered: By peer: why it was not measured.
        failures: By peer: what went wrong.
    """

    collective: str
    dtype: str
    num_ranks: int
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
        """How many times as long as copying the bytes a peer takes."""
        limit = self.of(Peer.LIMIT)
        return None if limit is None else _ratio(measured.median, limit.median)

    @property
    def faster_peers(self) -> list[Measurement]:
        """The peers whose median is below ours."""
        others = [one for one in self.measurements if one.peer != Peer.LIMIT.value and Peer(one.peer) not in OURS]
        return [one for one in others if (ratio := self.ratio_to_ours(one)) is not None and ratio < 1]


class PeerReport(msgspec.Struct, kw_only=True):
    """A peer on a number of ranks.

    Args:
        peer: Its name on the command line.
        num_ranks: Ranks.
        versions: Of what it consists of, and the thread level that an MPI gave.
        command: What started it, or its first rank, without the paths and options of the run.
        reason: Why it was not measured, if it was not.
    """

    peer: str
    num_ranks: int
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
            f"{case.collective} of {case.size_bytes} bytes ({case.dtype}) on {case.num_ranks} ranks, {name}: {reason}"
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
