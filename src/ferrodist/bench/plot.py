"""A report as a picture: a panel for each operation, time over size, a line for each peer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ferrodist.bench.cases import Operation
from ferrodist.bench.peers import Peer
from ferrodist.bench.quantities import format_bytes, format_seconds
from ferrodist.bench.suites import Suite
from ferrodist.bench.table import where

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from ferrodist.bench.report import CaseReport, Report

__all__ = ["save_plot"]

_COLORS = {
    Peer.NATIVE: "#08519c",
    Peer.NATIVE_SYMMETRIC: "#08519c",
    Peer.NATIVE_TCP: "#3182bd",
    Peer.TCP: "#9ecae1",
    Peer.GLOO: "#d95f0e",
    Peer.MPICH: "#31a354",
    Peer.MPICH_SINGLE: "#31a354",
    Peer.OPENMPI: "#756bb1",
    Peer.OPENMPI_SINGLE: "#756bb1",
    Peer.LIMIT: "#888888",
    Peer.IPERF3: "#888888",
}
_DASHED = {
    Peer.NATIVE_SYMMETRIC: "--",
    Peer.NATIVE_TCP: "--",
    Peer.MPICH_SINGLE: "--",
    Peer.OPENMPI_SINGLE: "--",
    Peer.LIMIT: ":",
    Peer.IPERF3: ":",
}
_DRAWN = {Suite.COLLECTIVES.value, Suite.MESSAGES.value, Suite.HOSTS.value}
"""The suites of a time over a size."""
_PANEL_INCHES = (4.2, 3.6)


def save_plot(path: Path, report: Report) -> bool:
    """Draw a report into a PNG file: a row for each number of ranks and type, a column for each operation.

    Returns:
        Whether there was anything to draw: a barrier has no size, and other suites ask for no time over a size.
    """
    cases = [case for case in report.cases if case.suite in _DRAWN and case.size_bytes and case.measurements]
    rows = list(dict.fromkeys((case.num_hosts, case.num_ranks, case.dtype) for case in cases))
    order = [operation.value for operation in Operation]
    columns = sorted({case.operation for case in cases}, key=order.index)
    if not cases:
        return False
    size = (_PANEL_INCHES[0] * len(columns), _PANEL_INCHES[1] * len(rows) + 0.8)
    figure = Figure(figsize=size, layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), len(columns), squeeze=False)
    for row, line in zip(rows, panels, strict=True):
        for operation, axes in zip(columns, line, strict=True):
            chosen = [
                case
                for case in cases
                if (case.num_hosts, case.num_ranks, case.dtype, case.operation) == (*row, operation)
            ]
            if not chosen:
                axes.set_axis_off()
                continue
            _draw(axes, chosen)
            axes.set_title(f"{operation}, {where(chosen[0])}, {chosen[0].dtype}", fontsize=10)
    labelled = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=len(labelled), frameon=False)
    figure.suptitle(f"Median time of a call, lower is better: {report.machine.processor}, {report.started[:10]}")
    figure.savefig(path, format="png")
    return True


def _draw(axes: Axes, cases: list[CaseReport]) -> None:
    for peer in Peer:
        points = [(case.size_bytes, measured.median) for case in cases if (measured := case.of(peer)) is not None]
        if points:
            sizes, medians = zip(*sorted(points), strict=True)
            style = _DASHED.get(peer, "-")
            axes.plot(sizes, medians, style, color=_COLORS[peer], label=peer.title, linewidth=1.4, marker=".")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=16, numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(round(value))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
