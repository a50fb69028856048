"""How a reducer is told that gradients have come.

[Note: hooks of others]
DDP hooks the node that accumulates a parameter's gradient, which is after all hooks on the parameter itself have run:
what they do to a gradient is part of it. Autograd makes another node for a parameter whose dtype was changed, though it
may have been changed back: a hook on the parameter itself notices that.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

__all__ = ["ParameterHooks"]


class ParameterHooks:
    """Hooks on parameters, which go when this is collected; see [Note: hooks of others].

    Args:
        parameters: Which are watched. The latest object that watches a parameter *has* it.
        on_arrival: Called when a gradient has come, which others' hooks may still change.
        on_gradient: Called with the parameter's number when they have. Neither may keep this object.
        title: What messages call whom this serves.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        on_arrival: Callable[[], None],
        on_gradient: Callable[[int], None],
        *,
        title: str,
    ) -> None:
        self.title = title
        self._parameters = tuple(parameters)
        self._on_gradient = on_gradient
        self._pending: set[int] = set()  # numbers of the gradients between the two calls
        self._nodes: list[Node | None] = [None] * len(self._parameters)  # kept, or autograd makes others without hooks
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles).atexit = False
        pending = self._pending
        for number, parameter in enumerate(self._parameters):

            def notice(_: torch.Tensor, number: int = number) -> None:
                pending.add(number)
                on_arrival()

            self._handles.append(parameter.register_post_accumulate_grad_hook(notice))  # type: ignore[no-untyped-call]
            self._watch_node(number)
            _holders[parameter] = weakref.ref(self)

    def find_lost(self) -> list[int]:
        """The parameters whose gradients came by nodes that autograd made anew; these are watched from now on."""
        lost = sorted(self._pending)
        for number in lost:
            self._watch_node(number)
        self._pending.clear()
        return lost

    def forget_pending(self) -> None:
        """A backward has ended in an error."""
        self._pending.clear()

    def find_taken(self) -> tuple[int, ParameterHooks] | None:
        """A parameter that another object has, and that object."""
        for number, parameter in enumerate(self._parameters):
            holder = _holders[parameter]()
            if holder is None:  # it had the parameter, and is gone
                _holders[parameter] = weakref.ref(self)
            elif holder is not self:
                return number, holder
        return None

    def _watch_node(self, number: int) -> None:
        parameter, pending, on_gradient = self._parameters[number], self._pending, self._on_gradient
        with torch.enable_grad():
            view = parameter.view_as(parameter)
        assert view.grad_fn is not None
        node = self._nodes[number] = view.grad_fn.next_functions[0][0]
        assert node is not None

        def notice(*_: object) -> None:
            pending.discard(number)
            on_gradient(number)

        self._handles.append(node.register_hook(notice))


_holders = WeakIdKeyDictionary()
"""The object that has a parameter, as a weak reference."""


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
