"""What a backward does, as data: a pure function of what the forward did.

[Note: plan]
A forward is recorded as a *trace*: which unit's call began and ended, in order. The backward goes through the trace
from its end. Where a call ended, its unit is needed (USE); where a unit's first call began, all its gradients are there
(REDUCE), and it is freed (FREE). Gathering (GATHER) is moved forward by the number of units to prefetch.

Every rank runs the steps in the plan's order, whatever the order in which autograd reaches the units there and whether
it reaches them all: a rank that leaves a unit out still gathers and reduces it with the others. Events only say how far
a rank may go. When autograd comes to a call, all steps up to its USE are due, for the engine of one thread takes the
operations that forward recorded last first: whatever was recorded after that call and is needed has run. REDUCE may
come sooner, when all gradients of the unit are there; FREE may not, for a frozen layer's weight can be needed after
them.

A forward as it was, and the backward of it that is under way.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrodist.parallel.module_guard import current_backward_id

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Action(enum.Enum):
    """What a step does to a unit."""

    GATHER = "gather"
    """Begin to gather it."""
    USE = "use"
    """Have it gathered."""
    REDUCE = "reduce"
    """Begin to average its gradients, those that there are."""
    FREE = "free"
    """Give up all but the shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A call of a unit in a forward.

    Args:
        unit: The unit's number.
        call: The call's number in its trace.
        begins: Whether the call begins here, or ends.
    """

    unit: int
    call: int
    begins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a backward.

    Args:
        action: What it does.
        unit: The unit's number.
        call: For USE: the call's number in the trace; else -1.
    """

    action: Action
    unit: int
    call: int = -1

    def __str__(self) -> str:
        return f"{self.action.value} {self.unit}"


def plan_backward(trace: Sequence[Event], prefetch: int, trainable: Collection[int]) -> list[Step]:
    """The steps of the backward of a forward.

    Args:
        trace: The forward; calls that did not end, for they raised, are left out.
        prefetch: How many units to gather before they are needed.
        trainable: The units that have gradients.
    """
    ended = {event.call for event in trace if not event.begins}
    events = [event for event in trace if event.call in ended]
    first_calls: dict[int, int] = {}
    for event in events:
        first_calls.setdefault(event.unit, event.call)
    uses = [event.unit for event in reversed(events) if not event.begins]
    steps: list[Step] = []
    num_gathered = num_used = 0
    for event in reversed(events):
        if event.begins:
            if first_calls[event.unit] == event.call and event.unit in trainable:
                steps.append(Step(action=Action.REDUCE, unit=event.unit))
            steps.append(Step(action=Action.FREE, unit=event.unit))
            continue
        num_used += 1
        if num_gathered < num_used:
            steps.append(Step(action=Action.GATHER, unit=event.unit))
            num_gathered = num_used
        steps.append(Step(action=Action.USE, unit=event.unit, call=event.call))
        while num_gathered < min(num_used + prefetch, len(uses)):
            steps.append(Step(action=Action.GATHER, unit=uses[num_gathered]))
            num_gathered += 1
    return steps


class ForwardTrace:
    """A forward, as it was: the calls of units, and which values their parameters had."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.order: list[int] = []
        """The units, as their calls began."""
        self.versions: dict[int, tuple[int, ...]] = {}
        """Version counters of each unit's pieces, by the unit's number."""

    def begin_call(self, unit: int) -> int:
        """Note that a unit's call begins; returns the call's number."""
        call = len(self.order)
        self.order.append(unit)
        self.events.append(Event(unit=unit, call=call, begins=True))
        return call

    def end_call(self, unit: int, call: int) -> None:
        """Note that it has ended well."""
        self.events.append(Event(unit=unit, call=call, begins=False))

    def last_ended(self, count: int) -> set[int]:
        """The ``count`` units, but for the outermost, whose calls ended last."""
        ended = dict.fromkeys(event.unit for event in reversed(self.events) if not event.begins and event.unit)
        return set(list(ended)[:count])


class BackwardRun:
    """The steps of a backward's plan, and how many were done.

    Args:
        trace: The forward.
        steps: Its plan.
    """

    def __init__(self, trace: ForwardTrace, steps: Sequence[Step]) -> None:
        self.trace = trace
        self.steps = steps
        self.num_done = 0
        self.backward = current_backward_id()
        self._used: set[int] = set()

    @property
    def next_step(self) -> Step | None:
        """What is to do next; None when all is done."""
        return self.steps[self.num_done] if self.num_done < len(self.steps) else None

    def take_step(self) -> Step:
        """The next step, which counts as done."""
        step = self.steps[self.num_done]
        self.num_done += 1
        self._used.add(step.call)
        return step

    def is_past(self, call: int) -> bool:
        """Whether the use of a call was done."""
        return call in self._used

    def recomputed_call(self, unit: int, *, is_gathered: bool) -> int:
        """Which call of a unit is computed again: the last that backward has not left; -1 if there is none."""
        uses = [step.action is Action.USE and step.unit == unit for step in self.steps]
        coming = [step.call for step, uses_it in zip(self.steps, uses, strict=True) if uses_it][
            sum(uses[: self.num_done]) :
        ]
        if coming and not is_gathered:
            return coming[0]
        done = [step.call for step, uses_it in zip(self.steps[: self.num_done], uses, strict=False) if uses_it]
        return done[-1] if done else coming[0] if coming else -1
