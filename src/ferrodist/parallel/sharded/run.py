"""One backward under way, and how a schedule learns of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten

from ferrodist.parallel.sharded.plan import Action, Event, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Run", "Trace", "current_backward", "watch_outputs"]


class Trace:
    """A forward, as it was: the calls of units, and which values their parameters had."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.versions: dict[int, tuple[int, ...]] = {}
        """Version counters of each unit's pieces, by the unit's number."""

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return sum(event.begins for event in self.events)

    @property
    def order(self) -> list[int]:
        """The units, as their calls began."""
        return [event.unit for event in self.events if event.begins]

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

    @property
    def next_step(self) -> Step | None:
        """What is to do next; None when all is done."""
        return self.steps[self.num_done] if self.num_done < len(self.steps) else None

    def is_past(self, call: int) -> bool:
        """Whether the use of a call was done."""
        return any(step.call == call for step in self.steps[: self.num_done])

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


def current_backward() -> int:
    """The engine's number of the backward that this is inside of, or -1."""
    return int(torch._C._current_graph_task_id())  # noqa: SLF001 - no public name; torch's own FSDP asks the same


def watch_outputs(output: Any, notice: Callable[[torch.Tensor], None]) -> bool:
    """Have ``notice`` called when a gradient reaches a tensor in what a module returned; whether one can.

    Of a view also its base is watched: an operation in place gives the view another history, without the hook.
    """
    found = [tensor for tensor in _tensors_in(output) if tensor.requires_grad]
    bases = [tensor._base for tensor in found if tensor._base is not None]  # noqa: SLF001 - torch has no other name
    for tensor in [*found, *(base for base in bases if base.requires_grad)]:
        tensor.register_hook(notice)  # type: ignore[no-untyped-call]
    return bool(found)


def _tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors in what a module returned, also in objects whose attributes are tensors."""
    leaves, _ = tree_flatten(output)
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) and hasattr(leaf, "__dict__") and not isinstance(leaf, type):
            found += [value for value in tree_flatten(vars(leaf))[0] if isinstance(value, torch.Tensor)]
    return found
