"""The collectives of a group whose backend moves bytes for all ranks at once, as an MPI does: its `mover`.

The backend moves, and what is folded is folded here, by `fold` and in rank order: so the bits are those of every other
backend, in every dtype, and what the backend itself can add does not matter. Chunks and segments are those of
`reference.py`; the steps are the backend's operations. n is the tensor's bytes, p the number of ranks, and the figures
are for what follows the agreement:

    operation        up to 108 B   up to 64 KiB             above
    allreduce        nothing       all_gather, (p-1)n       all_to_all a segment, all_gather: 2n(p-1)/p
    reduce           nothing       all_gather, (p-1)n       all_to_all a segment, gather: n(p-1)/p + n/p
    broadcast        nothing       broadcast, as the backend does it
    all_gather       nothing       all_gather, (p-1) times the own chunk
    gather, scatter                the backend's
    reduce_scatter                 all_to_all a segment, n(p-1)/p
    all_to_all                     all_to_all, what is for others

While a segment is folded the next one is on its way.
"""

from __future__ import annotations

import math
import struct
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ferrodist.backends.request import answer_seconds
from ferrodist.backends.signature import MAX_PAYLOAD
from ferrodist.backends.verification import left_reason
from ferrodist.collectives.arguments import bytes_of, compute_shard_sizes, offsets_of
from ferrodist.collectives.engines.reference import CollectiveRun, ReferenceEngine, call_of, is_tiny, payload_for
from ferrodist.collectives.reduce_op import fold
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.sequencer import Sequencer
    from ferrodist.backends.signature import CollectiveSignature
    from ferrodist.collectives.reduce_op import Op

if TYPE_CHECKING:
    Block = tuple[int, int]

    class Mover(Protocol):
        """What starts operations of all ranks, and waits for them; see `backends/mpi/collectives.py`."""

        sequencer: Sequencer

        def all_gather(self, out: memoryview, sizes: Sequence[int]) -> list[Any]:
            """Start an all-gather into ``out``, of ``sizes[rank]`` bytes from each rank."""

        def all_to_all(
            self, out: memoryview, incoming: Sequence[Block], source: memoryview, outgoing: Sequence[Block]
        ) -> list[Any]:
            """Start an all-to-all; a block is where a rank's bytes start, and how many there are."""

        def broadcast(self, data: memoryview, root: int) -> list[Any]:
            """Start a broadcast from ``root``."""

        def gather(self, data: memoryview, sizes: Sequence[int], root: int) -> list[Any]:
            """Start a gather on ``root`` of ``sizes[rank]`` bytes from each rank."""

        def scatter(self, data: memoryview, sizes: Sequence[int], root: int) -> list[Any]:
            """Start a scatter from ``root`` of ``sizes[rank]`` bytes to each rank."""

        def wait_for(self, requests: list[Any], deadline: Deadline) -> bool:
            """Wait for requests; whether all are done in time."""

        def abandon(self, requests: list[Any]) -> None:
            """Leave requests to themselves: the group has ended."""


_ONE_STEP_BYTES = 64 * 1024
"""Up to here one step with more bytes is faster than two with fewer."""

_SEGMENT_BYTES = 1 << 20
"""What a reduction receives from each rank at once: two of them for each rank are its memory."""

_COUNT = struct.Struct("<q")


class DataPlaneEngine(ReferenceEngine):
    """`Collectives` of a group with a `mover`.

    They run one after the other, in the order of their positions, whatever threads call them.

    Args:
        group: The group.
    """

    def await_turn(self, sequence: int) -> None:
        """Return when all before have ended, or the group has."""
        self._group.data_plane.sequencer.wait(sequence, math.inf)

    def allreduce(self, out: torch.Tensor, source: torch.Tensor, op: Op, *, timeout: float, sequence: int) -> None:
        """Fold ``source`` over the ranks into every rank's ``out``, which may be ``source``."""
        tiny = is_tiny(source, op)
        call = call_of("allreduce", source, op=op)
        with self._turn(call, payload_for(source if tiny else None, op), timeout, sequence) as run:
            if tiny:
                out.copy_(fold(op, run.tensors(source.dtype, [source.numel()] * run.world_size), run.factors(op)))
            elif source.nbytes <= _ONE_STEP_BYTES or run.world_size == 1:
                out.copy_(fold(op, run.collect(source), run.factors(op)))
            else:
                counts = compute_shard_sizes(source.numel(), run.world_size)
                run.fold_chunks(torch.split(out, counts)[run.rank], source, counts, op)
                run.move(lambda mover: mover.all_gather(bytes_of(out), _in_bytes(counts, out)))

    def reduce(
        self,
        out: torch.Tensor | None,
        source: torch.Tensor,
        op: Op,
        root: int,
        *,
        timeout: float,
        sequence: int,
    ) -> None:
        """Fold ``source`` over the ranks into the root's ``out``, which may be its ``source``; None elsewhere."""
        tiny = is_tiny(source, op)
        call = call_of("reduce", source, op=op, root=root)
        with self._turn(call, payload_for(source if tiny else None, op), timeout, sequence) as run:
            if tiny or source.nbytes <= _ONE_STEP_BYTES or run.world_size == 1:
                counts = [source.numel()] * run.world_size
                inputs = run.tensors(source.dtype, counts) if tiny else run.collect(source)
                if out is not None:
                    out.copy_(fold(op, inputs, run.factors(op)))
                return
            counts = compute_shard_sizes(source.numel(), run.world_size)
            own = source.new_empty(counts[run.rank]) if out is None else torch.split(out, counts)[run.rank]
            run.fold_chunks(own, source, counts, op)
            data = own if out is None else out
            run.move(lambda mover: mover.gather(bytes_of(data), _in_bytes(counts, data), root))

    def broadcast(self, tensor: torch.Tensor, root: int, *, timeout: float, sequence: int) -> None:
        """Copy the root's ``tensor`` into every rank's."""
        tiny = tensor.nbytes <= MAX_PAYLOAD
        mine = self._group.rank == root
        payload = payload_for(tensor if tiny and mine else None)
        with self._turn(call_of("broadcast", tensor, root=root), payload, timeout, sequence) as run:
            if not tiny:
                run.move(lambda mover: mover.broadcast(bytes_of(tensor), root))
            elif not mine:
                tensor.copy_(run.tensor(root, tensor.dtype, tensor.numel()))

    def all_gather(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        *,
        dim: int,
        timeout: float,
        sequence: int,
    ) -> None:
        """Copy every rank's ``source`` into every ``out``, one after the other; ``counts[r]`` is rank r's size."""
        tiny = max(counts) * source.element_size() <= MAX_PAYLOAD
        payload = payload_for(source if tiny else None)
        with self._turn(call_of("all_gather", out, dim=dim), payload, timeout, sequence) as run:
            chunks = torch.split(out, list(counts))
            if tiny:
                for chunk, tensor in zip(chunks, run.tensors(source.dtype, counts), strict=True):
                    chunk.copy_(tensor)
                return
            chunks[run.rank].copy_(source)
            run.move(lambda mover: mover.all_gather(bytes_of(out), _in_bytes(counts, out)))

    def gather(
        self,
        out: torch.Tensor | None,
        source: torch.Tensor,
        counts: Sequence[int],
        root: int,
        *,
        timeout: float,
        sequence: int,
    ) -> None:
        """Copy every rank's ``source`` into the root's ``out``; None elsewhere."""
        with self._turn(call_of("gather", source, root=root, count=sum(counts)), b"", timeout, sequence) as run:
            if out is not None:
                torch.split(out, list(counts))[root].copy_(source)
            data = source if out is None else out
            run.move(lambda mover: mover.gather(bytes_of(data), _in_bytes(counts, data), root))

    def scatter(
        self,
        out: torch.Tensor,
        source: torch.Tensor | None,
        counts: Sequence[int],
        root: int,
        *,
        timeout: float,
        sequence: int,
    ) -> None:
        """Copy part r of the root's ``source``, of ``counts[r]`` elements, into rank r's ``out``."""
        with self._turn(call_of("scatter", out, root=root, count=sum(counts)), b"", timeout, sequence) as run:
            if source is not None:
                out.copy_(torch.split(source, list(counts))[root])
            data = out if source is None else source
            run.move(lambda mover: mover.scatter(bytes_of(data), _in_bytes(counts, data), root))

    def reduce_scatter(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        op: Op,
        *,
        dim: int,
        timeout: float,
        sequence: int,
    ) -> None:
        """Fold part r of every rank's ``source`` into rank r's ``out``."""
        call = call_of("reduce_scatter", source, op=op, dim=dim)
        with self._turn(call, payload_for(None, op), timeout, sequence) as run:
            run.fold_chunks(out, source, counts, op)

    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        *,
        unit: int,
        timeout: float,
        sequence: int,
    ) -> None:
        """Send part r of ``source`` to rank r, and collect what the ranks sent here in ``out``."""
        said = b"".join(map(_COUNT.pack, send_counts))
        travels = len(said) <= MAX_PAYLOAD
        with self._turn(call_of("all_to_all", source, count=unit), said if travels else b"", timeout, sequence) as run:
            run.check_counts(said, receive_counts, unit, travels=travels)
            rank = run.rank
            torch.split(out, list(receive_counts))[rank].copy_(torch.split(source, list(send_counts))[rank])
            incoming, outgoing = run.blocks(receive_counts, out), run.blocks(send_counts, source)
            run.move(lambda mover: mover.all_to_all(bytes_of(out), incoming, bytes_of(source), outgoing))

    @contextmanager
    def _turn(
        self, call: CollectiveSignature, payload: bytes, timeout: float, sequence: int
    ) -> Iterator[_DataPlaneRun]:
        """The group's mover to ourselves, once all ranks have made the call."""
        deadline = Deadline(timeout)
        call = call.with_payload(payload)
        with self._group.data_plane.sequencer.hold(sequence, timeout):  # without a turn the agreement says so
            payloads = self._group.agreement.reach(call, deadline.remaining(), sequence)
            run = _DataPlaneRun(self._group, call, sequence, deadline, payloads)
            try:
                yield run
            except DistributedError:
                raise
            except BaseException as error:
                # An interruption, or no memory: this rank is out of step with the others.
                self._group.abort(left_reason(run.rank, f"{call}, operation {sequence},", error))
                raise


class _DataPlaneRun(CollectiveRun):
    """One collective that all ranks have agreed on, and that the group's mover moves."""

    def __init__(
        self, group: Backend, call: CollectiveSignature, sequence: int, deadline: Deadline, payloads: list[bytes]
    ) -> None:
        super().__init__(group, call, sequence, deadline, payloads)
        self._mover: Mover = group.data_plane

    def move(self, start: Callable[[Mover], list[Any]]) -> None:
        """One step: ``start(mover)`` begins it."""
        if self.world_size > 1:
            self._wait(start(self._mover))

    def _wait(self, requests: list[Any]) -> None:
        def wait() -> None:
            if not self._mover.wait_for(requests, self.deadline):
                if self._group.failure is not None:
                    raise self._group.failure.fresh()
                late = self._group.find_stragglers(tuple(sorted(self.peers)), answer_seconds(self.deadline.timeout))
                error = DistributedTimeoutError("the data did not come", ranks=late.ranks)
                error.detail = late.detail
                raise error

        self.guard(wait)

    def collect(self, source: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's ``source``, by rank."""
        table = source.new_empty((self.world_size, source.numel()))
        table[self.rank].copy_(source)
        self.move(lambda mover: mover.all_gather(bytes_of(table), [source.nbytes] * self.world_size))
        return list(table)

    def blocks(self, counts: Sequence[int], tensor: torch.Tensor) -> list[Block]:
        """Where each rank's part of a tensor begins, and its size, in bytes; this rank's is not moved."""
        sizes = _in_bytes(counts, tensor)
        places = [0, *accumulate(sizes)]
        return [(places[rank], size if rank != self.rank else 0) for rank, size in enumerate(sizes)]

    def check_counts(self, said: bytes, receive_counts: Sequence[int], unit: int, *, travels: bool) -> None:
        """Raise when a rank sends this one another number of elements than it expects."""
        if travels:
            place = self.rank * _COUNT.size
            coming = [_COUNT.unpack_from(self.payload(rank, len(said)), place)[0] for rank in range(self.world_size)]
        else:
            places = [(rank * _COUNT.size, _COUNT.size) for rank in range(self.world_size)]
            table = bytearray(len(said))
            self.move(lambda mover: mover.all_to_all(memoryview(table), places, memoryview(said), places))
            coming = [count for (count,) in _COUNT.iter_unpack(table)]
        for peer in self.peers:
            if coming[peer] != receive_counts[peer]:
                error = self.unmet(peer, receive_counts[peer] // unit)
                self._group.abort(error)
                raise (self._group.failure or error).fresh()

    def fold_chunks(self, out: torch.Tensor, source: torch.Tensor, counts: Sequence[int], op: Op) -> None:
        """Fold chunk ``rank`` of every rank's ``source`` into ``out``, segment by segment.

        ``out`` may be this rank's chunk of ``source``: a segment is folded from it before it is written, and no other
        rank needs it.
        """
        factors = self.factors(op)
        starts, item, mine = offsets_of(counts), source.element_size(), counts[self.rank]
        step = max(1, _SEGMENT_BYTES // item)
        data = bytes_of(source)
        tables = [source.new_empty((self.world_size, min(step, mine))) for _ in range(2)]

        def start(number: int) -> list[Any]:
            begin = number * step
            outgoing = [
                ((starts[rank] + min(begin, counts[rank])) * item, _length(counts[rank], begin, step) * item)
                for rank in range(self.world_size)
            ]
            outgoing[self.rank] = (0, 0)
            table = tables[number % 2]
            size = _length(mine, begin, step) * item
            incoming = [(rank * table.shape[1] * item, size) for rank in range(self.world_size)]
            incoming[self.rank] = (0, 0)
            return self._mover.all_to_all(bytes_of(table), incoming, data, outgoing) if self.world_size > 1 else []

        num_segments = -(-max(counts) // step)
        coming = start(0) if num_segments else []
        try:
            for number in range(num_segments):
                waited, coming = coming, []
                self._wait(waited)
                if number + 1 < num_segments:
                    coming = start(number + 1)
                begin, length = number * step, _length(mine, number * step, step)
                if length:
                    own = source[starts[self.rank] + begin : starts[self.rank] + begin + length]
                    table = tables[number % 2]
                    inputs = [own if rank == self.rank else table[rank, :length] for rank in range(self.world_size)]
                    out[begin : begin + length].copy_(fold(op, inputs, factors))
        finally:
            self._mover.abandon(coming)


def _length(count: int, begin: int, step: int) -> int:
    """Elements of a chunk's segment that begins at ``begin``."""
    return max(0, min(step, count - begin))


def _in_bytes(counts: Sequence[int], tensor: torch.Tensor) -> list[int]:
    return [count * tensor.element_size() for count in counts]
