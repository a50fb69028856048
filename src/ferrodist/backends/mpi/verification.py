"""Compare the ranks' calls by one MPI allgather; see [Note: verification] in `backends/verification.py`.

Every rank gets every call at once, in the fewest steps possible, by MPI's own algorithm. An allgather can't say who has
not called when the deadline passes: ranks are asked by frames, and answer how many collectives they have entered, even
while their programs do something else.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from ferrodist.backends import stragglers
from ferrodist.backends.signature import FINGERPRINT_BYTES, RECORD_BYTES, CollectiveSignature, stamp
from ferrodist.backends.verification import CollectiveVerifier, Verification, left_reason
from ferrodist.deadline import Deadline, Elapsed, long_wait
from ferrodist.errors import DistributedError, DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend
    from ferrodist.backends.mpi.data_plane import MpiDataPlane


class MpiVerifier(CollectiveVerifier):
    """The collectives of an MPI group: numbered, ordered and compared."""

    def __init__(
        self,
        group: Backend,
        data_plane: MpiDataPlane,
        find_behind: Callable[[int], tuple[int, ...]],  # asks which ranks have not entered a collective
        poll: Callable[[], object],  # handles the frames that have come
    ) -> None:
        super().__init__(group, sequencer=data_plane.sequencer)
        self._data_plane = data_plane
        self._find_behind = find_behind
        self._poll = poll
        self.num_entered = 0  # how many collectives this rank has entered
        # The table and the pending request of an `exchange` that takes the general path.
        self._begun: tuple[Any, list[Any]] | None = None

    def exchange(self, record: bytes, payload: bytes, timeout: float) -> bytes:
        """`verify` an encoded call, with another payload and its turn's sequence number; returns all ranks' records.

        The way of small collectives: without the objects of the general one, which goes on where anything is not as
        usual, or another rank is late.
        """
        began = time.monotonic()
        table = np.empty(RECORD_BYTES * self._group.world_size, np.uint8)
        sequencer = self._data_plane.sequencer
        sequence = sequencer.start_if_idle()
        try:
            if sequence is not None:
                try:
                    record = stamp(record, sequence, payload)
                    self._exchange_in_turn(record, table, sequence, timeout, began)
                finally:
                    sequencer.end(sequence)
            else:
                sequence = self.reserve()
                record = stamp(record, sequence, payload)
                with sequencer.hold(sequence, timeout) as has_turn:
                    if has_turn:
                        self._exchange_in_turn(record, table, sequence, timeout, began)
                    else:
                        self._verify(CollectiveSignature.decode(record), Deadline(timeout), has_turn=False)
        except DistributedError:
            raise
        except BaseException as error:  # an interruption; the group fails, unless it has already
            self._group.abort(left_reason(self._group.rank, CollectiveSignature.decode(record), error))
            raise
        return table.tobytes()

    def _exchange_in_turn(self, record: bytes, table: Any, sequence: int, timeout: float, began: float) -> None:
        try:
            if not self._gather_at_once(record, table, sequence):
                deadline = Deadline(timeout, elapsed=time.monotonic() - began)
                self._verify(CollectiveSignature.decode(record), deadline, has_turn=True)
        finally:
            if self._begun is not None:  # MPI may still write to the memory of its requests
                self._data_plane.abandon(self._begun[1])
                self._begun = None

    def _gather_at_once(self, record: bytes, table: Any, sequence: int) -> bool:
        """Gather the records, if that is over soon; False leaves what has begun to `_gather_calls`."""
        if self._group.failure is not None:
            return False
        request = self._start_gathering(record, table, sequence)
        self._begun = (table, [request])
        request = self._data_plane.await_briefly(request)
        self._begun = (table, [] if request is None else [request])
        if request is not None:
            return False
        self._poll()
        if self._group.failure is not None or not _are_equal(record, table.tobytes()):
            return False
        self._begun = None
        return True

    def _start_gathering(self, record: bytes, table: Any, sequence: int) -> Any:
        self.num_entered = sequence + 1
        return self._data_plane.all_gather_calls(np.frombuffer(record, np.uint8), table)

    @override
    def _gather_calls(self, current: Verification) -> list[memoryview]:
        group, (call, deadline, _) = self._group, current
        begun, self._begun = self._begun, None
        if begun is None:
            table = np.empty(RECORD_BYTES * group.world_size, np.uint8)
            pending = [self._start_gathering(call.encode(), table, call.sequence)]
        else:
            table, pending = begun
        if not self._data_plane.wait_for(pending, deadline, self._warner(call, deadline)):
            if group.failure is not None:
                raise group.failure.fresh()
            raise self.late_error(call, self._find_behind(call.sequence), Elapsed.of(deadline))
        # A rank that gives up has started its allgather before, so that a late rank's completes all the same.
        self._poll()
        if isinstance(group.failure, DistributedTimeoutError):
            raise group.failure.fresh()
        data = table.data
        return [data[start : start + RECORD_BYTES] for start in range(0, len(data), RECORD_BYTES)]

    def _warner(self, call: CollectiveSignature, deadline: Deadline) -> Callable[[], None]:
        """A function that warns once of the ranks that have not called, when it is called after a long wait."""
        due = long_wait()

        def warn() -> None:
            nonlocal due
            if not due.expired:
                return
            due = Deadline(math.inf)
            group, late = self._group, self._find_behind(call.sequence)
            if group.failure is None and stragglers.is_first_waiting_rank(group.rank, late):
                self._warn(call, late, deadline)

        return warn


def _are_equal(record: bytes, records: bytes) -> bool:
    """Return whether all ranks' records are of the same call as this rank's."""
    front = record[:FINGERPRINT_BYTES]
    for start in range(0, len(records), RECORD_BYTES):  # noqa: SIM110 - a generator takes three times the time
        if not records.startswith(front, start):
            return False
    return True
