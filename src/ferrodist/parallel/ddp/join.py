"""Uneven numbers of batches: ranks without a batch shadow the collectives of the others.

[Note: events]
Inside the block every rank announces its next step to all others in an all_gather of one number: it calls forward, it
averages gradients, or it has no batches left. Ranks that are done announce that again and again, and shadow the steps
of the others: they broadcast buffers with them, and give zeros to their buckets. So the ranks agree about every step,
also one with several forwards, and know who has a batch in it; a mismatch is an error on all of them. The block ends
when all are done.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.all_gather import all_gather
from ferrodist.errors import CollectiveMismatchError, add_error_context, describe_error, ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from ferrodist.backends.base import Backend


class Event(enum.IntEnum):
    """The next step of a rank."""

    DONE = 0
    FORWARD = 1
    ROUND = 2


_EVENT_TEXTS = {Event.DONE: "is done", Event.FORWARD: "calls forward", Event.ROUND: "averages gradients"}


@dataclass(kw_only=True)
class Join:
    """The block of `DDP.join`, for any model that is given as three functions; see [Note: events].

    ``broadcast_buffers(root)`` and ``reduce_without_batch()`` are a rank's part of the collectives before forward and
    of a reduction, without gradients of its own; ``broadcast_model(root)`` sends one rank's parameters and buffers to
    all. With ``divides_by_all`` averages count ranks without a batch too; with ``raises_early`` every rank raises as
    soon as one is done.
    """

    group: Backend
    title: str
    broadcast_buffers: Callable[[int], None]
    reduce_without_batch: Callable[[], None]
    broadcast_model: Callable[[int], None]
    divides_by_all: bool
    raises_early: bool
    _is_done: bool = False
    _has_raised: bool = False

    def __post_init__(self) -> None:
        self._active = list(range(self.group.world_size))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._is_done = True
            while (event := self._exchange_events(Event.DONE)) is not Event.DONE:
                if event is Event.FORWARD:
                    self.broadcast_buffers(self._active[0])
                else:
                    self.reduce_without_batch()
            if len(self._active) < self.group.world_size:
                self.broadcast_model(self._active[0])
        elif not self._has_raised and self.group.failure is None:
            self.group.abort(f"rank {self.group.rank} left a join() block by {describe_error(error)}")

    def announce(self, event: Event) -> int:
        """Announce this rank's next step; returns the lowest rank that has a batch."""
        self._exchange_events(event)
        return self._active[0]

    def begin_round(self) -> tuple[int, float]:
        """Announce a reduction; returns the lowest rank that has a batch and the factor for averages."""
        if not self._is_done:
            self._exchange_events(Event.ROUND)
        scale = 1.0 if self.divides_by_all else self.group.world_size / len(self._active)
        return self._active[0], scale

    def _exchange_events(self, event: Event) -> Event:
        """Exchange events; returns the event of the ranks with a batch."""
        mine = torch.tensor([int(event)], device="cpu")
        with add_error_context(
            lambda: f"In a join() block {self.title} compares what the ranks do next.",
            "Every rank must enter the block, and leave it only when its batches are used up.",
        ):
            events = [Event(value) for value in all_gather(mine, group=self.group).tolist()]
        active = [rank for rank, other in enumerate(events) if other is not Event.DONE]
        if self.raises_early and 0 < len(active) < len(events):
            self._has_raised = True
            done = [rank for rank in range(len(events)) if rank not in active]
            raise RuntimeError(
                f"{ranks_text(done)} of group {self.group.name!r} used up the batches before the others, and join()"
                " was called with throw_on_early_termination=True: the training loop ends on every rank"
            )
        if not active:
            return Event.DONE
        self._active = active
        first = events[active[0]]
        other = next((rank for rank in active if events[rank] is not first), None)
        if other is None:
            return first
        error = CollectiveMismatchError(
            f"the ranks of group {self.group.name!r} do different steps in a join() block: rank {active[0]}"
            f" {_EVENT_TEXTS[first]}, rank {other} {_EVENT_TEXTS[events[other]]}. Every rank must call forward and"
            " backward as often as the others for each of its batches.",
            ranks=(other,),
        )
        self.group.abort(error)
        raise error
