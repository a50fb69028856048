"""DDP's hooks on autograd: unused parameters, gradients that are ready, and the round of one backward.

[Note: order of hooks]
DDP hooks the AccumulateGrad node of a parameter, which runs after all hooks on the parameter itself: changes that these
make to a gradient are part of it. Autograd makes another node for a parameter whose dtype was changed, even if it was
changed back: a hook on the parameter itself notices that.

[Note: round]
A *round* is one reduction of all buckets. It opens when autograd first reaches one of the model's outputs or
parameters, and closes in a callback that the engine runs at the end of that backward, before ``backward()`` returns. In
between, a bucket starts as soon as it and all buckets before it are complete, so that all ranks start them in one
order, whatever the order of their gradients. When the round closes, the remaining buckets start as they are, with zeros
for gradients that did not arrive.

A backward inside the backward (re-entrant checkpointing) has an id of its own. The hook on the outputs opens the round
in the outer one, so that it lasts as long as that; but gradients of one parameter may now arrive more than once, so
buckets wait for the end, unless ``static_graph`` has counted how often each arrives. Where no output was found, a round
opens and closes with the inner backward; that is right to rounding, since the mean of values that are equal on all
ranks is that value again, but it costs messages.

A backward that fails leaves its round open. The engine then drops its callbacks, which the next round notices. If no
bucket had started, the round is discarded. If one had, the other ranks count on the rest, and the group is aborted: an
error on all ranks in place of mixed-up buckets. A failure of the reduction itself (a sparse gradient, an interruption)
ends the round at once, with the same two outcomes.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ferrodist.parallel.module_guard import current_backward_id
from ferrodist.torch_private.autograd import queue_callback

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.autograd.graph import Node

_REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"


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


class ParameterHooks:
    """Hooks on parameters, removed when this object is collected; see [Note: order of hooks].

    The latest object that hooks a parameter *owns* it. Neither callback may hold this object: ``on_accumulated`` is
    called when a gradient has been accumulated, before later hooks, which may still change it; ``on_ready`` with the
    parameter's id after all hooks.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        on_accumulated: Callable[[], None],
        on_ready: Callable[[int], None],
        *,
        title: str,
    ) -> None:
        self.title = title
        self._parameters = tuple(parameters)
        self._on_ready = on_ready
        self.pending: set[int] = set()  # ids of the parameters between the two calls
        self._nodes: list[Node | None] = [None] * len(self._parameters)  # owned, or autograd makes others without hooks
        self._removal = ExitStack()  # of all hooks
        weakref.finalize(self, self._removal.close).atexit = False
        pending = self.pending
        for param_id, parameter in enumerate(self._parameters):

            def hook(_: torch.Tensor, param_id: int = param_id) -> None:
                pending.add(param_id)
                on_accumulated()

            self._removal.callback(parameter.register_post_accumulate_grad_hook(hook).remove)  # type: ignore[no-untyped-call]
            self._hook_node(param_id)
            _owners[parameter] = weakref.ref(self)

    def missed_hooks(self) -> list[int]:
        """Parameters whose gradients came through nodes that autograd made anew; these nodes are hooked from now on."""
        missed = sorted(self.pending)
        for param_id in missed:
            self._hook_node(param_id)
        self.pending.clear()
        return missed

    def foreign_owner(self) -> tuple[int, ParameterHooks] | None:
        """A parameter that another object owns, and that object."""
        for param_id, parameter in enumerate(self._parameters):
            owner = _owners[parameter]()
            if owner is None:  # the last owner was collected
                _owners[parameter] = weakref.ref(self)
            elif owner is not self:
                return param_id, owner
        return None

    def _hook_node(self, param_id: int) -> None:
        parameter, pending, on_ready = self._parameters[param_id], self.pending, self._on_ready
        with torch.enable_grad():
            view = parameter.view_as(parameter)
        assert view.grad_fn is not None
        node = self._nodes[param_id] = view.grad_fn.next_functions[0][0]
        assert node is not None

        def hook(*_: object) -> None:
            pending.discard(param_id)
            on_ready(param_id)

        self._removal.callback(node.register_hook(hook).remove)


_owners = WeakIdKeyDictionary()  # for each parameter a weak reference to its owner


class BackwardRound:
    """The gradients that have arrived in one backward, and the buckets that are complete; see [Note: round].

    A static round learns at first how often each gradient arrives, and relies on it.
    """

    def __init__(self, bucket_indices: Sequence[int], *, is_static: bool) -> None:
        self._bucket_indices = bucket_indices
        self._is_static = is_static
        self._num_expected = [1] * len(bucket_indices)  # gradients of each position in a backward
        self.has_learned = not is_static
        self.unused: frozenset[int] = frozenset()  # positions that the outputs of the forwards so far don't depend on
        self.counts: dict[int, int] = {}  # number of gradients that have arrived, by position
        self.versions: tuple[int, ...] = ()  # the parameters' version counters when the round opened
        self._num_missing: list[int] = []
        self._backward_id = -1
        self._is_nested = False
        self._end_callback: weakref.ref[partial[None]] | None = None

    @property
    def is_open(self) -> bool:
        """True if a backward is under way, or has failed."""
        return self._end_callback is not None

    @property
    def has_failed(self) -> bool:
        """True if the backward that opened the round has ended without closing it."""
        return self._end_callback is not None and self._end_callback() is None

    def enter(self, on_end: Callable[[], None]) -> bool:
        """Open the round unless it is open, with a callback at the end of the backward; True if this opened it."""
        backward_id = current_backward_id()
        if self._end_callback is not None:
            self._is_nested |= backward_id != self._backward_id
            return False
        end = partial(on_end)  # alive as long as the engine's backward
        queue_callback(end)
        self._end_callback, self._backward_id = weakref.ref(end), backward_id
        self._num_missing = [0] * (max(self._bucket_indices, default=-1) + 1)
        for position, bucket_index in enumerate(self._bucket_indices):
            self._num_missing[bucket_index] += self._expected_count(position) > 0
        return True

    def count_gradient(self, position: int) -> None:
        """Count a gradient that has arrived."""
        count = self.counts[position] = self.counts.get(position, 0) + 1
        if count == self._expected_count(position):
            self._num_missing[self._bucket_indices[position]] -= 1

    def first_incomplete(self, first: int) -> int:
        """Index of the first bucket, from ``first`` on, that may not start yet."""
        if not self.has_learned or (self._is_nested and not self._is_static):
            return first
        while first < len(self._num_missing) and self._num_missing[first] == 0:
            first += 1
        return first

    def find_missing(self) -> int | None:
        """A position whose gradient arrived less often than in the learned round, if any."""
        if not (self._is_static and self.has_learned and self.is_open):
            return None
        expected = enumerate(self._num_expected)
        return next((position for position, count in expected if self.counts.get(position, 0) < count), None)

    def close(self, *, is_complete: bool) -> None:
        """Close the round; a complete one teaches a static graph its counts."""
        if is_complete and not self.has_learned and self.counts:
            self._num_expected = [self.counts.get(position, 0) for position in range(len(self._bucket_indices))]
            self.has_learned = True
        self.counts = {}
        self.unused = frozenset()
        self._is_nested = False
        self._end_callback = None

    def inherit_counts(self, other: BackwardRound, old_positions: Sequence[int]) -> None:
        """Take over the counts that ``other`` has learned, given each position's old one."""
        self._num_expected = [other._num_expected[position] for position in old_positions]
        self.has_learned = other.has_learned

    def _expected_count(self, position: int) -> int:
        return 0 if position in self.unused else self._num_expected[position]
