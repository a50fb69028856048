"""Which parameters a forward's outputs depend on.

How a reducer is told that gradients have come.

[Note: hooks of others]
DDP hooks the node that accumulates a parameter's gradient, which is after all hooks on the parameter itself have run:
what they do to a gradient is part of it. Autograd makes another node for a parameter whose dtype was changed, though it
may have been changed back: a hook on the parameter itself notices that.

When the gradients of one backward begin and end to be averaged: state, and nothing that is sent.

[Note: round]
A *round* is one reduction of all buckets. It opens when autograd first comes by one of the model's outputs or
parameters, and closes in a callback that the engine runs at the end of that backward, before ``backward()`` returns. In
between, a bucket starts as soon as it and all buckets before it are complete, so that all ranks start them in one
order, whatever the order in which their gradients come. When the round closes, the buckets that are still incomplete
start as they are, with zeros for gradients that did not come.

A backward inside the backward (re-entrant checkpointing) is one of its own to the engine. The hook on the outputs
opens the round in the outer one, so that it lasts as long as that; but gradients of one parameter may now come more
than once, so buckets wait for the end, unless ``static_graph`` has counted how often each comes. Where no output was
found, a round opens and closes with the inner backward; that is right to rounding, for the mean of what is equal on all
ranks is that value again, but it costs messages.

A backward that fails leaves its round open. The engine then drops its callbacks, by which the next round notices. If
nothing had started, the round is forgotten. If something had, the other ranks count on the rest of it, and the group is
ended: an error on all ranks in place of mixed-up buckets. What fails in the reduction itself (a sparse gradient, an
interruption) ends the round at once, in the same two ways.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ferrodist.parallel.module_guard import current_backward
from ferrodist.torch_private.autograd import queue_callback

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

_CHECKPOINT = "CheckpointFunctionBackward"


def find_unused(outputs: Sequence[torch.Tensor], parameters: Sequence[torch.nn.Parameter]) -> frozenset[int]:
    """`id` of the parameters that no output depends on; none where the outputs don't tell.

    They don't where there are none, or behind re-entrant checkpoints, whose graphs are made during backward. Walks the
    whole graph, one step of Python for each operation in it.
    """
    if not outputs:
        return frozenset()
    reached: set[int] = set()
    seen = set()
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    reached.update(id(output) for output in outputs if output.grad_fn is None)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == _CHECKPOINT:
            return frozenset()
        leaf = getattr(node, "variable", None)  # of the nodes that accumulate gradients
        if leaf is not None:
            reached.add(id(leaf))
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return frozenset(id(parameter) for parameter in parameters if id(parameter) not in reached)


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


class BackwardRound:
    """Which gradients have come, and which buckets are complete; see [Note: round].

    Args:
        homes: The number of the bucket of each place, in the order of the plan.
        is_static: Learn in the first round how often each gradient comes, and rely on it.
    """

    def __init__(self, homes: Sequence[int], *, is_static: bool) -> None:
        self._homes = homes
        self._is_static = is_static
        self._num_expected = [1] * len(homes)  # how often the gradient of each place comes
        self.has_learned = not is_static
        self.unreached: frozenset[int] = frozenset()
        """Places that the outputs of the forwards so far don't depend on."""
        self.counts: dict[int, int] = {}
        """How often the gradient of each place has come."""
        self.versions: tuple[int, ...] = ()
        """The parameters' version counters when it opened."""
        self._missing: list[int] = []
        self._task = -1
        self._is_nested = False
        self._end: weakref.ref[_EndOfBackward] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a backward is under way, or has failed."""
        return self._end is not None

    @property
    def has_failed(self) -> bool:
        """Whether the backward that opened it has ended without closing it."""
        return self._end is not None and self._end() is None

    def enter(self, on_end: Callable[[], None]) -> bool:
        """Say that autograd is at work; True when this opens the round. ``on_end`` is called when its backward ends."""
        task = current_backward()
        if self._end is not None:
            self._is_nested |= task != self._task
            return False
        end = _EndOfBackward(on_end)
        queue_callback(end)
        self._end, self._task = weakref.ref(end), task
        self._missing = [0] * (max(self._homes, default=-1) + 1)
        for place, home in enumerate(self._homes):
            self._missing[home] += self._num_expected_now(place) > 0
        return True

    def arrive(self, place: int) -> None:
        """Take note that a gradient is there."""
        count = self.counts[place] = self.counts.get(place, 0) + 1
        if count == self._num_expected_now(place):
            self._missing[self._homes[place]] -= 1

    def count_complete(self, first: int) -> int:
        """The number of the first bucket, from ``first`` on, that may not start yet."""
        if not self.has_learned or (self._is_nested and not self._is_static):
            return first
        while first < len(self._missing) and self._missing[first] == 0:
            first += 1
        return first

    def find_unexpected(self) -> int | None:
        """A place whose gradient came less often than was learned, if any."""
        if not (self._is_static and self.has_learned and self.is_open):
            return None
        expected = enumerate(self._num_expected)
        return next((place for place, number in expected if self.counts.get(place, 0) < number), None)

    def close(self, *, is_complete: bool) -> None:
        """Forget it; a complete one is learned from."""
        if is_complete and not self.has_learned and self.counts:
            self._num_expected = [self.counts.get(place, 0) for place in range(len(self._homes))]
            self.has_learned = True
        self.counts = {}
        self.unreached = frozenset()
        self._is_nested = False
        self._end = None

    def learn_like(self, other: BackwardRound, places: Sequence[int]) -> None:
        """Take over what ``other`` has learned; its place of each place here."""
        self._num_expected = [other._num_expected[place] for place in places]
        self.has_learned = other.has_learned

    def _num_expected_now(self, place: int) -> int:
        return 0 if place in self.unreached else self._num_expected[place]


class _EndOfBackward:
    """The engine's callback; it lives as long as the backward that it was given to."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def __call__(self) -> None:
        self._on_end()
