"""Ranks with fewer batches than the others: they go on taking part in the others' steps, with nothing of their own.

[Note: events]
Inside the block every rank tells all others what it does next, in an all_gather of one number: it calls forward, it
averages gradients, or it has no batches left. Ranks that are done say so again and again, and do the others' part of
what they hear: they broadcast buffers with them, and give zeros to their buckets. So the ranks agree about every step,
also one with several forwards, and about who has a batch in it; what does not fit is an error on all of them. The block
ends when all are done.
"""

from __future__ import annotations

import enum
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
    """What a rank does next."""

    DONE = 0
    FORWARD = 1
    ROUND = 2


_WORDS = {Event.DONE: "is done", Event.FORWARD: "calls forward", Event.ROUND: "averages gradients"}


class Join:
    """What `DDP.join` does, for any model that is given as three functions; see [Note: events].

    Args:
        group: The model's group.
        title: What messages call the model.
        share_buffers: ``share_buffers(root)`` is a rank's part in what precedes forward.
        help_round: A rank's part, without gradients of its own, in a reduction.
        share_model: ``share_model(root)`` gives all ranks the parameters and buffers of one.
        divides_by_all: Divide by the number of all ranks, also of those without a batch, so that every sample has the
            same weight from the first to the last step.
        throws: Raise RuntimeError on every rank once one is done, in place of helping.

    Raises:
        RuntimeError: Some rank is done, and ``throws``. The group stays good.
        CollectiveMismatchError: On every rank, when the ranks' steps differ.
    """

    def __init__(
        self,
        group: Backend,
        title: str,
        *,
        share_buffers: Callable[[int], None],
        help_round: Callable[[], None],
        share_model: Callable[[int], None],
        divides_by_all: bool,
        throws: bool,
    ) -> None:
        self._group = group
        self._title = title
        self._share_buffers = share_buffers
        self._help_round = help_round
        self._share_model = share_model
        self._divides_by_all = divides_by_all
        self._throws = throws
        self._active = list(range(group.world_size))
        self._is_done = False
        self._has_thrown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._is_done = True
            self._help()
            if len(self._active) < self._group.world_size:
                self._share_model(self._active[0])
        elif not self._has_thrown and self._group.failure is None:
            self._group.abort(f"rank {self._group.rank} left a join() block by {describe_error(error)}")

    def announce(self, event: Event) -> int:
        """Tell the others what this rank does next, and learn what they do.

        Returns:
            The lowest rank that has a batch.
        """
        self._meet(event)
        return self._active[0]

    def begin_round(self) -> tuple[int, float]:
        """Tell the others of a reduction; returns the lowest rank that has a batch, and averages' factor."""
        if not self._is_done:
            self._meet(Event.ROUND)
        scale = 1.0 if self._divides_by_all else self._group.world_size / len(self._active)
        return self._active[0], scale

    def _help(self) -> None:
        """Do this rank's part of the others' steps, until all are done."""
        while (event := self._meet(Event.DONE)) is not Event.DONE:
            if event is Event.FORWARD:
                self._share_buffers(self._active[0])
            else:
                self._help_round()

    def _meet(self, event: Event) -> Event:
        """Exchange events; returns what the ranks with a batch do."""
        mine = torch.tensor([int(event)], device="cpu")
        with add_error_context(
            lambda: f"In a join() block {self._title} compares what the ranks do next.",
            "Every rank must enter the block, and leave it only when its batches are used up.",
        ):
            said = [Event(number) for number in all_gather(mine, group=self._group).tolist()]
        active = [rank for rank, other in enumerate(said) if other is not Event.DONE]
        if self._throws and 0 < len(active) < len(said):
            self._has_thrown = True
            done = [rank for rank in range(len(said)) if rank not in active]
            raise RuntimeError(
                f"{ranks_text(done)} of group {self._group.name!r} used up the batches before the others, and join()"
                " was told throw_on_early_termination=True: the training loop ends on every rank"
            )
        if not active:
            return Event.DONE
        self._active = active
        self._check_agreed(said)
        return said[active[0]]

    def _check_agreed(self, said: list[Event]) -> None:
        first = said[self._active[0]]
        other = next((rank for rank in self._active if said[rank] is not first), None)
        if other is None:
            return
        error = CollectiveMismatchError(
            f"the ranks of group {self._group.name!r} do different steps in a join() block: rank {self._active[0]}"
            f" {_WORDS[first]}, rank {other} {_WORDS[said[other]]}. Every rank must call forward and backward as often"
            " as the others for each of its batches.",
            ranks=(other,),
        )
        self._group.abort(error)
        raise error
