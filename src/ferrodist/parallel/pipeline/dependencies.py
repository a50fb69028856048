"""How data go through a pipeline: which transfers a compute action has, and what an action has to wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.parallel.pipeline.actions import Action, ActionKind

if TYPE_CHECKING:
    from ferrodist.parallel.pipeline.schedule import Schedule

__all__ = ["Dependencies", "receive_for", "send_after"]


def receive_for(schedule: Schedule, action: Action) -> Action | None:
    """The receive that brings a compute action its data; None if they are on its rank already."""
    if action.kind is ActionKind.FORWARD and _crosses_ranks(schedule, action.stage, action.stage - 1):
        return Action(ActionKind.RECV_FORWARD, action.stage, action.microbatch)
    if action.kind.gives_gradients and _crosses_ranks(schedule, action.stage, action.stage + 1):
        return Action(ActionKind.RECV_BACKWARD, action.stage, action.microbatch)
    return None


def send_after(schedule: Schedule, action: Action) -> Action | None:
    """The send of what a compute action makes; None if it stays on its rank."""
    if action.kind is ActionKind.FORWARD and _crosses_ranks(schedule, action.stage, action.stage + 1):
        return Action(ActionKind.SEND_FORWARD, action.stage, action.microbatch)
    if action.kind.gives_gradients and _crosses_ranks(schedule, action.stage, action.stage - 1):
        return Action(ActionKind.SEND_BACKWARD, action.stage, action.microbatch)
    return None


def _crosses_ranks(schedule: Schedule, stage: int, neighbour: int) -> bool:
    """Whether two stages are there, and on different ranks."""
    if min(stage, neighbour) < 0 or max(stage, neighbour) >= schedule.num_stages:
        return False
    return schedule.stage_ranks[stage] != schedule.stage_ranks[neighbour]


class Dependencies:
    """What each action of a schedule waits for.

    Args:
        schedule: With sends and receives.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._backwards = {
            (action.stage, action.microbatch): action
            for actions in schedule.actions
            for action in actions
            if action.kind.gives_gradients
        }

    def of(self, action: Action) -> tuple[Action, ...]:
        """The actions that have to be done, here and elsewhere, before this one can begin.

        A compute action on received data waits for the receive, which its own rank begins, and for the send.
        """
        stage, microbatch = action.stage, action.microbatch
        forward = Action(ActionKind.FORWARD, stage, microbatch)
        match action.kind:
            case ActionKind.FORWARD:
                return self._data(action, Action(ActionKind.FORWARD, stage - 1, microbatch))
            case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
                return (forward, *self._data(action, self._backward(stage + 1, microbatch)))
            case ActionKind.BACKWARD_WEIGHT:
                return (Action(ActionKind.BACKWARD_INPUT, stage, microbatch),)
            case ActionKind.SEND_FORWARD:
                return (forward,)
            case ActionKind.SEND_BACKWARD:
                return (self._backward(stage, microbatch),)
            case _:
                return ()

    def _data(self, action: Action, made_by: Action) -> tuple[Action, ...]:
        """What brings a compute action the outputs or gradients that another stage's made."""
        if not 0 <= made_by.stage < self._schedule.num_stages:
            return ()
        receive, send = receive_for(self._schedule, action), send_after(self._schedule, made_by)
        return (made_by,) if receive is None or send is None else (receive, send)

    def _backward(self, stage: int, microbatch: int) -> Action:
        whole = Action(ActionKind.BACKWARD, stage, microbatch)
        return self._backwards.get((stage, microbatch), whole)
