"""Convolutions: the batch, the output channels and the input channels (summed) may be sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.op_strategy import EinsumPattern, Labels, LocalFunction, OpCall, OpRule, einsum_rule, make_zeros

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ferrodist.tensor.spec import DTensorSpec

_aten = torch.ops.aten
_BATCH, _IN, _OUT = "n", "i", "o"


def _labels(call: OpCall, weight: DTensorSpec) -> tuple[Labels, Labels, Labels]:
    """The labels of the input, the weight and the output; channels of several groups are not sharded."""
    space = [None] * (weight.ndim - 2)
    channels = [_IN, _OUT] if call["groups"] == 1 else [None, None]
    weight_channels = channels if call["transposed"] else channels[::-1]
    return [_BATCH, channels[0], *space], [*weight_channels, *space], [_BATCH, channels[1], *space]


def _forward_pattern(call: OpCall) -> EinsumPattern:
    tensor, weight, output = _labels(call, call.inputs[1])
    biases: list[Labels] = [] if call["bias"] is None else [output[1:2]]
    return EinsumPattern(
        inputs=[tensor, weight, *biases],
        outputs=[output],
        reductions={_IN: ReduceOp.SUM},
        linear=((0, 2), (1, 2)) if biases else ((0,), (1,)),
        addends=(2,),
    )


def _backward_pattern(call: OpCall) -> EinsumPattern:
    tensor, weight, output = _labels(call, call.inputs[2])
    outputs = zip((tensor, weight, output[1:2]), call["output_mask"], strict=True)
    return EinsumPattern(
        inputs=[output, tensor, weight],
        outputs=[one for one, is_wanted in outputs if is_wanted],
        reductions={_BATCH: ReduceOp.SUM, _OUT: ReduceOp.SUM},
        # The bias's gradient is a sum of the output's, which is replicated over ranks that shard the input channels.
        cross_rank=(_IN,),
        linear=((0,),),
    )


def _local_bias_size(call: OpCall) -> Mapping[str, Any]:
    return {} if call["bias_sizes"] is None else {"bias_sizes": [call.placed_inputs[0].local_shape[1]]}


def _handle_empty(call: OpCall) -> LocalFunction | None:
    """Zeros on a rank without channels or samples, for which torch refuses to compute some results."""
    if all(0 not in spec.local_shape for spec in call.placed_inputs):
        return None
    outputs = call.outputs
    wanted: Sequence[bool] = call.arguments.get("output_mask", ())

    def forward(_: torch.Tensor, __: torch.Tensor, bias: torch.Tensor | None, *___: Any, **____: Any) -> torch.Tensor:
        zeros = make_zeros(outputs)[0]
        return zeros if bias is None else zeros + bias.view(-1, *[1] * (zeros.dim() - 2))

    def backward(grad: torch.Tensor, *_: Any, **__: Any) -> list[torch.Tensor | None]:
        zeros = iter(make_zeros(outputs))
        grads = [next(zeros) if want else None for want in wanted[:2]]
        return [*grads, grad.sum([0, *range(2, grad.dim())]) if wanted[2] else None]

    return backward if wanted else forward


RULES: dict[torch._ops.OpOverload, OpRule] = {
    _aten.convolution.default: einsum_rule(_forward_pattern, local=_handle_empty),
    _aten.convolution_backward.default: einsum_rule(_backward_pattern, arguments=_local_bias_size, local=_handle_empty),
}
