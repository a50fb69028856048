"""The picture of a report: a panel for each operation, time over size, a line for each peer."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ferrodist.bench.cases import Peer, Suite, format_ranks
from ferrodist.bench.report import format_bytes, format_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from ferrodist.bench.cases import DataType, Operation
    from ferrodist.bench.report import CaseReport, Report

_PLOTTED_SUITES = {Suite.COLLECTIVES, Suite.MESSAGES, Suite.HOSTS}
_PANEL_INCHES = (4.2, 3.4)
_COLUMNS = 3
_LABELS_PER_COLUMN = 2


def save_plot(path: Path, report: Report) -> bool:
    """Draw a panel for each operation, number of ranks and hosts, and dtype into a PNG file; False without panels.

    Only some suites measure a time over a size, and a barrier has no size.
    """
    groups: dict[tuple[int, int, DataType, Operation], list[CaseReport]] = {}
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
        else:
            _draw(axes, cases)
    handles = {str(line.get_label()): line for axes in figure.axes for line in axes.lines}
    ncols = min(len(handles), _LABELS_PER_COLUMN * num_columns)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=ncols, frameon=False)
    figure.suptitle(f"Median time of a call, lower is better: {report.machine.processor}, {report.started[:10]}")
    figure.savefig(path, format="png")
    return True


def _draw(axes: Axes, cases: list[CaseReport]) -> None:
    for peer in Peer:
        found = [(case.size_bytes, case.measurement(peer)) for case in cases]
        points = [(size, measured.median) for size, measured in found if measured is not None]
        if points:
            sizes, medians = zip(*sorted(points), strict=True)
            axes.plot(sizes, medians, peer.line_style, color=peer.color, label=peer.title, linewidth=1.4, marker=".")
    where = format_ranks(cases[0].num_ranks, cases[0].num_hosts)
    axes.set_title(f"{cases[0].operation.value}, {where}, {cases[0].dtype.value}", fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=16, numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(round(value))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
