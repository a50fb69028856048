"""Checks of schedules, before the first microbatch is sent."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ferrodist.parallel.pipeline.schedule.ir import Action, ActionKind, Schedule
from ferrodist.parallel.pipeline.schedule.lowering import Dependencies, has_communication, receive_for, send_after
from ferrodist.parallel.pipeline.schedule.simulate import simulate
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

_BACKWARD_KINDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


def check_schedule(schedule: Schedule) -> None:
    """Raise for a schedule that can't be right.

    Every stage runs every microbatch once, forward and backward, on its rank; a schedule without any backward is one
    for inference. All data between ranks are sent and received once, and nothing else. No rank waits forever, which a
    simulation proves.

    Args:
        schedule: A schedule with its sends and receives: see `add_communication`.

    Raises:
        ValueError: The schedule is wrong; the message names the first wrong rank and action, or the ranks that wait
            forever.
    """
    _check_sizes(schedule)
    for rank, actions in enumerate(schedule.actions):
        _check_positions(schedule, rank, actions)
    _check_compute(schedule)
    _check_transfers(schedule)
    _check_order(schedule)
    _, blocked = simulate(schedule, lambda _: 0.0)
    if blocked:
        descriptions = []
        for rank, (action, needed) in sorted(blocked.items()):
            other = schedule.stage_ranks[needed.stage]
            descriptions.append(
                f"rank {rank} waits at {action} for {needed}, which comes on rank {other} after {blocked[other][0]}"
            )
        raise ValueError(f"schedule {schedule.name!r} never ends: {'; '.join(descriptions)}")


def _check_sizes(schedule: Schedule) -> None:
    if schedule.num_microbatches < 1:
        raise _error(schedule, f"there must be at least 1 microbatch, not {schedule.num_microbatches}")
    for stage, rank in enumerate(schedule.stage_ranks):
        if not 0 <= rank < schedule.num_ranks:
            raise _error(schedule, f"stage {stage} is on rank {rank}, and it has {counted(schedule.num_ranks, 'rank')}")
    for rank in range(schedule.num_ranks):
        if rank not in schedule.stage_ranks:
            raise _error(schedule, f"rank {rank} has no stage; stage_ranks is {schedule.stage_ranks}")
    if not schedule.num_ranks:
        raise _error(schedule, "it has no ranks")


def _check_positions(schedule: Schedule, rank: int, actions: Sequence[Action]) -> None:
    """Check that a rank's actions are of its own stages and of existing microbatches, each once."""
    for action in actions:
        if not 0 <= action.stage < schedule.num_stages:
            raise _error(schedule, f"rank {rank} has {action}, and it has {counted(schedule.num_stages, 'stage')}")
        if not 0 <= action.microbatch < schedule.num_microbatches:
            raise _error(
                schedule, f"rank {rank} has {action}, and it has {counted(schedule.num_microbatches, 'microbatch')}"
            )
        if schedule.stage_ranks[action.stage] != rank:
            owner = schedule.stage_ranks[action.stage]
            raise _error(schedule, f"rank {rank} has {action}, and stage {action.stage} is on rank {owner}")
    for action, count in Counter(actions).items():
        if count > 1:
            raise _error(schedule, f"rank {rank} has {action} {counted(count, 'time')}; once is right")


def _check_compute(schedule: Schedule) -> None:
    """Check that there is each forward, and either the whole backward or both of its halves."""
    found = {action for actions in schedule.actions for action in actions}
    has_backward = any(action.kind in _BACKWARD_KINDS for action in found)
    for stage, rank in enumerate(schedule.stage_ranks):
        for microbatch in range(schedule.num_microbatches):
            if Action(ActionKind.FORWARD, stage, microbatch) not in found:
                raise _error(schedule, f"rank {rank} lacks {Action(ActionKind.FORWARD, stage, microbatch)}")
            if not has_backward:
                continue
            whole, inputs, weights = (Action(kind, stage, microbatch) for kind in _BACKWARD_KINDS)
            halves = [half for half in (inputs, weights) if half in found]
            if whole in found and halves:
                raise _error(schedule, f"rank {rank} has {whole} and also {halves[0]}, which is a part of it")
            if whole in found or len(halves) == 2:
                continue
            if halves:
                other = weights if halves[0] == inputs else inputs
                raise _error(schedule, f"rank {rank} has {halves[0]} but lacks {other}")
            raise _error(schedule, f"rank {rank} lacks {whole}, or {inputs} and {weights}")


def _check_transfers(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        # In their order, which dict keys preserve.
        found = {action: None for action in actions if not action.kind.is_compute}
        transfers = (find(schedule, action) for action in actions for find in (receive_for, send_after))
        wanted = dict.fromkeys(transfer for transfer in transfers if transfer is not None)
        missing = [transfer for transfer in wanted if transfer not in found]
        excess = [transfer for transfer in found if transfer not in wanted]
        if missing:
            advice = "" if has_communication(schedule) else "; add_communication adds all sends and receives"
            raise _error(schedule, f"rank {rank} lacks {missing[0]}: {_reason(schedule, missing[0])}{advice}")
        if excess:
            raise _error(schedule, f"rank {rank} has {excess[0]}, but {_reason(schedule, excess[0])}")


def _reason(schedule: Schedule, transfer: Action) -> str:
    """A sentence about the other side of a transfer."""
    is_upward = transfer.kind in {ActionKind.SEND_FORWARD, ActionKind.RECV_BACKWARD}
    neighbour = transfer.stage + (1 if is_upward else -1)
    if not 0 <= neighbour < schedule.num_stages:
        return f"stage {transfer.stage} is the {'last' if is_upward else 'first'}"
    rank = schedule.stage_ranks[neighbour]
    if rank == schedule.stage_ranks[transfer.stage]:
        return f"stage {neighbour} is on rank {rank} too"
    if not transfer.kind.is_forward and not any(
        action.kind in _BACKWARD_KINDS for actions in schedule.actions for action in actions
    ):
        return "the schedule has no backward"
    return f"stage {neighbour} is on rank {rank}"


def _check_order(schedule: Schedule) -> None:
    """Check that each rank's actions follow their dependencies on the same rank."""
    dependencies = Dependencies(schedule)
    for rank, actions in enumerate(schedule.actions):
        done: set[Action] = set()
        for action in actions:
            for needed in dependencies.of(action):
                if schedule.stage_ranks[needed.stage] == rank and needed not in done:
                    raise _error(schedule, f"rank {rank} has {action} before {needed}, which has to come first")
            done.add(action)


def _error(schedule: Schedule, problem: str) -> ValueError:
    return ValueError(f"schedule {schedule.name!r} is wrong: {problem}")
