"""Softmax, cross-entropy and elementwise losses, with their gradients.

Softmax along a sharded dim reduces two numbers of each row over the ranks: the maximum and the sum of exponentials. Of
R rows over n ranks each rank sends 2R(n-1)/n elements for either; the elements themselves are not sent. The gradient
needs one such sum.

The negative log-likelihood takes inputs (N, C), (C) or, for images, (N, C, H, W). If the classes are sharded, as a
vocabulary is, nothing is sent: each rank gives the terms of the targets that are among its classes, and the result is
their partial sum. With the softmax this is the cross-entropy of Megatron-LM's vocabulary-parallel layers (Shoeybi et
al., 2019, section 3). A mean over a sharded batch sends one number, the total weight.
"""

from __future__ import annotations

import math
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp, accumulation_dtype
from ferrodist.tensor.op_strategy import (
    EinsumPattern,
    Labels,
    OpRule,
    OpStrategy,
    einsum_rule,
    einsum_strategies,
    rule_table,
)
from ferrodist.tensor.ops.pointwise import broadcast_labels
from ferrodist.tensor.ops.reduction import cross_rank_reducer, local_indices, traced_local_indices
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.tensor.spec import DTensorSpec, sharding_axes
from ferrodist.tensor.traced import traced_bounds
from ferrodist.torch_private.compilers import is_traced
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ferrodist.tensor.op_strategy import LocalFunction, OpCall


class Reduction(IntEnum):
    """The ``reduction`` of a loss, as torch's operators encode it."""

    NONE = 0
    MEAN = 1
    SUM = 2


def _loss_pattern(call: OpCall) -> EinsumPattern:
    """The pattern of an elementwise loss: the inputs are broadcast, and reduced unless the reduction is NONE."""
    shapes = [spec.shape for spec in call.inputs]
    ndim = max(map(len, shapes))
    reduced = () if call["reduction"] == Reduction.NONE else range(ndim)
    return EinsumPattern(
        inputs=broadcast_labels(shapes, ndim),
        outputs=[() if reduced else range(ndim)],
        reductions=dict.fromkeys(reduced, ReduceOp.SUM),
    )


def _loss_gradient_pattern(call: OpCall) -> EinsumPattern:
    """The pattern of an elementwise loss's gradient, whose first input is the gradient of the result."""
    ndim = call.results[0].ndim
    labels = broadcast_labels([spec.shape for spec in call.inputs], ndim)
    return EinsumPattern(inputs=labels, outputs=[range(ndim)], linear=((0,),))


def _is_sharded(spec: DTensorSpec) -> bool:
    return any(isinstance(placement, Shard) for placement in spec.placements)


def _is_sharded_mean(call: OpCall) -> bool:
    """Return whether this rank computes a mean's local sum, to be divided by the full size."""
    return call["reduction"] == Reduction.MEAN and any(map(_is_sharded, call.placed_inputs))


def _mean_as_sum(call: OpCall) -> Mapping[str, Any]:
    """Replace a mean by a sum, or by no reduction for small floats, whose sum may overflow: they are added up wide."""
    output = call.outputs[0]
    is_small = accumulation_dtype(output.dtype) != output.dtype and output.ndim == 0
    return {"reduction": int(Reduction.NONE if is_small else Reduction.SUM)} if _is_sharded_mean(call) else {}


def _mean_loss(call: OpCall) -> LocalFunction | None:
    if not _is_sharded_mean(call):
        return None
    count = math.prod(torch.broadcast_shapes(*[spec.shape for spec in call.placed_inputs]))  # type: ignore[no-untyped-call]
    operator, result = call.operator, call.outputs[0].dtype
    wide = accumulation_dtype(result)
    return lambda *given, **named: (operator(*given, **named).sum(dtype=wide) / count).to(result)


def _mean_gradient(call: OpCall) -> LocalFunction | None:
    if not _is_sharded_mean(call):
        return None
    operator, count = call.operator, math.prod(call.outputs[0].shape)
    return lambda grad, *given, **named: operator(grad / count, *given, **named)


def _class_dim(spec: DTensorSpec) -> int:
    return min(1, spec.ndim - 1)


def _nll_labels(call: OpCall, index: int) -> tuple[Labels, Labels, list[Labels]]:
    """The labels of the input at an index, of the target after it, and of the weights if there are any."""
    spec, target = call.inputs[index], call.inputs[index + 1]
    dims = range(spec.ndim)
    batch = [dim for dim in dims if dim != _class_dim(spec)] if spec.ndim > 1 else [None] * target.ndim
    # Weights are replicated: they are few, and any target may be any class.
    return dims, batch, [] if call["weight"] is None else [[None]]


def _nll_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    dims, batch, weights = _nll_labels(call, 0)
    pattern = EinsumPattern(
        inputs=[dims, batch, *weights],
        outputs=[batch if call["reduction"] == Reduction.NONE else (), ()],
        reductions=dict.fromkeys(dims, ReduceOp.SUM),
        linear=((0,),),
    )
    strategies = []
    for strategy in einsum_strategies(pattern, call, axis):
        first = strategy.inputs[0]
        is_batch_sharded = isinstance(first, Shard) and first.dim != _class_dim(call.inputs[0])
        total_weight = Partial() if call["reduction"] == Reduction.SUM and is_batch_sharded else Replicate()
        strategies.append(OpStrategy(strategy.inputs, (strategy.outputs[0], total_weight)))
    return strategies


def _nll_gradient_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    dims, batch, weights = _nll_labels(call, 1)
    grad: Labels = batch if call["reduction"] == Reduction.NONE else ()
    pattern = EinsumPattern(inputs=[grad, dims, batch, *weights, ()], outputs=[dims], linear=((0,),))
    strategies = einsum_strategies(pattern, call, axis)
    if call["reduction"] == Reduction.MEAN:
        return strategies
    # The total weight is not used, and may stay partial.
    current = call.inputs[-1].placements[axis]
    return [OpStrategy((*strategy.inputs[:-1], current), strategy.outputs) for strategy in strategies]


class _LocalClasses:
    """The classes of this rank, among which it finds targets."""

    def __init__(self, spec: DTensorSpec) -> None:
        self._spec, self.dim = spec, _class_dim(spec)
        self._num_classes = spec.shape[self.dim]
        self._indices = local_indices(spec, self.dim) if sharding_axes(spec.placements, (self.dim,)) else None

    def find(self, target: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For each target whether it counts, whether its class is local, and the local index of its class."""
        indices = self._indices
        if is_traced(target):
            target = traced_bounds(target, self._num_classes, ignore_index, "Target {} is out of bounds.")
            indices = None if indices is None else traced_local_indices(self._spec, self.dim)
        counts = target != ignore_index
        if not is_traced(target):
            wrong = counts & ((target < 0) | (target >= self._num_classes))
            if wrong.any():
                raise IndexError(f"Target {target[wrong][0].item()} is out of bounds.")
        known = torch.where(counts, target, 0).long()
        if indices is None:
            return counts, counts, known
        if not indices.numel():
            return counts, torch.zeros_like(counts), known
        index = torch.searchsorted(indices, known).clamp_(max=len(indices) - 1)
        return counts, counts & (indices[index] == known), index


def _target_weights(weight: torch.Tensor | None, target: torch.Tensor, counts: torch.Tensor, like: torch.Tensor) -> Any:
    """The weight of each target, 0 of those that don't count."""
    if weight is None:
        return counts.to(like.dtype)
    return torch.where(counts, weight[torch.where(counts, target, 0).long()].to(like.dtype), 0.0)


def _nll(call: OpCall) -> LocalFunction | None:
    spec = call.placed_inputs[0]
    if not _is_sharded(spec):
        return None
    classes = _LocalClasses(spec)
    batch_dims = [dim for dim in range(spec.ndim) if dim != classes.dim]
    reduce = cross_rank_reducer(spec, sharding_axes(spec.placements, batch_dims))
    result = call.outputs[0].dtype
    wide = accumulation_dtype(result)

    def forward(
        tensor: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counts, is_local, index = classes.find(target, ignore_index)
        if tensor.shape[classes.dim]:
            index = index.reshape(target.shape if tensor.dim() > 1 else ()).unsqueeze(classes.dim)
            picked = tensor.gather(classes.dim, index).squeeze(classes.dim).reshape(target.shape).to(wide)
        else:
            picked = torch.zeros(target.shape, dtype=wide, device="cpu")
        weights = _target_weights(weight, target, counts, picked)
        losses = torch.where(is_local, -picked * weights, 0.0)
        if reduction == Reduction.NONE:
            return losses.to(result), torch.zeros((), dtype=result, device="cpu")
        total = weights.sum()
        if reduction == Reduction.MEAN:
            total = reduce(total, ReduceOp.SUM)
            return (losses.sum() / total).to(result), total.to(result)
        return losses.sum().to(result), total.to(result)

    return forward


def _nll_gradient(call: OpCall) -> LocalFunction | None:
    spec = call.placed_inputs[1]
    if not sharding_axes(spec.placements, (_class_dim(spec),)):
        return None
    classes = _LocalClasses(spec)
    shape = call.outputs[0].local_shape

    def backward(grad: torch.Tensor, tensor: torch.Tensor, target: torch.Tensor, *given: Any) -> torch.Tensor:
        weight, reduction, ignore_index, total_weight = given
        counts, is_local, index = classes.find(target, ignore_index)
        found = tensor.new_zeros(shape)
        if not tensor.shape[classes.dim]:
            return found
        values = -_target_weights(weight, target, counts, tensor) * grad
        if reduction == Reduction.MEAN:
            values = values / total_weight
        values = torch.where(is_local, values, 0.0).to(tensor.dtype)
        if tensor.dim() == 1:
            index, values = index.reshape(()), values.reshape(())
        return found.scatter_(classes.dim, index.unsqueeze(classes.dim), values.unsqueeze(classes.dim))

    return backward


def _softmax_pattern(linear: Sequence[Sequence[int]], call: OpCall) -> EinsumPattern:
    labels = range(call.inputs[0].ndim)
    return EinsumPattern(inputs=[labels] * len(call.inputs), outputs=[labels], linear=linear)


def _softmax_dim(call: OpCall) -> tuple[int, tuple[int, ...]]:
    """The dim along which a softmax is computed, and the axes that shard it."""
    spec = call.placed_inputs[0]
    dim = call["dim"] % max(spec.ndim, 1)
    return dim, sharding_axes(spec.placements, (dim,))


def _softmax(call: OpCall) -> LocalFunction | None:
    spec, (dim, axes) = call.placed_inputs[0], _softmax_dim(call)
    if not axes:
        return None
    reduce, result = cross_rank_reducer(spec, axes), call.outputs[0].dtype
    wide, is_empty = accumulation_dtype(result), spec.local_shape[dim] == 0
    rows = [1 if other == dim else size for other, size in enumerate(spec.local_shape)]
    is_log = call.operator is private_aten.log_softmax.default
    is_safe = call.operator is private_aten.safe_softmax.default

    def forward(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        elements = tensor.to(wide)
        local = elements.new_full(rows, -math.inf) if is_empty else elements.amax(dim, keepdim=True)
        largest = reduce(local, ReduceOp.MAX)
        shifted = elements - largest
        exponentials = shifted.exp()
        total = reduce(exponentials.sum(dim, keepdim=True), ReduceOp.SUM)
        if is_log:
            return shifted.sub_(total.log_()).to(result)
        found = exponentials.div_(total)
        # Rows of masked elements alone attend to nothing.
        return (found.masked_fill_(largest == -math.inf, 0.0) if is_safe else found).to(result)

    return forward


def _softmax_gradient(call: OpCall) -> LocalFunction | None:
    spec, (dim, axes) = call.placed_inputs[0], _softmax_dim(call)
    if not axes:
        return None
    reduce, result = cross_rank_reducer(spec, axes), call.outputs[0].dtype
    is_log = call.operator is private_aten.log_softmax_backward_data.default

    def backward(grad: torch.Tensor, output: torch.Tensor, *_: Any) -> torch.Tensor:
        wide = grad.to(accumulation_dtype(grad.dtype))
        probabilities = output.to(wide.dtype).exp() if is_log else output.to(wide.dtype)
        weighted = wide if is_log else wide * output
        total = reduce(weighted.sum(dim, keepdim=True), ReduceOp.SUM)
        return torch.addcmul(weighted, probabilities, total, value=-1).to(result)

    return backward


RULES = rule_table(
    (
        einsum_rule(_loss_pattern, local=_mean_loss, arguments=_mean_as_sum),
        (
            "mse_loss.default smooth_l1_loss.default huber_loss.default binary_cross_entropy.default"
            " binary_cross_entropy_with_logits.default soft_margin_loss.default"
        ),
    ),
    (
        einsum_rule(_loss_gradient_pattern, local=_mean_gradient, arguments=_mean_as_sum),
        (
            "mse_loss_backward.default smooth_l1_loss_backward.default huber_loss_backward.default"
            " binary_cross_entropy_backward.default soft_margin_loss_backward.default"
        ),
    ),
    (OpRule(strategies=_nll_strategies, local=_nll), "nll_loss_forward.default nll_loss2d_forward.default"),
    (
        OpRule(strategies=_nll_gradient_strategies, local=_nll_gradient),
        "nll_loss_backward.default nll_loss2d_backward.default",
    ),
    (
        einsum_rule(partial(_softmax_pattern, ()), local=_softmax),
        "_softmax.default _log_softmax.default _safe_softmax.default",
    ),
    (
        einsum_rule(partial(_softmax_pattern, ((0,),)), local=_softmax_gradient),
        "_softmax_backward_data.default _log_softmax_backward_data.default",
    ),
)
