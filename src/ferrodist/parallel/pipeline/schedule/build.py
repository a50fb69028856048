"""The kinds of schedules, and the function that builds them."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

from ferrodist.arguments import check_int
from ferrodist.parallel.pipeline.schedule.dual_pipe_v import dual_pipe_v
from ferrodist.parallel.pipeline.schedule.gpipe import breadth_first
from ferrodist.parallel.pipeline.schedule.ir import PipelineSize, Schedule, Slot, assign_microbatches
from ferrodist.parallel.pipeline.schedule.lowering import add_communication
from ferrodist.parallel.pipeline.schedule.one_f_one_b import one_f_one_b
from ferrodist.parallel.pipeline.schedule.validate import check_schedule
from ferrodist.parallel.pipeline.schedule.zero_bubble import zero_bubble_h1, zero_bubble_v
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable


class PipelineSchedule(enum.Enum):
    """A kind of schedule. In all, every stage sees the microbatches in order, so that gradients add up to equal bits.

    The bubble and the memory of each, and its paper, are described in its module in `schedule`.
    """

    GPIPE = "gpipe"
    """All forwards, then all backwards. Simple; holds the activations of every microbatch."""
    ONE_F_ONE_B = "1f1b"
    """GPipe's bubble, but no more activations than there are ranks."""
    INTERLEAVED_ONE_F_ONE_B = "interleaved-1f1b"
    """1F1B with v stages on each rank: a v-th of the bubble, for v times the messages and some more activations."""
    LOOPED_BFS = "looped-bfs"
    """GPipe with v stages on each rank: a v-th of the bubble, for v times the messages."""
    ZERO_BUBBLE_H1 = "zb-h1"
    """1F1B with split backwards: a third of the bubble; every rank holds the activations of 1F1B's first."""
    ZERO_BUBBLE_V = "zb-v"
    """Two stages on each rank, and split backwards: no bubble in ZB-H1's memory, for twice the messages."""
    DUAL_PIPE_V = "dualpipe-v"
    """Two stages on each rank; forwards beside backwards, each of which overlaps the other's messages."""


class _ScheduleKind(NamedTuple):
    """Rules for building a kind of schedule."""

    slots: Callable[[PipelineSize, int], list[Slot]]
    stages_per_rank: int = 1
    allows_any_stages_per_rank: bool = False
    is_v_shaped: bool = False


_KINDS = {
    PipelineSchedule.GPIPE: _ScheduleKind(breadth_first),
    PipelineSchedule.ONE_F_ONE_B: _ScheduleKind(one_f_one_b),
    PipelineSchedule.INTERLEAVED_ONE_F_ONE_B: _ScheduleKind(
        one_f_one_b, stages_per_rank=2, allows_any_stages_per_rank=True
    ),
    PipelineSchedule.LOOPED_BFS: _ScheduleKind(breadth_first, stages_per_rank=2, allows_any_stages_per_rank=True),
    PipelineSchedule.ZERO_BUBBLE_H1: _ScheduleKind(zero_bubble_h1),
    PipelineSchedule.ZERO_BUBBLE_V: _ScheduleKind(zero_bubble_v, stages_per_rank=2, is_v_shaped=True),
    PipelineSchedule.DUAL_PIPE_V: _ScheduleKind(dual_pipe_v, stages_per_rank=2, is_v_shaped=True),
}


def build_schedule(
    kind: PipelineSchedule, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """Build a schedule, with its sends and receives.

    It depends on the arguments alone, so that all ranks get the same.

    Args:
        kind: The kind of schedule.
        num_ranks: Number of ranks, at least 1.
        num_microbatches: Number of microbatches of a step, at least 1. The more, the smaller the bubble's share; with
            fewer than twice the ranks, some kinds' bubbles are longer than in their papers.
        stages_per_rank: Number of stages of each rank; None is the kind's default: 2 for the interleaved, looped and
            V-shaped ones, else 1. Only interleaved and looped ones allow others.

    Raises:
        TypeError: An argument has another type.
        ValueError: A number is below 1, or the kind does not allow so many stages.
    """
    if not isinstance(kind, PipelineSchedule):
        raise TypeError(
            f"kind must be a PipelineSchedule, not {kind!r}: it has {', '.join(PipelineSchedule.__members__)}"
        )
    rules = _KINDS[kind]
    if stages_per_rank is None:
        stages_per_rank = rules.stages_per_rank
    size = PipelineSize(
        num_ranks=check_int("num_ranks", num_ranks, min=1),
        num_microbatches=check_int("num_microbatches", num_microbatches, min=1),
        stages_per_rank=check_int("stages_per_rank", stages_per_rank, min=1),
    )
    if not rules.allows_any_stages_per_rank and stages_per_rank != rules.stages_per_rank:
        raise ValueError(
            f"{kind.value} has stages_per_rank={rules.stages_per_rank}, not {stages_per_rank}: leave it out, or take"
            " PipelineSchedule.INTERLEAVED_ONE_F_ONE_B or LOOPED_BFS, which allow any number"
        )
    stage_ranks = _stage_ranks(size, is_v_shaped=rules.is_v_shaped)
    actions = (
        assign_microbatches(
            rules.slots(size, rank),
            [stage for stage, owner in enumerate(stage_ranks) if owner == rank],
            size.num_microbatches,
        )
        for rank in range(size.num_ranks)
    )
    return add_communication(Schedule(kind.value, stage_ranks, size.num_microbatches, tuple(actions)))


def resolve_schedule(
    schedule: PipelineSchedule | Schedule, num_ranks: int, num_microbatches: int, num_stages: int
) -> Schedule:
    """Build a kind's schedule, or check a custom one, for these numbers of ranks, microbatches and stages."""
    if isinstance(schedule, PipelineSchedule):
        if num_stages % num_ranks:
            raise ValueError(
                f"{counted(num_stages, 'stage')} can't be divided among {counted(num_ranks, 'rank')}: pass the same"
                " number for each, all of them in one list, with None for those of other ranks; or a Schedule with the"
                " rank of each"
            )
        return build_schedule(schedule, num_ranks, num_microbatches, num_stages // num_ranks)
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule is a PipelineSchedule or a Schedule, not {schedule!r}")
    schedule = add_communication(schedule)
    check_schedule(schedule)
    if not any(schedule.backward_orders):
        raise ValueError(
            f"the schedule {schedule.name!r} has no backward: pass one that has; forward() uses its forwards alone"
        )
    wanted = (num_ranks, num_microbatches, num_stages)
    if wanted != (schedule.num_ranks, schedule.num_microbatches, schedule.num_stages):
        raise ValueError(
            f"the schedule {schedule.name!r} is for {counted(schedule.num_ranks, 'rank')},"
            f" {counted(schedule.num_microbatches, 'microbatch')} and {counted(schedule.num_stages, 'stage')}; there"
            f" are {wanted[0]}, {wanted[1]} and {wanted[2]}"
        )
    return schedule


def _stage_ranks(size: PipelineSize, *, is_v_shaped: bool) -> tuple[int, ...]:
    """The rank of each stage: around the ring again and again, or to the last rank and back."""
    once = range(size.num_ranks)
    return (*once, *reversed(once)) if is_v_shaped else (*once,) * size.stages_per_rank
