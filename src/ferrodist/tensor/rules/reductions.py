"""Operators that fold dims: sums and their kin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.call import Rule
from ferrodist.tensor.patterns import Pattern, choices_of

if TYPE_CHECKING:
    from ferrodist.tensor.call import Call, Choice

__all__ = ["RULES", "kept_letters", "reduced_dims"]

_aten = torch.ops.aten


def reduced_dims(call: Call) -> list[int]:
    """The dims of the first input that an operator folds: those of ``dim``, or all."""
    ndim = call.inputs[0].ndim
    dims = call.arguments.get("dim")
    if dims is None or dims == []:
        return list(range(ndim))
    return [dim % max(ndim, 1) for dim in ([dims] if isinstance(dims, int) else dims)]


def kept_letters(call: Call) -> list[int | None]:
    """The letters of the result of a reduction whose input has the numbers of its dims as letters."""
    gone = reduced_dims(call)
    keepdim = call.arguments.get("keepdim", False)
    return [None if dim in gone else dim for dim in range(call.inputs[0].ndim) if keepdim or dim not in gone]


def _sum(call: Call, axis: int) -> list[Choice]:
    gone = reduced_dims(call)
    pattern = Pattern(
        inputs=[range(call.inputs[0].ndim)],
        outputs=[kept_letters(call)],
        folds=dict.fromkeys(gone, ReduceOp.SUM),
        linear=((0,),),
    )
    return choices_of(pattern, call, axis)


RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.sum.default: Rule(choices=_sum),
    _aten.sum.dim_IntList: Rule(choices=_sum),
}
