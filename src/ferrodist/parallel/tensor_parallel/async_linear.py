"""A linear layer on a sequence that is gathered in pieces, each while the product of the one before is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from ferrodist.collectives.all_gather import async_all_gather, async_reduce_scatter
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.tensor.redistribute import record_move

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrodist.collectives.work import PendingCollective
    from ferrodist.mesh import DeviceMesh


class AsyncTPLinear:
    """The forward of a column-parallel layer whose input is divided along its next to last dim, the sequence.

    Forward gathers piece after piece of the ranks' parts, and multiplies each as it comes; backward gathers the input
    again in the same way, for the weight's gradient, and sends the input's gradient in pieces too. Inputs that lie
    otherwise, or that ranks can't cut into as many equal pieces, are gathered first.

    Args:
        linear: The layer, whose weight is divided along dim 0.
        chunks: The number of pieces.
    """

    def __init__(self, linear: nn.Linear, chunks: int) -> None:
        self._linear, self._chunks = linear, chunks

    def __call__(self, input: DTensor) -> torch.Tensor:  # noqa: A002 - as nn.Linear's forward has it
        """Compute the layer: (..., T/p, C) on each rank becomes (..., T, O/p)."""
        tensor, weight, bias = self._cast(input)
        dim = tensor.dim() - 2
        (placement,), (num_ranks,) = tensor.placements, tensor.mesh.shape
        if placement != Shard(dim) or tensor.shape[dim] % (num_ranks * self._chunks):
            return functional.linear(tensor.redistribute(Replicate()), weight, bias)
        assert isinstance(weight, DTensor), "it is divided"
        local: torch.Tensor = _GatherAndMultiply.apply(  # type: ignore[no-untyped-call]
            tensor.to_local(),
            weight.to_local(),
            None if bias is None else bias.to_local(),
            (tensor.mesh, self._chunks),
        )
        shape = (*tensor.shape[:-1], weight.shape[0])
        (columns,) = weight.placements
        assert isinstance(columns, Shard), "it is divided"
        return DTensor.from_local(local, tensor.mesh, Shard(dim + 1, columns.blocks), shape=shape)

    def _cast(self, tensor: DTensor) -> tuple[Any, Any, Any]:
        """Input, weight and bias, as autocast has them for linear layers: backward then multiplies the same."""
        given = (tensor, self._linear.weight, self._linear.bias)
        if not torch.is_autocast_enabled("cpu") or tensor.dtype is torch.float64:
            return given
        dtype = torch.get_autocast_dtype("cpu")
        x, weight, bias = (one if one is None else one.to(dtype) for one in given)
        return x, weight, bias


class _GatherAndMultiply(torch.autograd.Function):
    """On this rank's parts. Sequences are first: x (t, ..., C), of p ranks in c pieces (c, t/c, ..., C)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, way: tuple[DeviceMesh, int]
    ) -> torch.Tensor:
        dim = x.dim() - 2
        mesh, chunks = way
        ctx.mesh, ctx.chunks, ctx.has_bias = mesh, chunks, bias is not None
        ctx.save_for_backward(x, weight)
        pieces = [functional.linear(piece, weight, bias) for piece in _gather_pieces(x, mesh, chunks)]
        return _join(pieces, mesh.size).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        mesh, chunks, p = ctx.mesh, ctx.chunks, ctx.mesh.size
        grad = grads[0].movedim(-2, 0)
        t = grad.shape[0] // p // chunks
        parts = grad.reshape(p, chunks, t, *grad.shape[1:])
        sent: list[PendingCollective[torch.Tensor]] = []
        grad_weight = torch.zeros_like(weight)
        for place, piece in enumerate(_gather_pieces(x, mesh, chunks)):
            mine = parts[:, place].reshape(p * t, *grad.shape[1:])
            grad_piece = mine @ weight
            record_move(grad_piece, mesh, Partial(), Shard(0))
            sent.append(async_reduce_scatter(grad_piece, group=mesh.group))
            grad_weight.addmm_(mine.reshape(-1, mine.shape[-1]).t(), piece.reshape(-1, piece.shape[-1]))
        grad_x = torch.cat([pending.wait() for pending in sent]).movedim(0, -2)
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, None


def _gather_pieces(x: torch.Tensor, mesh: DeviceMesh, chunks: int) -> Iterator[torch.Tensor]:
    """The pieces of all ranks' parts, each (p * t/c, ..., C), the next one already under way."""
    first = x.movedim(-2, 0)
    pieces = [piece.contiguous() for piece in first.chunk(chunks)]
    for piece in pieces:
        record_move(piece, mesh, Shard(0), Replicate())
    pending = async_all_gather(pieces[0], group=mesh.group)
    for place in range(chunks):
        piece = pending.wait()
        if place + 1 < chunks:
            pending = async_all_gather(pieces[place + 1], group=mesh.group)
        yield piece


def _join(pieces: list[torch.Tensor], p: int) -> torch.Tensor:
    """Pieces (p * t/c, ...) as the sequence (p * t, ...): each rank's pieces one after the other."""
    parts = [piece.view(p, piece.shape[0] // p, *piece.shape[1:]) for piece in pieces]
    return torch.cat(parts, dim=1).flatten(0, 1)
