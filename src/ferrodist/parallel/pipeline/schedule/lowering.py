"""Lowering of schedules: sends and receives, dependencies of actions, and schedules for forward or backward alone."""

from __future__ import annotations

import dataclasses

from ferrodist.parallel.pipeline.schedule.ir import Action, ActionKind, Schedule


def receive_for(schedule: Schedule, action: Action) -> Action | None:
    """The receive of a compute action's data; None if they are on its rank already."""
    return _transfer_of(schedule, action, (ActionKind.RECV_FORWARD, -1), (ActionKind.RECV_BACKWARD, 1))


def send_after(schedule: Schedule, action: Action) -> Action | None:
    """The send of a compute action's result; None if it stays on its rank."""
    return _transfer_of(schedule, action, (ActionKind.SEND_FORWARD, 1), (ActionKind.SEND_BACKWARD, -1))


def _transfer_of(
    schedule: Schedule, action: Action, forward: tuple[ActionKind, int], backward: tuple[ActionKind, int]
) -> Action | None:
    """A forward's or backward's transfer, given by kind and distance of stages, if these are on different ranks."""
    if action.kind is not ActionKind.FORWARD and not action.kind.gives_gradients:
        return None
    kind, distance = forward if action.kind is ActionKind.FORWARD else backward
    neighbour, ranks = action.stage + distance, schedule.stage_ranks
    if not 0 <= neighbour < schedule.num_stages or not 0 <= action.stage < schedule.num_stages:
        return None
    return None if ranks[action.stage] == ranks[neighbour] else Action(kind, action.stage, action.microbatch)


class Dependencies:
    """The dependencies of each action of a schedule with sends and receives."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._backwards = {
            (action.stage, action.microbatch): action
            for actions in schedule.actions
            for action in actions
            if action.kind.gives_gradients
        }

    def of(self, action: Action) -> tuple[Action, ...]:
        """The actions, here and elsewhere, that must be done before this one can begin.

        A compute action on received data waits for the receive, which its own rank starts, and for the send.
        """
        stage, microbatch = action.stage, action.microbatch
        forward = Action(ActionKind.FORWARD, stage, microbatch)
        match action.kind:
            case ActionKind.FORWARD:
                return self._data_dependencies(action, Action(ActionKind.FORWARD, stage - 1, microbatch))
            case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
                return (forward, *self._data_dependencies(action, self._backward(stage + 1, microbatch)))
            case ActionKind.BACKWARD_WEIGHT:
                return (Action(ActionKind.BACKWARD_INPUT, stage, microbatch),)
            case ActionKind.SEND_FORWARD:
                return (forward,)
            case ActionKind.SEND_BACKWARD:
                return (self._backward(stage, microbatch),)
            case _:
                return ()

    def _data_dependencies(self, action: Action, made_by: Action) -> tuple[Action, ...]:
        """The action that makes a compute action's data, or their receive and send."""
        if not 0 <= made_by.stage < self._schedule.num_stages:
            return ()
        receive, send = receive_for(self._schedule, action), send_after(self._schedule, made_by)
        return (made_by,) if receive is None or send is None else (receive, send)

    def _backward(self, stage: int, microbatch: int) -> Action:
        whole = Action(ActionKind.BACKWARD, stage, microbatch)
        return self._backwards.get((stage, microbatch), whole)


def has_communication(schedule: Schedule) -> bool:
    """True if a schedule has any sends or receives."""
    return any(not action.kind.is_compute for actions in schedule.actions for action in actions)


def add_communication(schedule: Schedule) -> Schedule:
    """Add sends and receives to a schedule.

    A send follows the action that computes its data. A receive is placed one compute action before the action that uses
    its data, so that the transfer of large data overlaps that action (see `PendingRecv`). Receives are in the order in
    which their data are used. Nothing is sent between stages of one rank.

    Args:
        schedule: A schedule with compute actions only; one that has sends or receives is returned unchanged.
    """
    if has_communication(schedule):
        return schedule
    lowered = []
    for actions in schedule.actions:
        receives = [receive_for(schedule, action) for action in actions]
        result = receives[:1]
        for index, action in enumerate(actions):
            # A send precedes the next receive: another rank waits for it already.
            result += [*receives[index + 1 : index + 2], action, send_after(schedule, action)]
        lowered.append(tuple(action for action in result if action is not None))
    return dataclasses.replace(schedule, actions=tuple(lowered))


def forward_only(schedule: Schedule) -> Schedule:
    """The forward of a schedule, for inference, with its sends and receives, if any, placed anew."""
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

    Microbatches keep the schedule's order: gradients are summed in the same order, to the same bits.
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
