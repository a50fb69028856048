"""Agreement by one MPI allgather: see [Note: agreement] in `backends/agreement.py`.

Every rank gets every call at once, which is the fewest steps there are, and MPI's own algorithm. What allgather can't
say, who has not called when the deadline passes, is asked for by frames: each rank answers how many collectives it
has entered, also while its program does something else.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ferrodist.backends import long_waits
from ferrodist.backends.agreement import Agreement, left_reason
from ferrodist.backends.call import CALL_SIZE, Call, payload_of
from ferrodist.deadline import Deadline, Elapsed, long_wait
from ferrodist.errors import DistributedError, DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend
    from ferrodist.backends.moving.call_order import CallOrder

    class Mover(Protocol):
        """What starts MPI's collectives, and waits for them."""

        turns: CallOrder

        def agree(self, own: Any, table: Any) -> Any: ...
        def wait_for(self, requests: list[Any], deadline: Deadline, meanwhile: Callable[[], object]) -> bool: ...


__all__ = ["MpiAgreement"]


class MpiAgreement(Agreement):
    """The collectives of an MPI group, counted, ordered and compared.

    Args:
        group: The group.
        mover: Its communicator's collectives.
        find_behind: ``find_behind(sequence)`` asks who has not entered the collective at a position.
        look: Takes in the frames that have come.
    """

    def __init__(
        self,
        group: Backend,
        mover: Mover,
        find_behind: Callable[[int], tuple[int, ...]],
        look: Callable[[], object],
    ) -> None:
        super().__init__(group)
        self._find_behind = find_behind
        self._look = look
        self._backend = group
        self._mover = mover
        self.num_entered = 0
        """How many collectives this rank has entered."""

    def reach(self, call: Call, timeout: float, sequence: int | None = None) -> list[bytes]:
        """Block until every rank has made the same call; see `Agreement.reach`."""
        group = self._backend
        sequence = self.reserve() if sequence is None else sequence
        call = call.at(sequence)
        deadline = Deadline(timeout)
        with self._mover.turns.hold(sequence, timeout) as has_turn:
            if group.failure is not None:
                raise group.failure.fresh()
            if not has_turn:
                raise self._fail(self._queued_error(call, deadline))
            if group.world_size == 1:
                return [call.payload]
            try:
                records = self._collect_calls(call, sequence, deadline)
            except DistributedError:
                raise
            except BaseException as error:
                group.abort(left_reason(group.rank, call, error))
                raise
        self._compare(records)
        return [payload_of(record) for record in records]

    def _collect_calls(self, call: Call, sequence: int, deadline: Deadline) -> list[memoryview]:
        """Every rank's call, encoded."""
        group = self._backend
        table = np.empty(CALL_SIZE * group.world_size, np.uint8)
        self.num_entered = sequence + 1
        request = self._mover.agree(np.frombuffer(call.encode(), np.uint8), table)
        if not self._mover.wait_for([request], deadline, self._warner(call, deadline)):
            if group.failure is not None:
                raise group.failure.fresh()
            late = self._find_behind(sequence)
            raise self._fail(self.late_error(call, late, Elapsed.of(deadline)))
        self._hear_who_gave_up()
        data = table.data
        return [data[i : i + CALL_SIZE] for i in range(0, len(data), CALL_SIZE)]

    def _warner(self, call: Call, deadline: Deadline) -> Callable[[], None]:
        """What names those that have not called, once, when it is called after a long wait."""
        due = long_wait()

        def warn() -> None:
            nonlocal due
            if not due.expired:
                return
            due = Deadline(math.inf)
            group, late = self._backend, self._find_behind(call.sequence)
            if group.failure is None and long_waits.is_speaker(group.rank, late):
                long_waits.warn_of_late_ranks(
                    call, late, group=group.name, rank=group.rank, elapsed=Elapsed.of(deadline)
                )

        return warn

    def _hear_who_gave_up(self) -> None:
        """Raise when others have given this collective up: what they had given MPI before ends it for a late rank."""
        self._look()
        if isinstance(self._backend.failure, DistributedTimeoutError):
            raise self._backend.failure.fresh()

    def _fail(self, error: DistributedError) -> DistributedError:
        self._backend.abort(error)
        return (self._backend.failure or error).fresh()

    def _queued_error(self, call: Call, deadline: Deadline) -> DistributedTimeoutError:
        return DistributedTimeoutError(
            f"{call} on group {self._backend.name!r}, operation {call.sequence}: the operations before it on rank"
            f" {self._backend.rank} had not ended after {Elapsed.of(deadline)}. Collectives of a group run one after"
            " the other: wait for those that were started, or pass a larger timeout.",
            ranks=(self._backend.rank,),
        )
