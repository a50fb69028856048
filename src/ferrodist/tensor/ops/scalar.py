"""Operators that return a Python number, the same on every rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.ops.reduction import cross_rank_reducer
from ferrodist.tensor.redistribute import full_local, redistribute_local
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.tensor.op_strategy import OpRule
    from ferrodist.tensor.spec import DTensorSpec

_aten = torch.ops.aten


def _compare(compare: Callable[..., bool], one: Any, other: Any, *tolerance: Any, **named: Any) -> bool:
    """Return whether two tensors are equal on all ranks, by a comparison of local shards."""
    for tensor, distributed in ((one, other), (other, one)):
        if not hasattr(tensor, "_spec"):
            raise TypeError(
                f"a distributed tensor is compared with a plain one of shape {tuple(tensor.shape)}: distribute it too,"
                f" as by fd.distribute(tensor, mesh, {list(distributed.placements)}), or compare with full_tensor()"
            )
    first: DTensorSpec = one._spec
    second: DTensorSpec = other._spec
    if first.mesh.identity != second.mesh.identity:
        raise ValueError(f"tensors of different meshes are compared:\n{first.mesh}\nand\n{second.mesh}")
    if first.shape != second.shape:
        first, second = first.replicated, second.replicated
    else:
        first = first.without_partial
        second = second.with_placements(first.placements)
    shards = [redistribute_local(tensor._local, tensor._spec, spec) for tensor, spec in ((one, first), (other, second))]
    are_equal = compare(*shards, *tolerance, **named)
    reduce = cross_rank_reducer(first, tuple(range(first.mesh.ndim)))
    return bool(reduce(torch.tensor([are_equal], dtype=torch.uint8, device="cpu"), ReduceOp.MIN).item())


RULES: dict[torch._ops.OpOverload, OpRule] = {}

DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    private_aten.local_scalar_dense.default: lambda tensor: private_aten.local_scalar_dense(full_local(tensor)),
    _aten.is_same_size.default: lambda one, other: one.shape == other.shape,
    _aten.equal.default: partial(_compare, torch.equal),
    _aten.allclose.default: partial(_compare, torch.allclose),
}
