"""Pipeline schedules as text, with sends and receives, and checked: errors are found and named."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedules import divided_v, gpipe, interleaved, one_forward_one_backward, schedule_of

from ferrodist.parallel.pipeline.schedule.ir import Action, ActionKind, Schedule
from ferrodist.parallel.pipeline.schedule.lowering import add_communication, backward_only, forward_only
from ferrodist.parallel.pipeline.schedule.timeline import predict
from ferrodist.parallel.pipeline.schedule.validate import check_schedule

VALID = [
    add_communication(schedule)
    for schedule in (
        gpipe(1, 1),
        gpipe(1, 3),
        gpipe(3, 2),
        one_forward_one_backward(2, 1),
        one_forward_one_backward(2, 3),
        one_forward_one_backward(4, 2),
        divided_v(),
        interleaved(),
        forward_only(one_forward_one_backward(3, 2)),
        forward_only(divided_v()),
    )
]
TEXT = """ferrodist pipeline schedule: two ranks
stage ranks: 0 1
microbatches: 1
rank 0: F0.0 SF0.0 RB0.0 B0.0
rank 1: RF1.0 F1.0 I1.0 SB1.0 W1.0
"""

actions = st.builds(Action, st.sampled_from(ActionKind), st.integers(0, 99), st.integers(0, 99))


def rows_of(schedule: Schedule) -> list[list[str]]:
    """What the ranks do, as words."""
    return [[str(action) for action in row] for row in schedule.actions]


def with_rows(schedule: Schedule, rows: list[list[str]]) -> Schedule:
    """The same with other rows."""
    return dataclasses.replace(schedule, actions=tuple(tuple(map(Action.from_text, row)) for row in rows))


def lines_of(schedule: Schedule) -> list[str]:
    """What the ranks do, a line for each."""
    return [" ".join(row) for row in rows_of(schedule)]


def is_right(schedule: Schedule) -> bool:
    """Whether a schedule is, found by brute force over words."""
    rows, local_stage = rows_of(schedule), schedule.stage_ranks
    words = set(itertools.chain(*rows))
    backward = any(word[0] in "BIW" for word in words)
    before: dict[str, list[str]] = {}
    wanted: list[list[str]] = [[] for _ in rows]

    def want(word: str, stage: int, *needed: str) -> None:
        before[word] = list(needed)
        wanted[local_stage[stage]].append(word)

    for stage, microbatch in itertools.product(range(len(local_stage)), range(schedule.num_microbatches)):
        here, is_upward, down = (f"{each}.{microbatch}" for each in (stage, stage + 1, stage - 1))
        crosses_down = stage > 0 and local_stage[stage] != local_stage[stage - 1]
        crosses_up = stage + 1 < len(local_stage) and local_stage[stage] != local_stage[stage + 1]
        want(f"F{here}", stage, *([f"RF{here}", f"SF{down}"] if crosses_down else [f"F{down}"] if stage > 0 else []))
        if crosses_down:
            want(f"RF{here}", stage)
        if crosses_up:
            want(f"SF{here}", stage, f"F{here}")
        if not backward:
            continue
        made, made_up = (f"B{each}" if f"B{each}" in words else f"I{each}" for each in (here, is_upward))
        source = [f"RB{here}", f"SB{is_upward}"] if crosses_up else [made_up] if stage + 1 < len(local_stage) else []
        want(made, stage, f"F{here}", *source)
        if made[0] == "I":
            want(f"W{here}", stage, made)
        if crosses_up:
            want(f"RB{here}", stage)
        if crosses_down:
            want(f"SB{here}", stage, made)
    if [sorted(row) for row in rows] != [sorted(row) for row in wanted]:
        return False
    done: set[str] = set()
    while any(rows):
        ready = [row for row in rows if row and done.issuperset(before[row[0]])]
        if not ready:
            return False
        done.add(ready[0].pop(0))
    return True


def is_accepted(schedule: Schedule) -> bool:
    """Whether it passes the check."""
    try:
        check_schedule(schedule)
    except ValueError:
        return False
    return True


@given(action=actions)
def test_actions_as_text(action: Action) -> None:
    """An action equals its parsed text."""
    assert Action.from_text(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "F1", "F1.", "F.1", "X1.1", "f1.1", "F1.1 ", "F-1.0", "FF1.1", "SI1.1"])
def test_wrong_action_texts(text: str) -> None:
    """They are refused, and shown."""
    with pytest.raises(ValueError, match=f"^{text!r} is not an action: write F2.5"):
        Action.from_text(text)


@given(
    name=st.sampled_from(["a", "1F1B, forward only", "a: b"]),
    stage_ranks=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    num_microbatches=st.integers(0, 200),
    rows=st.lists(st.lists(actions, max_size=4).map(tuple), min_size=1, max_size=12).map(tuple),
)
def test_schedules_as_text(name, stage_ranks, num_microbatches, rows) -> None:
    """A schedule equals its parsed text, right or wrong."""
    schedule = Schedule(name, stage_ranks, num_microbatches, rows)
    assert Schedule.from_text(str(schedule)) == schedule


@pytest.mark.parametrize("name", ["a # b", " a", "a\n", "a\nb", "a\u2028b"])
def test_wrong_schedule_names(name: str) -> None:
    """Names that a text can't hold are refused at once."""
    with pytest.raises(ValueError, match="a schedule's name is one line"):
        dataclasses.replace(gpipe(1, 1), name=name)


def test_comments_and_white_space_in_texts() -> None:
    """Empty lines, comments and any white space are accepted; the text of the result has none."""
    loose = TEXT.replace("\n", "   # a comment: with a colon\n\n").replace("rank 0: F0.0", "  rank   0:F0.0\t")
    assert str(Schedule.from_text(loose)) == TEXT


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("microbatches: 1", "microbatches 1", r"^line 3 of a schedule has no colon: 'microbatches 1'$"),
        (
            "ferrodist pipeline schedule",
            "schedule",
            "^line 1 of a schedule is 'schedule' where 'ferrodist pipeline sch",
        ),
        ("stage ranks", "ranks", "^line 2 of a schedule is 'ranks' where 'stage ranks' comes next$"),
        ("rank 1:", "rank 2:", "^line 5 of a schedule is 'rank 2' where 'rank 1' comes next$"),
        ("microbatches: 1\n", "", "^line 3 of a schedule is 'rank 0' where 'microbatches' comes next$"),
        ("ranks: 0 1", "ranks: 0 -1", "^line 2 of a schedule has '-1' where a number belongs$"),
        (
            "microbatches: 1",
            "microbatches: \N{SUPERSCRIPT TWO}",
            "^line 3 of a schedule has '\N{SUPERSCRIPT TWO}' where",
        ),
        ("microbatches: 1", "microbatches: 1 2", "^line 3 of a schedule has '1 2' where a number belongs$"),
        ("SB1.0", "Sb1.0", "^line 5 of a schedule: 'Sb1.0' is not an action"),
        (TEXT[TEXT.index("rank 0:") :], "", "^a schedule has a line for each of: .*, rank 0, ..., and not 'ferrodist"),
        (TEXT, "", "^a schedule has a line for each of: .*, and not ''$"),
    ],
)
def test_wrong_schedule_texts(old: str, new: str, message: str) -> None:
    """They are refused, and the line is named."""
    assert old in TEXT
    with pytest.raises(ValueError, match=message):
        Schedule.from_text(TEXT.replace(old, new))


def test_where_sends_and_receives_are_added() -> None:
    """Sends follow the computation; receives start one compute action before the one that uses the data."""
    assert lines_of(add_communication(one_forward_one_backward(2, 2))) == [
        "F0.0 SF0.0 RB0.0 F0.1 SF0.1 RB0.1 B0.0 B0.1",
        "RF1.0 F1.0 RF1.1 B1.0 SB1.0 F1.1 B1.1 SB1.1",
    ]


def test_no_transfers_within_a_rank() -> None:
    """Neighbouring stages of one rank need none; gradients are sent after the first half of a split backward."""
    assert lines_of(add_communication(divided_v())) == [
        "F0.0 SF0.0 RF3.0 F0.1 SF0.1 F3.0 RF3.1 I3.0 SB3.0 F3.1 I3.1 SB3.1 RB0.0 W3.0 I0.0 RB0.1 W0.0 I0.1 W3.1 W0.1",
        "RF1.0 F1.0 RF1.1 F2.0 SF2.0 F1.1 RB2.0 F2.1 SF2.1 I2.0 I1.0 SB1.0 RB2.1 W2.0 I2.1 I1.1 SB1.1 W1.0 W2.1 W1.1",
    ]
    assert add_communication(gpipe(1, 3)) == gpipe(1, 3)


def test_schedules_with_transfers_are_unchanged() -> None:
    """Existing sends and receives stay where they are, even if some are missing."""
    schedule = Schedule.from_text(TEXT.replace("SF0.0 ", ""))
    assert add_communication(schedule) is schedule


def test_the_forward_alone() -> None:
    """Only forwards, with their transfers if there were any, still one action ahead."""
    schedule = interleaved()
    plain = forward_only(schedule)
    assert lines_of(plain) == ["F0.0 F0.1 F2.0 F2.1", "F1.0 F1.1 F3.0 F3.1"]
    assert plain.name == "interleaved, forward only"
    assert forward_only(add_communication(schedule)) == add_communication(plain)
    assert lines_of(add_communication(plain)) == [
        "F0.0 SF0.0 RF2.0 F0.1 SF0.1 RF2.1 F2.0 SF2.0 F2.1 SF2.1",
        "RF1.0 RF1.1 F1.0 SF1.0 RF3.0 F1.1 SF1.1 RF3.1 F3.0 F3.1",
    ]


def test_the_backward_alone() -> None:
    """It runs from a rank's last stage to its first, each in the schedule's order; backwards are not split."""
    text = """ferrodist pipeline schedule: mine
        stage ranks: 0 1 1 0
        microbatches: 2
        rank 0: F0.0 F0.1 F3.0 F3.1 I3.1 B3.0 W3.1 B0.1 B0.0
        rank 1: F1.0 F1.1 F2.0 F2.1 B2.1 I2.0 B1.0 B1.1 W2.0
    """
    schedule = Schedule.from_text(text)
    assert schedule.backward_orders == ((1, 0), (0, 1), (1, 0), (1, 0))
    assert lines_of(backward_only(schedule)) == [
        "B3.1 SB3.1 RB0.1 B3.0 SB3.0 RB0.0 B0.1 B0.0",
        "RB2.1 RB2.0 B2.1 B2.0 B1.0 SB1.0 B1.1 SB1.1",
    ]


@pytest.mark.parametrize("schedule", VALID, ids=lambda schedule: f"{schedule.name}-{schedule.num_ranks}")
def test_right_schedules(schedule: Schedule) -> None:
    """They pass, and so does their forward alone; brute force finds them right as well."""
    for each in (schedule, forward_only(schedule)):
        check_schedule(each)
        assert is_right(each)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("microbatches: 1", "microbatches: 0", "there must be at least 1 microbatch, not 0"),
        ("ranks: 0 1", "ranks: 0 2", "stage 1 is on rank 2, and it has 2 ranks"),
        ("ranks: 0 1", "ranks: 0 0", r"rank 1 has no stage; stage_ranks is \(0, 0\)"),
        ("ranks: 0 1", "ranks:", r"rank 0 has no stage; stage_ranks is \(\)"),
        ("RB0.0", "RB2.0", "rank 0 has RB2.0, and it has 2 stages"),
        ("W1.0", "W1.1", "rank 1 has W1.1, and it has 1 microbatch"),
        ("RB0.0", "SB1.0", "rank 0 has SB1.0, and stage 1 is on rank 1"),
        (": F0.0", ": F0.0 F0.0", "rank 0 has F0.0 2 times; once is right"),
        ("RB0.0", "RB0.0 RB0.0", "rank 0 has RB0.0 2 times; once is right"),
        ("RF1.0 F1.0", "RF1.0", "rank 1 lacks F1.0"),
        (" B0.0", "", "rank 0 lacks B0.0, or I0.0 and W0.0"),
        (" W1.0", "", "rank 1 has I1.0 but lacks W1.0"),
        ("I1.0", "", "rank 1 has W1.0 but lacks I1.0"),
        ("I1.0", "B1.0", "rank 1 has B1.0 and also W1.0, which is a part of it"),
        ("W1.0", "B1.0", "rank 1 has B1.0 and also I1.0, which is a part of it"),
        ("SF0.0", "", "rank 0 lacks SF0.0: stage 1 is on rank 1"),
        ("RF1.0 ", "", "rank 1 lacks RF1.0: stage 0 is on rank 0"),
        ("SB1.0", "", "rank 1 lacks SB1.0: stage 0 is on rank 0"),
        ("RB0.0", "", "rank 0 lacks RB0.0: stage 1 is on rank 1"),
        ("RB0.0", "RB0.0 RF0.0", "rank 0 has RF0.0, but stage 0 is the first"),
        ("RB0.0 B0.0", "RB0.0 B0.0 SB0.0", "rank 0 has SB0.0, but stage 0 is the first"),
        ("W1.0", "W1.0 SF1.0", "rank 1 has SF1.0, but stage 1 is the last"),
        ("RF1.0", "RF1.0 RB1.0", "rank 1 has RB1.0, but stage 1 is the last"),
        ("F0.0 SF0.0", "SF0.0 F0.0", "rank 0 has SF0.0 before F0.0, which has to come first"),
        ("RF1.0 F1.0", "F1.0 RF1.0", "rank 1 has F1.0 before RF1.0, which has to come first"),
        ("RB0.0 B0.0", "B0.0 RB0.0", "rank 0 has B0.0 before RB0.0, which has to come first"),
        ("I1.0 SB1.0", "SB1.0 I1.0", "rank 1 has SB1.0 before I1.0, which has to come first"),
        ("I1.0 SB1.0 W1.0", "W1.0 I1.0 SB1.0", "rank 1 has W1.0 before I1.0, which has to come first"),
        ("F1.0 I1.0", "I1.0 F1.0", "rank 1 has I1.0 before F1.0, which has to come first"),
    ],
)
def test_wrong_schedules(old: str, new: str, message: str) -> None:
    """The message names the rank, the action, and what is wrong."""
    assert old in TEXT
    schedule = Schedule.from_text(TEXT.replace(old, new))
    with pytest.raises(ValueError, match=f"^schedule 'two ranks' is wrong: {message}$"):
        check_schedule(schedule)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("F0.0 SF0.0 F1.0 B1.0 B0.0", "rank 0 has SF0.0, but stage 1 is on rank 0 too"),
        ("F0.0 RF1.0 F1.0 B1.0 B0.0", "rank 0 has RF1.0, but stage 0 is on rank 0 too"),
        ("F1.0 F0.0 B1.0 B0.0", "rank 0 has F1.0 before F0.0, which has to come first"),
        ("F0.0 F1.0 B0.0 B1.0", "rank 0 has B0.0 before B1.0, which has to come first"),
        ("F0.0 F1.0 I0.0 W0.0 I1.0 W1.0", "rank 0 has I0.0 before I1.0, which has to come first"),
    ],
)
def test_stages_of_one_rank(row: str, message: str) -> None:
    """They have no transfers, and run in the order of the data."""
    check_schedule(schedule_of("one", [0, 0], 1, "F0.0 F1.0 B1.0 B0.0"))
    with pytest.raises(ValueError, match=f": {message}$"):
        check_schedule(schedule_of("one", [0, 0], 1, row))


def test_schedules_without_ranks_and_out_of_range() -> None:
    """Errors that a text can't express are found as well."""
    with pytest.raises(ValueError, match=r": it has no ranks$"):
        check_schedule(Schedule("none", (), 1, ()))
    with pytest.raises(ValueError, match=r": stage 0 is on rank -1, and it has 1 rank$"):
        check_schedule(dataclasses.replace(gpipe(1, 1), stage_ranks=(-1,)))
    for action, problem in (
        (Action(ActionKind.FORWARD, -1, 0), "1 stage"),
        (Action(ActionKind.FORWARD, 0, -1), "1 mic"),
    ):
        with pytest.raises(ValueError, match=f": rank 0 has {action}, and it has {problem}"):
            check_schedule(Schedule("none", (0,), 1, ((action,),)))


def test_forward_only_is_all_or_nothing() -> None:
    """A schedule with one backward needs all; one with none has no gradients to send."""
    forwards = add_communication(forward_only(gpipe(2, 2)))
    rows = rows_of(forwards)
    with pytest.raises(ValueError, match=r"rank 0 has RB0.0, but the schedule has no backward$"):
        check_schedule(with_rows(forwards, [[*rows[0], "RB0.0"], rows[1]]))
    with pytest.raises(ValueError, match=r"rank 0 lacks B0.0, or I0.0 and W0.0$"):
        check_schedule(with_rows(forwards, [rows[0], [*rows[1], "B1.1", "SB1.1"]]))


def test_a_schedule_without_any_transfers() -> None:
    """The message names the function that adds them."""
    with pytest.raises(ValueError, match=r"rank 0 lacks SF0.0: .*; add_communication adds all sends and receives$"):
        check_schedule(gpipe(2, 1))


def test_a_deadlock() -> None:
    """Each stuck rank is named with the action that it waits for; ranks that finish are not."""
    schedule = schedule_of(
        "knot",
        [0, 1, 2],
        2,
        "RB0.0 RB0.1 F0.0 SF0.0 B0.0 F0.1 SF0.1 B0.1",
        "RF1.0 RF1.1 RB1.0 RB1.1 F1.0 SF1.0 F1.1 SF1.1 B1.0 SB1.0 B1.1 SB1.1",
        "RF2.0 RF2.1 F2.0 B2.0 SB2.0 F2.1 B2.1 SB2.1",
    )
    with pytest.raises(ValueError) as caught:
        check_schedule(schedule)
    assert str(caught.value) == (
        "schedule 'knot' never ends: rank 0 waits at B0.0 for SB1.0, which comes on rank 1 after F1.1; rank 1 waits at"
        " F1.1 for SF0.1, which comes on rank 0 after B0.0; rank 2 waits at F2.1 for SF1.1, which comes on rank 1 after"
        " F1.1"
    )
    assert not is_right(schedule)


@pytest.mark.parametrize("schedule", [VALID[4], VALID[6]], ids=["1F1B", "V"])
def test_each_action_removed_or_exchanged(schedule: Schedule) -> None:
    """Every action is necessary, and exchanging two of a rank is found wrong exactly when it is."""
    num_right = num_wrong = 0
    for rank, row in enumerate(rows_of(schedule)):
        for first in range(len(row)):
            rows = rows_of(schedule)
            del rows[rank][first]
            assert not is_accepted(with_rows(schedule, rows))
            for second in range(first):
                rows = rows_of(schedule)
                rows[rank][first], rows[rank][second] = row[second], row[first]
                changed = with_rows(schedule, rows)
                assert is_accepted(changed) == is_right(changed)
                num_right, num_wrong = num_right + is_right(changed), num_wrong + (not is_right(changed))
    assert num_right > 10
    assert num_wrong > 100


@settings(max_examples=300, deadline=None)
@given(data=st.data(), schedule=st.sampled_from(VALID), num_changes=st.integers(1, 3))
def test_random_changes(data: st.DataObject, schedule: Schedule, num_changes: int) -> None:
    """A randomly changed schedule is refused if and only if it is wrong; others run to their end."""
    rows = [list(row) for row in schedule.actions]
    for _ in range(num_changes):
        if not any(rows):
            break
        row = data.draw(st.sampled_from([row for row in rows if row]))
        here, there = data.draw(st.integers(0, len(row) - 1)), data.draw(st.integers(0, len(row) - 1))
        match data.draw(st.sampled_from(["drop", "repeat", "exchange", "move", "to another rank", "replace"])):
            case "drop":
                del row[here]
            case "repeat":
                row.insert(there, row[here])
            case "exchange":
                row[here], row[there] = row[there], row[here]
            case "move":
                row.insert(there, row.pop(here))
            case "to another rank":
                data.draw(st.sampled_from(rows)).append(row.pop(here))
            case "replace":
                kind, stage = data.draw(st.sampled_from(ActionKind)), data.draw(st.integers(0, schedule.num_stages))
                row[here] = Action(kind, stage, row[here].microbatch)
    changed = dataclasses.replace(schedule, actions=tuple(map(tuple, rows)))
    right = is_right(changed)
    assert is_accepted(changed) == right
    if right:
        spans = predict(changed).spans
        assert [[span.action for span in each] for each in spans] == [
            [action for action in row if action.kind.is_compute] for row in rows
        ]
