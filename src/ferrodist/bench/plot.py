"""The picture of a report: a panel for each operation, time over size, a line for each peer."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ferrodist.bench.cases import LIMITS, Peer
from ferrodist.bench.report import format_bytes, format_seconds
from ferrodist.bench.suites import Suite, format_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from ferrodist.bench.report import CaseReport, Report

_COLORS = {
    Peer.NATIVE: "#08519c",
    Peer.NATIVE_SYMMETRIC: "#08519c",
    Peer.NATIVE_TCP: "#3182bd",
    Peer.TCP: "#9ecae1",
    Peer.OVER_MPI: "#a1d99b",
    Peer.OVER_UCC: "#dd1c77",
    Peer.OVER_NCCL: "#76b900",
    Peer.GLOO: "#d95f0e",
    Peer.MPICH: "#31a354",
    Peer.MPICH_SINGLE: "#31a354",
    Peer.OPENMPI: "#756bb1",
    Peer.OPENMPI_SINGLE: "#756bb1",
    Peer.MPI4PY: "#bcbddc",
    Peer.LIMIT: "#888888",
    Peer.IPERF3: "#888888",
}
_DASHED = (Peer.NATIVE_SYMMETRIC, Peer.NATIVE_TCP, Peer.MPICH_SINGLE, Peer.OPENMPI_SINGLE)
_PLOTTED_SUITES = {Suite.COLLECTIVES.value, Suite.MESSAGES.value, Suite.HOSTS.value}
_PANEL_INCHES = (4.2, 3.4)
_COLUMNS = 3
_LABELS_PER_COLUMN = 2


def save_plot(path: Path, report: Report) -> bool:
    """Draw a panel for each operation, number of ranks and hosts, and dtype into a PNG file; False if there is none.

    Only some suites measure a time over a size, and a barrier has no size.
    """
    groups: dict[tuple[int, int, str, str], list[CaseReport]] = {}
    for case in report.cases:
        if case.suite in _PLOTTED_SUITES and case.size_bytes and case.measurements:
            groups.setdefault((case.num_hosts, case.num_ranks, case.dtype, case.operation), []).append(case)
    if not groups:
        return False
    num_columns = min(_COLUMNS, len(groups))
    num_rows = -(-len(groups) // num_columns)
    size = (_PANEL_INCHES[0] * num_columns, _PANEL_INCHES[1] * num_rows + 1.2)
    figure = Figure(figsize=size, layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_rows, num_columns, squeeze=False).flat
    for axes, cases in zip_longest(panels, groups.values()):
        if cases is None:
            axes.set_axis_off()
            continue
        _draw(axes, cases)
        axes.set_title(
            f"{cases[0].operation}, {format_ranks(cases[0].num_ranks, cases[0].num_hosts)}, {cases[0].dtype}",
            fontsize=10,
        )
    labelled = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        labelled.values(),
        labelled.keys(),
        loc="outside lower center",
        ncols=min(len(labelled), _LABELS_PER_COLUMN * num_columns),
        frameon=False,
    )
    figure.suptitle(f"Median time of a call, lower is better: {report.machine.processor}, {report.started[:10]}")
    figure.savefig(path, format="png")
    return True


def _draw(axes: Axes, cases: list[CaseReport]) -> None:
    for peer in Peer:
        points = [
            (case.size_bytes, measured.median) for case in cases if (measured := case.measurement(peer)) is not None
        ]
        if points:
            sizes, medians = zip(*sorted(points), strict=True)
            style = ":" if peer in LIMITS else "--" if peer in _DASHED else "-"
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
