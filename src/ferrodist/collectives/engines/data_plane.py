"""The engine of groups with a `DataPlane`, whose backend moves bytes between all ranks, as MPI and UCC do.

The backend only moves bytes; reductions are folded here, by `fold` and in rank order. So the bits are those of every
other backend, in every dtype. Chunks and segments are those of `reference.py`; the steps are the backend's operations.
n is the tensor's bytes, p the number of ranks. After the verification:

    operation        up to 108 B   up to 64 KiB             above
    allreduce        nothing       all_gather, (p-1)n       all_to_all a segment, all_gather: 2n(p-1)/p
    reduce           nothing       all_gather, (p-1)n       all_to_all a segment, gather: n(p-1)/p + n/p
    broadcast        nothing       broadcast, as the backend does it
    all_gather       nothing       all_gather, (p-1) times the own chunk
    gather, scatter                the backend's
    reduce_scatter                 all_to_all a segment, n(p-1)/p
    all_to_all                     all_to_all, what is for others

While a segment is folded, the next one is in flight.
"""

from __future__ import annotations

import math
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.backends.collective_op import CollectiveKind
from ferrodist.backends.request import answer_seconds
from ferrodist.backends.signature import MAX_PAYLOAD
from ferrodist.backends.verification import left_reason
from ferrodist.collectives.arguments import bytes_of, compute_shard_sizes, offsets_of
from ferrodist.collectives.engines.reference import EAGER_ALGORITHMS, CollectiveRun, ReferenceEngine, make_payload
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.collective_op import CollectiveOp
    from ferrodist.backends.interfaces import Block, DataPlane


_ONE_STEP_BYTES = 64 * 1024  # up to here one step with more bytes is faster than two with fewer

_SEGMENT_BYTES = 1 << 20
"""The bytes that a reduction receives from each rank at once; it buffers two segments for each rank."""

_COUNT = struct.Struct("<q")


class DataPlaneEngine(ReferenceEngine):
    """A `HostEngine` of a group with a `data_plane`; collectives run one after the other, in their order."""

    def __init__(self, group: Backend) -> None:
        super().__init__(group)
        assert group.data_plane is not None
        self._data_plane = group.data_plane

    def await_turn(self, sequence: int) -> None:
        """Return when all earlier collectives have ended, or the group has failed."""
        self._data_plane.sequencer.wait(sequence, math.inf)

    def run(self, op: CollectiveOp, sequence: int) -> list[bytes] | None:
        """Run a collective."""
        if op.device is None:
            return super().run(op, sequence)
        payload, is_eager = make_payload(op, self._group.rank)
        if op.kind is CollectiveKind.ALL_TO_ALL:
            payload = _encode_counts(op.counts)
        with self._turn(op, payload if len(payload) <= MAX_PAYLOAD else b"", sequence) as run:
            if is_eager:
                EAGER_ALGORITHMS[op.kind](run)
            else:
                _ALGORITHMS[op.kind](run)
        return None

    @contextmanager
    def _turn(self, op: CollectiveOp, payload: bytes, sequence: int) -> Iterator[_DataPlaneRun]:
        """Use the group's data plane exclusively, once all ranks have made the call."""
        deadline = Deadline(op.timeout)
        call = op.signature(payload=payload)
        with self._data_plane.sequencer.hold(sequence, op.timeout):  # without a turn the verification raises
            payloads = self._group.verifier.verify(call, deadline.remaining(), sequence)
            run = _DataPlaneRun(self._group, op, call, sequence, deadline, payloads, self._data_plane)
            try:
                yield run
            except DistributedError:
                raise
            except BaseException as error:
                # An interruption, or no memory: this rank is out of step with the others.
                self._group.abort(left_reason(run.rank, f"{call}, operation {sequence},", error))
                raise


@dataclass
class _DataPlaneRun(CollectiveRun):
    """One collective in progress, on which all ranks have agreed, over the data plane."""

    data_plane: DataPlane

    def move(self, start: Callable[[DataPlane], list[Any]]) -> None:
        """Run one step, which ``start(data_plane)`` starts."""
        if self.world_size > 1:
            self._wait(start(self.data_plane))

    def _wait(self, requests: list[Any]) -> None:
        def wait() -> None:
            if not self.data_plane.wait_for(requests, self.deadline):
                if self.group.failure is not None:
                    raise self.group.failure.fresh()
                stragglers = self.group.find_stragglers(
                    tuple(sorted(self.peers)), answer_seconds(self.deadline.timeout)
                )
                error = DistributedTimeoutError("the data did not come", ranks=stragglers.ranks)
                error.detail = stragglers.detail
                raise error

        self.guard(wait)

    def collect(self, source: torch.Tensor) -> list[torch.Tensor]:
        """Gather every rank's ``source``, by rank."""
        table = source.new_empty((self.world_size, source.numel()))
        table[self.rank].copy_(source)
        self.move(lambda plane: plane.all_gather(bytes_of(table), [source.nbytes] * self.world_size))
        return list(table)

    def blocks(self, counts: Sequence[int], tensor: torch.Tensor) -> list[Block]:
        """Offset and size of each rank's part of a tensor, in bytes; the size of this rank's is 0."""
        sizes = _in_bytes(counts, tensor)
        pairs = zip(offsets_of(sizes), sizes, strict=False)
        return [(offset, size if rank != self.rank else 0) for rank, (offset, size) in enumerate(pairs)]

    def check_counts(self) -> None:
        """Raise if a rank sends another number of elements than this one expects."""
        op = self.op
        sent = _encode_counts(op.counts)
        if len(sent) <= MAX_PAYLOAD:  # they came with the calls
            offset = self.rank * _COUNT.size
            incoming = [_COUNT.unpack_from(self.payload(rank, len(sent)), offset)[0] for rank in range(self.world_size)]
        else:
            blocks = [(rank * _COUNT.size, _COUNT.size) for rank in range(self.world_size)]
            table = bytearray(len(sent))
            self.move(lambda plane: plane.all_to_all(memoryview(table), blocks, memoryview(sent), blocks))
            incoming = [count for (count,) in _COUNT.iter_unpack(table)]
        for peer in self.peers:
            if incoming[peer] != op.recv_counts[peer]:
                error = self.row_count_error(peer, op.recv_counts[peer] // op.unit)
                self.group.abort(error)
                raise (self.group.failure or error).fresh()

    def fold_chunks(self, out: torch.Tensor, counts: Sequence[int]) -> None:
        """Fold chunk ``rank`` of every rank's ``source`` into ``out``, segment by segment.

        ``out`` may be this rank's chunk of ``source``: a segment is folded from it before it is written, and no other
        rank needs it.
        """
        source = self.op.source
        starts, item, mine = offsets_of(counts), source.element_size(), counts[self.rank]
        step = max(1, _SEGMENT_BYTES // item)
        data = bytes_of(source)
        tables = [source.new_empty((self.world_size, min(step, mine))) for _ in range(2)]

        def start(index: int) -> list[Any]:
            begin = index * step
            outgoing = [
                ((starts[rank] + min(begin, counts[rank])) * item, _length(counts[rank], begin, step) * item)
                for rank in range(self.world_size)
            ]
            outgoing[self.rank] = (0, 0)
            table = tables[index % 2]
            size = _length(mine, begin, step) * item
            incoming = [(rank * table.shape[1] * item, size) for rank in range(self.world_size)]
            incoming[self.rank] = (0, 0)
            return self.data_plane.all_to_all(bytes_of(table), incoming, data, outgoing) if self.world_size > 1 else []

        num_segments = -(-max(counts) // step)
        pending = start(0) if num_segments else []
        try:
            for index in range(num_segments):
                waited, pending = pending, []
                self._wait(waited)
                if index + 1 < num_segments:
                    pending = start(index + 1)
                begin, length = index * step, _length(mine, index * step, step)
                if length:
                    own = source[starts[self.rank] + begin : starts[self.rank] + begin + length]
                    table = tables[index % 2]
                    inputs = [own if rank == self.rank else table[rank, :length] for rank in range(self.world_size)]
                    out[begin : begin + length].copy_(self.fold(inputs))
        finally:
            self.data_plane.abandon(pending)


def _length(count: int, begin: int, step: int) -> int:
    """The number of elements of a chunk's segment that begins at ``begin``."""
    return max(0, min(step, count - begin))


def _in_bytes(counts: Sequence[int], tensor: torch.Tensor) -> list[int]:
    return [count * tensor.element_size() for count in counts]


def _encode_counts(counts: Sequence[int]) -> bytes:
    return b"".join(map(_COUNT.pack, counts))


def _fold(run: _DataPlaneRun) -> None:
    """Allreduce and reduce."""
    op, out, source = run.op, run.op.out, run.op.source
    if source.nbytes <= _ONE_STEP_BYTES or run.world_size == 1:
        inputs = run.collect(source)
        if out is not None:
            out.copy_(run.fold(inputs))
        return
    counts = compute_shard_sizes(source.numel(), run.world_size)
    own = source.new_empty(counts[run.rank]) if out is None else torch.split(out, counts)[run.rank]
    run.fold_chunks(own, counts)
    data, sizes = own if out is None else out, _in_bytes(counts, source)
    if op.kind is CollectiveKind.ALLREDUCE:
        run.move(lambda plane: plane.all_gather(bytes_of(data), sizes))
    else:
        run.move(lambda plane: plane.gather(bytes_of(data), sizes, op.root))


def _broadcast(run: _DataPlaneRun) -> None:
    op = run.op
    run.move(lambda plane: plane.broadcast(bytes_of(op.out), op.root))


def _all_gather(run: _DataPlaneRun) -> None:
    op = run.op
    torch.split(op.out, list(op.counts))[run.rank].copy_(op.source)
    run.move(lambda plane: plane.all_gather(bytes_of(op.out), _in_bytes(op.counts, op.out)))


def _gather(run: _DataPlaneRun) -> None:
    op = run.op
    if op.out is not None:
        torch.split(op.out, list(op.counts))[op.root].copy_(op.source)
    data = op.source if op.out is None else op.out
    run.move(lambda plane: plane.gather(bytes_of(data), _in_bytes(op.counts, data), op.root))


def _scatter(run: _DataPlaneRun) -> None:
    op = run.op
    if op.source is not None:
        op.out.copy_(torch.split(op.source, list(op.counts))[op.root])
    data = op.out if op.source is None else op.source
    run.move(lambda plane: plane.scatter(bytes_of(data), _in_bytes(op.counts, data), op.root))


def _all_to_all(run: _DataPlaneRun) -> None:
    op, rank = run.op, run.rank
    run.check_counts()
    torch.split(op.out, list(op.recv_counts))[rank].copy_(torch.split(op.source, list(op.counts))[rank])
    incoming, outgoing = run.blocks(op.recv_counts, op.out), run.blocks(op.counts, op.source)
    run.move(lambda plane: plane.all_to_all(bytes_of(op.out), incoming, bytes_of(op.source), outgoing))


_ALGORITHMS: dict[CollectiveKind, Callable[[_DataPlaneRun], None]] = {
    CollectiveKind.ALLREDUCE: _fold,
    CollectiveKind.REDUCE: _fold,
    CollectiveKind.BROADCAST: _broadcast,
    CollectiveKind.ALL_GATHER: _all_gather,
    CollectiveKind.GATHER: _gather,
    CollectiveKind.SCATTER: _scatter,
    CollectiveKind.REDUCE_SCATTER: lambda run: run.fold_chunks(run.op.out, run.op.counts),
    CollectiveKind.ALL_TO_ALL: _all_to_all,
}
