"""The reference engine: collectives over any backend's ``isend`` and ``irecv``, with which other engines are compared.

A *chunk* is the part of a tensor that one rank owns in a collective, a *segment* a part of a chunk that moves at once.
n is the tensor's bytes, p the number of ranks. Every collective begins with a verification ([Note: verification] in
`backends/verification.py`: 2 steps, 192 bytes up and 192*p down for each rank), and tiny ones end with it, for their
elements travel with the call. The figures below are for the steps after it, and the bytes that the busiest rank sends.

    operation        up to 108 B   up to 64 KiB                    above
    allreduce        0 steps       1 step, (p-1)n                  2 steps a segment, 2n(p-1)/p
    reduce           0 steps       1 step, n                       2 steps, n(p-1)/p + n/p
    broadcast        0 steps       log2(p) steps, n*log2(p)        2 steps, 2n(p-1)/p
    all_gather       0 steps       1 step, (p-1) times the own chunk
    gather, scatter                1 step, the chunk; the root's link carries n(p-1)/p
    reduce_scatter                 1 step a segment, n(p-1)/p
    all_to_all                     1 step, what is for others

A step is `exchange`: all receives are posted, then all sends started, then all waited for. No rank waits for a send
before its receives are posted, so it can't deadlock for any order of arrival and any size of socket buffers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.collective_op import CollectiveKind
from ferrodist.backends.request import wait_all
from ferrodist.backends.signature import MAX_PAYLOAD
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.collectives.arguments import bytes_of, compute_shard_sizes, offsets_of
from ferrodist.collectives.reduce_op import PremultipliedSum, fold
from ferrodist.deadline import Deadline, Elapsed
from ferrodist.errors import (
    DistributedError,
    DistributedTimeoutError,
    GroupClosedError,
    ProtocolError,
    SizeMismatchError,
    ranks_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.collective_op import CollectiveOp
    from ferrodist.backends.request import Request
    from ferrodist.backends.signature import CollectiveSignature

_ONE_STEP_BYTES = 64 * 1024  # up to this size one step with more bytes is faster than two with fewer

_SEGMENT_BYTES = 4 << 20
"""The bytes that a reduction receives from each rank before it folds: bounds its memory to p segments."""

_FACTOR = struct.Struct("<d")


class ReferenceEngine:
    """A `HostEngine` over the point-to-point messages of a group of any backend."""

    share_room = MAX_PAYLOAD

    def __init__(self, group: Backend) -> None:
        self._group = group

    def reserve(self) -> int:
        """Take the next sequence number of the group's collectives."""
        return self._group.verifier.reserve()

    def await_turn(self, sequence: int) -> None:
        """Return at once: these collectives don't wait for each other."""

    def run(self, op: CollectiveOp, sequence: int) -> list[bytes] | None:
        """Run a collective."""
        deadline = Deadline(op.timeout)
        payload, is_eager = make_payload(op, self._group.rank)
        call = op.signature(payload=payload)
        payloads = self._group.verifier.verify(call, op.timeout, sequence)
        if op.kind is CollectiveKind.SHARE:
            return payloads
        if op.kind is not CollectiveKind.BARRIER:
            run = CollectiveRun(self._group, op, call, sequence, deadline, payloads)
            (EAGER_ALGORITHMS if is_eager else _ALGORITHMS)[op.kind](run)
        return None


def make_payload(op: CollectiveOp, rank: int) -> tuple[bytes, bool]:
    """The payload of a rank's call, and whether it is all of the data, as for tiny tensors."""
    match op.kind:
        case CollectiveKind.SHARE:
            return op.payload, True
        case CollectiveKind.ALLREDUCE | CollectiveKind.REDUCE | CollectiveKind.REDUCE_SCATTER:
            if isinstance(op.reduction, PremultipliedSum):  # whose factor takes the room
                return _FACTOR.pack(op.reduction.factor), False
            if op.kind is not CollectiveKind.REDUCE_SCATTER and op.source.nbytes <= MAX_PAYLOAD:
                return bytes(bytes_of(op.source)), True
        case CollectiveKind.BROADCAST if op.out.nbytes <= MAX_PAYLOAD:
            return bytes(bytes_of(op.out)) if rank == op.root else b"", True
        case CollectiveKind.ALL_GATHER if max(op.counts) * op.source.element_size() <= MAX_PAYLOAD:
            return bytes(bytes_of(op.source)), True
    return b"", False


@dataclass
class CollectiveRun:
    """One collective in progress, on which all ranks have agreed."""

    group: Backend
    op: CollectiveOp
    call: CollectiveSignature
    sequence: int
    deadline: Deadline
    payloads: list[bytes]  # by rank

    def __post_init__(self) -> None:
        self.rank, self.world_size = self.group.rank, self.group.world_size
        # The other ranks, starting after this one, so that not all ranks send to the same one first.
        self.peers = [(self.rank + i) % self.world_size for i in range(1, self.world_size)]
        self._tag = channel_tag(Channel.DATA, self.sequence)
        self._factors = None  # every rank's, of a premultiplied sum
        if isinstance(self.op.reduction, PremultipliedSum):
            self._factors = [_FACTOR.unpack(self.payload(rank, _FACTOR.size))[0] for rank in range(self.world_size)]

    def tensor(self, rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """The elements in the payload of a rank's call."""
        payload = self.payload(rank, count * dtype.itemsize)
        if not payload:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(dtype)

    def tensors(self, dtype: torch.dtype, counts: Sequence[int]) -> list[torch.Tensor]:
        """The elements in the payload of every rank's call."""
        return [self.tensor(rank, dtype, count) for rank, count in enumerate(counts)]

    def fold(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Fold one tensor a rank by the call's reduction."""
        return fold(self.op.reduction, inputs, self._factors)

    def payload(self, rank: int, size_bytes: int) -> bytes:
        """The payload of a rank's call; aborts the group unless it has ``size_bytes``."""
        payload = self.payloads[rank]
        if len(payload) != size_bytes:
            error = ProtocolError(
                f"rank {rank} of group {self.group.name!r} sent {len(payload)} bytes with its {self.call}, operation"
                f" {self.sequence}, which takes {size_bytes}",
                ranks=(rank,),
            )
            self.group.abort(error)
            raise error
        return payload

    def exchange(self, sends: Iterable[tuple[int, torch.Tensor]], receives: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Run one step: all these receives and sends of (rank, tensor) at the same time."""
        self.guard(
            lambda: wait_all(
                self._start(
                    [(peer, tensor) for peer, tensor in sends if tensor.numel()],
                    [(peer, tensor) for peer, tensor in receives if tensor.numel()],
                ),
                self.deadline,
            )
        )

    def exchange_uneven(
        self, sends: Iterable[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]], unit: int
    ) -> None:
        """`exchange` between ranks that may expect other sizes: empty messages are sent, too, so that no rank waits."""

        def start_and_wait() -> None:
            pending = self._start(sends, receives)
            try:
                wait_all(pending, self.deadline)
            except SizeMismatchError as error:
                for (peer, tensor), request in zip(receives, pending, strict=False):  # the receives come first
                    if _has_other_size(request):
                        raise self.row_count_error(peer, tensor.numel() // unit) from error
                raise

        self.guard(start_and_wait)

    def _start(
        self, sends: Iterable[tuple[int, torch.Tensor]], receives: Iterable[tuple[int, torch.Tensor]]
    ) -> list[Request]:
        """Start all receives, then all sends; the requests in that order."""
        pending: list[Request] = []
        try:
            for peer, tensor in receives:
                pending.append(self.group.irecv(bytes_of(tensor), peer, tag=self._tag))
            for peer, tensor in sends:
                pending.append(self.group.isend(bytes_of(tensor), peer, tag=self._tag))
        except BaseException:
            for request in pending:
                request.cancel()
            raise
        return pending

    def row_count_error(self, peer: int, num_rows: int) -> SizeMismatchError:
        """The error of a peer that sends another number of rows than this rank expects."""
        return SizeMismatchError(
            f"{self.call} on group {self.group.name!r}, operation {self.sequence}: rank {self.rank} expects"
            f" {num_rows} {'row' if num_rows == 1 else 'rows'} from rank {peer} (recv_counts[{peer}]), which sends it"
            f" another number: its send_counts[{self.rank}] must be {num_rows} too.",
            ranks=(peer,),
        )

    def fold_chunks(self, out: torch.Tensor, counts: Sequence[int]) -> None:
        """Fold chunk ``rank`` of every rank's ``source`` into ``out``, segment by segment.

        ``out`` may be this rank's chunk of ``source``: a segment is folded from it before it is written.
        """
        source = self.op.source
        starts = offsets_of(counts)
        step = max(1, _SEGMENT_BYTES // source.element_size())
        for begin in range(0, max(counts), step):
            segments = [
                source[starts[rank] + min(begin, counts[rank]) : starts[rank] + min(begin + step, counts[rank])]
                for rank in range(self.world_size)
            ]
            own = segments[self.rank]
            inputs = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.world_size)]
            self.exchange(
                [(peer, segments[peer]) for peer in self.peers], [(peer, inputs[peer]) for peer in self.peers]
            )
            if own.numel():
                out[begin : begin + own.numel()].copy_(self.fold(inputs))

    def send_down_tree(self, tensor: torch.Tensor, root: int) -> None:
        """Broadcast along a binomial tree: rank v (relative to the root) receives from v without its highest bit."""
        position = (self.rank - root) % self.world_size
        distance = 1
        if position:
            distance = 1 << position.bit_length()
            self.exchange([], [((position - (distance >> 1) + root) % self.world_size, tensor)])
        children = []
        while position + distance < self.world_size:
            children.append((position + distance + root) % self.world_size)
            distance <<= 1
        self.exchange([(child, tensor) for child in children], [])

    def guard(self, action: Callable[[], None]) -> None:
        """Run a step; an error in the middle of a collective ends the group, whose ranks are out of step then."""
        try:
            action()
        except GroupClosedError:
            raise
        except DistributedTimeoutError as error:
            failure = self.group.failure or DistributedTimeoutError(
                f"{self.call} on group {self.group.name!r}, operation {self.sequence}: all ranks have called it, but"
                f" rank {self.rank} was still exchanging data with {ranks_text(error.ranks)} after"
                f" {Elapsed.of(self.deadline)}{error.detail}. Pass a larger timeout, or look at what is going"
                " on there.",
                ranks=error.ranks,
            )
            self.group.abort(failure)
            raise (self.group.failure or failure).fresh() from None
        except DistributedError as error:
            self.group.abort(error)
            raise (self.group.failure or error).fresh() from None


def _has_other_size(receive: Request) -> bool:
    """True if a receive of a failed step ended because its message has another size."""
    try:
        receive.wait(0)
    except DistributedError as error:
        return isinstance(error, SizeMismatchError)
    return False


def _fold_eager(run: CollectiveRun) -> None:
    """Allreduce and reduce: every element has come with the calls."""
    op = run.op
    if op.out is not None:
        op.out.copy_(run.fold(run.tensors(op.source.dtype, [op.source.numel()] * run.world_size)))


def _broadcast_eager(run: CollectiveRun) -> None:
    op = run.op
    if run.rank != op.root:
        op.out.copy_(run.tensor(op.root, op.out.dtype, op.out.numel()))


def _all_gather_eager(run: CollectiveRun) -> None:
    op = run.op
    for chunk, tensor in zip(torch.split(op.out, list(op.counts)), run.tensors(op.out.dtype, op.counts), strict=True):
        chunk.copy_(tensor)


EAGER_ALGORITHMS: dict[CollectiveKind, Callable[[CollectiveRun], None]] = {
    CollectiveKind.ALLREDUCE: _fold_eager,
    CollectiveKind.REDUCE: _fold_eager,
    CollectiveKind.BROADCAST: _broadcast_eager,
    CollectiveKind.ALL_GATHER: _all_gather_eager,
}
"""The rest of a collective whose data has come with the calls."""


def _fold_onto(run: CollectiveRun, receivers: Sequence[int]) -> None:
    """Allreduce and reduce: the ranks ``receivers`` get the result."""
    out, source = run.op.out, run.op.source
    to = [peer for peer in run.peers if peer in receivers]
    senders = run.peers if run.rank in receivers else []
    if source.nbytes <= _ONE_STEP_BYTES or run.world_size == 1:
        inputs = {run.rank: source} | {peer: torch.empty_like(source) for peer in senders}
        run.exchange([(peer, source) for peer in to], [(peer, inputs[peer]) for peer in senders])
        if out is not None:
            out.copy_(run.fold([inputs[rank] for rank in range(run.world_size)]))
    else:
        counts = compute_shard_sizes(source.numel(), run.world_size)
        chunks = [] if out is None else torch.split(out, counts)
        own = chunks[run.rank] if chunks else source.new_empty(counts[run.rank])
        run.fold_chunks(own, counts)
        run.exchange([(peer, own) for peer in to], [(peer, chunks[peer]) for peer in senders])


def _broadcast(run: CollectiveRun) -> None:
    tensor, root = run.op.out, run.op.root
    if run.world_size == 1:
        return
    if tensor.nbytes <= _ONE_STEP_BYTES:
        run.send_down_tree(tensor, root)
        return
    chunks = torch.split(tensor, compute_shard_sizes(tensor.numel(), run.world_size))
    if run.rank == root:
        run.exchange([(peer, chunks[peer]) for peer in run.peers], [])
        run.exchange([(peer, chunks[root]) for peer in run.peers], [])
    else:
        run.exchange([], [(root, chunks[run.rank])])
        others = [peer for peer in run.peers if peer != root]
        run.exchange([(peer, chunks[run.rank]) for peer in others], [(peer, chunks[peer]) for peer in run.peers])


def _all_gather(run: CollectiveRun) -> None:
    source = run.op.source
    chunks = torch.split(run.op.out, list(run.op.counts))
    chunks[run.rank].copy_(source)
    run.exchange([(peer, source) for peer in run.peers], [(peer, chunks[peer]) for peer in run.peers])


def _gather(run: CollectiveRun) -> None:
    op = run.op
    if op.out is None:
        run.exchange([(op.root, op.source)], [])
        return
    chunks = torch.split(op.out, list(op.counts))
    chunks[op.root].copy_(op.source)
    run.exchange([], [(peer, chunks[peer]) for peer in run.peers])


def _scatter(run: CollectiveRun) -> None:
    op = run.op
    if op.source is None:
        run.exchange([], [(op.root, op.out)])
        return
    chunks = torch.split(op.source, list(op.counts))
    op.out.copy_(chunks[op.root])
    run.exchange([(peer, chunks[peer]) for peer in run.peers], [])


def _all_to_all(run: CollectiveRun) -> None:
    op = run.op
    outgoing, incoming = torch.split(op.source, list(op.counts)), torch.split(op.out, list(op.recv_counts))
    incoming[run.rank].copy_(outgoing[run.rank])
    run.exchange_uneven(
        [(peer, outgoing[peer]) for peer in run.peers], [(peer, incoming[peer]) for peer in run.peers], op.unit
    )


_ALGORITHMS: dict[CollectiveKind, Callable[[CollectiveRun], None]] = {
    CollectiveKind.ALLREDUCE: lambda run: _fold_onto(run, range(run.world_size)),
    CollectiveKind.REDUCE: lambda run: _fold_onto(run, [run.op.root]),
    CollectiveKind.BROADCAST: _broadcast,
    CollectiveKind.ALL_GATHER: _all_gather,
    CollectiveKind.GATHER: _gather,
    CollectiveKind.SCATTER: _scatter,
    CollectiveKind.REDUCE_SCATTER: lambda run: run.fold_chunks(run.op.out, run.op.counts),
    CollectiveKind.ALL_TO_ALL: _all_to_all,
}
