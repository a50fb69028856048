"""A linear layer on distributed tensors as one call, without a dispatch of each of its operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ferrodist.tensor.dtensor import DTensor, redistribute_grad
from ferrodist.tensor.placement import Partial, Placement, Replicate, Shard
from ferrodist.tensor.spec import DTensorSpec
from ferrodist.torch_private.compilers import outside_of_compiler


@outside_of_compiler
def linear(tensor: DTensor, weight: DTensor, bias: DTensor | None) -> torch.Tensor | None:
    """`torch.nn.functional.linear` where one call can compute it; None for others.

    The placements are those that the operators would give: a replicated input with a weight that is replicated or
    sharded by columns, or an input and a weight that are both sharded by rows.
    """
    specs = (tensor._spec, weight._spec, None if bias is None else bias._spec)
    cache, key = specs[0].dispatch_cache, (id(_Linear), *specs)
    placed = cache[key] if key in cache else cache.setdefault(key, _place(*specs))
    if placed is None:
        return None
    made: torch.Tensor = _Linear.apply(tensor, weight, bias, placed)  # type: ignore[no-untyped-call]
    return made


@dataclass(frozen=True, slots=True)
class _LinearSpecs:
    """The specs of a linear layer's output and gradients, and whether this rank adds the bias."""

    output: DTensorSpec
    grad: DTensorSpec
    """The output's gradient, as backward takes it."""
    of_input: DTensorSpec
    of_weight: DTensorSpec
    of_bias: DTensorSpec
    adds_bias: bool


def _place(tensor: DTensorSpec, weight: DTensorSpec, bias: DTensorSpec | None) -> _LinearSpecs | None:
    """The specs for the common placements; None for others."""
    mesh, last = tensor.mesh, tensor.ndim - 1
    fits = mesh.ndim == 1 and last > 0 and weight.ndim == 2 and tensor.dtype is weight.dtype
    if not fits or any(one is not None and one.mesh.identity != mesh.identity for one in (weight, bias)):
        return None
    (given,), (placed,) = tensor.placements, weight.placements
    if isinstance(given, Replicate) and isinstance(placed, Replicate):
        output: Placement = given
        of_input: Placement = given
        of_bias: Placement = given
    elif isinstance(given, Replicate) and isinstance(placed, Shard) and placed.dim == 0:
        # Each rank's columns give a part of the input's gradient.
        output, of_input, of_bias = Shard(last, placed.blocks), Partial(), placed
    elif given == Shard(last) and placed == Shard(1):
        output, of_input, of_bias = Partial(), given, Replicate()
    else:
        return None
    if bias is not None and (bias.placements != (of_bias,) or bias.dtype is not tensor.dtype):
        return None
    shape = (*tensor.shape[:-1], weight.shape[0])
    made = DTensorSpec.make(mesh, (output,), shape, tensor.dtype)
    return _LinearSpecs(
        output=made,
        grad=made.without_partial,
        of_input=DTensorSpec.make(mesh, (of_input,), tensor.shape, tensor.dtype),
        of_weight=DTensorSpec.make(mesh, (placed,), weight.shape, weight.dtype),
        of_bias=DTensorSpec.make(mesh, (of_bias,), shape[-1:], tensor.dtype),
        # Once, to what the ranks sum.
        adds_bias=bias is not None and (not isinstance(output, Partial) or tensor.coordinate == (0,)),
    )


class _Linear(torch.autograd.Function):
    """A linear layer on local shards."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, weight: DTensor, bias: DTensor | None, placed: _LinearSpecs) -> DTensor:
        ctx.save_for_backward(tensor, weight)
        ctx.placed = placed
        local_bias = bias._local if bias is not None and placed.adds_bias else None
        return DTensor._wrap(functional.linear(tensor._local, weight._local, local_bias).contiguous(), placed.output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        tensor, weight = ctx.saved_tensors
        placed: _LinearSpecs = ctx.placed
        wants_input, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grad = redistribute_grad(grads[0], placed.grad.placements, placed.grad.mesh)
        if torch.is_grad_enabled():  # for gradients of gradients
            rows, inputs = grad.flatten(0, -2), tensor.flatten(0, -2)
            return (
                grad @ weight if wants_input else None,
                rows.t() @ inputs if wants_weight else None,
                rows.sum(0) if wants_bias else None,
                None,
            )
        rows, inputs = grad._local.flatten(0, -2), tensor._local.flatten(0, -2)
        of_input = of_weight = of_bias = None
        if wants_input:
            of_input = DTensor._wrap((rows @ weight._local).view(tensor._local.shape), placed.of_input)
        if wants_weight:
            of_weight = DTensor._wrap((rows.t() @ inputs).contiguous(), placed.of_weight)
        if wants_bias:
            of_bias = DTensor._wrap(rows.sum(0), placed.of_bias)
        return of_input, of_weight, of_bias, None
