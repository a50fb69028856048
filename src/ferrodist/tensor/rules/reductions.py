"""Operators that fold dims: sums and their kin, whose parts are folded by the same operation.

Where a dim that goes is divided, the result is partial: of a sum by SUM, of a maximum by MAX. Operators whose parts
make no such result fold over the ranks themselves, in `moments` and `extremes`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.fold import accumulation_dtype
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.call import Rule
from ferrodist.tensor.patterns import Pattern, choices_of
from ferrodist.tensor.redistribution import extreme
from ferrodist.tensor.rules.creation import all_whole
from ferrodist.tensor.rules.folding import dividers
from ferrodist.tensor.rules.pointwise import keeps_parts
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.tensor.call import Call, Choice
    from ferrodist.tensor.layout import Layout

__all__ = ["DECOMPOSITIONS", "RULES", "is_cut_off", "kept_letters", "reduced_dims"]

_aten = torch.ops.aten

_KEEP_ALL = (_aten.all.dims, _aten.any.dims)
"""To these no dims mean none, and not all."""


def reduced_dims(call: Call) -> list[int]:
    """The dims of the first input that an operator folds: those of ``dim``, or all."""
    ndim = call.inputs[0].ndim
    dims = call.arguments.get("dim")
    if dims is None or (dims == [] and call.operator not in _KEEP_ALL):
        return list(range(ndim))
    return [dim % max(ndim, 1) for dim in ([dims] if isinstance(dims, int) else dims) if ndim]


def kept_letters(call: Call) -> list[int | None]:
    """The letters of the result of a reduction whose input has the numbers of its dims as letters."""
    gone = reduced_dims(call)
    keepdim = call.arguments.get("keepdim", False)
    return [None if dim in gone else dim for dim in range(call.inputs[0].ndim) if keepdim or dim not in gone]


def is_cut_off(call: Call) -> bool:
    """Whether elements are cast before they are folded to a dtype in which parts of them are no parts any more."""
    dtype = call.arguments.get("dtype")
    return dtype is not None and not keeps_parts(call.inputs[0].dtype, dtype)


def _folded(
    op: ReduceOp, linear: Sequence[Sequence[int]], keeps: Sequence[ReduceOp], call: Call, axis: int
) -> list[Choice]:
    is_cut = is_cut_off(call)
    pattern = Pattern(
        inputs=[range(call.inputs[0].ndim)],
        outputs=[kept_letters(call)],
        folds=dict.fromkeys(reduced_dims(call), op),
        linear=() if is_cut else linear,
        keeps=() if is_cut else keeps,
    )
    return choices_of(pattern, call, axis)


def _mean(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any] | None:
    """The sum of this rank's part, divided by the size of the whole: parts need not be of one size."""
    gone = reduced_dims(call)
    if not dividers(inputs[0], gone):
        return None
    count = math.prod(inputs[0].shape[dim] for dim in gone)
    result, shape = outputs[0].dtype, outputs[0].local_shape
    wide = accumulation_dtype(result)

    def mean(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        del given, named  # as in the layouts
        return (tensor.sum(gone, dtype=wide) / count).reshape(shape).to(result)

    return mean


def _extremum(
    op: ReduceOp, call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Callable[..., Any] | None:
    """Of an empty part, for which torch has none, what every element of another part wins against."""
    gone = reduced_dims(call)
    if all(inputs[0].local_shape[dim] for dim in gone) or any(inputs[0].shape[dim] == 0 for dim in gone):
        return None  # torch raises where the whole has no element
    shape, dtype = outputs[0].local_shape, outputs[0].dtype

    def neutral(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        del given, named  # as in the layouts
        return tensor.new_full(shape, extreme(op, dtype))

    return neutral


def _rule(op: ReduceOp, *, linear: Sequence[Sequence[int]] = (), keeps: Sequence[ReduceOp] = ()) -> Rule:
    return Rule(choices=partial(_folded, op, linear, keeps))


def _extremum_rule(op: ReduceOp) -> Rule:
    return Rule(choices=partial(_folded, op, (), (op,)), local=partial(_extremum, op))


def _both_extrema(tensor: Any, *, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    dims = () if dim is None else (dim,)
    return torch.amin(tensor, dims, keepdim), torch.amax(tensor, dims, keepdim)


_sum_rule = _rule(ReduceOp.SUM, linear=((0,),))
_mean_rule = Rule(choices=partial(_folded, ReduceOp.SUM, ((0,),), ()), local=_mean)
_count_rule = _rule(ReduceOp.SUM)
_product_rule = _rule(ReduceOp.PRODUCT, keeps=(ReduceOp.PRODUCT,))
_all_rule, _any_rule = _rule(ReduceOp.MIN), _rule(ReduceOp.MAX)
_max_rule, _min_rule = _extremum_rule(ReduceOp.MAX), _extremum_rule(ReduceOp.MIN)

RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.sum.default: _sum_rule,
    _aten.sum.dim_IntList: _sum_rule,
    _aten.nansum.default: _count_rule,
    _aten.mean.default: _mean_rule,
    _aten.mean.dim: _mean_rule,
    _aten.count_nonzero.default: _count_rule,
    _aten.count_nonzero.dim_IntList: _count_rule,
    _aten.prod.default: _product_rule,
    _aten.prod.dim_int: _product_rule,
    _aten.amax.default: _max_rule,
    _aten.max.default: _max_rule,
    _aten.amin.default: _min_rule,
    _aten.min.default: _min_rule,
    _aten.all.default: _all_rule,
    _aten.all.dim: _all_rule,
    _aten.all.dims: _all_rule,
    _aten.any.default: _any_rule,
    _aten.any.dim: _any_rule,
    _aten.any.dims: _any_rule,
    private_aten.is_all_true.default: _all_rule,
    private_aten.is_any_true.default: _any_rule,
    _aten.histc.default: Rule(choices=all_whole),
}

DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {_aten.aminmax.default: _both_extrema}
