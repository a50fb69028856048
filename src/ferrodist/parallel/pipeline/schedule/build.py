"""The kinds of schedules, and one function that builds any of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrodist.arguments import check_int
from ferrodist.parallel.pipeline.schedule.dual_pipe_v import dual_pipe_v
from ferrodist.parallel.pipeline.schedule.gpipe import breadth_first
from ferrodist.parallel.pipeline.schedule.ir import PipelineSize, Schedule, actions_of_turns
from ferrodist.parallel.pipeline.schedule.lowering import add_communication
from ferrodist.parallel.pipeline.schedule.one_f_one_b import one_f_one_b
from ferrodist.parallel.pipeline.schedule.validate import check_schedule
from ferrodist.parallel.pipeline.schedule.zero_bubble import zero_bubble_h1, zero_bubble_v
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.parallel.pipeline.schedule.ir import Slot


class PipelineSchedule(enum.Enum):
    """A kind of schedule. For all, every stage sees the microbatches in order, so that gradients add up to equal bits.

    What each promises, and the paper that has it, stands at the head of its module in `schedules`.
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
    """1F1B with backwards in halves: a third of the bubble; every rank holds the activations of 1F1B's first."""

    ZERO_BUBBLE_V = "zb-v"
    """Two stages on each rank, and backwards in halves: no bubble in ZB-H1's memory, for twice the messages."""

    DUAL_PIPE_V = "dualpipe-v"
    """Two stages on each rank; forwards beside backwards, each of which covers the other's messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """How a kind is built.

    Args:
        turns: What a rank does.
        stages_per_rank: How many stages a rank has unless the caller says.
        is_any_number: Whether the caller may say another number.
        is_v_shaped: Whether the ranks have their second stages in reverse.
    """

    turns: Callable[[PipelineSize, int], list[Slot]]
    stages_per_rank: int = 1
    is_any_number: bool = False
    is_v_shaped: bool = False


_RECIPES = {
    PipelineSchedule.GPIPE: _Recipe(turns=breadth_first),
    PipelineSchedule.ONE_F_ONE_B: _Recipe(turns=one_f_one_b),
    PipelineSchedule.INTERLEAVED_ONE_F_ONE_B: _Recipe(turns=one_f_one_b, stages_per_rank=2, is_any_number=True),
    PipelineSchedule.LOOPED_BFS: _Recipe(turns=breadth_first, stages_per_rank=2, is_any_number=True),
    PipelineSchedule.ZERO_BUBBLE_H1: _Recipe(turns=zero_bubble_h1),
    PipelineSchedule.ZERO_BUBBLE_V: _Recipe(turns=zero_bubble_v, stages_per_rank=2, is_v_shaped=True),
    PipelineSchedule.DUAL_PIPE_V: _Recipe(turns=dual_pipe_v, stages_per_rank=2, is_v_shaped=True),
}


def build_schedule(
    kind: PipelineSchedule, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """Build a schedule, with its sends and receives.

    It depends on the arguments alone, so that ranks that call this alike have the same.

    Args:
        kind: Which.
        num_ranks: How many ranks the stages are on, at least 1.
        num_microbatches: How many microbatches a step has, at least 1. The more, the smaller is the bubble's part;
            with fewer than twice the ranks, some kinds' bubbles are longer than their papers say.
        stages_per_rank: How many stages each rank has; None is the kind's own number: 2 for the interleaved, looped and
            V-shaped ones, else 1. Only interleaved and looped ones allow any.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: A number is below 1, or stages that the kind does not allow.
    """
    if not isinstance(kind, PipelineSchedule):
        raise TypeError(
            f"kind must be a PipelineSchedule, not {kind!r}: it has {', '.join(PipelineSchedule.__members__)}"
        )
    recipe = _RECIPES[kind]
    if stages_per_rank is None:
        stages_per_rank = recipe.stages_per_rank
    size = PipelineSize(
        num_ranks=check_int("num_ranks", num_ranks, min=1),
        num_microbatches=check_int("num_microbatches", num_microbatches, min=1),
        stages_per_rank=check_int("stages_per_rank", stages_per_rank, min=1),
    )
    if not recipe.is_any_number and stages_per_rank != recipe.stages_per_rank:
        raise ValueError(
            f"{kind.value} has stages_per_rank={recipe.stages_per_rank}, not {stages_per_rank}: leave it out, or take"
            " PipelineSchedule.INTERLEAVED_ONE_F_ONE_B or LOOPED_BFS, which allow any number"
        )
    stage_ranks = _stage_ranks(size, is_v_shaped=recipe.is_v_shaped)
    actions = (
        actions_of_turns(
            recipe.turns(size, rank),
            [stage for stage, of in enumerate(stage_ranks) if of == rank],
            size.num_microbatches,
        )
        for rank in range(size.num_ranks)
    )
    return add_communication(Schedule(kind.value, stage_ranks, size.num_microbatches, tuple(actions)))


def resolve_schedule(
    schedule: PipelineSchedule | Schedule, num_ranks: int, num_microbatches: int, num_stages: int
) -> Schedule:
    """The schedule of a kind, or one that was brought, for so many ranks, microbatches and stages.

    Raises:
        TypeError: It is neither.
        ValueError: There is none for so many, or the one that was brought is wrong, or has no backward.
    """
    if isinstance(schedule, PipelineSchedule):
        if num_stages % num_ranks:
            raise ValueError(
                f"{counted(num_stages, 'stage')} can't be divided among {counted(num_ranks, 'rank')}: pass as"
                " many for each, all of them in"
                " one list, with None for those of other ranks; or a Schedule that says where each is"
            )
        return build_schedule(schedule, num_ranks, num_microbatches, num_stages // num_ranks)
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule is a PipelineSchedule or a Schedule, not {schedule!r}")
    schedule = add_communication(schedule)
    check_schedule(schedule)
    if not any(schedule.backward_orders):
        raise ValueError(
            f"the schedule {schedule.name!r} has no backward: pass one that has; forward() takes its forwards alone"
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
