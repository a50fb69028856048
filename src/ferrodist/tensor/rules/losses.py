"""Losses that compute each element by itself and fold them, and their gradients."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.fold import accumulation_dtype
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.call import Rule
from ferrodist.tensor.patterns import Pattern, choices_of
from ferrodist.tensor.placement import Shard
from ferrodist.tensor.rules.pointwise import broadcast_letters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.tensor.call import Call, Choice
    from ferrodist.tensor.layout import Layout

__all__ = ["RULES", "Reduction"]

_aten = torch.ops.aten


class Reduction(IntEnum):
    """What becomes of the elements' losses, as operators number it."""

    NONE = 0
    MEAN = 1
    SUM = 2


def _folded_choices(call: Call, axis: int) -> list[Choice]:
    """Of a loss: the inputs are broadcast, and folded unless each element's loss is asked for."""
    shapes = [layout.shape for layout in call.inputs]
    ndim = max(map(len, shapes))
    keeps = call["reduction"] == Reduction.NONE
    pattern = Pattern(
        inputs=broadcast_letters(shapes, ndim),
        outputs=[range(ndim) if keeps else ()],
        folds={} if keeps else dict.fromkeys(range(ndim), ReduceOp.SUM),
    )
    return choices_of(pattern, call, axis)


def _gradient_choices(call: Call, axis: int) -> list[Choice]:
    """Of a loss's gradient: the first input is the result's gradient, a number unless each element has its loss."""
    shapes = [layout.shape for layout in call.inputs]
    ndim = len(call.results[0].shape)
    pattern = Pattern(inputs=broadcast_letters(shapes, ndim), outputs=[range(ndim)], linear=((0,),))
    return choices_of(pattern, call, axis)


def _broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _is_divided_mean(call: Call, layouts: Sequence[Layout]) -> bool:
    """Whether a mean is asked for of which this rank has a part: that is then divided by the size of the whole."""
    return call["reduction"] == Reduction.MEAN and any(
        isinstance(one, Shard) for layout in layouts for one in layout.placements
    )


def _mean_as_sum(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Mapping[str, Any]:
    """Small floats are added up in float32, as the sum may be too large for them."""
    small = accumulation_dtype(outputs[0].dtype) != outputs[0].dtype and outputs[0].ndim == 0
    return {"reduction": int(Reduction.NONE if small else Reduction.SUM)} if _is_divided_mean(call, inputs) else {}


def _mean_loss(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any] | None:
    if not _is_divided_mean(call, inputs):
        return None
    count = math.prod(_broadcast([layout.shape for layout in inputs]))
    operator, result = call.operator, outputs[0].dtype
    wide = accumulation_dtype(result)

    def mean(*given: Any, **named: Any) -> torch.Tensor:
        losses: torch.Tensor = operator(*given, **named)
        return (losses.sum(dtype=wide) / count).to(result)

    return mean


def _mean_gradient(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any] | None:
    if not _is_divided_mean(call, inputs):
        return None
    count = math.prod(outputs[0].shape)
    operator = call.operator

    def gradient(grad: torch.Tensor, *given: Any, **named: Any) -> Any:
        return operator(grad / count, *given, **named)

    return gradient


_loss_rule = Rule(choices=_folded_choices, local=_mean_loss, arguments=_mean_as_sum)
_gradient_rule = Rule(choices=_gradient_choices, local=_mean_gradient, arguments=_mean_as_sum)

RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.mse_loss.default: _loss_rule,
    _aten.smooth_l1_loss.default: _loss_rule,
    _aten.huber_loss.default: _loss_rule,
    _aten.binary_cross_entropy.default: _loss_rule,
    _aten.binary_cross_entropy_with_logits.default: _loss_rule,
    _aten.soft_margin_loss.default: _loss_rule,
    _aten.mse_loss_backward.default: _gradient_rule,
    _aten.smooth_l1_loss_backward.default: _gradient_rule,
    _aten.huber_loss_backward.default: _gradient_rule,
    _aten.binary_cross_entropy_backward.default: _gradient_rule,
    _aten.soft_margin_loss_backward.default: _gradient_rule,
}
