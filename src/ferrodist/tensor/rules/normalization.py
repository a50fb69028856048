"""Layer and group normalisation: dims that are not normalised may be divided, and the weights' gradients are sums."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.call import Rule
from ferrodist.tensor.patterns import Letters, Pattern, choices_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.tensor.call import Call, Choice
    from ferrodist.tensor.layout import Layout

__all__ = ["RULES"]

_aten = torch.ops.aten


def _layer_letters(call: Call) -> list[int | None]:
    """The dims of the input; those that are normalised have no letter."""
    layout = call.inputs[0]
    first = layout.ndim - len(call["normalized_shape"])
    return [dim if dim < first else None for dim in range(layout.ndim)]


def _group_letters(call: Call) -> list[int | None]:
    """The first dim only: groups of channels, and what is behind them, are normalised together."""
    return [0, *[None] * (call.inputs[0].ndim - 1)]


def _forward_choices(letters: Callable[[Call], list[int | None]], call: Call, axis: int) -> list[Choice]:
    first = letters(call)
    outputs: list[Letters] = [first[: len(result.shape)] for result in call.results]
    weights: list[Letters] = [[None] * layout.ndim for layout in call.inputs[1:]]
    return choices_of(Pattern(inputs=[first, *weights], outputs=outputs), call, axis)


def _backward_choices(letters: Callable[[Call], list[int | None]], call: Call, axis: int) -> list[Choice]:
    first = letters(call)
    weights = [call[name] is not None for name in ("weight", "bias") if name in call.arguments]
    num_full = len(call.inputs) - sum(weights)
    inputs: list[Letters] = [first[: layout.ndim] for layout in call.inputs[:num_full]]
    inputs += [[None] * layout.ndim for layout in call.inputs[num_full:]]
    outputs: list[Letters] = [first] if call["output_mask"][0] else []
    outputs += [[None] * len(result.shape) for result in call.results[len(outputs) :]]
    pattern = Pattern(
        inputs=inputs,
        outputs=outputs,
        folds=dict.fromkeys([letter for letter in first if letter is not None], ReduceOp.SUM),
        linear=((0,),),
    )
    return choices_of(pattern, call, axis)


def _local_batch(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Mapping[str, Any]:
    """Group normalisation is told the size of the batch."""
    del call, outputs
    return {"N": inputs[0].local_shape[0]}


# [Note: statistics of small floats]
# Of bfloat16 and float16 throughout torch's CPU kernel returns means and deviations of that type, and says float32 of
# meta tensors. They are converted to what it says, which loses nothing, and back for the gradient.


def _wide_statistics(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any] | None:
    """See [Note: statistics of small floats]."""
    del inputs
    operator = call.operator
    dtypes = [output.dtype for output in outputs]
    if len(set(dtypes)) == 1:
        return None

    def forward(*given: Any, **named: Any) -> list[torch.Tensor]:
        return [one.to(dtype) for one, dtype in zip(operator(*given, **named), dtypes, strict=True)]

    return forward


def _narrow_statistics(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any] | None:
    """See [Note: statistics of small floats]."""
    del outputs
    operator = call.operator
    dtype, of_statistics, *of_weights = [layout.dtype for layout in (inputs[1], inputs[2], *inputs[4:])]
    if of_statistics == dtype or any(one != dtype for one in of_weights):
        return None

    def backward(grad: torch.Tensor, tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        narrow = [one.to(dtype) if isinstance(one, torch.Tensor) else one for one in given]
        return operator(grad, tensor, *narrow, **named)

    return backward


def _contiguous(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any]:
    """Torch's kernel of group normalisation reads memory in order: its callers see to that by the whole's stride."""
    del inputs, outputs
    operator = call.operator

    def compute(*given: Any) -> Any:
        return operator(*[one.contiguous() if isinstance(one, torch.Tensor) else one for one in given])

    return compute


RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.native_layer_norm.default: Rule(choices=partial(_forward_choices, _layer_letters), local=_wide_statistics),
    _aten.native_layer_norm_backward.default: Rule(
        choices=partial(_backward_choices, _layer_letters), local=_narrow_statistics
    ),
    _aten.native_group_norm.default: Rule(
        choices=partial(_forward_choices, _group_letters), arguments=_local_batch, local=_contiguous
    ),
    _aten.native_group_norm_backward.default: Rule(
        choices=partial(_backward_choices, _group_letters), arguments=_local_batch, local=_contiguous
    ),
}
