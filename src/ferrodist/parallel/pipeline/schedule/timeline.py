"""How long a schedule takes and how much of it ranks stand idle, and how many activations they keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ferrodist.parallel.pipeline.schedule.ir import Action, ActionKind
from ferrodist.parallel.pipeline.schedule.lowering import add_communication
from ferrodist.parallel.pipeline.schedule.validate import Span, check_schedule, execute
from ferrodist.wording import counted

if TYPE_CHECKING:
    from ferrodist.parallel.pipeline.schedule.ir import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """How long things take, in any unit of time: each is one number, or one for each stage.

    Args:
        forward: The forward of a stage for one microbatch.
        backward_input: The gradients of its inputs; a whole backward takes this and the next.
        backward_weight: The gradients of its parameters.
        transfer: From the send of what a stage has made until it has arrived. Ranks compute meanwhile.

    Raises:
        ValueError: One is negative or not finite.
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
        """How long an action takes; a send has taken place when its data have arrived, and a receive only begins."""
        match action.kind:
            case ActionKind.FORWARD:
                return _at(self.forward, action.stage)
            case ActionKind.BACKWARD:
                return _at(self.backward_input, action.stage) + _at(self.backward_weight, action.stage)
            case ActionKind.BACKWARD_INPUT:
                return _at(self.backward_input, action.stage)
            case ActionKind.BACKWARD_WEIGHT:
                return _at(self.backward_weight, action.stage)
            case ActionKind.SEND_FORWARD | ActionKind.SEND_BACKWARD:
                return _at(self.transfer, action.stage)
            case _:
                return 0.0

    def check_stages(self, num_stages: int) -> None:
        """Raise unless costs that are given by stage are so for each one.

        Raises:
            ValueError: One has too few or too many.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and len(value) != num_stages:
                costs, stages = counted(len(value), "stage"), counted(num_stages, "stage")
                raise ValueError(f"{field.name} has costs of {costs}, and the schedule {stages}")


def _at(cost: float | Sequence[float], stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost


@dataclass(frozen=True, slots=True)
class Timeline:
    """When the ranks of a schedule compute what.

    Args:
        schedule: What they do.
        spans: For each rank its compute actions, in its order.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def duration(self) -> float:
        """From the beginning to the end of the last action of all."""
        return max((span.stop for spans in self.spans for span in spans), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank, how long it computes."""
        return tuple(sum(span.stop - span.start for span in spans) for spans in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """How much of all ranks' time passes without computing, 0 to 1."""
        whole = self.duration * len(self.spans)
        return 1 - sum(self.busy) / whole if whole else 0.0


def predict(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Say how a schedule would run.

    Args:
        schedule: Sends and receives are added if it has none.
        costs: What everything costs; 1 for each forward and for each half of a backward if None.

    Raises:
        ValueError: The schedule is wrong, or the costs are of another number of stages.
    """
    costs = Costs() if costs is None else costs
    schedule = add_communication(schedule)
    check_schedule(schedule)
    costs.check_stages(schedule.num_stages)
    return Timeline(schedule, execute(schedule, costs.of).spans)


def count_activations(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, of how many forwards it keeps the activations at most: the memory that a schedule takes.

    They are kept from the forward until the backward has run, or its later part if it is divided. A schedule without
    any backward keeps none.
    """
    last = {ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT}
    if not any(action.kind in last for actions in schedule.actions for action in actions):
        return (0,) * schedule.num_ranks
    return tuple(_most_kept(actions, last) for actions in schedule.actions)


def _most_kept(actions: Sequence[Action], last: set[ActionKind]) -> int:
    most = kept = 0
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            kept += 1
            most = max(most, kept)
        elif action.kind in last:
            kept -= 1
    return most
