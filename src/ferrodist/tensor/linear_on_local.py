"""Linear layers on plain local tensors with the shards of distributed parameters, and the sums over ranks around them.

`share_input` and `sum_over_ranks` are each other's gradient, as in M. Shoeybi et al., "Megatron-LM", 2019: so gradients
of gradients are right, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from ferrodist.collectives.reduce import allreduce
from ferrodist.tensor.dtensor import DTensor, owned_grad
from ferrodist.tensor.placement import Partial, Replicate
from ferrodist.tensor.redistribute import record_step

if TYPE_CHECKING:
    from ferrodist.mesh import DeviceMesh


def share_input(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A replicated tensor for layers sharded by columns: its gradient is the sum of the ranks' gradients."""
    made: torch.Tensor = _SharedInput.apply(tensor, mesh)  # type: ignore[no-untyped-call]
    return made


class _SharedInput(torch.autograd.Function):
    """`share_input`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        if torch.is_grad_enabled():
            return _SumOverRanks.apply(grads[0], ctx.mesh), None  # type: ignore[no-untyped-call]
        return _sum_in_place(owned_grad(grads[0]), ctx.mesh), None


class _SumOverRanks(torch.autograd.Function):
    """The sum of the ranks' tensors, whose gradient is replicated."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return _sum_in_place(tensor.clone(memory_format=torch.contiguous_format), mesh)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return share_input(grads[0], ctx.mesh), None


def linear_on_local(
    tensor: torch.Tensor, weight: DTensor, bias: DTensor | None, mesh: DeviceMesh | None
) -> torch.Tensor:
    """A linear layer of this rank's shards of the parameters on a plain tensor of at least two dims.

    The input's gradient is this rank's part. With a mesh the weight is sharded by rows: the result is summed over its
    ranks, and has the bias once.
    """
    made: torch.Tensor = _LinearOnLocal.apply(tensor, weight, bias, mesh)  # type: ignore[no-untyped-call]
    return made


class _LinearOnLocal(torch.autograd.Function):
    """`linear_on_local`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, weight: DTensor, bias: DTensor | None, mesh: DeviceMesh | None
    ) -> torch.Tensor:
        ctx.save_for_backward(tensor, weight)
        ctx.mesh, ctx.bias_spec = mesh, None if bias is None else bias._spec
        adds_bias = bias is not None and (mesh is None or mesh.group.rank == 0)
        result = functional.linear(tensor, weight._local, bias._local if bias is not None and adds_bias else None)
        return result if mesh is None else _sum_in_place(result.contiguous(), mesh)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        tensor, weight = ctx.saved_tensors
        grad = grads[0]
        wants_input, wants_weight, wants_bias, _ = ctx.needs_input_grad
        of_input = of_weight = of_bias = None
        if torch.is_grad_enabled():  # for gradients of gradients
            if wants_bias:  # without a sum over ranks, for a bias of layers by rows is replicated
                of_bias = _distribute(grad.flatten(0, -2).sum(0), ctx.bias_spec)
            grad = grad if ctx.mesh is None else share_input(grad, ctx.mesh)
            rows = grad.flatten(0, -2)
            if wants_input:
                of_input = grad @ weight.to_local()
            if wants_weight:
                of_weight = _distribute(rows.t() @ tensor.flatten(0, -2), weight._spec)
            return of_input, of_weight, of_bias, None
        rows = grad.flatten(0, -2)
        if wants_input:
            of_input = (rows @ weight._local).view(tensor.shape)
        if wants_weight:
            of_weight = DTensor._wrap((rows.t() @ tensor.flatten(0, -2)).contiguous(), weight._spec)
        if wants_bias:
            of_bias = DTensor._wrap(rows.sum(0), ctx.bias_spec)
        return of_input, of_weight, of_bias, None


def _sum_in_place(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    record_step(tensor, mesh, Partial(), Replicate())
    return allreduce(tensor, group=mesh.group, out=tensor)


def _distribute(local: torch.Tensor, spec: Any) -> DTensor:
    return DTensor.from_local(local, spec.mesh, spec.placements, shape=spec.shape)
