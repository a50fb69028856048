"""The collectives of tensors on GPUs, by NCCL.

What NCCL has is one call. The rest is made of grouped sends and receives, or of one broadcast or reduction a rank in a
group, which NCCL overlaps. What it can't reduce goes another way: see [Note: recipes] in `reductions.py`. Bits differ
from those of other backends where the order of additions shows, for the order is NCCL's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ferrodist.backends.nccl.reductions import NCCL_DTYPES, Encoding, ReductionRecipe, fold_gathered, recipe_of
from ferrodist.backends.nccl.verification import SplitSizeVerifier
from ferrodist.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.collective_op import CollectiveOp
    from ferrodist.backends.nccl.communicator import Communicator
    from ferrodist.backends.nccl.in_flight import EnqueuedOp
    from ferrodist.backends.nccl.stream_executor import StreamContext, StreamExecutor


class _Run(NamedTuple):
    """A collective that is being put on a stream; ``recipe`` says how NCCL reduces, where something is reduced."""

    op: CollectiveOp
    sequence: int
    recipe: ReductionRecipe | None

    @property
    def reduction(self) -> ReductionRecipe:
        assert self.recipe is not None
        return self.recipe


class NcclEngine:
    """`StreamEngine` of a group, by NCCL.

    Args:
        group: The group.
        executor: Enqueues the group's work on its stream.
    """

    enqueue = True

    def __init__(self, group: Backend, executor: StreamExecutor) -> None:
        self._group = group
        self._rank, self._world_size = group.rank, group.world_size
        self._executor = executor
        self._split_sizes = SplitSizeVerifier(group, executor.reporter())

    def reserve(self) -> int:
        """Take the next position among the group's collectives on GPUs."""
        return self._executor.sequencer.reserve()

    def begin_async(self) -> None:
        """Let the current stream not wait for what this thread calls, until `end_async`."""
        self._executor.begin_async()

    def end_async(self) -> EnqueuedOp:
        """What was called since `begin_async`."""
        return self._executor.end_async()

    def run(self, op: CollectiveOp, sequence: int) -> None:
        """Run a collective.

        Where the parts of an all_to_all are not all of ``unit`` elements, the host waits for the other ranks, whose
        counts are compared before anything moves.
        """
        recipe = None if op.op is None else recipe_of(op.source.dtype, op.op, self._world_size)
        work = partial(getattr(self, f"_{op.kind}"), _Run(op, sequence, recipe))
        tensors = tuple(tensor for tensor in (op.source, op.out) if tensor is not None)
        self._executor.launch(op.signature(sequence), tensors, work, timeout=op.timeout)

    def _allreduce(self, run: _Run, context: StreamContext) -> None:
        out, source, recipe = run.op.out, run.op.source, run.reduction
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
            lambda nccl, op, stream: nccl.all_reduce(result, packed, _number(recipe), op, stream=stream),
        )
        recipe.unpack(result, out)

    def _reduce(self, run: _Run, context: StreamContext) -> None:
        out, source, root, recipe = run.op.out, run.op.source, run.op.root, run.reduction
        if not source.numel():
            return
        if recipe.encoding is Encoding.GATHERED:
            parts = self._gather_to(context, source, root)
            if out is not None:
                fold_gathered(recipe, parts, out)
            return
        packed = recipe.pack(source)
        result = packed if out is None else _result_for(packed, source, out)
        self._reduce_by(
            context,
            recipe,
            packed,
            lambda nccl, op, stream: nccl.reduce(result, packed, _number(recipe), op, root=root, stream=stream),
        )
        if out is not None:
            recipe.unpack(result, out)

    def _broadcast(self, run: _Run, context: StreamContext) -> None:
        op = run.op
        if op.out.numel():
            context.grouped(lambda nccl, stream: nccl.broadcast(op.out, root=op.root, stream=stream))

    def _all_gather(self, run: _Run, context: StreamContext) -> None:
        op = run.op
        if not op.out.numel():
            return
        if len(set(op.counts)) == 1:
            context.grouped(lambda nccl, stream: nccl.all_gather(op.out, op.source, stream=stream))
            return
        parts = _parts(op.out, op.counts)
        parts[self._rank].copy_(op.source)

        def broadcast_parts(nccl: Communicator, stream: int) -> None:
            for rank, part in enumerate(parts):
                if part.numel():
                    nccl.broadcast(part, root=rank, stream=stream)

        context.grouped(broadcast_parts)

    def _gather(self, run: _Run, context: StreamContext) -> None:
        op = run.op
        parts = None if op.out is None else _parts(op.out, op.counts)
        self._move_to(context, op.source, parts, op.root)

    def _scatter(self, run: _Run, context: StreamContext) -> None:
        op = run.op
        if op.source is None:
            if op.out.numel():
                context.grouped(lambda nccl, stream: nccl.recv(op.out, op.root, stream=stream))
            return
        parts = _parts(op.source, op.counts)
        others = [(rank, part) for rank, part in enumerate(parts) if rank != op.root and part.numel()]
        if others:
            context.grouped(lambda nccl, stream: _send_all(nccl, others, stream))
        op.out.copy_(parts[op.root])

    def _reduce_scatter(self, run: _Run, context: StreamContext) -> None:
        out, source, counts, recipe = run.op.out, run.op.source, run.op.counts, run.reduction
        if not source.numel():
            return
        if recipe.encoding is Encoding.GATHERED:
            self._fold_parts(context, recipe, source, counts, out)
            return
        packed = recipe.pack(source)
        scale = packed.numel() // source.numel()  # 2 where complex numbers have become pairs
        result = out if packed.dtype is out.dtype else packed.new_empty(out.numel() * scale)
        sizes = [count * scale for count in counts]
        self._reduce_by(context, recipe, packed, self._scatter_reduced(recipe, result, packed, sizes))
        recipe.unpack(result, out)

    def _all_to_all(self, run: _Run, context: StreamContext) -> None:
        op = run.op
        rows = [[count // op.unit if op.unit else 0 for count in counts] for counts in (op.counts, op.recv_counts)]
        self._split_sizes.send(self._group, run.sequence, *rows)
        if set(op.counts) | set(op.recv_counts) != {op.unit}:
            self._split_sizes.wait(self._group, run.sequence, str(op.signature()), Deadline(op.timeout))
        outgoing, incoming = _parts(op.source, op.counts), _parts(op.out, op.recv_counts)
        sends = [(rank, part) for rank, part in enumerate(outgoing) if rank != self._rank and part.numel()]
        receives = [(rank, part) for rank, part in enumerate(incoming) if rank != self._rank and part.numel()]
        if sends or receives:

            def exchange(nccl: Communicator, stream: int) -> None:
                _send_all(nccl, sends, stream)
                _receive_all(nccl, receives, stream)

            context.grouped(exchange)
        incoming[self._rank].copy_(outgoing[self._rank])

    # What they are made of.

    def _reduce_by(
        self,
        context: StreamContext,
        recipe: ReductionRecipe,
        packed: torch.Tensor,
        call: Callable[[Communicator, int, int], None],
    ) -> None:
        """Have ``call(communicator, operation, stream)`` reduce, with the operation that the recipe needs."""
        if recipe.factor is None:
            assert recipe.op is not None
            operation = recipe.op
            context.grouped(lambda nccl, stream: call(nccl, operation, stream))
            return
        factor = torch.tensor([recipe.factor], dtype=packed.dtype, device="cpu")
        made = context.communicator.premultiplied_sum(factor, _number(recipe))
        context.grouped(lambda nccl, stream: call(nccl, made, stream))
        context.communicator.release_operation(made)

    def _scatter_reduced(
        self, recipe: ReductionRecipe, result: torch.Tensor, packed: torch.Tensor, sizes: Sequence[int]
    ) -> Callable[[Communicator, int, int], None]:
        number = _number(recipe)

        def call(nccl: Communicator, op: int, stream: int) -> None:
            if len(set(sizes)) == 1:
                nccl.reduce_scatter(result, packed, number, op, stream=stream)
                return
            for rank, part in enumerate(_parts(packed, sizes)):
                if part.numel():
                    nccl.reduce(result if rank == self._rank else part, part, number, op, root=rank, stream=stream)

        return call

    def _gather_all(self, context: StreamContext, source: torch.Tensor) -> tuple[torch.Tensor, ...]:
        everyone = source.new_empty(source.numel() * self._world_size)
        context.grouped(lambda nccl, stream: nccl.all_gather(everyone, source, stream=stream))
        return _parts(everyone, [source.numel()] * self._world_size)

    def _gather_room(self, source: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        """Room for ``count`` elements of each rank."""
        return _parts(source.new_empty(count * self._world_size), [count] * self._world_size)

    def _gather_to(self, context: StreamContext, source: torch.Tensor, root: int) -> tuple[torch.Tensor, ...]:
        """All ranks' elements on the root; on the others nothing."""
        parts = self._gather_room(source, source.numel()) if self._rank == root else ()
        self._move_to(context, source, parts or None, root)
        return parts

    def _move_to(
        self, context: StreamContext, source: torch.Tensor, parts: Sequence[torch.Tensor] | None, root: int
    ) -> None:
        """Copy every rank's ``source`` into the root's ``parts``."""
        if parts is None:
            if source.numel():
                context.grouped(lambda nccl, stream: nccl.send(source, root, stream=stream))
            return
        others = [(rank, part) for rank, part in enumerate(parts) if rank != root and part.numel()]
        if others:
            context.grouped(lambda nccl, stream: _receive_all(nccl, others, stream))
        parts[root].copy_(source)

    def _fold_parts(
        self,
        context: StreamContext,
        recipe: ReductionRecipe,
        source: torch.Tensor,
        counts: Sequence[int],
        out: torch.Tensor,
    ) -> None:
        """Bring what is to be folded here to this rank, and fold it."""
        outgoing = _parts(source, counts)
        incoming = self._gather_room(source, out.numel()) if out.numel() else ()
        sends = [(rank, part) for rank, part in enumerate(outgoing) if rank != self._rank and part.numel()]
        receives = [(rank, part) for rank, part in enumerate(incoming) if rank != self._rank]

        def exchange(nccl: Communicator, stream: int) -> None:
            _send_all(nccl, sends, stream)
            _receive_all(nccl, receives, stream)

        if sends or receives:
            context.grouped(exchange)
        if incoming:
            incoming[self._rank].copy_(outgoing[self._rank])
            fold_gathered(recipe, incoming, out)


def _number(recipe: ReductionRecipe) -> int:
    return NCCL_DTYPES[recipe.carrier]


def _result_for(packed: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Where NCCL writes: to ``out`` when it is given ``source`` as it is, else over what it is given."""
    if source.dtype.is_complex and packed.dtype is out.dtype.to_real():
        return torch.view_as_real(out).view(-1)
    return out if packed.dtype is out.dtype else packed


def _parts(tensor: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.split(tensor, list(counts)))


def _send_all(nccl: Communicator, parts: Sequence[tuple[int, torch.Tensor]], stream: int) -> None:
    for rank, part in parts:
        nccl.send(part, rank, stream=stream)


def _receive_all(nccl: Communicator, parts: Sequence[tuple[int, torch.Tensor]], stream: int) -> None:
    for rank, part in parts:
        nccl.recv(part, rank, stream=stream)
