"""Agreement by the control group's messages, in turns: UCC's collectives start in the same order on all ranks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ferrodist.backends.agreement import Agreement
from ferrodist.deadline import Deadline, Elapsed
from ferrodist.errors import DistributedTimeoutError

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.backends.call import Call
    from ferrodist.backends.moving.call_order import CallOrder

__all__ = ["OrderedAgreement"]


class OrderedAgreement(Agreement):
    """The collectives of a UCC group, counted, ordered and compared.

    Args:
        group: The group.
        turns: Those of its mover.
    """

    def __init__(self, group: Backend, turns: CallOrder) -> None:
        super().__init__(group)
        self._counter = itertools.count(turns.position)
        self._turns = turns

    def reach(self, call: Call, timeout: float, sequence: int | None = None) -> list[bytes]:
        """Block until every rank has made the same call; see `Agreement.reach`."""
        group = self._group
        sequence = self.reserve() if sequence is None else sequence
        deadline = Deadline(timeout)
        with self._turns.hold(sequence, timeout) as has_turn:
            if not has_turn and group.failure is None:
                error = DistributedTimeoutError(
                    f"{call} on group {group.name!r}, operation {sequence}: the operations before it on rank"
                    f" {group.rank} had not ended after {Elapsed.of(deadline)}. Collectives of a group run one after"
                    " the other: wait for those that were started, or pass a larger timeout.",
                    ranks=(group.rank,),
                )
                group.abort(error)
                raise (group.failure or error).fresh()
            return super().reach(call, timeout, sequence)
