"""The collectives of tensors on GPUs, by NCCL.

What NCCL has is one call. The rest is made of grouped sends and receives, or of one broadcast or reduction a rank in a
group, which NCCL overlaps. What it can't reduce goes another way: see [Note: recipes] in `reductions.py`. Bits differ
from those of other backends where the order of additions shows, for the order is NCCL's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrodist.backends.nccl.reductions import NCCL_DTYPES, Encoding, ReductionRecipe, fold_gathered, recipe_of
from ferrodist.backends.nccl.verification import SplitSizeVerifier
from ferrodist.backends.signature import CollectiveSignature
from ferrodist.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.nccl.communicator import Communicator
    from ferrodist.backends.nccl.in_flight import EnqueuedOp
    from ferrodist.backends.nccl.stream_executor import StreamContext, StreamExecutor


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

    # The collectives: see `CollectiveEngine`.

    def allreduce(self, out: torch.Tensor, source: torch.Tensor, op: Any, *, timeout: float, sequence: int) -> None:
        """Fold ``source`` over the ranks into every rank's ``out``, which may be ``source``."""
        recipe = recipe_of(source.dtype, op, self._world_size)

        def work(context: StreamContext) -> None:
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

        call = _call("allreduce", source, source.numel(), op=op, sequence=sequence)
        self._executor.launch(call, (source, out), work, timeout=timeout)

    def reduce(
        self,
        out: torch.Tensor | None,
        source: torch.Tensor,
        op: Any,
        root: int,
        *,
        timeout: float,
        sequence: int,
    ) -> None:
        """Fold ``source`` over the ranks into the root's ``out``, which may be its ``source``; None elsewhere."""
        recipe = recipe_of(source.dtype, op, self._world_size)

        def work(context: StreamContext) -> None:
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

        call = _call("reduce", source, source.numel(), op=op, root=root, sequence=sequence)
        self._executor.launch(call, _present(source, out), work, timeout=timeout)

    def broadcast(self, tensor: torch.Tensor, root: int, *, timeout: float, sequence: int) -> None:
        """Copy the root's ``tensor`` into every rank's."""

        def work(context: StreamContext) -> None:
            if tensor.numel():
                context.grouped(lambda nccl, stream: nccl.broadcast(tensor, root=root, stream=stream))

        call = _call("broadcast", tensor, tensor.numel(), root=root, sequence=sequence)
        self._executor.launch(call, (tensor,), work, timeout=timeout)

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
        """Copy every rank's ``source`` into every ``out``, one after the other."""

        def work(context: StreamContext) -> None:
            if not out.numel():
                return
            if len(set(counts)) == 1:
                context.grouped(lambda nccl, stream: nccl.all_gather(out, source, stream=stream))
                return
            parts = _parts(out, counts)
            parts[self._rank].copy_(source)

            def broadcast_parts(nccl: Communicator, stream: int) -> None:
                for rank, part in enumerate(parts):
                    if part.numel():
                        nccl.broadcast(part, root=rank, stream=stream)

            context.grouped(broadcast_parts)

        call = _call("all_gather", out, out.numel(), dim=dim, sequence=sequence)
        self._executor.launch(call, (out, source), work, timeout=timeout)

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

        def work(context: StreamContext) -> None:
            parts = None if out is None else _parts(out, counts)
            self._move_to(context, source, parts, root)

        call = _call("gather", source, sum(counts), root=root, sequence=sequence)
        self._executor.launch(call, _present(source, out), work, timeout=timeout)

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

        def work(context: StreamContext) -> None:
            if source is None:
                if out.numel():
                    context.grouped(lambda nccl, stream: nccl.recv(out, root, stream=stream))
                return
            parts = _parts(source, counts)
            others = [(rank, part) for rank, part in enumerate(parts) if rank != root and part.numel()]
            if others:
                context.grouped(lambda nccl, stream: _send_all(nccl, others, stream))
            out.copy_(parts[root])

        call = _call("scatter", out, sum(counts), root=root, sequence=sequence)
        self._executor.launch(call, _present(out, source), work, timeout=timeout)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        op: Any,
        *,
        dim: int,
        timeout: float,
        sequence: int,
    ) -> None:
        """Fold part r of every rank's ``source`` into rank r's ``out``."""
        recipe = recipe_of(source.dtype, op, self._world_size)

        def work(context: StreamContext) -> None:
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

        call = _call("reduce_scatter", source, source.numel(), op=op, dim=dim, sequence=sequence)
        self._executor.launch(call, (source, out), work, timeout=timeout)

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
        """Send part r of ``source`` to rank r, and collect what the ranks sent here in ``out``.

        Where the parts are not all of ``unit`` elements, the host waits for the other ranks, whose counts are compared
        before anything moves.
        """
        call = _call("all_to_all", source, unit, sequence=sequence)
        is_even = set(send_counts) | set(receive_counts) == {unit}

        def work(context: StreamContext) -> None:
            rows = [[count // unit if unit else 0 for count in counts] for counts in (send_counts, receive_counts)]
            self._split_sizes.send(self._group, sequence, *rows)
            if not is_even:
                self._split_sizes.wait(self._group, sequence, str(call), Deadline(timeout))
            outgoing, incoming = _parts(source, send_counts), _parts(out, receive_counts)
            sends = [(rank, part) for rank, part in enumerate(outgoing) if rank != self._rank and part.numel()]
            receives = [(rank, part) for rank, part in enumerate(incoming) if rank != self._rank and part.numel()]
            if sends or receives:

                def exchange(nccl: Communicator, stream: int) -> None:
                    _send_all(nccl, sends, stream)
                    _receive_all(nccl, receives, stream)

                context.grouped(exchange)
            incoming[self._rank].copy_(outgoing[self._rank])

        self._executor.launch(call, (source, out), work, timeout=timeout)

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


def _call(
    operation: str,
    tensor: torch.Tensor,
    count: int,
    *,
    sequence: int,
    op: Any = "",
    root: int = -1,
    dim: int = -1,
) -> CollectiveSignature:
    name = str(tensor.dtype).removeprefix("torch.")
    return CollectiveSignature(
        operation=operation, dtype=name, reduce_op=str(op), root=root, dim=dim, count=count, sequence=sequence
    )


def _number(recipe: ReductionRecipe) -> int:
    return NCCL_DTYPES[recipe.carrier]


def _result_for(packed: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Where NCCL writes: to ``out`` when it is given ``source`` as it is, else over what it is given."""
    if source.dtype.is_complex and packed.dtype is out.dtype.to_real():
        return torch.view_as_real(out).view(-1)
    return out if packed.dtype is out.dtype else packed


def _parts(tensor: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.split(tensor, list(counts)))


def _present(*tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)


def _send_all(nccl: Communicator, parts: Sequence[tuple[int, torch.Tensor]], stream: int) -> None:
    for rank, part in parts:
        nccl.send(part, rank, stream=stream)


def _receive_all(nccl: Communicator, parts: Sequence[tuple[int, torch.Tensor]], stream: int) -> None:
    for rank, part in parts:
        nccl.recv(part, rank, stream=stream)
