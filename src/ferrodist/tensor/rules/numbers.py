"""Operators whose result is a number of Python's: the same on every rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.redistribution import redistribute_local
from ferrodist.tensor.rules.folding import fold_over
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.tensor.layout import Layout

__all__ = ["DECOMPOSITIONS", "RULES"]

_aten = torch.ops.aten


def _number(tensor: Any) -> Any:
    """The element of a tensor that has one."""
    layout: Layout = tensor._layout
    return private_aten.local_scalar_dense(redistribute_local(tensor._local, layout, layout.whole))


def _compare(compare: Callable[..., bool], one: Any, other: Any, *tolerance: Any, **named: Any) -> bool:
    """Whether all ranks find their parts to be alike."""
    for tensor, beside in ((one, other), (other, one)):
        if not hasattr(tensor, "_layout"):
            raise TypeError(
                f"a distributed tensor is compared with a plain one of shape {tuple(tensor.shape)}: distribute it too,"
                f" as by fd.distribute(tensor, mesh, {list(beside.placements)}), or compare with full_tensor()"
            )
    here: Layout = one._layout
    there: Layout = other._layout
    if here.mesh.identity != there.mesh.identity:
        raise ValueError(f"tensors of different meshes are compared:\n{here.mesh}\nand\n{there.mesh}")
    if here.shape != there.shape:
        # Both are whole, and compared as any two are.
        here, there = here.whole, there.whole
    else:
        here = here.folded
        there = there.placed(here.placements)
    parts = [
        redistribute_local(tensor._local, tensor._layout, layout) for tensor, layout in ((one, here), (other, there))
    ]
    alike = compare(*parts, *tolerance, **named)
    fold = fold_over(here, tuple(range(here.mesh.ndim)))
    return bool(fold(torch.tensor([alike], dtype=torch.uint8, device="cpu"), ReduceOp.MIN).item())


RULES: dict[torch._ops.OpOverload, Any] = {}

DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    private_aten.local_scalar_dense.default: _number,
    _aten.is_same_size.default: lambda one, other: one.shape == other.shape,
    _aten.equal.default: partial(_compare, torch.equal),
    _aten.allclose.default: partial(_compare, torch.allclose),
}
