"""Predicted timelines of pipeline schedules, activations that ranks hold, and pictures of both."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedules import divided_v, gpipe, interleaved, one_forward_one_backward, schedule_of

from ferrodist.parallel.pipeline.schedule.build import PipelineSchedule
from ferrodist.parallel.pipeline.schedule.ir import ActionKind
from ferrodist.parallel.pipeline.schedule.lowering import add_communication, forward_only
from ferrodist.parallel.pipeline.schedule.simulate import Span
from ferrodist.parallel.pipeline.schedule.timeline import Costs, Timeline, count_activations, predict
from ferrodist.parallel.pipeline.schedule.visualize import draw_text, plot

if TYPE_CHECKING:
    from pathlib import Path

SCHEDULES = [
    gpipe(2, 3),
    one_forward_one_backward(4, 6),
    divided_v(),
    interleaved(),
    forward_only(one_forward_one_backward(3, 4)),
]


@pytest.mark.parametrize("build", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (1, 5), (2, 2), (4, 8), (4, 3), (5, 16)])
def test_known_bubbles(build, num_ranks: int, num_microbatches: int) -> None:
    """GPipe and 1F1B take m + p - 1 forwards and backwards, of which p - 1 are bubble."""
    timeline = predict(build(num_ranks, num_microbatches))
    rounds = num_microbatches + num_ranks - 1
    assert timeline.duration == 3 * rounds
    assert timeline.bubble_fraction == pytest.approx((num_ranks - 1) / rounds)
    assert timeline.busy == (3 * num_microbatches,) * num_ranks


def test_every_action_of_a_timeline() -> None:
    """Costs by stage; transfers delay the next rank and not the sender."""
    costs = Costs(forward=[1, 2], backward_input=[3, 4], backward_weight=0.5, transfer=[0.25, 0.125])
    timeline = predict(gpipe(2, 2), costs)
    assert [[(str(span.action), span.start, span.stop) for span in spans] for spans in timeline.spans] == [
        [("F0.0", 0, 1), ("F0.1", 1, 2), ("B0.0", 9.875, 13.375), ("B0.1", 14.375, 17.875)],
        [("F1.0", 1.25, 3.25), ("F1.1", 3.25, 5.25), ("B1.0", 5.25, 9.75), ("B1.1", 9.75, 14.25)],
    ]
    assert timeline.duration == 17.875
    assert timeline.busy == (9, 13)
    assert timeline.bubble_fraction == 1 - 22 / (2 * 17.875)


def test_the_order_of_a_rank_counts() -> None:
    """Data are sent at their send's position, not sooner; and a rank runs no later action while it waits."""
    late = schedule_of("late", [0, 1], 2, "F0.0 F0.1 SF0.0 SF0.1", "RF1.0 RF1.1 F1.1 F1.0")
    assert [span.start for span in predict(late, Costs(transfer=0.5)).spans[1]] == [2.5, 3.5]
    waiting = schedule_of("waiting", [0, 1, 1], 1, "F0.0 SF0.0 RB0.0 B0.0", "RF1.0 F1.0 F2.0 I2.0 I1.0 SB1.0 W2.0 W1.0")
    assert [span.start for span in predict(waiting, Costs(transfer=2)).spans[1]] == [3, 4, 5, 6, 7, 8]
    assert predict(waiting, Costs(transfer=2)).spans[0][1].start == 9


@settings(max_examples=60, deadline=None)
@given(data=st.data(), schedule=st.sampled_from(SCHEDULES))
def test_everything_begins_as_soon_as_it_can(data: st.DataObject, schedule) -> None:
    """With any costs: each action begins when its rank is free and its data are there, and lasts for its cost."""
    number = st.integers(0, 5)
    cost = st.one_of(number, st.tuples(*[number] * schedule.num_stages))
    costs = Costs(
        forward=data.draw(cost),
        backward_input=data.draw(cost),
        backward_weight=data.draw(cost),
        transfer=data.draw(cost),
    )
    timeline = predict(schedule, costs)
    stops = {str(span.action): span.stop for spans in timeline.spans for span in spans}

    def at(costs: float | tuple[float, ...], stage: int) -> float:
        return costs[stage] if isinstance(costs, tuple) else costs

    def lasts(kind: ActionKind, stage: int) -> float:
        inputs, weights = at(costs.backward_input, stage), at(costs.backward_weight, stage)
        by_kind = {"F": at(costs.forward, stage), "B": inputs + weights, "I": inputs, "W": weights}
        return by_kind[kind.value]

    def arrival(kind: ActionKind, stage: int, microbatch: int) -> float:
        source = stage - 1 if kind is ActionKind.FORWARD else stage + 1
        if kind is ActionKind.BACKWARD_WEIGHT or not 0 <= source < schedule.num_stages:
            return 0
        words = [f"{letter}{source}.{microbatch}" for letter in ("F" if kind is ActionKind.FORWARD else "BI")]
        moves = schedule.stage_ranks[source] != schedule.stage_ranks[stage]
        return next(stops[word] for word in words if word in stops) + (at(costs.transfer, source) if moves else 0)

    for spans in timeline.spans:
        free = 0.0
        for span in spans:
            kind, stage, microbatch = span.action.kind, span.action.stage, span.action.microbatch
            assert span.start == max(free, arrival(kind, stage, microbatch))
            assert span.stop == span.start + lasts(kind, stage)
            free = span.stop
    assert timeline.duration == max(stops.values())


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, [1, -0.5]])
def test_wrong_costs(value) -> None:
    """They are refused by name."""
    for name in ("forward", "backward_input", "backward_weight", "transfer"):
        with pytest.raises(ValueError, match=f"^costs are finite and not negative; {name} is "):
            Costs(**{name: value})


def test_costs_of_another_number_of_stages() -> None:
    """They are refused before anything runs."""
    with pytest.raises(ValueError, match=r"^transfer has costs of 3 stages, and the schedule 2 stages$"):
        predict(gpipe(2, 1), Costs(transfer=[1, 2, 3]))


def test_wrong_schedules_have_no_timeline() -> None:
    """The check comes first."""
    with pytest.raises(ValueError, match=r"rank 0 lacks F0\.0$"):
        predict(schedule_of("none", [0], 1, ""))


def test_nothing_takes_time() -> None:
    """Then there is no bubble either."""
    timeline = predict(gpipe(2, 1), Costs(forward=0, backward_input=0, backward_weight=0))
    assert (timeline.duration, timeline.busy, timeline.bubble_fraction) == (0, (0, 0), 0)


def test_numbers_of_activations() -> None:
    """GPipe holds all, 1F1B one for each rank below; split backwards hold theirs until the second half."""
    assert count_activations(gpipe(3, 7)) == (7, 7, 7)
    assert count_activations(one_forward_one_backward(4, 8)) == (4, 3, 2, 1)
    assert count_activations(add_communication(one_forward_one_backward(4, 2))) == (2, 2, 2, 1)
    assert count_activations(divided_v()) == (4, 4)
    assert count_activations(interleaved()) == (4, 3)
    assert count_activations(schedule_of("late", [0], 2, "F0.0 I0.0 F0.1 I0.1 W0.0 W0.1")) == (2,)
    assert count_activations(schedule_of("early", [0], 3, "F0.0 F0.1 B0.0 B0.1 F0.2 B0.2")) == (2,)
    assert count_activations(forward_only(gpipe(3, 7))) == (0, 0, 0)


def test_a_drawing() -> None:
    """One stage a rank: forwards are numbers, backwards have a letter, and take two columns."""
    assert draw_text(one_forward_one_backward(3, 4)) == (
        "1F1B: 3 ranks, 3 stages, 4 microbatches\n"
        "rank 0 | 0 1 2 . . . . B0- 3 B1- . B2- . B3-\n"
        "rank 1 | . 0 1 . . B0- 2 B1- 3 B2- . B3- . .\n"
        "rank 2 | . . 0 B0- 1 B1- 2 B2- 3 B3- . . . .\n"
        "m forward, Bm backward of microbatch m; . idle\n"
        "a column is 1\n"
        "duration 18, bubble fraction 33.3%\n"
    )


def test_a_drawing_with_several_stages_a_rank() -> None:
    """The stage comes first, and the halves of a backward have letters of their own."""
    assert draw_text(divided_v()) == (
        "V: 2 ranks, 4 stages, 2 microbatches\n"
        "rank 0 | 0.0- 0.1- .    3.0- I3.0 3.1- I3.1 W3.0 I0.0 W0.0 I0.1 W3.1 W0.1\n"
        "rank 1 | .    1.0- 2.0- 1.1- 2.1- I2.0 I1.0 W2.0 I2.1 I1.1 W1.0 W2.1 W1.1\n"
        "s.m forward, Is.m backward of inputs, Ws.m backward of weights of stage s, microbatch m; . idle\n"
        "a column is 1\n"
        "duration 13, bubble fraction 7.7%\n"
    )


def rows_drawn(*arguments, **options) -> list[str]:
    """The rows of ranks, and the line about columns."""
    lines = draw_text(*arguments, **options).splitlines()
    return [*lines[1:-3], lines[-2]]


def test_columns_shorter_than_an_action() -> None:
    """If costs are not multiples of the shortest, a column is their greatest common measure."""
    costs = Costs(forward=0.3, backward_input=0.3, backward_weight=0.2, transfer=0.1)
    assert rows_drawn(gpipe(2, 2), costs) == [
        "rank 0 | 0- 1- ..........B0-- B1--",
        "rank 1 | ....0- 1- B0-- B1-- ......",
        "a column is 0.1",
    ]


def test_rounded_columns() -> None:
    """Costs without a common measure are rounded; so are those that would make the drawing endless."""
    costs = Costs(forward=1, backward_input=math.pi, backward_weight=0)
    assert rows_drawn(gpipe(2, 1), costs) == [
        "rank 0 | 0-- .................B0---------",
        "rank 1 | ....0-- B0---------- ............",
        "a column is 0.25; beginnings and ends are rounded",
    ]
    small = rows_drawn(gpipe(2, 1), Costs(forward=1e-6))
    assert max(map(len, small)) < 1100
    assert small[-1] == "a column is 0.004; beginnings and ends are rounded; actions too short to be seen: 2"


def test_a_given_unit() -> None:
    """It is used unchanged."""
    assert rows_drawn(gpipe(1, 1), unit=0.5) == ["rank 0 | 0 B0-", "a column is 0.5"]
    assert rows_drawn(gpipe(2, 2), unit=4)[-1] == (
        "a column is 4; beginnings and ends are rounded; actions too short to be seen: 4"
    )
    for unit in (0, -1, math.nan):
        with pytest.raises(ValueError, match=rf"^unit must be greater than 0, not {unit}$"):
            draw_text(gpipe(1, 1), unit=unit)


def test_actions_that_take_no_time() -> None:
    """They are not drawn, as the text says."""
    assert rows_drawn(gpipe(2, 2), Costs(forward=0)) == [
        "rank 0 | .  B0 B1",
        "rank 1 | B0 B1 .",
        "a column is 2; actions too short to be seen: 4",
    ]
    assert rows_drawn(gpipe(1, 1), Costs(forward=0, backward_input=0, backward_weight=0))[0] == "rank 0 |"


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from([(1, 1), (2, 9), (3, 101), (4, 2), (11, 11), (12, 1)]),
    costs=st.builds(
        Costs,
        forward=st.sampled_from([0.5, 1, 1.5, 2]),
        backward_input=st.sampled_from([0.75, 1, 2.5]),
        backward_weight=st.sampled_from([0, 0.5, 1]),
        transfer=st.sampled_from([0, 0.25]),
    ),
)
def test_drawings_are_aligned(size, costs) -> None:
    """Each action's label is at its time, on all ranks with the same scale, and idle time is dots."""
    num_ranks, num_microbatches = size
    timeline = predict(one_forward_one_backward(num_ranks, num_microbatches), costs)
    *rows, about = rows_drawn(timeline)
    unit = float(about.removeprefix("a column is "))
    rows = [row.partition("| ")[2] for row in rows]
    width = round(rows[0].index(f"B{num_microbatches - 1}") / (timeline.spans[0][-1].start / unit))
    for row, spans in zip(rows, timeline.spans, strict=True):
        free = 0
        for span in spans:
            start, stop = (round(time / unit) * width for time in (span.start, span.stop))
            label = f"{'' if span.action.kind is ActionKind.FORWARD else 'B'}{span.action.microbatch}"
            assert set(row[free:start]) <= {".", " "}
            assert row[start:stop].rstrip() == label.ljust(stop - start - 1, "-")
            free = stop
        assert set(row[free:]) <= {".", " "}


def test_timelines_can_be_drawn() -> None:
    """A timeline has its own times, such as measured ones; costs with it are refused."""
    schedule = add_communication(gpipe(1, 1))
    forward, backward = schedule.actions[0]
    timeline = Timeline(schedule, ((Span(forward, 1.0, 2.0), Span(backward, 3.0, 5.0)),))
    assert draw_text(timeline).splitlines()[1] == "rank 0 | . 0 . B0-"
    assert timeline.bubble_fraction == 0.4
    with pytest.raises(ValueError, match=r"^costs go with a schedule; a timeline has its times already$"):
        draw_text(timeline, Costs())


def test_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A box for each action at its time, with its index; the title has the name and the bubble."""
    figure = pytest.importorskip("matplotlib.figure", reason="the extra 'demo' is not installed")
    figures = []
    save = figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1])
    for schedule, colours, legend in (
        (one_forward_one_backward(3, 4), 2, ["forward", "backward"]),
        (divided_v(), 6, ["forward", "backward of inputs", "backward of weights"]),
    ):
        plot(schedule, tmp_path / "plot.png", Costs(forward=1.5))
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
        timeline = predict(schedule, Costs(forward=1.5))
        (axes,) = figures[-1].axes
        boxes = [(round(box.get_y() + box.get_height() / 2), box.get_x(), box.get_width()) for box in axes.patches]
        wanted = [
            (rank, span.start, span.stop - span.start) for rank, spans in enumerate(timeline.spans) for span in spans
        ]
        assert sorted(boxes) == sorted(wanted)
        assert len({box.get_facecolor() for box in axes.patches}) == colours
        numbers = sorted((text.get_position(), text.get_text()) for text in axes.texts)
        assert numbers == sorted(
            (((span.start + span.stop) / 2, rank), str(span.action.microbatch))
            for rank, spans in enumerate(timeline.spans)
            for span in spans
        )
        assert axes.get_title() == f"{schedule.name}: {timeline.bubble_fraction:.1%} bubble"
        assert [text.get_text() for text in figures[-1].legends[0].get_texts()] == legend


def test_plots_without_durations_or_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without durations there is nothing to draw, and without matplotlib the message says what to install."""
    pytest.importorskip("matplotlib", reason="the extra 'demo' is not installed")
    with pytest.raises(ValueError, match=r"^nothing takes time in this schedule"):
        plot(gpipe(1, 1), tmp_path / "plot.png", Costs(forward=0, backward_input=0, backward_weight=0))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r": pip install .*\[demo\]"):
        plot(gpipe(1, 1), tmp_path / "plot.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("function", [predict, count_activations, draw_text])
def test_a_kind_is_not_a_schedule(function):
    """The error says what makes one."""
    with pytest.raises(TypeError, match=r"a Schedule, as build_schedule\(\) makes, not PipelineSchedule"):
        function(PipelineSchedule.GPIPE)
