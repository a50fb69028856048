"""Plots of a report: the time of each peer over the size; and of ferrodist over ranks and sizes, beside its model."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from ferrodist.bench.cases import OURS, Case, DataType, Operation, Peer, Suite, format_ranks
from ferrodist.bench.model import predict
from ferrodist.bench.report import format_bytes, format_seconds, growth_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    from ferrodist.bench.report import CaseReport, Report

_PLOTTED_SUITES = {Suite.COLLECTIVES, Suite.MESSAGES, Suite.HOSTS}
_PANEL_INCHES = (4.2, 3.4)
_GROWTH_PANEL_INCHES = (3.3, 2.9)
_COLUMNS, _LABELS_PER_COLUMN = 3, 2
_COLORS = ("#08519c", "#d95f0e", "#31a354", "#756bb1", "#dd1c77", "#636363")  # of lines, in turn
_MARKERS = {Peer.GLOO: "+", Peer.OPENMPI: "x", Peer.MPICH: "1"}


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
    _set_sizes_axis(axes)
    where = format_ranks(cases[0].num_ranks, cases[0].num_hosts)
    _finish(axes, f"{cases[0].operation.value}, {where}, {cases[0].dtype.value}")


def _set_sizes_axis(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=16, numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(round(value))))


def _finish(axes: Axes, title: str) -> None:
    """The title, the axis of times and the grid, which all panels have."""
    axes.set_title(title, fontsize=10)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def save_growth_plots(path: Path, report: Report) -> list[Path]:
    """Draw the cases that the model speaks of over the ranks, and over the size, into two PNG files beside ``path``.

    Returns their paths: none where the report has no constants, or one number of ranks alone.
    """
    groups = growth_groups(report)
    if not groups:
        return []
    cases = [case for chosen in groups.values() for case in chosen]
    over_ranks, over_size = path.with_name(f"{path.stem}-ranks.png"), path.with_name(f"{path.stem}-bytes.png")
    _save_growth(over_ranks, report, cases, _draw_over_ranks, "over the number of ranks")
    _save_growth(over_size, report, cases, _draw_over_size, "over the size")
    return [over_ranks, over_size]


def _save_growth(
    path: Path,
    report: Report,
    cases: Sequence[CaseReport],
    draw: Callable[[Axes, Report, Sequence[CaseReport]], None],
    title: str,
) -> None:
    """A panel for each number of hosts (a row) and operation; one of several types has rows of its own."""
    rows = sorted({(case.num_hosts, case.dtype) for case in cases}, key=lambda row: (row[0], row[1].value))
    columns = [operation for operation in Operation if any(case.operation is operation for case in cases)]
    size = (_GROWTH_PANEL_INCHES[0] * len(columns), _GROWTH_PANEL_INCHES[1] * len(rows) + 1.0)
    figure = Figure(figsize=size, layout="constrained", dpi=80)
    panels = figure.subplots(len(rows), len(columns), squeeze=False)
    labels: dict[str, Line2D] = {}
    for row, (num_hosts, dtype) in enumerate(rows):
        for column, operation in enumerate(columns):
            axes = panels[row][column]
            chosen = [
                case for case in cases if (case.num_hosts, case.dtype, case.operation) == (num_hosts, dtype, operation)
            ]
            if not chosen:
                axes.set_axis_off()
                continue
            draw(axes, report, chosen)
            where = f"{num_hosts} hosts" if num_hosts > 1 else "one host"
            _finish(axes, f"{operation.value}, {where}" + ("" if dtype is DataType.FLOAT32 else f", {dtype.value}"))
            labels |= {str(line.get_label()): line for line in axes.lines if not str(line.get_label()).startswith("_")}
    figure.legend(list(labels.values()), list(labels), loc="outside lower center", ncols=7, frameon=False, fontsize=9)
    machine = f"{report.machine.num_processors} processors ({report.machine.processor}), {report.started[:10]}"
    figure.suptitle(
        f"Time of a call {title}: ferrodist, its processor time (dotted), its model (dashed), others; {machine}"
    )
    figure.savefig(path, format="png")


def _draw_over_ranks(axes: Axes, report: Report, cases: Sequence[CaseReport]) -> None:
    """A line for each size; the model's is dashed, other libraries' have marks of their own."""
    for index, size_bytes in enumerate(sorted({case.size_bytes for case in report.cases})):
        chosen = sorted((case for case in cases if case.size_bytes == size_bytes), key=lambda case: case.num_ranks)
        if not chosen:
            continue
        color, ranks = _COLORS[index % len(_COLORS)], [case.num_ranks for case in chosen]
        for peer in Peer:
            points = [(case.num_ranks, one.median) for case in chosen if (one := case.measurement(peer))]
            if not points or (peer in OURS and peer is not Peer.NATIVE):
                continue
            if peer is Peer.NATIVE:
                label, width, marker = format_bytes(size_bytes), 1.6, "o"
            else:  # one label for all sizes
                label, width, marker = peer.title if index == 0 else "_", 0.5, _MARKERS.get(peer, ".")
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=color, label=label, linewidth=width, marker=marker, markersize=4)
        work = [one.work_seconds for case in chosen if (one := case.measurement(Peer.NATIVE))]
        axes.plot(ranks, work, ":", color=color, linewidth=1.4)
        axes.plot(ranks, [report.predict(case) or 0.0 for case in chosen], "--", color=color, linewidth=1.2)
    axes.set_xscale("log", base=2)
    ranks = sorted({case.num_ranks for case in cases})
    axes.set_xticks(ranks, [f"{count}" for count in ranks])
    axes.xaxis.set_minor_locator(NullLocator())


def _draw_over_size(axes: Axes, report: Report, cases: Sequence[CaseReport]) -> None:
    """A line for each number of ranks; the model's is dashed, and has each power of two."""
    assert report.constants is not None, "the cases have predictions"
    for index, num_ranks in enumerate(sorted({case.num_ranks for case in report.cases})):
        chosen = sorted((case for case in cases if case.num_ranks == num_ranks), key=lambda case: case.size_bytes)
        if not chosen:
            continue
        color, first = _COLORS[index % len(_COLORS)], chosen[0]
        points = [(case.size_bytes, one.median) for case in chosen if (one := case.measurement(Peer.NATIVE))]
        x, y = zip(*points, strict=True)
        axes.plot(x, y, "o-", color=color, label=f"{num_ranks} ranks", linewidth=1.6, markersize=4)
        work = [one.work_seconds for case in chosen if (one := case.measurement(Peer.NATIVE))]
        axes.plot(x, work, ":", color=color, linewidth=1.4)
        sizes = [size for bits in range(40) if first.size_bytes <= (size := 1 << bits) <= chosen[-1].size_bytes]
        curve = [
            predict(Case(first.operation, num_ranks, first.num_hosts, first.dtype, n), report.constants) for n in sizes
        ]
        axes.plot(sizes, [seconds or 0.0 for seconds in curve], "--", color=color, linewidth=1.2)
    _set_sizes_axis(axes)
