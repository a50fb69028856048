"""A linear layer whose sharded input is gathered chunk by chunk, overlapped with the products (async TP)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from ferrodist.collectives.all_gather import async_all_gather, async_reduce_scatter
from ferrodist.parallel.tensor_parallel import compiled_forwards
from ferrodist.parallel.tensor_parallel.compiled_forwards import GraphPlacement, prepare_compiler
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.tensor.redistribute import record_step
from ferrodist.torch_private.compilers import is_compiling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrodist.collectives.work import PendingCollective
    from ferrodist.mesh import DeviceMesh


class AsyncTPLinear:
    """The forward of a column-parallel layer whose input is sharded along its next to last dim, the sequence.

    Forward gathers chunk by chunk of the ranks' shards, and multiplies each when it arrives; backward gathers the input
    again in the same way, for the weight's gradient, and reduce-scatters the input's gradient in chunks. Inputs with
    other placements, or of a length that has no equal chunks, are gathered first.
    """

    def __init__(self, linear: nn.Linear, chunks: int) -> None:
        self._linear, self._chunks = linear, chunks
        assert isinstance(linear.weight, DTensor), "the layer is sharded"
        self._graph_name = GraphPlacement(linear.weight.mesh, Replicate(), Replicate()).name

    def __call__(self, input: DTensor) -> torch.Tensor:  # noqa: A002 - as nn.Linear's forward has it
        """Compute the layer: (..., T/p, C) on each rank becomes (..., T, O/p)."""
        given: Any = (input, self._linear.weight, self._linear.bias)
        if torch.is_autocast_enabled("cpu") and input.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype("cpu")  # in which backward multiplies too
            given = (one if one is None else one.to(dtype) for one in given)
        tensor, weight, bias = given
        if is_compiling() and prepare_compiler():  # graphs wait for each collective
            return functional.linear(compiled_forwards.place(tensor, self._graph_name), weight, bias)
        dim = tensor.dim() - 2
        (placement,), (num_ranks,) = tensor.placements, tensor.mesh.shape
        if placement != Shard(dim) or tensor.shape[dim] % (num_ranks * self._chunks):
            return functional.linear(tensor.redistribute(Replicate()), weight, bias)
        assert isinstance(weight, DTensor), "the layer is sharded"
        local: torch.Tensor = _GatherAndMultiply.apply(  # type: ignore[no-untyped-call]
            tensor.to_local(), weight.to_local(), None if bias is None else bias.to_local(), (tensor.mesh, self._chunks)
        )
        shape = (*tensor.shape[:-1], weight.shape[0])
        (columns,) = weight.placements
        assert isinstance(columns, Shard), "the layer is sharded"
        return DTensor.from_local(local, tensor.mesh, Shard(dim + 1, columns.blocks), shape=shape)


class _GatherAndMultiply(torch.autograd.Function):
    """The layer on local shards, with the sequence first: x (t, ..., C), in c chunks (c, t/c, ..., C), of p ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunking: tuple[DeviceMesh, int]
    ) -> torch.Tensor:
        dim = x.dim() - 2
        mesh, chunks = chunking
        ctx.mesh, ctx.chunks, ctx.has_bias = mesh, chunks, bias is not None
        ctx.save_for_backward(x, weight)
        outputs = [functional.linear(chunk, weight, bias) for chunk in _gather_chunks(x, mesh, chunks)]
        # Chunks (p * t/c, ...) become the sequence (p * t, ...): each rank's chunks one after the other.
        by_rank = [chunk.view(mesh.size, chunk.shape[0] // mesh.size, *chunk.shape[1:]) for chunk in outputs]
        return torch.cat(by_rank, dim=1).flatten(0, 1).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        mesh, chunks, p = ctx.mesh, ctx.chunks, ctx.mesh.size
        grad = grads[0].movedim(-2, 0)
        t = grad.shape[0] // p // chunks
        grad_chunks = grad.reshape(p, chunks, t, *grad.shape[1:])
        pending: list[PendingCollective[torch.Tensor]] = []
        grad_weight = torch.zeros_like(weight)
        for index, chunk in enumerate(_gather_chunks(x, mesh, chunks)):
            grad_output = grad_chunks[:, index].reshape(p * t, *grad.shape[1:])
            grad_input = grad_output @ weight
            record_step(grad_input, mesh, Partial(), Shard(0))
            pending.append(async_reduce_scatter(grad_input, group=mesh.group))
            grad_weight.addmm_(grad_output.reshape(-1, grad_output.shape[-1]).t(), chunk.reshape(-1, chunk.shape[-1]))
        grad_x = torch.cat([one.wait() for one in pending]).movedim(0, -2)
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, None


def _gather_chunks(x: torch.Tensor, mesh: DeviceMesh, chunks: int) -> Iterator[torch.Tensor]:
    """The chunks of all ranks' shards, each (p * t/c, ..., C), while the next one is being gathered."""
    local_chunks = [chunk.contiguous() for chunk in x.movedim(-2, 0).chunk(chunks)]
    for chunk in local_chunks:
        record_step(chunk, mesh, Shard(0), Replicate())
    pending = async_all_gather(local_chunks[0], group=mesh.group)
    for index in range(chunks):
        gathered = pending.wait()
        if index + 1 < chunks:
            pending = async_all_gather(local_chunks[index + 1], group=mesh.group)
        yield gathered
