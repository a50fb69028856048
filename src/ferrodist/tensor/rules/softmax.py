"""Softmax and its kin. Along a divided dim two numbers of each row travel: its maximum, and the sum of exponentials.

Of R rows over n ranks each sends 2R(n-1)/n elements for either of them; the elements themselves stay where they are.
The gradient needs one such sum.
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
from ferrodist.tensor.rules.folding import dividers, fold_over
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.tensor.call import Call, Choice
    from ferrodist.tensor.layout import Layout

__all__ = ["RULES"]

_aten = torch.ops.aten


def _choices(linear: Sequence[Sequence[int]], call: Call, axis: int) -> list[Choice]:
    letters = range(call.inputs[0].ndim)
    pattern = Pattern(inputs=[letters] * len(call.inputs), outputs=[letters], linear=linear)
    return choices_of(pattern, call, axis)


def _divided_dim(call: Call, layout: Layout) -> tuple[int, tuple[int, ...]]:
    """The dim along which it is computed, and the axes that divide it."""
    dim = call["dim"] % max(layout.ndim, 1)
    return dim, dividers(layout, (dim,))


def _forward(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any] | None:
    layout = inputs[0]
    dim, axes = _divided_dim(call, layout)
    if not axes:
        return None
    fold = fold_over(layout, axes)
    result = outputs[0].dtype
    wide = accumulation_dtype(result)
    is_empty = layout.local_shape[dim] == 0
    rows = [1 if place == dim else size for place, size in enumerate(layout.local_shape)]
    is_log = call.operator is private_aten.log_softmax.default
    is_safe = call.operator is private_aten.safe_softmax.default

    def forward(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        del given, named  # as in the layouts
        elements = tensor.to(wide)
        own = elements.new_full(rows, -math.inf) if is_empty else elements.amax(dim, keepdim=True)
        largest = fold(own, ReduceOp.MAX)
        shifted = elements - largest
        exponentials = shifted.exp()
        total = fold(exponentials.sum(dim, keepdim=True), ReduceOp.SUM)
        if is_log:
            return shifted.sub_(total.log_()).to(result)
        found = exponentials.div_(total)
        # Rows of nothing but masked elements attend to nothing.
        return (found.masked_fill_(largest == -math.inf, 0.0) if is_safe else found).to(result)

    return forward


def _backward(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any] | None:
    layout = inputs[0]
    dim, axes = _divided_dim(call, layout)
    if not axes:
        return None
    fold = fold_over(layout, axes)
    result = outputs[0].dtype
    is_log = call.operator is private_aten.log_softmax_backward_data.default

    def backward(grad: torch.Tensor, output: torch.Tensor, *given: Any) -> torch.Tensor:
        del given  # as in the layouts
        wide = grad.to(accumulation_dtype(grad.dtype))
        if is_log:
            total = fold(wide.sum(dim, keepdim=True), ReduceOp.SUM)
            return torch.addcmul(wide, output.to(wide.dtype).exp(), total, value=-1).to(result)
        weighted = wide * output
        total = fold(weighted.sum(dim, keepdim=True), ReduceOp.SUM)
        return torch.addcmul(weighted, output.to(wide.dtype), total, value=-1).to(result)

    return backward


_forward_rule = Rule(choices=partial(_choices, ()), local=_forward)
_backward_rule = Rule(choices=partial(_choices, ((0,),)), local=_backward)

RULES: dict[torch._ops.OpOverload, Rule] = {
    private_aten.softmax.default: _forward_rule,
    private_aten.log_softmax.default: _forward_rule,
    private_aten.safe_softmax.default: _forward_rule,
    private_aten.softmax_backward_data.default: _backward_rule,
    private_aten.log_softmax_backward_data.default: _backward_rule,
}
