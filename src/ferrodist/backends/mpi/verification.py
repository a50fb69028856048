"""Compare the ranks' calls by one MPI allgather; see [Note: verification] in `backends/verification.py`.

Every rank gets every call at once, in the fewest steps possible, by MPI's own algorithm. An allgather can't say who has
not called when the deadline passes: ranks are asked by frames, and answer how many collectives they have entered, even
while their programs do something else.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from ferrodist.backends import stragglers
from ferrodist.backends.signature import RECORD_BYTES, CollectiveSignature
from ferrodist.backends.verification import CollectiveVerifier, Verification
from ferrodist.deadline import Deadline, Elapsed, long_wait
from ferrodist.errors import DistributedTimeoutError

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

    @override
    def _gather_calls(self, current: Verification) -> list[memoryview]:
        group, (call, deadline, _) = self._group, current
        table = np.empty(RECORD_BYTES * group.world_size, np.uint8)
        self.num_entered = call.sequence + 1
        request = self._data_plane.all_gather_calls(np.frombuffer(call.encode(), np.uint8), table)
        if not self._data_plane.wait_for([request], deadline, self._warner(call, deadline)):
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
