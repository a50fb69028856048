"""Batch normalisation, of which instance normalisation is made: channels may be divided, as each is normalised alone.

What divides the batch is gathered in training, for the statistics are those of the whole batch. In evaluation nothing
is folded, and batches stay divided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrodist.tensor.call import Rule
from ferrodist.tensor.patterns import Letters, Pattern, choices_of
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.tensor.call import Call, Choice
    from ferrodist.tensor.layout import Layout

__all__ = ["DECOMPOSITIONS", "RULES"]

_aten = torch.ops.aten
_CHANNEL = "c"


def _letters(layout: Layout, *, divides_batch: bool) -> Letters:
    """Of a tensor (B, C, ...), or of one number for each channel (C)."""
    if layout.ndim == 1:
        return [_CHANNEL]
    return [_CHANNEL if dim == 1 else dim if divides_batch else None for dim in range(layout.ndim)]


def _batch_forward_choices(call: Call, axis: int) -> list[Choice]:
    is_training = call.arguments.get("training", False)
    first = _letters(call.inputs[0], divides_batch=not is_training)
    pattern = Pattern(
        inputs=[first, *[[_CHANNEL]] * (len(call.inputs) - 1)],
        outputs=[first, *[[_CHANNEL]] * (len(call.results) - 1)],
        # Of evaluation no statistics come out that the batch takes part in.
        settled=[letter for letter in first if letter not in (_CHANNEL, None)],
    )
    return choices_of(pattern, call, axis)


def _batch_backward_choices(call: Call, axis: int) -> list[Choice]:
    pattern = Pattern(
        inputs=[_letters(layout, divides_batch=False) for layout in call.inputs],
        outputs=[
            [_CHANNEL] if len(result.shape) == 1 else _letters(call.inputs[0], divides_batch=False)
            for result in call.results
        ],
        linear=((0,),),
    )
    return choices_of(pattern, call, axis)


def _forward(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any]:
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


def _backward(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any] | None:
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


_forward_rule = Rule(choices=_batch_forward_choices, local=_forward)

RULES: dict[torch._ops.OpOverload, Rule] = {
    private_aten.native_batch_norm_legit_functional.default: _forward_rule,
    private_aten.native_batch_norm_legit_no_training.default: _forward_rule,
    private_aten.native_batch_norm_legit.no_stats: _forward_rule,
    _aten.native_batch_norm_backward.default: Rule(choices=_batch_backward_choices, local=_backward),
}

DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    private_aten.native_batch_norm_legit.default: _update
}
