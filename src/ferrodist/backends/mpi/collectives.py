"""Agreement by one MPI allgather: see [Note: agreement] in `backends/verification.py`.

Every rank gets every call at once, which is the fewest steps there are, and MPI's own algorithm. What allgather can't
say, who has not called when the deadline passes, is asked for by frames: each rank answers how many collectives it
has entered, also while its program does something else.

What MPI has been given, can't give back, and nobody waits for any more.

The bytes of a group's collectives, by MPI's own: started, then looked after until they end or the deadline passes.

Everything is `MPI_BYTE` in host memory, so no element type can come out wrong. What one call moves in all stays below
2 GiB, which is what counts and places are counted in; more goes as messages, of at most 1 GiB each.

An MPI collective can't be taken back. One that is given up is kept with its buffers for good, and its group has failed.
"""

from __future__ import annotations

import math
import threading
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from typing_extensions import override

from ferrodist.backends import stragglers
from ferrodist.backends.polling import wait_until
from ferrodist.backends.sequencer import Sequencer
from ferrodist.backends.signature import CALL_SIZE, CollectiveSignature, payload_of
from ferrodist.backends.verification import CollectiveVerifier, left_reason
from ferrodist.deadline import Deadline, Elapsed, long_wait
from ferrodist.errors import DistributedError, DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend

if TYPE_CHECKING:

    class Mover(Protocol):
        """What starts MPI's collectives, and waits for them."""

        sequencer: Sequencer

        def agree(self, own: Any, table: Any) -> Any:
            """Start the comparison of all ranks' calls; the request to wait for."""

        def wait_for(self, requests: list[Any], deadline: Deadline, meanwhile: Callable[[], object]) -> bool:
            """Wait for requests; whether all are done in time."""


class MpiVerifier(CollectiveVerifier):
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

    @override
    def reserve(self) -> int:
        return self._mover.sequencer.reserve()

    def verify(self, call: CollectiveSignature, timeout: float, sequence: int | None = None) -> list[bytes]:
        """Block until every rank has made the same call; see `CollectiveVerifier.verify`."""
        group = self._backend
        sequence = self.reserve() if sequence is None else sequence
        call = call.at(sequence)
        deadline = Deadline(timeout)
        with self._mover.sequencer.hold(sequence, timeout) as has_turn:
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

    def _collect_calls(self, call: CollectiveSignature, sequence: int, deadline: Deadline) -> list[memoryview]:
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

    def _warner(self, call: CollectiveSignature, deadline: Deadline) -> Callable[[], None]:
        """What names those that have not called, once, when it is called after a long wait."""
        due = long_wait()

        def warn() -> None:
            nonlocal due
            if not due.expired:
                return
            due = Deadline(math.inf)
            group, late = self._backend, self._find_behind(call.sequence)
            if group.failure is None and stragglers.is_speaker(group.rank, late):
                stragglers.warn_about_stragglers(
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

    def _queued_error(self, call: CollectiveSignature, deadline: Deadline) -> DistributedTimeoutError:
        return DistributedTimeoutError(
            f"{call} on group {self._backend.name!r}, operation {call.sequence}: the operations before it on rank"
            f" {self._backend.rank} had not ended after {Elapsed.of(deadline)}. Collectives of a group run one after"
            " the other: wait for those that were started, or pass a larger timeout.",
            ranks=(self._backend.rank,),
        )


_kept: list[Any] = []


def leak_request(request: Any) -> None:
    """Keep a request, with its buffers: MPI may read and write them at any time."""
    _kept.append(request)


def num_leaked() -> int:
    """How many requests may still be under way."""
    return len(_kept)


if TYPE_CHECKING:
    Block = tuple[int, int]


MOST_BYTES = (1 << 31) - 1
"""What the counts of one MPI collective can say."""

PIECE_BYTES = 1 << 30


class MpiDataPlane:
    """MPI's collectives on one communicator, which all ranks start in the same order.

    Each method starts one and returns what to `wait_for`. Buffers are flat and of bytes, sizes are in bytes, by rank.

    Args:
        mpi: The module ``mpi4py.MPI``.
        communicator: One that nothing else uses.
        is_in_vain: Whether a wait is: the group has failed, or does with this for a rank that has left it.
        explain: Ends the group for an exception of MPI's.
        grace: Seconds that a wait which has become vain goes on.
    """

    def __init__(
        self,
        mpi: Any,
        communicator: Any,
        is_in_vain: Callable[[], bool],
        explain: Callable[[Exception], None],
        grace: Callable[[], float],
    ) -> None:
        self._grace = grace
        self._mpi = mpi
        self._communicator = communicator
        self._is_in_vain = is_in_vain
        self._explain = explain
        self._starting = threading.Lock()  # held while MPI is given something
        self._has_ended = False
        self._num_under_way = 0
        self.sequencer = Sequencer(is_in_vain)
        self.rank: int = communicator.Get_rank()
        self.world_size: int = communicator.Get_size()

    def wait_for(self, requests: list[Any], deadline: Deadline, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Wait until all have ended; False when they have not in time, or the group has, and they are kept for good.

        ``meanwhile`` is called at each look that finds them under way.
        """
        pending = list(requests)

        def done() -> bool:
            while pending and pending[-1].Test():
                pending.pop()
                self._num_under_way -= 1
            if pending:
                meanwhile()
            return not pending

        is_done = False
        try:
            is_done = wait_until(done, deadline, self._is_in_vain)
            if not is_done and self._is_in_vain():
                is_done = wait_until(done, Deadline(self._grace()))
        except self._mpi.Exception as error:
            self._explain(error)
        finally:
            if not is_done:
                self.abandon(pending)
        return is_done

    def end(self) -> bool:
        """Start nothing any more; whether nothing is under way either, and the communicator may be freed.

        MPI allows that before, and Open MPI crashes when what is under way never ends.
        """
        with self._starting:
            self._has_ended = True
            return self._num_under_way == 0

    def _start(self, start: Callable[..., Any], *arguments: Any) -> Any:
        """What MPI returns for what it is given: a request. What it refuses has ended the group, and does not end."""
        with self._starting:
            if self._has_ended:
                return _Refused()
            try:
                request = start(*arguments)
            except self._mpi.Exception as error:
                refusal = error
            else:
                self._num_under_way += 1
                return request
        self._explain(refusal)
        return _Refused()

    def abandon(self, requests: list[Any]) -> None:
        """Keep for good what nobody will wait for."""
        for request in requests:
            if not isinstance(request, _Refused):
                leak_request(request)

    def agree(self, own: Any, table: Any) -> Any:
        """Every rank's call to every rank."""
        byte = self._mpi.BYTE
        return self._start(self._communicator.Iallgather, [own, CALL_SIZE, byte], [table, CALL_SIZE, byte])

    def all_gather(self, out: memoryview, sizes: Sequence[int]) -> list[Any]:
        """Fill ``out`` with every rank's part; this rank's is in its place already."""
        if len(out) > MOST_BYTES:
            parts = _parts(out, sizes)
            peers = self._peers()
            return self._exchange([(peer, parts[self.rank]) for peer in peers], [(peer, parts[peer]) for peer in peers])
        return [self._start(self._communicator.Iallgatherv, self._mpi.IN_PLACE, self._divided(out, sizes))]

    def all_to_all(
        self, out: memoryview, incoming: Sequence[Block], source: memoryview, outgoing: Sequence[Block]
    ) -> list[Any]:
        """Send block r of ``source`` to rank r, and take rank r's into block r of ``out``.

        A block is where it begins and its size. This rank's own are of no bytes: what stays here is not moved.
        """
        if max(len(out), len(source)) > MOST_BYTES:
            return self._exchange(
                [(peer, source[place : place + size]) for peer in self._peers() for place, size in [outgoing[peer]]],
                [(peer, out[place : place + size]) for peer in self._peers() for place, size in [incoming[peer]]],
            )
        byte = self._mpi.BYTE
        to, from_ = [
            [data, ([size for _, size in blocks], [place for place, _ in blocks]), byte]
            for data, blocks in ((source, outgoing), (out, incoming))
        ]
        return [self._start(self._communicator.Ialltoallv, to, from_)]

    def broadcast(self, data: memoryview, root: int) -> list[Any]:
        """Copy the root's ``data`` to all."""
        return [
            self._start(self._communicator.Ibcast, [piece, len(piece), self._mpi.BYTE], root) for piece in _pieces(data)
        ]

    def gather(self, data: memoryview, sizes: Sequence[int], root: int) -> list[Any]:
        """Fill the root's ``data`` with every other rank's, whose size is its own; the root's part is in its place."""
        mpi = self._mpi
        if self.rank != root:
            if sum(sizes) > MOST_BYTES:
                return self._exchange([(root, data)], [])
            return [self._start(self._communicator.Igatherv, [data, len(data), mpi.BYTE], None, root)]
        if sum(sizes) > MOST_BYTES:
            parts = _parts(data, sizes)
            return self._exchange([], [(peer, parts[peer]) for peer in self._peers()])
        return [self._start(self._communicator.Igatherv, mpi.IN_PLACE, self._divided(data, sizes), root)]

    def scatter(self, data: memoryview, sizes: Sequence[int], root: int) -> list[Any]:
        """Copy part r of the root's ``data`` into rank r's, whose size it has; the root's own part stays."""
        mpi = self._mpi
        if self.rank != root:
            if sum(sizes) > MOST_BYTES:
                return self._exchange([], [(root, data)])
            return [self._start(self._communicator.Iscatterv, None, [data, len(data), mpi.BYTE], root)]
        if sum(sizes) > MOST_BYTES:
            parts = _parts(data, sizes)
            return self._exchange([(peer, parts[peer]) for peer in self._peers()], [])
        return [self._start(self._communicator.Iscatterv, self._divided(data, sizes), mpi.IN_PLACE, root)]

    def _divided(self, data: memoryview, sizes: Sequence[int]) -> list[Any]:
        return [data, (list(sizes), [0, *accumulate(sizes)][:-1]), self._mpi.BYTE]

    def _exchange(
        self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]
    ) -> list[Any]:
        """Send and receive (rank, data), each pair of ranks in pieces and in order."""
        communicator, byte = self._communicator, self._mpi.BYTE
        requests = []
        for start, transfers in ((communicator.Irecv, receives), (communicator.Isend, sends)):
            requests += [
                self._start(start, [piece, len(piece), byte], peer, 0)
                for peer, data in transfers
                for piece in _pieces(data)
            ]
        return requests

    def _peers(self) -> list[int]:
        """The other ranks, beginning after this one, so that not all ranks send to the same one first."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]


class _Refused:
    """In place of the request for what MPI was not given, or has not taken."""

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Whether it has ended."""
        return False


def _parts(data: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    return [data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _pieces(data: memoryview) -> list[memoryview]:
    return [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
