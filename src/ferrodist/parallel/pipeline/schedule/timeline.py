"""Predicted duration, bubble and activation memory of a schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

from ferrodist.arguments import check_type
from ferrodist.parallel.pipeline.schedule.ir import Action, ActionKind, Schedule
from ferrodist.parallel.pipeline.schedule.lowering import add_communication
from ferrodist.parallel.pipeline.schedule.simulate import Span, simulate
from ferrodist.parallel.pipeline.schedule.validate import check_schedule
from ferrodist.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Durations of actions, in any unit of time: each one number, or one for each stage.

    Args:
        forward: Forward of a stage for one microbatch.
        backward_input: Gradients of its inputs; a whole backward takes this and the next.
        backward_weight: Gradients of its parameters.
        transfer: Time from the send of a stage's result to its arrival. Ranks compute meanwhile.

    Raises:
        ValueError: A cost is negative or not finite.
    """

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    transfer: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Sequence):
                value = tuple(value)
                object.__setattr__(self, field.name, value)
            for cost in value if isinstance(value, tuple) else (value,):
                if not (math.isfinite(cost) and cost >= 0):
                    raise ValueError(f"costs are finite and not negative; {field.name} is {value}")

    def of(self, action: Action) -> float:
        """The duration of an action; a send ends when its data have arrived, and a receive only starts."""
        costs = {
            ActionKind.FORWARD: [self.forward],
            ActionKind.BACKWARD: [self.backward_input, self.backward_weight],
            ActionKind.BACKWARD_INPUT: [self.backward_input],
            ActionKind.BACKWARD_WEIGHT: [self.backward_weight],
            ActionKind.SEND_FORWARD: [self.transfer],
            ActionKind.SEND_BACKWARD: [self.transfer],
        }.get(action.kind, [])
        return sum((cost[action.stage] if isinstance(cost, Sequence) else cost for cost in costs), 0.0)

    def check_stages(self, num_stages: int) -> None:
        """Raise ValueError unless costs that are given by stage have one for each."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and len(value) != num_stages:
                costs, stages = counted(len(value), "stage"), counted(num_stages, "stage")
                raise ValueError(f"{field.name} has costs of {costs}, and the schedule {stages}")


@dataclass(frozen=True, slots=True)
class Timeline:
    """The compute actions of a schedule's ranks with their times.

    Args:
        schedule: The schedule.
        spans: For each rank its compute actions, in order.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def duration(self) -> float:
        """Time from the beginning to the end of the last action of all."""
        return max((span.stop for spans in self.spans for span in spans), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Computing time of each rank."""
        return tuple(sum(span.stop - span.start for span in spans) for spans in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time without computing, 0 to 1."""
        whole = self.duration * len(self.spans)
        return 1 - sum(self.busy) / whole if whole else 0.0


def predict(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Predict the timeline of a schedule.

    Args:
        schedule: The schedule; sends and receives are added if it has none.
        costs: Durations; by default 1 for each forward and for each half of a backward.

    Raises:
        TypeError: ``schedule`` is not a `Schedule`, but a `PipelineSchedule` or something else.
        ValueError: The schedule is wrong, or the costs are of another number of stages.
    """
    check_type(schedule, Schedule, "a timeline is that of a Schedule, as build_schedule() makes")
    costs = Costs() if costs is None else costs
    schedule = add_communication(schedule)
    check_schedule(schedule)
    costs.check_stages(schedule.num_stages)
    spans, _ = simulate(schedule, costs.of)
    return Timeline(schedule, spans)


def count_activations(schedule: Schedule) -> tuple[int, ...]:
    """For each rank the largest number of forwards whose activations it holds: the memory of a schedule.

    They are held from the forward until the backward has run, or its weight half if it is split. A schedule without any
    backward holds none.
    """
    check_type(schedule, Schedule, "activations are counted in a Schedule, as build_schedule() makes")
    last = {ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT}
    if not any(action.kind in last for actions in schedule.actions for action in actions):
        return (0,) * schedule.num_ranks
    changes = (
        [1 if action.kind is ActionKind.FORWARD else -1 if action.kind in last else 0 for action in actions]
        for actions in schedule.actions
    )
    return tuple(max(accumulate(each, initial=0)) for each in changes)
