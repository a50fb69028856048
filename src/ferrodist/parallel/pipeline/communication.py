"""Who sends what to whom: the sends and receives of a schedule, and its forward alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ferrodist.parallel.pipeline.actions import Action, ActionKind
from ferrodist.parallel.pipeline.dependencies import receive_for, send_after

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.parallel.pipeline.schedule import Schedule

__all__ = ["add_communication", "backward_only", "forward_only", "has_communication"]


def has_communication(schedule: Schedule) -> bool:
    """Whether a schedule has any sends or receives."""
    return any(not action.kind.is_compute for actions in schedule.actions for action in actions)


def add_communication(schedule: Schedule) -> Schedule:
    """Give a schedule its sends and receives.

    Data are sent when they are made. Their receive begins one compute action before the one that uses them, and so goes
    on meanwhile; receives begin in the order in which their data are used. Between stages of one rank nothing moves.

    Args:
        schedule: With compute actions only; one that has sends or receives is returned as it is.
    """
    if has_communication(schedule):
        return schedule
    return dataclasses.replace(schedule, actions=tuple(_add(schedule, actions) for actions in schedule.actions))


def forward_only(schedule: Schedule) -> Schedule:
    """The forward of a schedule, for inference.

    Its sends and receives, if there are some, are placed anew: where a backward covered a receive, a forward does.

    Args:
        schedule: With or without sends and receives; the result has them if this does.
    """
    forwards = dataclasses.replace(
        schedule,
        name=f"{schedule.name}, forward only",
        actions=tuple(
            tuple(action for action in actions if action.kind is ActionKind.FORWARD) for actions in schedule.actions
        ),
    )
    return add_communication(forwards) if has_communication(schedule) else forwards


def backward_only(schedule: Schedule) -> Schedule:
    """The backward that follows `forward_only`: stage by stage from the last, all microbatches of each.

    They come in the schedule's order, so that gradients add up to its bits, and the last one is the same.

    Args:
        schedule: With backwards, whole or in halves.
    """
    backwards = (
        tuple(
            Action(ActionKind.BACKWARD, stage, microbatch)
            for stage in reversed(stages)
            for microbatch in schedule.backward_orders[stage]
        )
        for stages in schedule.rank_stages
    )
    return add_communication(
        dataclasses.replace(schedule, name=f"{schedule.name}, backward only", actions=tuple(backwards))
    )


def _add(schedule: Schedule, actions: Sequence[Action]) -> tuple[Action, ...]:
    """One rank's actions with its sends and receives."""
    receives = [receive_for(schedule, action) for action in actions]
    result = receives[:1]
    for index, action in enumerate(actions):
        # A send goes first: another rank waits for it, and nobody yet for the receive.
        result += [*receives[index + 1 : index + 2], action, send_after(schedule, action)]
    return tuple(action for action in result if action is not None)
