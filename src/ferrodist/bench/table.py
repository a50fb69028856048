"""A report as text, for terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.bench.cases import Operation
from ferrodist.bench.peers import LIMITS, Peer
from ferrodist.bench.quantities import format_bytes, format_ratio, format_seconds
from ferrodist.bench.report import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.bench.report import CaseReport, Measurement, PeerReport, Report

LOSS_MARK = "<- faster than ferrodist"
_HEADINGS = ("", "median", "p10", "p99", "/ours", "/limit")
_WIDTHS = (22, 9, 9, 9, 9, 9)


def case_title(case: CaseReport) -> str:
    """Return "allreduce, 2 ranks, float32, 16 KiB"."""
    words = [case.operation, where(case)]
    if case.size_bytes:
        words += [case.dtype, format_bytes(case.size_bytes)]
    return ", ".join(words)


def where(case: CaseReport | PeerReport) -> str:
    """Return "2 ranks", or "2 ranks on 2 hosts"."""
    return f"{case.num_ranks} ranks" + (f" on {case.num_hosts} hosts" if case.num_hosts > 1 else "")


def format_value(case: CaseReport, value: float) -> str:
    """A case's value as people read it: a time, or for an overlap a ratio of times."""
    return format_ratio(value) if case.operation == Operation.OVERLAP.value else format_seconds(value)


def parts_of(measured: Measurement) -> str:
    """Return "alone 5 ms, computing 5 ms, together 8 ms" for what a value is made of; nothing for a plain time."""
    return ", ".join(f"{name} {format_seconds(percentile(times, 50))}" for name, times in measured.parts.items())


def case_lines(case: CaseReport) -> list[str]:
    """The figures of one case, a line a peer; a peer that is faster than ferrodist is marked."""
    lines = [case_title(case), _row(_HEADINGS)]
    faster = {measured.peer for measured in case.faster_peers}
    for measured in case.measurements:
        values = [format_value(case, value) for value in (measured.median, measured.p10, measured.p99)]
        to_ours = None if Peer(measured.peer) in LIMITS else case.ratio_to_ours(measured)
        ratios = [format_ratio(to_ours), format_ratio(case.ratio_to_limit(measured))]
        row = _row((Peer(measured.peer).title, *values, *ratios))
        notes = [parts_of(measured), LOSS_MARK if measured.peer in faster else ""]
        lines.append("  ".join([row, *filter(None, notes)]))
    for name, reason in (*case.not_offered.items(), *case.failures.items()):
        lines.append(f"  {Peer(name).title:<{_WIDTHS[0]}}{'FAILED: ' if name in case.failures else '-  '}{reason}")
    return lines


def summary_lines(report: Report) -> list[str]:
    """What to know about the whole run: who was left out, what failed, and where ferrodist was slower."""
    lines = [
        f"{Peer(peer.peer).title} was not measured on {where(peer)}: {peer.reason}"
        for peer in report.peers
        if peer.reason is not None
    ]
    lines += report.left_out
    lines += [f"FAILED: {failure}" for failure in report.failures]
    compared = [case for case in report.cases if case.ours is not None and len(case.measurements) > 1]
    lost = [case for case in compared if case.faster_peers]
    lines.append(f"ferrodist was slower than a peer in {len(lost)} of {len(compared)} cases{':' if lost else '.'}")
    for case in lost:
        best = min(case.faster_peers, key=lambda measured: measured.median)
        assert case.ours is not None
        lines.append(
            f"  {case_title(case)}: {Peer(best.peer).title} {format_value(case, best.median)},"
            f" ferrodist {format_value(case, case.ours.median)}"
        )
    if report.machine.is_busy:
        lines.append(
            f"The machine was busy when the run began (load {report.machine.load:.1f} on"
            f" {report.machine.num_processors} processors): these figures say little."
        )
    return lines


def _row(cells: Sequence[str]) -> str:
    padded = [
        f"{cells[0]:<{_WIDTHS[0]}}",
        *(f"{cell:>{width}}" for cell, width in zip(cells[1:], _WIDTHS[1:], strict=True)),
    ]
    return "  " + "".join(padded).rstrip()
