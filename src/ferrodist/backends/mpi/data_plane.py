"""The data plane of MPI: collectives of bytes, started, then polled until they end or the deadline passes.

All data is `MPI_BYTE` in host memory, so no element type can come out wrong. One call moves less than 2 GiB in all, the
limit of its counts and displacements; more goes as messages, of at most 1 GiB each.

An MPI collective can't be taken back. An abandoned one is leaked with its buffers, and its group has failed.
"""

from __future__ import annotations

import threading
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ferrodist.backends.interfaces import Block, DataPlane
from ferrodist.backends.mpi.runtime import leak_request
from ferrodist.backends.polling import wait_until
from ferrodist.backends.sequencer import Sequencer
from ferrodist.backends.signature import RECORD_BYTES
from ferrodist.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


MAX_COLLECTIVE_BYTES = (1 << 31) - 1  # the largest count of one MPI collective
MAX_MESSAGE_BYTES = 1 << 30
_BRIEF_POLLS = 100


class MpiDataPlane(DataPlane):
    """MPI's collectives on a communicator of their own, which all ranks start in the same order."""

    def __init__(
        self,
        mpi: Any,  # the module mpi4py.MPI
        communicator: Any,
        cannot_complete: Callable[[], bool],  # whether the group has failed; may fail it for a rank that has left
        on_exception: Callable[[Exception], None],  # aborts the group for an exception of MPI's
        grace_seconds: Callable[[], float],  # how long a collective that can't complete is waited for all the same
    ) -> None:
        self._grace_seconds = grace_seconds
        self._mpi = mpi
        self._communicator = communicator
        self._cannot_complete = cannot_complete
        self._on_exception = on_exception
        self._starting = threading.Lock()  # held while MPI starts an operation
        self._is_closed = False
        self._num_pending = 0
        self.sequencer = Sequencer(cannot_complete)
        self.rank: int = communicator.Get_rank()
        self.world_size: int = communicator.Get_size()

    def wait_for(self, requests: list[Any], deadline: Deadline, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Wait for requests; False when some were not done in time, or the group has failed: these are leaked.

        ``meanwhile()`` is called at each poll that finds some pending.
        """
        pending = list(requests)

        def done() -> bool:
            while pending and pending[-1].Test():
                pending.pop()
                self._num_pending -= 1
            if pending:
                meanwhile()
            return not pending

        is_done = False
        try:
            is_done = wait_until(done, deadline, self._cannot_complete)
            if not is_done and self._cannot_complete():
                is_done = wait_until(done, Deadline(self._grace_seconds()))
        except self._mpi.Exception as error:
            self._on_exception(error)
        finally:
            if not is_done:
                self.abandon(pending)
        return is_done

    def await_briefly(self, request: Any) -> Any:
        """Poll a request for as long as ranks that call at the same time take.

        Returns None once it has completed, else the request to wait for.
        """
        try:
            for _ in range(_BRIEF_POLLS):
                if request.Test():
                    self._num_pending -= 1
                    return None
        except self._mpi.Exception as error:
            self._on_exception(error)
            self.abandon([request])
            return _Refused()
        return request

    def close(self) -> bool:
        """Start no more operations; whether none is pending, so that the communicator may be freed.

        MPI allows freeing it earlier, but Open MPI crashes when a pending operation never completes.
        """
        with self._starting:
            self._is_closed = True
            return self._num_pending == 0

    def _start(self, start: Callable[..., Any], *arguments: Any) -> Any:
        """Start an operation; returns MPI's request. If MPI refuses it the group fails, and the request never ends."""
        with self._starting:
            if self._is_closed:
                return _Refused()
            try:
                request = start(*arguments)
            except self._mpi.Exception as error:
                refusal = error
            else:
                self._num_pending += 1
                return request
        self._on_exception(refusal)
        return _Refused()

    @override
    def abandon(self, requests: list[Any]) -> None:
        for request in requests:
            if not isinstance(request, _Refused):
                leak_request(request)

    def all_gather_calls(self, own: Any, table: Any) -> Any:
        """Start to copy every rank's encoded call into every rank's ``table``; returns the request."""
        byte = self._mpi.BYTE
        return self._start(self._communicator.Iallgather, [own, RECORD_BYTES, byte], [table, RECORD_BYTES, byte])

    @override
    def all_gather(self, out: memoryview, sizes: Sequence[int]) -> list[Any]:
        if len(out) > MAX_COLLECTIVE_BYTES:
            own = _split(out, sizes)[self.rank]
            return self._exchange([(peer, own) for peer in self._peers()], self._peer_parts(out, sizes))
        return [self._start(self._communicator.Iallgatherv, self._mpi.IN_PLACE, self._with_counts(out, sizes))]

    @override
    def all_to_all(
        self, out: memoryview, incoming: Sequence[Block], source: memoryview, outgoing: Sequence[Block]
    ) -> list[Any]:
        if max(len(out), len(source)) > MAX_COLLECTIVE_BYTES:
            return self._exchange(
                [(peer, source[offset : offset + size]) for peer in self._peers() for offset, size in [outgoing[peer]]],
                [(peer, out[offset : offset + size]) for peer in self._peers() for offset, size in [incoming[peer]]],
            )
        byte = self._mpi.BYTE
        to, from_ = [
            [data, ([size for _, size in blocks], [offset for offset, _ in blocks]), byte]
            for data, blocks in ((source, outgoing), (out, incoming))
        ]
        return [self._start(self._communicator.Ialltoallv, to, from_)]

    @override
    def broadcast(self, data: memoryview, root: int) -> list[Any]:
        return [
            self._start(self._communicator.Ibcast, [piece, len(piece), self._mpi.BYTE], root) for piece in _pieces(data)
        ]

    @override
    def gather(self, data: memoryview, sizes: Sequence[int], root: int) -> list[Any]:
        if sum(sizes) > MAX_COLLECTIVE_BYTES:
            return self._exchange(*self._transfers_with_root(data, sizes, root))
        own, whole = self._buffers_with_root(data, sizes, root)
        return [self._start(self._communicator.Igatherv, own, whole, root)]

    @override
    def scatter(self, data: memoryview, sizes: Sequence[int], root: int) -> list[Any]:
        if sum(sizes) > MAX_COLLECTIVE_BYTES:
            receives, sends = self._transfers_with_root(data, sizes, root)
            return self._exchange(sends, receives)
        own, whole = self._buffers_with_root(data, sizes, root)
        return [self._start(self._communicator.Iscatterv, whole, own, root)]

    def _buffers_with_root(self, data: memoryview, sizes: Sequence[int], root: int) -> tuple[Any, Any]:
        """This rank's own part, and the root's buffer of all parts, as mpi4py takes them."""
        if self.rank == root:
            return self._mpi.IN_PLACE, self._with_counts(data, sizes)
        return [data, len(data), self._mpi.BYTE], None

    def _transfers_with_root(self, data: memoryview, sizes: Sequence[int], root: int) -> tuple[Any, Any]:
        """The transfers of this rank's own part to the root, and those of the other ranks' parts on the root."""
        return ([], self._peer_parts(data, sizes)) if self.rank == root else ([(root, data)], [])

    def _with_counts(self, data: memoryview, sizes: Sequence[int]) -> list[Any]:
        """A buffer with counts and displacements, as mpi4py takes it."""
        return [data, (list(sizes), [0, *accumulate(sizes)][:-1]), self._mpi.BYTE]

    def _exchange(
        self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]
    ) -> list[Any]:
        """Send and receive (rank, data), between each pair of ranks in pieces and in order."""
        communicator, byte = self._communicator, self._mpi.BYTE
        requests = []
        for start, transfers in ((communicator.Irecv, receives), (communicator.Isend, sends)):
            requests += [
                self._start(start, [piece, len(piece), byte], peer, 0)
                for peer, data in transfers
                for piece in _pieces(data)
            ]
        return requests

    def _peer_parts(self, data: memoryview, sizes: Sequence[int]) -> list[tuple[int, memoryview]]:
        parts = _split(data, sizes)
        return [(peer, parts[peer]) for peer in self._peers()]

    def _peers(self) -> list[int]:
        """The other ranks, beginning after this one, so that not all ranks send to the same one first."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]


class _Refused:
    """The request of an operation that MPI was not given or has refused; it never ends."""

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Return whether the collective has ended."""
        return False


def _split(data: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    return [data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _pieces(data: memoryview) -> list[memoryview]:
    return [data[start : start + MAX_MESSAGE_BYTES] for start in range(0, len(data), MAX_MESSAGE_BYTES)]
