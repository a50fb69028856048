"""When the gradients of one backward begin and end to be averaged: state, and nothing that is sent.

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

from ferrodist.parallel.autograd import current_backward
from ferrodist.torch_private.autograd import queue_callback

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Round"]


class Round:
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
        self._end: weakref.ref[_End] | None = None

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
        end = _End(on_end)
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

    def learn_like(self, other: Round, places: Sequence[int]) -> None:
        """Take over what ``other`` has learned; its place of each place here."""
        self._num_expected = [other._num_expected[place] for place in places]
        self.has_learned = other.has_learned

    def _num_expected_now(self, place: int) -> int:
        return 0 if place in self.unreached else self._num_expected[place]


class _End:
    """The engine's callback; it lives as long as the backward that it was given to."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def __call__(self) -> None:
        self._on_end()
