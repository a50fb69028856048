"""The negative log-likelihood of classes: of inputs (N, C) or (C), and of images (N, C, H, W).

Where the classes are divided (a vocabulary over the ranks of an axis) nothing is sent: each rank gives the terms of the
targets that are among its classes, and the result is their sum. With the softmax of `softmax` this is the cross-entropy
of Megatron-LM's vocabulary-parallel layers (Shoeybi et al., 2019, section 3). A mean over a batch that is divided sends
one number, the total weight.

Losses that compute each element by itself and fold them, and their gradients.

Softmax and its kin. Along a divided dim two numbers of each row travel: its maximum, and the sum of exponentials.

Of R rows over n ranks each sends 2R(n-1)/n elements for either of them; the elements themselves stay where they are.
The gradient needs one such sum.
"""

from __future__ import annotations

import math
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp, accumulation_dtype
from ferrodist.tensor.op_strategy import EinsumPattern, Labels, OpRule, OpStrategy, einsum_strategies
from ferrodist.tensor.ops.pointwise import broadcast_labels
from ferrodist.tensor.ops.reduction import cross_rank_reducer, local_indices, sharding_axes
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.tensor.op_strategy import OpCall
    from ferrodist.tensor.spec import DTensorSpec

_aten = torch.ops.aten


class Reduction(IntEnum):
    """What becomes of the elements' losses, as operators number it."""

    NONE = 0
    MEAN = 1
    SUM = 2


def _reduction_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    """Of a loss: the inputs are broadcast, and folded unless each element's loss is asked for."""
    shapes = [spec.shape for spec in call.inputs]
    ndim = max(map(len, shapes))
    commuting = call["reduction"] == Reduction.NONE
    pattern = EinsumPattern(
        inputs=broadcast_labels(shapes, ndim),
        outputs=[range(ndim) if commuting else ()],
        reductions={} if commuting else dict.fromkeys(range(ndim), ReduceOp.SUM),
    )
    return einsum_strategies(pattern, call, axis)


def _gradient_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    """Of a loss's gradient: the first input is the result's gradient, a number unless each element has its loss."""
    shapes = [spec.shape for spec in call.inputs]
    ndim = len(call.results[0].shape)
    pattern = EinsumPattern(inputs=broadcast_labels(shapes, ndim), outputs=[range(ndim)], linear=((0,),))
    return einsum_strategies(pattern, call, axis)


def _broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _is_divided_mean(call: OpCall, specs: Sequence[DTensorSpec]) -> bool:
    """Whether a mean is asked for of which this rank has a part: that is then divided by the size of the whole."""
    return call["reduction"] == Reduction.MEAN and any(
        isinstance(one, Shard) for spec in specs for one in spec.placements
    )


def _mean_as_sum(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Mapping[str, Any]:
    """Small floats are added up in float32, as the sum may be too large for them."""
    small = accumulation_dtype(outputs[0].dtype) != outputs[0].dtype and outputs[0].ndim == 0
    return {"reduction": int(Reduction.NONE if small else Reduction.SUM)} if _is_divided_mean(call, inputs) else {}


def _mean_loss(
    call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]
) -> Callable[..., Any] | None:
    if not _is_divided_mean(call, inputs):
        return None
    count = math.prod(_broadcast([spec.shape for spec in inputs]))
    operator, result = call.operator, outputs[0].dtype
    wide = accumulation_dtype(result)

    def mean(*given: Any, **named: Any) -> torch.Tensor:
        losses: torch.Tensor = operator(*given, **named)
        return (losses.sum(dtype=wide) / count).to(result)

    return mean


def _mean_gradient(
    call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]
) -> Callable[..., Any] | None:
    if not _is_divided_mean(call, inputs):
        return None
    count = math.prod(outputs[0].shape)
    operator = call.operator

    def gradient(grad: torch.Tensor, *given: Any, **named: Any) -> Any:
        return operator(grad / count, *given, **named)

    return gradient


_loss_rule = OpRule(strategies=_reduction_strategies, local=_mean_loss, arguments=_mean_as_sum)
_gradient_rule = OpRule(strategies=_gradient_strategies, local=_mean_gradient, arguments=_mean_as_sum)

RULES: dict[torch._ops.OpOverload, OpRule] = {
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


def _class_dim(spec: DTensorSpec) -> int:
    return min(1, spec.ndim - 1)


def _labels(call: OpCall, place: int) -> tuple[Labels, Labels, list[Labels]]:
    """The letters of the input, whose number is given, of the target after it, and of the weights if there are any."""
    spec, target = call.inputs[place], call.inputs[place + 1]
    dims = range(spec.ndim)
    batch = [dim for dim in dims if dim != _class_dim(spec)] if spec.ndim > 1 else [None] * target.ndim
    # Weights are whole: they are few, and any target may be any class.
    return dims, batch, [] if call["weight"] is None else [[None]]


def _forward_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    dims, batch, weights = _labels(call, 0)
    pattern = EinsumPattern(
        inputs=[dims, batch, *weights],
        outputs=[batch if call["reduction"] == Reduction.NONE else (), ()],
        reductions=dict.fromkeys(dims, ReduceOp.SUM),
        linear=((0,),),
    )
    along = _class_dim(call.inputs[0])
    strategies = []
    for strategy in einsum_strategies(pattern, call, axis):
        first = strategy.inputs[0]
        in_parts = call["reduction"] == Reduction.SUM and isinstance(first, Shard) and first.dim != along
        strategies.append(OpStrategy(strategy.inputs, (strategy.outputs[0], Partial() if in_parts else Replicate())))
    return strategies


def _backward_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    dims, batch, weights = _labels(call, 1)
    grad: Labels = batch if call["reduction"] == Reduction.NONE else ()
    pattern = EinsumPattern(inputs=[grad, dims, batch, *weights, ()], outputs=[dims], linear=((0,),))
    strategies = einsum_strategies(pattern, call, axis)
    if call["reduction"] == Reduction.MEAN:
        return strategies
    # The total weight is not used, and may stay in parts.
    now = call.inputs[-1].placements[axis]
    return [OpStrategy((*strategy.inputs[:-1], now), strategy.outputs) for strategy in strategies]


class _Terms:
    """Which targets are among this rank's classes."""

    def __init__(self, spec: DTensorSpec) -> None:
        self.dim = _class_dim(spec)
        self._num_classes = spec.shape[self.dim]
        self._cached_indices = local_indices(spec, self.dim) if sharding_axes(spec, (self.dim,)) else None

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
        if self._cached_indices is None:
            return counts, counts, known
        if not self._cached_indices.numel():
            return counts, torch.zeros_like(counts), known
        index = torch.searchsorted(self._cached_indices, known).clamp_(max=len(self._cached_indices) - 1)
        return counts, counts & (self._cached_indices[index] == known), index


def _weights(weight: torch.Tensor | None, target: torch.Tensor, counts: torch.Tensor, like: torch.Tensor) -> Any:
    """The weight of each target, 0 of those that don't count."""
    if weight is None:
        return counts.to(like.dtype)
    return torch.where(counts, weight[torch.where(counts, target, 0).long()].to(like.dtype), 0.0)


def _nll_forward(
    call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]
) -> Callable[..., Any] | None:
    del call
    spec = inputs[0]
    if not any(isinstance(placement, Shard) for placement in spec.placements):
        return None
    terms = _Terms(spec)
    fold = cross_rank_reducer(spec, sharding_axes(spec, [dim for dim in range(spec.ndim) if dim != terms.dim]))
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


def _nll_backward(
    call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]
) -> Callable[..., Any] | None:
    del call
    spec = inputs[1]
    if not sharding_axes(spec, (_class_dim(spec),)):
        return None
    terms = _Terms(spec)
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


_nll_forward_rule = OpRule(strategies=_forward_strategies, local=_nll_forward)
_nll_backward_rule = OpRule(strategies=_backward_strategies, local=_nll_backward)

RULES |= {
    _aten.nll_loss_forward.default: _nll_forward_rule,
    _aten.nll_loss2d_forward.default: _nll_forward_rule,
    _aten.nll_loss_backward.default: _nll_backward_rule,
    _aten.nll_loss2d_backward.default: _nll_backward_rule,
}


def _strategies(linear: Sequence[Sequence[int]], call: OpCall, axis: int) -> list[OpStrategy]:
    labels = range(call.inputs[0].ndim)
    pattern = EinsumPattern(inputs=[labels] * len(call.inputs), outputs=[labels], linear=linear)
    return einsum_strategies(pattern, call, axis)


def _divided_dim(call: OpCall, spec: DTensorSpec) -> tuple[int, tuple[int, ...]]:
    """The dim along which it is computed, and the axes that divide it."""
    dim = call["dim"] % max(spec.ndim, 1)
    return dim, sharding_axes(spec, (dim,))


def _forward(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any] | None:
    spec = inputs[0]
    dim, axes = _divided_dim(call, spec)
    if not axes:
        return None
    fold = cross_rank_reducer(spec, axes)
    result = outputs[0].dtype
    wide = accumulation_dtype(result)
    is_empty = spec.local_shape[dim] == 0
    rows = [1 if place == dim else size for place, size in enumerate(spec.local_shape)]
    is_log = call.operator is private_aten.log_softmax.default
    is_safe = call.operator is private_aten.safe_softmax.default

    def forward(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        del given, named  # as in the layouts
        elements = tensor.to(wide)
        owned_grad = elements.new_full(rows, -math.inf) if is_empty else elements.amax(dim, keepdim=True)
        largest = fold(owned_grad, ReduceOp.MAX)
        shifted = elements - largest
        exponentials = shifted.exp()
        total = fold(exponentials.sum(dim, keepdim=True), ReduceOp.SUM)
        if is_log:
            return shifted.sub_(total.log_()).to(result)
        found = exponentials.div_(total)
        # Rows of nothing but masked elements attend to nothing.
        return (found.masked_fill_(largest == -math.inf, 0.0) if is_safe else found).to(result)

    return forward


def _backward(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any] | None:
    spec = inputs[0]
    dim, axes = _divided_dim(call, spec)
    if not axes:
        return None
    fold = cross_rank_reducer(spec, axes)
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


_forward_rule = OpRule(strategies=partial(_strategies, ()), local=_forward)
_backward_rule = OpRule(strategies=partial(_strategies, ((0,),)), local=_backward)

RULES |= {
    private_aten.softmax.default: _forward_rule,
    private_aten.log_softmax.default: _forward_rule,
    private_aten.safe_softmax.default: _forward_rule,
    private_aten.softmax_backward_data.default: _backward_rule,
    private_aten.log_softmax_backward_data.default: _backward_rule,
}
