"""Where the largest and smallest elements are, and operators that put a dim in order or run along it."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.call import Rule
from ferrodist.tensor.layout import contiguous_stride
from ferrodist.tensor.patterns import Pattern, choices_of
from ferrodist.tensor.redistribution import extreme
from ferrodist.tensor.rules.folding import dividers, fold_over, positions
from ferrodist.tensor.rules.moments import settled_choices
from ferrodist.tensor.rules.reductions import is_cut_off, kept_letters, reduced_dims

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.tensor.call import Call, Choice
    from ferrodist.tensor.layout import Layout

__all__ = ["RULES"]

_aten = torch.ops.aten
_NOWHERE = torch.iinfo(torch.int64).max


def _find(op: ReduceOp, call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any] | None:
    """Each part's extremum and its place in the whole; of equal ones the first counts, as torch has it."""
    layout = inputs[0]
    gone = reduced_dims(call)
    axes = dividers(layout, gone)
    if not axes or any(layout.shape[dim] == 0 for dim in gone):  # of nothing there is none: torch raises
        return None
    fold = fold_over(layout, axes)
    dim = call["dim"]
    where = [positions(layout, dim) for dim in gone]
    whole = contiguous_stride([layout.shape[dim] for dim in gone])
    sizes = [layout.local_shape[dim] for dim in gone]
    shape = outputs[0].local_shape

    def find(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        del given, named  # as in the layouts
        flat, along = (tensor.reshape(-1), 0) if dim is None else (tensor, dim)
        if math.prod(sizes):
            values, index = flat.max(along) if op is ReduceOp.MAX else flat.min(along)
            parts = torch.unravel_index(index, sizes)
            steps = [place[part] * step for place, part, step in zip(where, parts, whole, strict=True)]
            index = torch.stack(steps).sum(0)
        else:
            values = tensor.new_full(shape, extreme(op, tensor.dtype))
            index = torch.full(shape, _NOWHERE, device="cpu")
        values, index = values.reshape(shape), index.reshape(shape)
        best = fold(values, op)
        # A NaN is the extremum wherever there is one.
        is_best = (values == best) | (values != values)  # noqa: PLR0124
        index = fold(torch.where(is_best, index, _NOWHERE), ReduceOp.MIN)
        return (best, index) if len(outputs) == 2 else index

    return find


def _along(linear: Sequence[Sequence[int]], call: Call, axis: int) -> list[Choice]:
    """The dim that it runs along must be whole; the others may be divided."""
    ndim = call.inputs[0].ndim
    dim = call["dim"] % max(ndim, 1)
    letters = [None if place == dim else place for place in range(ndim)]
    pattern = Pattern(
        inputs=[letters], outputs=[letters] * len(call.results), linear=() if is_cut_off(call) else linear
    )
    return choices_of(pattern, call, axis)


def _picked(call: Call, axis: int) -> list[Choice]:
    """Reductions that need a whole dim."""
    gone = reduced_dims(call)
    letters = [None if dim in gone else dim for dim in range(call.inputs[0].ndim)]
    pattern = Pattern(inputs=[letters], outputs=[kept_letters(call)] * len(call.results))
    return choices_of(pattern, call, axis)


_highest = Rule(choices=settled_choices, local=partial(_find, ReduceOp.MAX))
_lowest = Rule(choices=settled_choices, local=partial(_find, ReduceOp.MIN))
_cumsum_rule, _order_rule = Rule(choices=partial(_along, ((0,),))), Rule(choices=partial(_along, ()))
_pick_rule = Rule(choices=_picked)

RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.argmax.default: _highest,
    _aten.argmin.default: _lowest,
    _aten.max.dim: _highest,
    _aten.min.dim: _lowest,
    _aten.cumsum.default: _cumsum_rule,
    _aten.cumprod.default: _order_rule,
    _aten.cummax.default: _order_rule,
    _aten.cummin.default: _order_rule,
    _aten.logcumsumexp.default: _order_rule,
    _aten.topk.default: _order_rule,
    _aten.sort.default: _order_rule,
    _aten.sort.stable: _order_rule,
    _aten.median.default: _pick_rule,
    _aten.median.dim: _pick_rule,
    _aten.nanmedian.default: _pick_rule,
    _aten.nanmedian.dim: _pick_rule,
    _aten.kthvalue.default: _pick_rule,
    _aten.mode.default: _pick_rule,
}
