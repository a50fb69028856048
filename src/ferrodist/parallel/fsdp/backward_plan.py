"""The plan of a backward as data: a pure function of its forward's trace.

[Note: plan]
A forward is recorded as a *trace* of the calls of units that began and ended, in order. The backward follows the trace
from its end. Where a call ended, its unit is needed (USE); where a unit's first call began, all its gradients are there
(REDUCE), and it is freed (FREE). Gathering (GATHER) starts earlier, by the number of units to prefetch.

Every rank executes the steps in the plan's order, whatever the order in which autograd reaches the units there and
whether it reaches them all: a rank that skips a unit still gathers and reduces it with the others. Events only say how
far a rank may go. When autograd reaches a call, all steps up to its USE are due, since the engine of one thread runs
the latest operations first: all that were recorded after that call and are needed have run. REDUCE may come sooner,
when all gradients of the unit are there; FREE may not, since a frozen layer's weight can be needed after them.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from ferrodist.parallel.backward_hooks import current_backward_id

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class StepKind(enum.Enum):
    """The effect of a step on a unit."""

    GATHER = "gather"  # start gathering it
    USE = "use"  # finish gathering it
    REDUCE = "reduce"  # start averaging the gradients that it has
    FREE = "free"  # free all but the shards


class CallEvent(NamedTuple):
    """The beginning or end of a call of a unit, by the indices of both."""

    unit: int
    call: int
    begins: bool


class Step(NamedTuple):
    """One step of a backward; ``call`` is the index of the call for USE, otherwise -1."""

    kind: StepKind
    unit: int
    call: int = -1


def plan_backward(trace: Sequence[CallEvent], prefetch: int, trainable: Collection[int]) -> list[Step]:
    """Plan the backward of a recorded forward: its steps, in the order in which every rank executes them.

    Args:
        trace: The calls of units, in order.
        prefetch: Number of units that are gathered ahead.
        trainable: Indices of the units with parameters that require grad.
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
                steps.append(Step(kind=StepKind.REDUCE, unit=event.unit))
            steps.append(Step(kind=StepKind.FREE, unit=event.unit))
            continue
        num_used += 1
        if num_gathered < num_used:
            steps.append(Step(kind=StepKind.GATHER, unit=event.unit))
            num_gathered = num_used
        steps.append(Step(kind=StepKind.USE, unit=event.unit, call=event.call))
        while num_gathered < min(num_used + prefetch, len(uses)):
            steps.append(Step(kind=StepKind.GATHER, unit=uses[num_gathered]))
            num_gathered += 1
    return steps


class ForwardTrace:
    """The calls of units in a forward, and the versions of their shards."""

    def __init__(self) -> None:
        self.events: list[CallEvent] = []
        self.order: list[int] = []  # the units in the order in which their calls began
        self.versions: dict[int, tuple[int, ...]] = {}  # version counters of each unit's shards

    def begin_call(self, unit: int) -> int:
        """Record that a unit's call begins; returns the call's index."""
        call = len(self.order)
        self.order.append(unit)
        self.events.append(CallEvent(unit=unit, call=call, begins=True))
        return call

    def end_call(self, unit: int, call: int, *, forgets: bool = False) -> None:
        """Record that a unit's call has ended without an error.

        With ``forgets`` it is not recorded at all if nothing else was meanwhile: no backward reaches it, and a long
        text has thousands.
        """
        last = self.events[-1]
        if forgets and last.begins and last.call == call:
            self.events.pop()
            self.order.pop()
        else:
            self.events.append(CallEvent(unit=unit, call=call, begins=False))

    def digest(self) -> int:
        """A number of 64 bits that is the same on ranks that made the same calls."""
        return xxhash.xxh3_64_intdigest(repr([tuple(event) for event in self.events]).encode())

    def last_ended(self, count: int) -> set[int]:
        """The ``count`` units, without the outermost, whose calls ended last."""
        ended = dict.fromkeys(event.unit for event in reversed(self.events) if not event.begins and event.unit)
        return set(list(ended)[:count])


class BackwardRun:
    """The steps of a plan, and the number that are done."""

    def __init__(self, trace: ForwardTrace, steps: Sequence[Step]) -> None:
        self.trace, self.steps = trace, steps
        self.num_done = 0
        self.backward_id = current_backward_id()
        self._used: set[int] = set()

    @property
    def next_step(self) -> Step | None:
        """The next step; None when all are done."""
        return self.steps[self.num_done] if self.num_done < len(self.steps) else None

    def advance(self) -> Step:
        """Count the next step as done, and return it."""
        step = self.steps[self.num_done]
        self.num_done += 1
        self._used.add(step.call)
        return step

    def was_used(self, call: int) -> bool:
        """True if the USE of a call is done."""
        return call in self._used

    def recomputed_call(self, unit: int, *, is_gathered: bool) -> int:
        """The call of a unit that is recomputed: the last that backward has not passed; -1 if there is none."""
        done, coming = (
            [step.call for step in steps if step.kind is StepKind.USE and step.unit == unit]
            for steps in (self.steps[: self.num_done], self.steps[self.num_done :])
        )
        if coming and not is_gathered:
            return coming[0]
        return done[-1] if done else coming[0] if coming else -1
