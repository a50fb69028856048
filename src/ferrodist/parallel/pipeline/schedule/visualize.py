"""Pictures of schedules, as text and as a plot."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from ferrodist.installation import how_to_install
from ferrodist.parallel.pipeline.schedule.ir import Action, ActionKind, Schedule
from ferrodist.parallel.pipeline.schedule.timeline import Costs, Timeline, predict
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from ferrodist.parallel.pipeline.schedule.simulate import Span

_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward of inputs",
    ActionKind.BACKWARD_WEIGHT: "backward of weights",
}
_COLOURS = {
    ActionKind.FORWARD: (0.19, 0.40, 0.65),
    ActionKind.BACKWARD: (0.85, 0.42, 0.10),
    ActionKind.BACKWARD_INPUT: (0.75, 0.22, 0.27),
    ActionKind.BACKWARD_WEIGHT: (0.22, 0.52, 0.29),
}
_PALEST = 0.55  # share of white in the colours of a rank's last stage

_MOST_PARTS = 20  # most columns of the shortest action, tried so that all actions have whole numbers of them
_MOST_COLUMNS, _MOST_COLUMNS_FOR_AN_ACTION = 1000, 20
"""Width limit of a drawing: the first, or the second for each action of a rank if that is more."""
_TOLERANCE = 1e-6  # rounding error of sums of costs, in columns


def draw_text(drawn: Schedule | Timeline, costs: Costs | None = None, *, unit: float | None = None) -> str:
    """Draw a schedule as lines of text: a row for each rank, a column for each unit of time.

    An action is written at its beginning and continued, as dashes, to its end. Forwards are the indices of their
    microbatches; other actions have their letter before. If a rank has several stages, the stage and a dot precede the
    microbatch.

    Args:
        drawn: A schedule, or a timeline.
        costs: Costs of a schedule's actions: see `predict`.
        unit: Time of a column. By default the longest that all actions are multiples of, or a longer one if that made
            the drawing too wide. Times that are not multiples are rounded, and the text says so.

    Raises:
        ValueError: The schedule is wrong, there are costs for a timeline, or the unit is not positive.
    """
    timeline = _timeline(drawn, costs)
    schedule = timeline.schedule
    if unit is None:
        unit = _choose_unit(timeline)
    elif not unit > 0:
        raise ValueError(f"unit must be greater than 0, not {unit}")
    with_stages = any(len(stages) > 1 for stages in schedule.rank_stages)
    rows = [
        [
            _Cell(_label(span.action, with_stages=with_stages), _column(span.start, unit), _column(span.stop, unit))
            for span in spans
        ]
        for spans in timeline.spans
    ]
    # Characters of a column, in which each label and a space after it have room.
    widths = (-(-(len(label) + 1) // (stop - start)) for cells in rows for label, start, stop in cells if start < stop)
    width = max(widths, default=1)
    num_columns = _column(timeline.duration, unit)
    title_width = len(f"rank {schedule.num_ranks - 1}")
    lines = [
        f"{f'rank {rank}':<{title_width}} | {_draw_row(cells, num_columns, width)}" for rank, cells in enumerate(rows)
    ]
    left_out = sum(start == stop for cells in rows for _, start, stop in cells)
    rounding = "" if _fits(timeline, unit) else "; beginnings and ends are rounded"
    microbatches = counted(schedule.num_microbatches, "microbatch")
    sizes = f"{counted(schedule.num_ranks, 'rank')}, {counted(schedule.num_stages, 'stage')}, {microbatches}"
    lines = [
        f"{schedule.name}: {sizes}",
        *lines,
        _describe_cells(timeline, with_stages=with_stages),
        f"a column is {unit:g}{rounding}{f'; actions too short to be seen: {left_out}' if left_out else ''}",
        f"duration {timeline.duration:g}, bubble fraction {timeline.bubble_fraction:.1%}",
    ]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def plot(drawn: Schedule | Timeline, path: Path | str, costs: Costs | None = None) -> None:
    """Draw a schedule into a PNG file: a row for each rank, a box with the microbatch's index for each action.

    Args:
        drawn: A schedule, or a timeline.
        path: The file.
        costs: Costs of a schedule's actions: see `predict`.

    Raises:
        ValueError: The schedule is wrong, there are costs for a timeline, or nothing takes time.
        ModuleNotFoundError: matplotlib is not installed, which the extra ``demo`` brings.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - needs the extra
        from matplotlib.figure import Figure  # noqa: PLC0415 - needs the extra
    except ModuleNotFoundError as error:
        message = f"plot needs matplotlib, which is not installed here: {how_to_install('demo')}"
        raise ModuleNotFoundError(message, name=error.name) from error

    timeline = _timeline(drawn, costs)
    schedule = timeline.schedule
    lengths = _lengths(timeline)
    if not lengths:
        raise ValueError("nothing takes time in this schedule, so there is nothing to see: give some action a cost")
    width = min(max(0.28 * timeline.duration / min(lengths), 8), 40)
    figure = Figure(figsize=(width, 1.6 + 0.4 * schedule.num_ranks), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _plot_boxes(axes, timeline, points=72 * width * 0.9 / timeline.duration)
    axes.set(
        title=f"{schedule.name}: {timeline.bubble_fraction:.1%} bubble",
        xlabel="time",
        xlim=(0, timeline.duration),
        ylim=(schedule.num_ranks - 0.5, -0.5),
        yticks=range(schedule.num_ranks),
        yticklabels=[f"rank {rank}" for rank in range(schedule.num_ranks)],
    )
    axes.spines[["top", "right"]].set_visible(False)
    title = "paler: later stages of a rank" if schedule.num_stages > schedule.num_ranks else None
    figure.legend(loc="outside lower center", ncols=len(_NAMES), frameon=False, title=title)
    figure.savefig(path, format="png")


def _timeline(drawn: Schedule | Timeline, costs: Costs | None) -> Timeline:
    if not isinstance(drawn, Timeline):
        return predict(drawn, costs)
    if costs is not None:
        raise ValueError("costs go with a schedule; a timeline has its times already")
    return drawn


def _lengths(timeline: Timeline) -> list[float]:
    """Durations of the actions that take time."""
    return [span.stop - span.start for spans in timeline.spans for span in spans if span.stop > span.start]


class _Cell(NamedTuple):
    """An action in a row of text, between two columns."""

    label: str
    start: int
    stop: int


def _letter(kind: ActionKind) -> str:
    return "" if kind is ActionKind.FORWARD else kind.value


def _label(action: Action, *, with_stages: bool) -> str:
    return f"{_letter(action.kind)}{f'{action.stage}.' if with_stages else ''}{action.microbatch}"


def _draw_row(cells: Sequence[_Cell], num_columns: int, width: int) -> str:
    row, column = "", 0
    for label, start, stop in cells:
        if start < stop:
            row += ".".ljust(width) * (start - column)
            row += label.ljust((stop - start) * width - 1, "-") + " "
            column = stop
    return row + ".".ljust(width) * (num_columns - column)


def _column(time: float, unit: float) -> int:
    # Unlike round(), this never merges two times that are a unit apart.
    return math.floor(time / unit + 0.5)


def _choose_unit(timeline: Timeline) -> float:
    """The longest time that all actions are multiples of; a fraction of the shortest action if there is none."""
    # The unit divides the shortest action, since it divides its begin and its end.
    shortest = min(_lengths(timeline), default=1.0)
    most = max(_MOST_COLUMNS, _MOST_COLUMNS_FOR_AN_ACTION * max(map(len, timeline.spans)))
    for parts in range(1, _MOST_PARTS + 1):
        if timeline.duration * parts / shortest <= most and _fits(timeline, shortest / parts):
            return shortest / parts
    return max(shortest / 4, timeline.duration / most)


def _fits(timeline: Timeline, unit: float) -> bool:
    """True if all begins and ends are multiples of a unit."""
    times = {time for spans in timeline.spans for span in spans for time in (span.start, span.stop)}
    return all(abs(time / unit - _column(time, unit)) < _TOLERANCE for time in times)


def _describe_cells(timeline: Timeline, *, with_stages: bool) -> str:
    kinds = {span.action.kind for spans in timeline.spans for span in spans}
    indices, words = ("s.m", "stage s, microbatch m") if with_stages else ("m", "microbatch m")
    marks = [f"{_letter(kind)}{indices} {name}" for kind, name in _NAMES.items() if kind in kinds]
    return f"{', '.join(marks)} of {words}; . idle"


def _plot_boxes(axes: Axes, timeline: Timeline, points: float) -> None:
    """Draw all boxes; ``points`` is the width of a unit of time."""
    boxes: defaultdict[tuple[ActionKind, int], list[tuple[int, Span]]] = defaultdict(list)
    for rank, spans in enumerate(timeline.spans):
        stages = timeline.schedule.rank_stages[rank]
        for span in spans:
            boxes[span.action.kind, stages.index(span.action.stage)].append((rank, span))
    num_shades = max(map(len, timeline.schedule.rank_stages))
    kinds = list(_NAMES)
    named: set[ActionKind] = set()
    for kind, shade in sorted(boxes, key=lambda box: (box[1], kinds.index(box[0]))):
        found = boxes[kind, shade]
        paleness = _PALEST * shade / max(1, num_shades - 1)
        axes.barh(
            [rank for rank, _ in found],
            [span.stop - span.start for _, span in found],
            left=[span.start for _, span in found],
            height=0.9,
            color=[part + (1 - part) * paleness for part in _COLOURS[kind]],
            edgecolor="white",
            linewidth=0.5,
            label=None if kind in named else _NAMES[kind],
        )
        named.add(kind)
        colour = "black" if paleness > _PALEST / 2 else "white"
        for rank, span in found:
            index = str(span.action.microbatch)
            size = min(9.0, (span.stop - span.start) * points / (0.75 * len(index)))
            if size >= 3:  # smaller ones are illegible
                axes.text(
                    (span.start + span.stop) / 2, rank, index, ha="center", va="center", color=colour, fontsize=size
                )
