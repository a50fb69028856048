"""The engine of collectives of tensors on GPUs, by NCCL.

A collective that NCCL has is one call. The others are grouped sends and receives, or one broadcast or reduction per
rank in a group, which NCCL overlaps. For reductions that NCCL lacks see [Note: recipes] in `reductions.py`. Bits differ
from those of other backends where the order of additions shows, for the order is NCCL's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.nccl.reductions import NCCL_DTYPES, Encoding, ReductionRecipe, fold_gathered, recipe_of
from ferrodist.backends.nccl.verification import SplitSizeVerifier
from ferrodist.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.nccl.communicator import Communicator
    from ferrodist.backends.nccl.in_flight import LaunchedOps
    from ferrodist.backends.nccl.stream_executor import StreamContext, StreamExecutor


class NcclEngine:
    """`StreamEngine` of a group, by NCCL."""

    enqueue = True

    def __init__(self, group: Backend, executor: StreamExecutor) -> None:
        self._group = group
        self._rank, self._world_size = group.rank, group.world_size
        self._executor = executor
        self._split_sizes = SplitSizeVerifier(group, executor.reporter())

    def reserve(self) -> int:
        """Take the next sequence number of the group's collectives on GPUs."""
        return self._executor.sequencer.reserve()

    def begin_async(self) -> None:
        """Until `end_async`, don't make the current stream wait for this thread's calls."""
        self._executor.begin_async()

    def end_async(self) -> LaunchedOps:
        """The calls since `begin_async`."""
        return self._executor.end_async()

    def run(self, op: CollectiveOp, sequence: int) -> None:
        """Run a collective.

        For an all_to_all whose shards are not all of ``unit`` elements, the host waits until the ranks' split sizes
        have been compared, before anything moves.
        """
        work = partial(getattr(self, f"_{op.kind}"), op)
        if op.reduction is not None:
            work = partial(work, recipe_of(op.source.dtype, op.reduction, self._world_size))
        elif op.kind is CollectiveKind.ALL_TO_ALL:
            work = partial(work, sequence)
        tensors = tuple(tensor for tensor in (op.source, op.out) if tensor is not None)
        self._executor.launch(op.signature(sequence), tensors, work, timeout=op.timeout)

    def _allreduce(self, op: CollectiveOp, recipe: ReductionRecipe, context: StreamContext) -> None:
        out, source = op.out, op.source
        if not source.numel():
            return
        if recipe.encoding is Encoding.GATHERED:
            fold_gathered(recipe, self._gather_all(context, source), out)
            return
        packed = recipe.pack(source)
        result = _result_for(packed, source, out)
        self._reduce_by(
            context,
            recipe,
            packed,
            lambda nccl, dtype, red_op, stream: nccl.all_reduce(result, packed, dtype, red_op, stream=stream),
        )
        recipe.unpack(result, out)

    def _reduce(self, op: CollectiveOp, recipe: ReductionRecipe, context: StreamContext) -> None:
        out, source, root = op.out, op.source, op.root
        if not source.numel():
            return
        if recipe.encoding is Encoding.GATHERED:
            gathered = () if out is None else self._allocate(source, source.numel())
            self._exchange(context, {root: source}, dict(enumerate(gathered)))
            if out is not None:
                fold_gathered(recipe, gathered, out)
            return
        packed = recipe.pack(source)
        result = packed if out is None else _result_for(packed, source, out)
        self._reduce_by(
            context,
            recipe,
            packed,
            lambda nccl, dtype, red_op, stream: nccl.reduce(result, packed, dtype, red_op, root=root, stream=stream),
        )
        if out is not None:
            recipe.unpack(result, out)

    def _broadcast(self, op: CollectiveOp, context: StreamContext) -> None:
        if op.out.numel():
            context.grouped(lambda nccl, stream: nccl.broadcast(op.out, root=op.root, stream=stream))

    def _all_gather(self, op: CollectiveOp, context: StreamContext) -> None:
        if not op.out.numel():
            return
        if len(set(op.counts)) == 1:
            context.grouped(lambda nccl, stream: nccl.all_gather(op.out, op.source, stream=stream))
            return
        shards = _split(op.out, op.counts)
        shards[self._rank].copy_(op.source)

        def broadcast_shards(nccl: Communicator, stream: int) -> None:
            for rank, shard in enumerate(shards):
                if shard.numel():
                    nccl.broadcast(shard, root=rank, stream=stream)

        context.grouped(broadcast_shards)

    def _gather(self, op: CollectiveOp, context: StreamContext) -> None:
        shards = () if op.out is None else _split(op.out, op.counts)
        self._exchange(context, {op.root: op.source}, dict(enumerate(shards)))

    def _scatter(self, op: CollectiveOp, context: StreamContext) -> None:
        shards = () if op.source is None else _split(op.source, op.counts)
        self._exchange(context, dict(enumerate(shards)), {op.root: op.out})

    def _reduce_scatter(self, op: CollectiveOp, recipe: ReductionRecipe, context: StreamContext) -> None:
        out, source, counts = op.out, op.source, op.counts
        if not source.numel():
            return
        if recipe.encoding is Encoding.GATHERED:
            gathered = self._allocate(source, out.numel()) if out.numel() else ()
            self._exchange(context, dict(enumerate(_split(source, counts))), dict(enumerate(gathered)))
            if gathered:
                fold_gathered(recipe, gathered, out)
            return
        packed = recipe.pack(source)
        scale = packed.numel() // source.numel()  # 2 where complex numbers have become pairs
        result = out if packed.dtype is out.dtype else packed.new_empty(out.numel() * scale)
        sizes = [count * scale for count in counts]

        def reduce_shards(nccl: Communicator, dtype: int, red_op: int, stream: int) -> None:
            if len(set(sizes)) == 1:
                nccl.reduce_scatter(result, packed, dtype, red_op, stream=stream)
                return
            for rank, shard in enumerate(_split(packed, sizes)):
                if shard.numel():
                    nccl.reduce(result if rank == self._rank else shard, shard, dtype, red_op, root=rank, stream=stream)

        self._reduce_by(context, recipe, packed, reduce_shards)
        recipe.unpack(result, out)

    def _all_to_all(self, op: CollectiveOp, sequence: int, context: StreamContext) -> None:
        rows = [[count // op.unit if op.unit else 0 for count in counts] for counts in (op.counts, op.recv_counts)]
        self._split_sizes.send(self._group, sequence, *rows)
        if set(op.counts) | set(op.recv_counts) != {op.unit}:
            self._split_sizes.wait(self._group, sequence, str(op.signature()), Deadline(op.timeout))
        outgoing, incoming = _split(op.source, op.counts), _split(op.out, op.recv_counts)
        self._exchange(context, dict(enumerate(outgoing)), dict(enumerate(incoming)))

    # Steps of these.

    def _exchange(
        self, context: StreamContext, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]
    ) -> None:
        """Send ``outgoing[rank]`` to each rank and receive ``incoming[rank]`` from each, and copy this rank's own."""
        sends = [(rank, shard) for rank, shard in outgoing.items() if rank != self._rank and shard.numel()]
        receives = [(rank, shard) for rank, shard in incoming.items() if rank != self._rank and shard.numel()]

        def transfer(nccl: Communicator, stream: int) -> None:
            for rank, shard in sends:
                nccl.send(shard, rank, stream=stream)
            for rank, shard in receives:
                nccl.recv(shard, rank, stream=stream)

        if sends or receives:
            context.grouped(transfer)
        if self._rank in incoming:
            incoming[self._rank].copy_(outgoing[self._rank])

    def _reduce_by(
        self,
        context: StreamContext,
        recipe: ReductionRecipe,
        packed: torch.Tensor,
        call: Callable[[Communicator, int, int, int], None],
    ) -> None:
        """Run ``call(communicator, dtype, red_op, stream)`` with the recipe's ncclDataType_t and ncclRedOp_t."""
        dtype = NCCL_DTYPES[recipe.carrier]
        if recipe.factor is None:
            red_op = recipe.op
            assert red_op is not None
            context.grouped(lambda nccl, stream: call(nccl, dtype, red_op, stream))
            return
        factor = torch.tensor([recipe.factor], dtype=packed.dtype, device="cpu")
        made = context.communicator.premultiplied_sum(factor, dtype)
        context.grouped(lambda nccl, stream: call(nccl, dtype, made, stream))
        context.communicator.release_operation(made)

    def _gather_all(self, context: StreamContext, source: torch.Tensor) -> tuple[torch.Tensor, ...]:
        everyone = source.new_empty(source.numel() * self._world_size)
        context.grouped(lambda nccl, stream: nccl.all_gather(everyone, source, stream=stream))
        return _split(everyone, [source.numel()] * self._world_size)

    def _allocate(self, source: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        """A buffer of ``count`` elements for each rank."""
        return _split(source.new_empty(count * self._world_size), [count] * self._world_size)


def _result_for(packed: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The tensor that NCCL writes to: ``out`` if its dtype is NCCL's, else ``packed`` itself."""
    if source.dtype.is_complex and packed.dtype is out.dtype.to_real():
        return torch.view_as_real(out).view(-1)
    return out if packed.dtype is out.dtype else packed


def _split(tensor: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.split(tensor, list(counts)))
