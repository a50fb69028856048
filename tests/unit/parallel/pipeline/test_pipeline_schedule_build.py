"""Built schedules are complete, end, keep the order of microbatches, and have their papers' bubbles and memory."""

from __future__ import annotations

import functools

import pytest

from ferrodist.parallel.pipeline.schedule.build import PipelineSchedule, build_schedule
from ferrodist.parallel.pipeline.schedule.ir import ActionKind, Schedule, Slot, assign_microbatches, parse_slots
from ferrodist.parallel.pipeline.schedule.lowering import add_communication
from ferrodist.parallel.pipeline.schedule.timeline import Costs, count_activations, predict
from ferrodist.parallel.pipeline.schedule.validate import check_schedule

GPIPE, LOOPED = PipelineSchedule.GPIPE, PipelineSchedule.LOOPED_BFS
ONE_F_ONE_B, INTERLEAVED = PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED_ONE_F_ONE_B
H1, ZBV, DUAL = PipelineSchedule.ZERO_BUBBLE_H1, PipelineSchedule.ZERO_BUBBLE_V, PipelineSchedule.DUAL_PIPE_V

KINDS = {
    GPIPE: (1,),
    ONE_F_ONE_B: (1,),
    INTERLEAVED: (1, 2, 3),
    LOOPED: (1, 2, 3),
    H1: (1,),
    ZBV: (2,),
    DUAL: (2,),
}
"""Each kind with the stages a rank may have."""

RANKS = (1, 2, 3, 4, 6)
MICROBATCHES = (*range(1, 9), 11, 12, 13)
FAMILIES = [(kind, stages) for kind, numbers in KINDS.items() for stages in numbers]

build = functools.cache(build_schedule)


@functools.cache
def timeline(kind, num_ranks, num_microbatches, stages_per_rank):
    """How long it takes where a forward and each half of a backward take 1. Refuses what `check_schedule` does."""
    return predict(build(kind, num_ranks, num_microbatches, stages_per_rank))


def duration(kind, num_ranks, num_microbatches, stages_per_rank):
    """In forwards of a stage; stages of which two are on each rank are half as long as where one is."""
    return timeline(kind, num_ranks, num_microbatches, stages_per_rank).duration


def texts(schedule):
    """For each rank its compute actions."""
    return [" ".join(str(action) for action in actions if action.kind.is_compute) for actions in schedule.actions]


@pytest.mark.parametrize(("kind", "stages"), FAMILIES)
@pytest.mark.parametrize("ranks", RANKS)
def test_schedules_are_complete_and_end(kind, stages, ranks):
    """With every number of microbatches nothing is missing and no rank waits forever."""
    for microbatches in MICROBATCHES:
        spans = timeline(kind, ranks, microbatches, stages).spans
        for of_rank in spans:
            assert sum(span.stop - span.start for span in of_rank) == 3 * stages * microbatches


@pytest.mark.parametrize(("kind", "stages"), FAMILIES)
@pytest.mark.parametrize("ranks", RANKS)
def test_microbatches_come_in_order(kind, stages, ranks):
    """In each stage forwards, gradients of inputs and those of parameters all go through microbatches 0, 1, 2, ..."""
    steps = (
        {ActionKind.FORWARD},
        {ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT},
        {ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT},
    )
    for microbatches in MICROBATCHES:
        schedule = build(kind, ranks, microbatches, stages)
        for rank, actions in enumerate(schedule.actions):
            for step in steps:
                found = {stage: [] for stage in schedule.rank_stages[rank]}
                for action in actions:
                    if action.kind in step:
                        found[action.stage].append(action.microbatch)
                assert all(each == list(range(microbatches)) for each in found.values())


@pytest.mark.parametrize("kind", PipelineSchedule)
def test_name_size_and_communication(kind):
    """A schedule has its kind's name, the requested numbers, and its communication."""
    stages = KINDS[kind][-1]
    schedule = build(kind, 3, 5, stages)
    assert isinstance(schedule, Schedule)
    assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == (kind.value, 3, 5)
    assert schedule.num_stages == 3 * stages
    assert any(action.kind is ActionKind.SEND_FORWARD for action in schedule.actions[0])
    assert add_communication(schedule) == schedule
    check_schedule(schedule)
    assert Schedule.from_text(str(schedule)) == schedule


def test_stages_go_around_the_ring_or_along_the_v():
    """Stage s is on rank s mod p, but in a V the second half comes back."""
    assert build(INTERLEAVED, 3, 4, 2).stage_ranks == (0, 1, 2, 0, 1, 2)
    assert build(LOOPED, 2, 4, 3).stage_ranks == (0, 1, 0, 1, 0, 1)
    assert build(ZBV, 3, 4).stage_ranks == build(DUAL, 3, 4).stage_ranks == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("kind", PipelineSchedule)
def test_default_numbers_of_stages(kind):
    """2 for interleaved, looped and V-shaped kinds, and 1 for the others."""
    expected = 1 if kind in {GPIPE, ONE_F_ONE_B, H1} else 2
    assert build(kind, 2, 3) == build(kind, 2, 3, expected)


def test_small_schedules_as_in_the_papers():
    """The actions of two ranks, kind by kind."""
    assert texts(build(GPIPE, 2, 2)) == ["F0.0 F0.1 B0.0 B0.1", "F1.0 F1.1 B1.0 B1.1"]
    assert texts(build(LOOPED, 2, 1)) == ["F0.0 F2.0 B2.0 B0.0", "F1.0 F3.0 B3.0 B1.0"]
    assert texts(build(ONE_F_ONE_B, 2, 3)) == ["F0.0 F0.1 B0.0 F0.2 B0.1 B0.2", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"]
    assert texts(build(INTERLEAVED, 2, 2)) == [
        "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
    ]
    assert texts(build(H1, 2, 3)) == [
        "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2",
    ]
    assert texts(build(ZBV, 2, 3)) == [
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2",
    ]
    assert texts(build(DUAL, 2, 4)) == [
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 F0.3 B3.1 F3.2 B0.0 B3.2 F3.3 B0.1 B3.3 I0.2 W0.2 I0.3 W0.3",
        "F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 F2.2 B1.0 F1.3 B2.1 F2.3 B1.1 B2.2 B1.2 I2.3 I1.3 W2.3 W1.3",
    ]


@pytest.mark.parametrize(("kind", "stages"), [family for family in FAMILIES if family[0] not in {H1, ZBV, DUAL}])
@pytest.mark.parametrize("ranks", RANKS)
def test_bubble_of_whole_backwards(kind, stages, ranks):
    """The bubble is (p-1)(F+B), for any m >= p; with fewer, each round of the ring takes as long as with p."""
    for microbatches in MICROBATCHES:
        expected = 3 * (stages * max(microbatches, ranks) + min(microbatches, ranks) - 1)
        assert duration(kind, ranks, microbatches, stages) == expected
        if microbatches >= ranks:
            assert expected == 3 * (stages * microbatches + ranks - 1)


@pytest.mark.parametrize("kind", [GPIPE, LOOPED, ONE_F_ONE_B, INTERLEAVED])
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (3, 1), (2, 7)])
def test_bubble_of_any_times(kind, forward, backward):
    """The bubble is (p-1)(F+B) whatever the ratio of F and B."""
    for ranks, microbatches in ((4, 4), (4, 8), (3, 7)):
        stages = KINDS[kind][-1]
        costs = Costs(forward=forward, backward_input=backward, backward_weight=0)
        predicted = predict(build(kind, ranks, microbatches, stages), costs)
        assert predicted.duration == (forward + backward) * (stages * microbatches + ranks - 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_bubble_of_zb_h1(ranks):
    """The bubble is (p-1)(F+I-W) for m >= p, and each microbatch less defers a W less."""
    for microbatches in MICROBATCHES:
        missing = max(0, ranks - microbatches)
        assert duration(H1, ranks, microbatches, 1) == 3 * microbatches + ranks - 1 + missing
        costs = Costs(forward=6, backward_input=7, backward_weight=5)
        if microbatches >= ranks:
            predicted = predict(build(H1, ranks, microbatches), costs)
            assert predicted.duration == 18 * microbatches + (ranks - 1) * (6 + 7 - 5)


@pytest.mark.parametrize("ranks", RANKS)
def test_zb_v_has_no_bubble(ranks):
    """No rank waits between its first action and its last for m >= 2p-1, and for fewer one does."""
    for microbatches in MICROBATCHES:
        spans = timeline(ZBV, ranks, microbatches, 2).spans
        lengths = [of_rank[-1].stop - of_rank[0].start for of_rank in spans]
        assert (max(lengths) == 6 * microbatches) == (microbatches >= 2 * ranks - 1)
        if microbatches >= 2 * ranks - 1:
            assert [of_rank[0].start for of_rank in spans] == list(range(ranks))
            assert duration(ZBV, ranks, microbatches, 2) == 6 * microbatches + ranks - 1


@pytest.mark.parametrize("ranks", RANKS)
def test_bubble_of_dual_pipe_v(ranks):
    """The bubble is (p-1)(F+I-W) for m >= 2p, below the report's (p-1)(F&B+B-3W) with F&B = F+B."""
    for microbatches in (2 * ranks, 2 * ranks + 1, 2 * ranks + 6):
        bubble = duration(DUAL, ranks, microbatches, 2) - 6 * microbatches
        assert bubble == ranks - 1 <= (ranks - 1) * (3 + 2 - 3)


@pytest.mark.parametrize("kind", [ZBV, DUAL])
@pytest.mark.parametrize("ranks", RANKS)
def test_few_microbatches_in_a_v(kind, ranks):
    """Below the papers' numbers a microbatch less never takes longer, and no more than 1F1B of the same model."""
    durations = [duration(kind, ranks, microbatches, 2) for microbatches in MICROBATCHES]
    assert durations == sorted(durations)
    for microbatches, found in zip(MICROBATCHES, durations, strict=True):
        assert found <= 2 * duration(ONE_F_ONE_B, ranks, microbatches, 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_memory_of_all_forwards_first(ranks):
    """Every rank holds every activation."""
    for kind, stages in ((GPIPE, 1), (LOOPED, 1), (LOOPED, 2), (LOOPED, 3)):
        for microbatches in MICROBATCHES:
            assert count_activations(build(kind, ranks, microbatches, stages)) == (stages * microbatches,) * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_memory_of_1f1b(ranks):
    """Rank r holds min(m, p-r) activations."""
    for microbatches in MICROBATCHES:
        expected = tuple(min(microbatches, ranks - rank) for rank in range(ranks))
        assert count_activations(build(ONE_F_ONE_B, ranks, microbatches)) == expected
        assert count_activations(build(INTERLEAVED, ranks, microbatches, 1)) == expected


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("ranks", RANKS)
def test_memory_of_interleaved_1f1b(ranks, stages):
    """Rank r holds 2(p-r-1) + (v-1)g + 1 activations with groups of g: the paper's p, or few more."""
    for microbatches in MICROBATCHES:
        groups = max(1, microbatches // ranks)
        group = -(-microbatches // groups)
        assert group == ranks or microbatches % ranks
        expected = [2 * (ranks - rank - 1) + (stages - 1) * group + 1 for rank in range(ranks)]
        in_flight = count_activations(build(INTERLEAVED, ranks, microbatches, stages))
        assert in_flight == tuple(min(stages * microbatches, number) for number in expected)


@pytest.mark.parametrize("ranks", RANKS)
def test_memory_of_zb_h1(ranks):
    """Every rank holds min(m, p) activations, as 1F1B's first rank does."""
    for microbatches in MICROBATCHES:
        in_flight = count_activations(build(H1, ranks, microbatches))
        assert in_flight == (min(microbatches, ranks),) * ranks
        assert in_flight[0] == count_activations(build(ONE_F_ONE_B, ranks, microbatches))[0]


@pytest.mark.parametrize(("kind", "extra"), [(ZBV, 0), (DUAL, 1)])
@pytest.mark.parametrize("ranks", RANKS)
def test_memory_in_a_v(kind, extra, ranks):
    """Every rank holds 2p activations in ZB-V and 2p+1 in DualPipeV, less with few microbatches."""
    for microbatches in MICROBATCHES:
        in_flight = count_activations(build(kind, ranks, microbatches))
        most = 2 * ranks + extra
        if microbatches >= 2 * ranks - 1 + extra:
            assert in_flight == (most,) * ranks
        assert max(in_flight) == min(2 * microbatches, most)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_which_is_faster(ranks):
    """For one model in as many microbatches: the papers' order, and the differences."""
    microbatches = 2 * ranks

    def bubble(kind, stages):
        """In forwards of a rank's whole part of the model."""
        return duration(kind, ranks, microbatches, stages) / stages - 3 * microbatches

    assert bubble(GPIPE, 1) == bubble(ONE_F_ONE_B, 1) == 3 * (ranks - 1)
    for stages in (2, 3):
        assert bubble(INTERLEAVED, stages) == bubble(LOOPED, stages) == bubble(ONE_F_ONE_B, 1) / stages
    assert bubble(H1, 1) == bubble(ONE_F_ONE_B, 1) / 3
    assert bubble(ZBV, 2) == bubble(DUAL, 2) == bubble(H1, 1) / 2 < bubble(INTERLEAVED, 2)


def test_slots_are_counted_by_stage_and_kind():
    """A whole backward counts as both halves, and excess microbatches are left out."""
    slots = parse_slots("F1 F0", 2) + parse_slots("B1", 1) + parse_slots("I1", 1) + parse_slots("W1", 1)
    assert slots[0] == Slot(ActionKind.FORWARD, 1)
    all_of_them = " ".join(map(str, assign_microbatches(slots, (2, 7), 2)))
    assert all_of_them == "F7.0 F2.0 F7.1 F2.1 B7.0 I7.1 W7.1"
    first = " ".join(map(str, assign_microbatches(slots, (2, 7), 1)))
    assert first == "F7.0 F2.0 B7.0"


@pytest.mark.parametrize("kind", [GPIPE, ONE_F_ONE_B, H1, ZBV, DUAL])
def test_stages_that_a_kind_does_not_allow(kind):
    """Kinds with a fixed number of stages refuse another, and name kinds without."""
    own = KINDS[kind][0]
    with pytest.raises(ValueError, match=rf"{kind.value} has stages_per_rank={own}, not 3: leave it out, or take") as e:
        build_schedule(kind, 2, 4, 3)
    assert "INTERLEAVED_ONE_F_ONE_B or LOOPED_BFS" in str(e.value)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_numbers_below_one(index):
    """No ranks, microbatches or stages are refused, with the argument's name."""
    name = ("num_ranks", "num_microbatches", "stages_per_rank")[index]
    for number in (0, -3):
        numbers = [2, 4, 2]
        numbers[index] = number
        with pytest.raises(ValueError, match=rf"^{name} must be at least 1, not {number}$"):
            build_schedule(INTERLEAVED, *numbers)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_numbers_of_other_types(index):
    """Booleans, floats and texts are refused, with the argument's name."""
    name = ("num_ranks", "num_microbatches", "stages_per_rank")[index]
    for number in (True, 2.0, "2"):
        numbers = [2, 4, 2]
        numbers[index] = number
        with pytest.raises(TypeError, match=rf"^{name} must be an integer, not {number!r}$"):
            build_schedule(INTERLEAVED, *numbers)


def test_wrong_kinds():
    """A text is not a kind, and the message lists all kinds."""
    with pytest.raises(TypeError, match=r"kind must be a PipelineSchedule, not '1f1b': it has GPIPE, ONE_F_ONE_B, "):
        build_schedule("1f1b", 2, 4)
    assert PipelineSchedule("zb-v") is ZBV
    assert [kind.value for kind in PipelineSchedule] == [
        "gpipe",
        "1f1b",
        "interleaved-1f1b",
        "looped-bfs",
        "zb-h1",
        "zb-v",
        "dualpipe-v",
    ]
