"""Layer, group, batch and instance norms: dims that are not normalised together may be sharded.

Batch normalisation, of which instance normalisation is made, normalises each channel alone, so channels may be sharded.
In training the batch is gathered, as the statistics are the full batch's; in evaluation it stays sharded. The gradients
of weights are partial sums over sharded dims.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.op_strategy import EinsumPattern, Labels, einsum_rule, make_zeros, rule_table, zeros_if_empty
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ferrodist.tensor.op_strategy import LocalFunction, OpCall

_CHANNEL = "c"


def _batch_labels(ndim: int, *, shards_batch: bool) -> Labels:
    """The labels of a tensor (B, C, ...), or of one number for each channel (C)."""
    if ndim == 1:
        return [_CHANNEL]
    return [_CHANNEL if dim == 1 else dim if shards_batch else None for dim in range(ndim)]


def _batch_forward_pattern(call: OpCall) -> EinsumPattern:
    first = _batch_labels(call.inputs[0].ndim, shards_batch=not call.arguments.get("training", False))
    return EinsumPattern(
        inputs=[first, *[[_CHANNEL]] * (len(call.inputs) - 1)],
        outputs=[first, *[[_CHANNEL]] * (len(call.results) - 1)],
        # Evaluation returns no statistics that depend on the batch.
        cross_rank=[label for label in first if label not in (_CHANNEL, None)],
    )


def _batch_backward_pattern(call: OpCall) -> EinsumPattern:
    return EinsumPattern(
        inputs=[_batch_labels(spec.ndim, shards_batch=False) for spec in call.inputs],
        outputs=[_batch_labels(result.ndim, shards_batch=False) for result in call.results],
        linear=((0,),),
    )


def _batch_forward(call: OpCall) -> LocalFunction:
    """Run torch's kernel, which in evaluation returns no statistics, though on the meta device it does."""
    operator, spec, outputs = call.operator, call.placed_inputs[0], call.outputs
    if 0 in spec.local_shape and 0 not in spec.shape:  # the kernel takes no shard of a rank without channels
        return lambda *_: make_zeros(outputs)

    def forward(*given: Any) -> list[torch.Tensor]:
        return [
            one.to(spec.dtype) if one.shape == spec.local_shape else make_zeros([spec])[0]
            for one, spec in zip(operator(*given), outputs, strict=True)
        ]

    return forward


def _update_statistics(tensor: Any, weight: Any, bias: Any, *given: Any) -> tuple[Any, Any, Any]:
    """Normalise, and in training write the running statistics, which are the first two of the other arguments."""
    results = private_aten.native_batch_norm_legit_functional(tensor, weight, bias, *given)
    if given[2]:  # training
        for running, new in zip(given, results[3:], strict=False):
            running.copy_(new)
    return results[:3]  # type: ignore[no-any-return]


def _layer_labels(call: OpCall) -> list[int | None]:
    """The labels of the input's dims, without those that are normalised."""
    spec = call.inputs[0]
    first = spec.ndim - len(call["normalized_shape"])
    return [dim if dim < first else None for dim in range(spec.ndim)]


def _group_labels(call: OpCall) -> list[int | None]:
    """A label for the batch alone: groups of channels are normalised together with the dims after them."""
    return [0, *[None] * (call.inputs[0].ndim - 1)]


def _forward_pattern(labels: Callable[[OpCall], list[int | None]], call: OpCall) -> EinsumPattern:
    first = labels(call)
    outputs: list[Labels] = [first[: len(result.shape)] for result in call.results]
    weights: list[Labels] = [[None] * spec.ndim for spec in call.inputs[1:]]
    return EinsumPattern(inputs=[first, *weights], outputs=outputs)


def _backward_pattern(labels: Callable[[OpCall], list[int | None]], call: OpCall) -> EinsumPattern:
    first = labels(call)
    weights = [call[name] is not None for name in ("weight", "bias") if name in call.arguments]
    num_full = len(call.inputs) - sum(weights)
    inputs: list[Labels] = [first[: spec.ndim] for spec in call.inputs[:num_full]]
    inputs += [[None] * spec.ndim for spec in call.inputs[num_full:]]
    outputs: list[Labels] = [first] if call["output_mask"][0] else []
    outputs += [[None] * len(result.shape) for result in call.results[len(outputs) :]]
    return EinsumPattern(
        inputs=inputs,
        outputs=outputs,
        reductions=dict.fromkeys([label for label in first if label is not None], ReduceOp.SUM),
        linear=((0,),),
    )


def _local_batch_size(call: OpCall) -> Mapping[str, Any]:
    return {"N": call.placed_inputs[0].local_shape[0]}


# [Note: statistics of small floats]
# For bfloat16 and float16 throughout, torch's CPU kernel returns means and deviations of that dtype, but float32 on the
# meta device. They are converted to what the meta device says, which loses nothing, and back for the gradient.


def _widen_statistics(call: OpCall) -> LocalFunction | None:
    """See [Note: statistics of small floats]."""
    operator, dtypes = call.operator, [output.dtype for output in call.outputs]
    if len(set(dtypes)) == 1:
        return None
    return lambda *given, **named: [one.to(dtype) for one, dtype in zip(operator(*given, **named), dtypes, strict=True)]


def _narrow_statistics(call: OpCall) -> LocalFunction | None:
    """See [Note: statistics of small floats]."""
    operator, inputs = call.operator, call.placed_inputs
    dtype, statistics, *weights = [spec.dtype for spec in (inputs[1], inputs[2], *inputs[4:])]
    if statistics == dtype or any(one != dtype for one in weights):
        return None

    def backward(grad: torch.Tensor, tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        narrow = [one.to(dtype) if isinstance(one, torch.Tensor) else one for one in given]
        return operator(grad, tensor, *narrow, **named)

    return backward


def _contiguous(call: OpCall) -> LocalFunction:
    """Call torch's kernel with contiguous shards: its callers check the full tensor's stride alone."""
    operator = call.operator
    return lambda *given: operator(*[one.contiguous() if isinstance(one, torch.Tensor) else one for one in given])


RULES = rule_table(
    (
        einsum_rule(_batch_forward_pattern, local=_batch_forward),
        (
            "_native_batch_norm_legit_functional.default _native_batch_norm_legit_no_training.default"
            " _native_batch_norm_legit.no_stats"
        ),
    ),
    (einsum_rule(_batch_backward_pattern, local=zeros_if_empty), "native_batch_norm_backward.default"),
    (einsum_rule(partial(_forward_pattern, _layer_labels), local=_widen_statistics), "native_layer_norm.default"),
    (
        einsum_rule(partial(_backward_pattern, _layer_labels), local=_narrow_statistics),
        "native_layer_norm_backward.default",
    ),
    (
        einsum_rule(partial(_forward_pattern, _group_labels), arguments=_local_batch_size, local=_contiguous),
        "native_group_norm.default",
    ),
    (
        einsum_rule(partial(_backward_pattern, _group_labels), arguments=_local_batch_size, local=_contiguous),
        "native_group_norm_backward.default",
    ),
)


def _weight_norm(direction: Any, magnitude: Any, dim: int = 0) -> tuple[Any, Any]:
    """Weight normalization (https://arxiv.org/abs/1602.07868): the weight, and the norm of each slice along a dim."""
    others = [at for at in range(direction.dim()) if at != dim % direction.dim()]
    norms = torch.linalg.vector_norm(direction, 2, others, keepdim=True)
    return direction * (magnitude / norms), norms


def _weight_norm_backward(grad: Any, direction: Any, magnitude: Any, norms: Any, dim: int) -> tuple[Any, Any]:
    """The gradients of `_weight_norm`'s direction and magnitude."""
    others = [at for at in range(direction.dim()) if at != dim % direction.dim()]
    along = (grad * direction).sum(others, keepdim=True) / norms
    return magnitude / norms * (grad - direction * (along / norms)), along


DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    private_aten.native_batch_norm_legit.default: _update_statistics,
    private_aten.weight_norm_interface.default: _weight_norm,
    private_aten.weight_norm_interface_backward.default: _weight_norm_backward,
}
