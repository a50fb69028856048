"""Layer and group normalisation: dims that are not normalised may be divided, and the weights' gradients are sums.

Batch normalisation, of which instance normalisation is made: channels may be divided, as each is normalised alone.

What divides the batch is gathered in training, for the statistics are those of the whole batch. In evaluation nothing
is folded, and batches stay divided.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.op_strategy import EinsumPattern, Labels, OpRule, einsum_strategies
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.tensor.op_strategy import OpCall, OpStrategy
    from ferrodist.tensor.spec import DTensorSpec

_aten = torch.ops.aten
_CHANNEL = "c"


def _labels(spec: DTensorSpec, *, divides_batch: bool) -> Labels:
    """Of a tensor (B, C, ...), or of one number for each channel (C)."""
    if spec.ndim == 1:
        return [_CHANNEL]
    return [_CHANNEL if dim == 1 else dim if divides_batch else None for dim in range(spec.ndim)]


def _batch_forward_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    is_training = call.arguments.get("training", False)
    first = _labels(call.inputs[0], divides_batch=not is_training)
    pattern = EinsumPattern(
        inputs=[first, *[[_CHANNEL]] * (len(call.inputs) - 1)],
        outputs=[first, *[[_CHANNEL]] * (len(call.results) - 1)],
        # Of evaluation no statistics come out that the batch takes part in.
        reduced_locally=[label for label in first if label not in (_CHANNEL, None)],
    )
    return einsum_strategies(pattern, call, axis)


def _batch_backward_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    pattern = EinsumPattern(
        inputs=[_labels(spec, divides_batch=False) for spec in call.inputs],
        outputs=[
            [_CHANNEL] if len(result.shape) == 1 else _labels(call.inputs[0], divides_batch=False)
            for result in call.results
        ],
        linear=((0,),),
    )
    return einsum_strategies(pattern, call, axis)


def _forward(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any]:
    """In evaluation torch's kernel returns no statistics, and says of meta tensors that it does.

    It takes no tensors without elements, as the part of a rank without channels is.
    """
    operator = call.operator
    is_empty = 0 in inputs[0].local_shape and 0 not in inputs[0].shape
    expected = [(output.local_shape, output.dtype) for output in outputs]

    def forward(*given: Any) -> list[torch.Tensor]:
        if is_empty:
            return [torch.zeros(shape, dtype=dtype) for shape, dtype in expected]
        return [
            one.to(dtype) if one.shape == shape else torch.zeros(shape, dtype=dtype, device="cpu")
            for one, (shape, dtype) in zip(operator(*given), expected, strict=True)
        ]

    return forward


def _backward(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any] | None:
    """Without channels the gradients are empty: torch's kernel divides by the number of elements."""
    if 0 not in inputs[0].local_shape:
        return None
    made = [(output.local_shape, output.dtype) for output in outputs]
    wanted: Sequence[bool] = call["output_mask"]

    def backward(*given: Any) -> list[torch.Tensor | None]:
        del given
        zeros = iter([torch.zeros(shape, dtype=dtype) for shape, dtype in made])
        return [next(zeros) if want else None for want in wanted]

    return backward


def _update(tensor: Any, weight: Any, bias: Any, *given: Any) -> tuple[Any, Any, Any]:
    """Compute it, and write the new running statistics, which are the next two arguments."""
    results = private_aten.native_batch_norm_legit_functional(tensor, weight, bias, *given)
    is_training = given[2]
    if is_training:
        for running, new in zip(given, results[3:], strict=False):
            running.copy_(new)
    return results[:3]  # type: ignore[no-any-return]


_forward_rule = OpRule(strategies=_batch_forward_strategies, local=_forward)

RULES: dict[torch._ops.OpOverload, OpRule] = {
    private_aten.native_batch_norm_legit_functional.default: _forward_rule,
    private_aten.native_batch_norm_legit_no_training.default: _forward_rule,
    private_aten.native_batch_norm_legit.no_stats: _forward_rule,
    _aten.native_batch_norm_backward.default: OpRule(strategies=_batch_backward_strategies, local=_backward),
}

DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    private_aten.native_batch_norm_legit.default: _update
}


def _layer_labels(call: OpCall) -> list[int | None]:
    """The dims of the input; those that are normalised have no letter."""
    spec = call.inputs[0]
    first = spec.ndim - len(call["normalized_shape"])
    return [dim if dim < first else None for dim in range(spec.ndim)]


def _group_labels(call: OpCall) -> list[int | None]:
    """The first dim only: groups of channels, and what is behind them, are normalised together."""
    return [0, *[None] * (call.inputs[0].ndim - 1)]


def _forward_strategies(labels: Callable[[OpCall], list[int | None]], call: OpCall, axis: int) -> list[OpStrategy]:
    first = labels(call)
    outputs: list[Labels] = [first[: len(result.shape)] for result in call.results]
    weights: list[Labels] = [[None] * spec.ndim for spec in call.inputs[1:]]
    return einsum_strategies(EinsumPattern(inputs=[first, *weights], outputs=outputs), call, axis)


def _backward_strategies(labels: Callable[[OpCall], list[int | None]], call: OpCall, axis: int) -> list[OpStrategy]:
    first = labels(call)
    weights = [call[name] is not None for name in ("weight", "bias") if name in call.arguments]
    num_full = len(call.inputs) - sum(weights)
    inputs: list[Labels] = [first[: spec.ndim] for spec in call.inputs[:num_full]]
    inputs += [[None] * spec.ndim for spec in call.inputs[num_full:]]
    outputs: list[Labels] = [first] if call["output_mask"][0] else []
    outputs += [[None] * len(result.shape) for result in call.results[len(outputs) :]]
    pattern = EinsumPattern(
        inputs=inputs,
        outputs=outputs,
        reductions=dict.fromkeys([label for label in first if label is not None], ReduceOp.SUM),
        linear=((0,),),
    )
    return einsum_strategies(pattern, call, axis)


def _local_batch(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Mapping[str, Any]:
    """Group normalisation is told the size of the batch."""
    del call, outputs
    return {"N": inputs[0].local_shape[0]}


# [Note: statistics of small floats]
# Of bfloat16 and float16 throughout torch's CPU kernel returns means and deviations of that type, and says float32 of
# meta tensors. They are converted to what it says, which loses nothing, and back for the gradient.


def _wide_statistics(
    call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]
) -> Callable[..., Any] | None:
    """See [Note: statistics of small floats]."""
    del inputs
    operator = call.operator
    dtypes = [output.dtype for output in outputs]
    if len(set(dtypes)) == 1:
        return None

    def forward(*given: Any, **named: Any) -> list[torch.Tensor]:
        return [one.to(dtype) for one, dtype in zip(operator(*given, **named), dtypes, strict=True)]

    return forward


def _narrow_statistics(
    call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]
) -> Callable[..., Any] | None:
    """See [Note: statistics of small floats]."""
    del outputs
    operator = call.operator
    dtype, of_statistics, *of_weights = [spec.dtype for spec in (inputs[1], inputs[2], *inputs[4:])]
    if of_statistics == dtype or any(one != dtype for one in of_weights):
        return None

    def backward(grad: torch.Tensor, tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        narrow = [one.to(dtype) if isinstance(one, torch.Tensor) else one for one in given]
        return operator(grad, tensor, *narrow, **named)

    return backward


def _contiguous(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any]:
    """Torch's kernel of group normalisation reads memory in order: its callers see to that by the whole's stride."""
    del inputs, outputs
    operator = call.operator

    def compute(*given: Any) -> Any:
        return operator(*[one.contiguous() if isinstance(one, torch.Tensor) else one for one in given])

    return compute


RULES |= {
    _aten.native_layer_norm.default: OpRule(
        strategies=partial(_forward_strategies, _layer_labels), local=_wide_statistics
    ),
    _aten.native_layer_norm_backward.default: OpRule(
        strategies=partial(_backward_strategies, _layer_labels), local=_narrow_statistics
    ),
    _aten.native_group_norm.default: OpRule(
        strategies=partial(_forward_strategies, _group_labels), arguments=_local_batch, local=_contiguous
    ),
    _aten.native_group_norm_backward.default: OpRule(
        strategies=partial(_backward_strategies, _group_labels), arguments=_local_batch, local=_contiguous
    ),
}
