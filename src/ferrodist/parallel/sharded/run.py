"""A forward as it was, and the backward of it that is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.parallel.autograd import current_backward
from ferrodist.parallel.sharded.plan import Action, Event, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Run", "Trace"]


class Trace:
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


class Run:
    """The steps of a backward's plan, and how many were done.

    Args:
        trace: The forward.
        steps: Its plan.
    """

    def __init__(self, trace: Trace, steps: Sequence[Step]) -> None:
        self.trace = trace
        self.steps = steps
        self.num_done = 0
        self.backward = current_backward()
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
