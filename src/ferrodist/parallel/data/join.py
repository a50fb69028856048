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

from ferrodist.collectives.gathering import all_gather
from ferrodist.errors import CollectiveMismatchError, describe_error, ranks_text
from ferrodist.parallel.data.explain import explain_errors

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from ferrodist.parallel.data.ddp import DDP

__all__ = ["Event", "Join"]


class Event(enum.IntEnum):
    """What a rank does next."""

    DONE = 0
    FORWARD = 1
    ROUND = 2


_WORDS = {Event.DONE: "is done", Event.FORWARD: "calls forward", Event.ROUND: "averages gradients"}


class Join:
    """A context for a training loop, for ranks that may have different numbers of batches; all ranks enter it.

    ::

        with ddp.join():
            for inputs, labels in batches:
                optimizer.zero_grad()
                loss_fn(ddp(inputs), labels).backward()
                optimizer.step()

    A rank whose loop has ended stays at the end of the block and helps the others. Averages are those of the ranks that
    have a batch, as in one process with the batches that there are. Buffers come from the lowest of them. When the
    block ends, all ranks have the parameters and buffers of the ranks that were last; a rank's optimizer has made as
    many steps as the rank had batches.

    The module must not call collectives itself (`SyncBatchNorm2d`), and other models of the group must not train inside
    the block. An exception inside the block ends the group, for the others may count on this rank.

    Args:
        ddp: The model.
        divides_by_all: Divide by the number of all ranks, also of those without a batch, so that every sample has the
            same weight from the first to the last step.
        throws: Raise RuntimeError on every rank once one is done, in place of helping.

    Raises:
        RuntimeError: Some rank is done, and ``throws``. The group stays good.
        CollectiveMismatchError: On every rank, when the ranks' steps differ.
    """

    def __init__(self, ddp: DDP, *, divides_by_all: bool, throws: bool) -> None:
        self._ddp = ddp
        self._divides_by_all = divides_by_all
        self._throws = throws
        self._active: list[int] = []
        self._is_done = False
        self._has_thrown = False

    def __enter__(self) -> Self:
        ddp = self._ddp
        self._group = ddp._group  # noqa: SLF001 - a part of DDP in a file of its own, as all below
        self._active = list(range(self._group.world_size))
        ddp._join = self  # noqa: SLF001
        ddp._attached().before_round = self._begin_round  # noqa: SLF001
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._is_done = True
                self._help()
                self._share_model()
            elif not self._has_thrown and self._group.failure is None:
                self._group.abort(f"rank {self._group.rank} left a join() block by {describe_error(error)}")
        finally:
            self._ddp._join = None  # noqa: SLF001
            self._ddp._attached().before_round = None  # noqa: SLF001

    def announce(self, event: Event) -> int:
        """Tell the others what this rank does next, and learn what they do.

        Returns:
            The lowest rank that has a batch.
        """
        self._meet(event)
        return self._active[0]

    def _begin_round(self) -> tuple[int, float]:
        """See `Reducer.before_round`."""
        if not self._is_done:
            self._meet(Event.ROUND)
        scale = 1.0 if self._divides_by_all else self._group.world_size / len(self._active)
        return self._active[0], scale

    def _help(self) -> None:
        """Do this rank's part of the others' steps, until all are done."""
        ddp = self._ddp
        while (event := self._meet(Event.DONE)) is not Event.DONE:
            if event is Event.FORWARD:
                ddp._broadcast_buffers(self._active[0])  # noqa: SLF001
            else:
                ddp._attached().reduce(is_idle=True)  # noqa: SLF001

    def _share_model(self) -> None:
        if len(self._active) < self._group.world_size:
            ddp = self._ddp
            ddp.broadcast_parameters(self._active[0])

    def _meet(self, event: Event) -> Event:
        """Exchange events; returns what the ranks with a batch do."""
        mine = torch.tensor([int(event)])
        with explain_errors(
            lambda: f"In a join() block {self._ddp._title()} compares what the ranks do next.",  # noqa: SLF001
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
