"""Convolutions: the batch and the output channels may be divided, and the input channels, over which is summed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.op_strategy import EinsumPattern, Labels, OpRule, einsum_strategies

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.tensor.op_strategy import OpCall, OpStrategy
    from ferrodist.tensor.spec import DTensorSpec

_aten = torch.ops.aten
_BATCH, _IN, _OUT = "n", "i", "o"


def _labels(call: OpCall, weight: DTensorSpec) -> tuple[Labels, Labels, Labels]:
    """Of the input, the weight and the output; channels of several groups are whole."""
    space = [None] * (weight.ndim - 2)
    channels = [_IN, _OUT] if call["groups"] == 1 else [None, None]
    of_weight = channels if call["transposed"] else channels[::-1]
    return [_BATCH, channels[0], *space], [*of_weight, *space], [_BATCH, channels[1], *space]


def _forward_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    tensor, weight, output = _labels(call, call.inputs[1])
    biases: list[Labels] = [] if call["bias"] is None else [output[1:2]]
    pattern = EinsumPattern(
        inputs=[tensor, weight, *biases],
        outputs=[output],
        reductions={_IN: ReduceOp.SUM},
        linear=((0, 2), (1, 2)) if biases else ((0,), (1,)),
        addends=(2,),
    )
    return einsum_strategies(pattern, call, axis)


def _backward_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    tensor, weight, output = _labels(call, call.inputs[2])
    wanted = call["output_mask"]
    outputs = [one for one, want in zip((tensor, weight, output[1:2]), wanted, strict=True) if want]
    pattern = EinsumPattern(
        inputs=[output, tensor, weight],
        outputs=outputs,
        reductions={_BATCH: ReduceOp.SUM, _OUT: ReduceOp.SUM},
        # The gradient of the bias is that of the output, which ranks that divide the input channels have whole.
        reduced_locally=(_IN,),
        linear=((0,),),
    )
    return einsum_strategies(pattern, call, axis)


def _bias_size(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Mapping[str, Any]:
    del outputs
    return {} if call["bias_sizes"] is None else {"bias_sizes": [inputs[0].local_shape[1]]}


def _of_nothing(
    call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]
) -> Callable[..., Any] | None:
    """A rank without channels or samples has results of nothing, which torch refuses to compute for some of them."""
    if all(0 not in spec.local_shape for spec in inputs):
        return None
    made = [(spec.local_shape, spec.dtype) for spec in outputs]
    wanted: Sequence[bool] = call.arguments.get("output_mask", ())

    def forward(
        tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *given: Any, **named: Any
    ) -> torch.Tensor:
        del tensor, weight, given, named
        zeros = torch.zeros(made[0][0], dtype=made[0][1], device="cpu")
        return zeros if bias is None else zeros + bias.view(-1, *[1] * (zeros.dim() - 2))

    def backward(grad: torch.Tensor, *given: Any, **named: Any) -> list[torch.Tensor | None]:
        del given, named
        zeros = iter([torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in made])
        found = [next(zeros) if want else None for want in wanted[:2]]
        return [*found, grad.sum([0, *range(2, grad.dim())]) if wanted[2] else None]

    return backward if wanted else forward


RULES: dict[torch._ops.OpOverload, OpRule] = {
    _aten.convolution.default: OpRule(strategies=_forward_strategies, local=_of_nothing),
    _aten.convolution_backward.default: OpRule(
        strategies=_backward_strategies, arguments=_bias_size, local=_of_nothing
    ),
}
