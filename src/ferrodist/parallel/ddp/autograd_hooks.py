"""DDP's hooks on autograd: gradients that are ready, and parameters that the outputs don't depend on.

[Note: order of hooks]
DDP hooks the AccumulateGrad node of a parameter, which runs after all hooks on the parameter itself: changes that these
make to a gradient are part of it. Autograd makes another node for a parameter whose dtype was changed, even if it was
changed back: a hook on the parameter itself notices that. So each parameter has two hooks:

    on_parameter   a hook on the parameter     called whichever node has accumulated the gradient; later hooks may still
                                               change that
    on_node        a hook on the node          called last, with the final gradient; not called by a node made anew

A parameter with a call of the first but none of the second has a new node (`ParameterHooks.missed_hooks`).
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ferrodist.errors import UnsupportedOpError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.autograd.graph import Node

_REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"


class ParameterHooks:
    """Two hooks on each parameter, one on its node, removed with this object; see [Note: order of hooks].

    The latest object that hooks a parameter *owns* it. Neither callback may hold this object. ``on_accumulated`` is
    called when a gradient has been accumulated, before later hooks, which may still change it; ``on_ready`` with the
    parameter's id after all hooks.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        on_accumulated: Callable[[], None],
        on_ready: Callable[[int], None],
        *,
        title: str,
    ) -> None:
        self.title = title
        self._names, self._parameters = tuple(parameters), tuple(parameters.values())
        self._on_ready = on_ready
        self.pending: set[int] = set()  # ids of the parameters between the two calls
        self._nodes: list[Node | None] = [None] * len(self._parameters)  # owned, or autograd makes others without hooks
        self._removal = ExitStack()  # of all hooks
        weakref.finalize(self, self._removal.close).atexit = False
        pending = self.pending
        for param_id, parameter in enumerate(self._parameters):

            def on_parameter(_: torch.Tensor, param_id: int = param_id) -> None:
                pending.add(param_id)
                on_accumulated()

            self._removal.callback(parameter.register_post_accumulate_grad_hook(on_parameter).remove)  # type: ignore[no-untyped-call]
            self._hook_node(param_id)
            _owners[parameter] = weakref.ref(self)

    def missed_hooks(self) -> list[int]:
        """Parameters whose gradients came through nodes that autograd made anew; these nodes are hooked from now on."""
        missed = sorted(self.pending)
        for param_id in missed:
            self._hook_node(param_id)
        self.pending.clear()
        return missed

    def check_owner(self) -> None:
        """Raise UnsupportedOpError if another DDP was made of one of the parameters."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            owner = _owners[parameter]()
            if owner is None:  # the last owner was collected
                _owners[parameter] = weakref.ref(self)
            elif owner is not self:
                raise UnsupportedOpError(
                    f"parameter {name!r} of {self.title} belongs to {owner.title} since that was made: two DDPs can't"
                    " average one gradient. Put modules that share parameters into one, and wrap that once; to keep"
                    " using this DDP, drop the other."
                )

    def _hook_node(self, param_id: int) -> None:
        parameter, pending, on_ready = self._parameters[param_id], self.pending, self._on_ready
        with torch.enable_grad():
            view = parameter.view_as(parameter)
        assert view.grad_fn is not None
        node = self._nodes[param_id] = view.grad_fn.next_functions[0][0]
        assert node is not None

        def on_node(*_: object) -> None:
            pending.discard(param_id)
            on_ready(param_id)

        self._removal.callback(node.register_hook(on_node).remove)


_owners = WeakIdKeyDictionary()  # for each parameter a weak reference to its owner


def find_unused_parameters(outputs: Sequence[torch.Tensor], parameters: Sequence[torch.nn.Parameter]) -> frozenset[int]:
    """Return the `id` of each parameter that no output depends on, in a walk of the whole graph.

    Nothing without outputs, and behind re-entrant checkpoints, whose graphs are made during backward.
    """
    if not outputs:
        return frozenset()
    reached = {id(output) for output in outputs if output.grad_fn is None}
    seen = set()
    queue = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == _REENTRANT_CHECKPOINT:
            return frozenset()
        leaf = getattr(node, "variable", None)  # AccumulateGrad nodes have one
        if leaf is not None:
            reached.add(id(leaf))
        queue.extend(child for child, _ in node.next_functions if child is not None)
    return frozenset(map(id, parameters)) - reached
