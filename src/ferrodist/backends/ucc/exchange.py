"""What UCC's ranks tell each other before they are connected, by the control group's messages."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.errors import RendezvousError, ranks_text

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request
    from ferrodist.deadline import Deadline

__all__ = ["ControlExchange"]

_FIRST_NUMBER = 1 << 55
"""Numbers of the channel for collectives' data that no collective comes to."""


@dataclass(slots=True, eq=False)
class _UnderWay:
    parts: list[bytearray]
    pending: list[Request]


class ControlExchange:
    """Exchanges over a group's messages; the ranks begin them in the same order.

    Args:
        control: The group.
        deadline: When all must have ended.
    """

    def __init__(self, control: Backend, deadline: Deadline) -> None:
        self._control = control
        self._deadline = deadline
        self._numbers = itertools.count(_FIRST_NUMBER)

    def begin(self, data: bytes) -> _UnderWay:
        """Start to give ``data`` to all ranks, each of which gives as much."""
        control = self._control
        tag = channel_tag(Channel.DATA, next(self._numbers))
        parts = [
            bytearray(data) if rank == control.rank else bytearray(len(data)) for rank in range(control.world_size)
        ]
        peers = [rank for rank in range(control.world_size) if rank != control.rank]
        pending = [control.irecv(parts[rank], rank, tag=tag) for rank in peers]
        pending += [control.isend(data, rank, tag=tag) for rank in peers]
        return _UnderWay(parts, pending)

    def is_done(self, under_way: _UnderWay) -> bool:
        """Whether all have come.

        Raises:
            RendezvousError: They have not by the deadline.
            DistributedError: A message failed, as it does when the group has.
        """
        pending = under_way.pending
        while pending and pending[-1].done():
            pending.pop().wait(0)
        if not pending:
            return True
        if self._deadline.expired:
            ranks = tuple(sorted({request.peer for request in pending}))
            for request in pending:
                request.cancel()
            raise RendezvousError(
                f"group {self._control.name!r}: {ranks_text(ranks)} did not exchange UCC's addresses within"
                f" {self._deadline.timeout:g} s. Look at what is going on there, or pass a larger timeout.",
                ranks=ranks,
            )
        return False

    def result(self, under_way: _UnderWay) -> bytes:
        """What the ranks gave, one after the other."""
        return b"".join(under_way.parts)
