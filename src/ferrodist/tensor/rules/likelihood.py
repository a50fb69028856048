"""The negative log-likelihood of classes: of inputs (N, C) or (C), and of images (N, C, H, W).

Where the classes are divided (a vocabulary over the ranks of an axis) nothing is sent: each rank gives the terms of the
targets that are among its classes, and the result is their sum. With the softmax of `softmax` this is the cross-entropy
of Megatron-LM's vocabulary-parallel layers (Shoeybi et al., 2019, section 3). A mean over a batch that is divided sends
one number, the total weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.fold import accumulation_dtype
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.call import Choice, Rule
from ferrodist.tensor.patterns import Letters, Pattern, choices_of
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.tensor.rules.folding import dividers, fold_over, positions
from ferrodist.tensor.rules.losses import Reduction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.tensor.call import Call
    from ferrodist.tensor.layout import Layout

__all__ = ["RULES"]

_aten = torch.ops.aten


def _class_dim(layout: Layout) -> int:
    return min(1, layout.ndim - 1)


def _letters(call: Call, place: int) -> tuple[Letters, Letters, list[Letters]]:
    """The letters of the input, whose number is given, of the target after it, and of the weights if there are any."""
    layout, target = call.inputs[place], call.inputs[place + 1]
    dims = range(layout.ndim)
    batch = [dim for dim in dims if dim != _class_dim(layout)] if layout.ndim > 1 else [None] * target.ndim
    # Weights are whole: they are few, and any target may be any class.
    return dims, batch, [] if call["weight"] is None else [[None]]


def _forward_choices(call: Call, axis: int) -> list[Choice]:
    dims, batch, weights = _letters(call, 0)
    pattern = Pattern(
        inputs=[dims, batch, *weights],
        outputs=[batch if call["reduction"] == Reduction.NONE else (), ()],
        folds=dict.fromkeys(dims, ReduceOp.SUM),
        linear=((0,),),
    )
    along = _class_dim(call.inputs[0])
    choices = []
    for choice in choices_of(pattern, call, axis):
        first = choice.inputs[0]
        in_parts = call["reduction"] == Reduction.SUM and isinstance(first, Shard) and first.dim != along
        choices.append(Choice(choice.inputs, (choice.outputs[0], Partial() if in_parts else Replicate())))
    return choices


def _backward_choices(call: Call, axis: int) -> list[Choice]:
    dims, batch, weights = _letters(call, 1)
    grad: Letters = batch if call["reduction"] == Reduction.NONE else ()
    pattern = Pattern(inputs=[grad, dims, batch, *weights, ()], outputs=[dims], linear=((0,),))
    choices = choices_of(pattern, call, axis)
    if call["reduction"] == Reduction.MEAN:
        return choices
    # The total weight is not used, and may stay in parts.
    now = call.inputs[-1].placements[axis]
    return [Choice((*choice.inputs[:-1], now), choice.outputs) for choice in choices]


class _Terms:
    """Which targets are among this rank's classes."""

    def __init__(self, layout: Layout) -> None:
        self.dim = _class_dim(layout)
        self._num_classes = layout.shape[self.dim]
        self._positions = positions(layout, self.dim) if dividers(layout, (self.dim,)) else None

    def find(self, target: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For each target whether it counts, whether it is here, and the place of its class in this rank's part.

        Raises:
            IndexError: A target is no class.
        """
        counts = target != ignore_index
        wrong = counts & ((target < 0) | (target >= self._num_classes))
        if wrong.any():
            raise IndexError(f"Target {target[wrong][0].item()} is out of bounds.")
        known = torch.where(counts, target, 0).long()
        if self._positions is None:
            return counts, counts, known
        if not self._positions.numel():
            return counts, torch.zeros_like(counts), known
        index = torch.searchsorted(self._positions, known).clamp_(max=len(self._positions) - 1)
        return counts, counts & (self._positions[index] == known), index


def _weights(weight: torch.Tensor | None, target: torch.Tensor, counts: torch.Tensor, like: torch.Tensor) -> Any:
    """The weight of each target, 0 of those that don't count."""
    if weight is None:
        return counts.to(like.dtype)
    return torch.where(counts, weight[torch.where(counts, target, 0).long()].to(like.dtype), 0.0)


def _nll_forward(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any] | None:
    del call
    layout = inputs[0]
    if not any(isinstance(placement, Shard) for placement in layout.placements):
        return None
    terms = _Terms(layout)
    fold = fold_over(layout, dividers(layout, [dim for dim in range(layout.ndim) if dim != terms.dim]))
    result = outputs[0].dtype
    wide = accumulation_dtype(result)

    def forward(
        tensor: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counts, here, index = terms.find(target, ignore_index)
        if tensor.shape[terms.dim]:
            place = index.reshape(target.shape if tensor.dim() > 1 else ()).unsqueeze(terms.dim)
            picked = tensor.gather(terms.dim, place).squeeze(terms.dim).reshape(target.shape).to(wide)
        else:
            picked = torch.zeros(target.shape, dtype=wide, device="cpu")
        weights = _weights(weight, target, counts, picked)
        losses = torch.where(here, -picked * weights, 0.0)
        if reduction == Reduction.NONE:
            return losses.to(result), torch.zeros((), dtype=result, device="cpu")
        total = weights.sum()
        if reduction == Reduction.MEAN:
            total = fold(total, ReduceOp.SUM)
            return (losses.sum() / total).to(result), total.to(result)
        return losses.sum().to(result), total.to(result)

    return forward


def _nll_backward(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any] | None:
    del call
    layout = inputs[1]
    if not dividers(layout, (_class_dim(layout),)):
        return None
    terms = _Terms(layout)
    shape = outputs[0].local_shape

    def backward(grad: torch.Tensor, tensor: torch.Tensor, target: torch.Tensor, *given: Any) -> torch.Tensor:
        weight, reduction, ignore_index, total_weight = given
        counts, here, index = terms.find(target, ignore_index)
        found = tensor.new_zeros(shape)
        if not tensor.shape[terms.dim]:
            return found
        values = -_weights(weight, target, counts, tensor) * grad
        if reduction == Reduction.MEAN:
            values = values / total_weight
        values = torch.where(here, values, 0.0).to(tensor.dtype)
        if tensor.dim() == 1:
            index, values = index.reshape(()), values.reshape(())
        return found.scatter_(terms.dim, index.unsqueeze(terms.dim), values.unsqueeze(terms.dim))

    return backward


_nll_forward_rule = Rule(choices=_forward_choices, local=_nll_forward)
_nll_backward_rule = Rule(choices=_backward_choices, local=_nll_backward)

RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.nll_loss_forward.default: _nll_forward_rule,
    _aten.nll_loss2d_forward.default: _nll_forward_rule,
    _aten.nll_loss_backward.default: _nll_backward_rule,
    _aten.nll_loss2d_backward.default: _nll_backward_rule,
}
