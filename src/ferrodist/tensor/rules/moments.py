"""Variances, norms and logsumexp: where a dim that goes is divided, small tensors are reduced over its ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.fold import accumulation_dtype
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.call import Rule
from ferrodist.tensor.patterns import Pattern, choices_of
from ferrodist.tensor.rules.folding import dividers, fold_over
from ferrodist.tensor.rules.reductions import kept_letters, reduced_dims

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.tensor.call import Call, Choice
    from ferrodist.tensor.layout import Layout

__all__ = ["DECOMPOSITIONS", "RULES", "settled_choices"]

_aten = torch.ops.aten


def settled_choices(call: Call, axis: int) -> list[Choice]:
    """Any dim divided; the results are whole where one is that goes."""
    kept = kept_letters(call)
    pattern = Pattern(
        inputs=[range(call.inputs[0].ndim)], outputs=[kept] * len(call.results), settled=reduced_dims(call)
    )
    return choices_of(pattern, call, axis)


def _moments(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any] | None:
    """The mean first, then the sum of the squares of what the elements differ from it."""
    layout = inputs[0]
    gone = reduced_dims(call)
    axes = dividers(layout, gone)
    if not axes and 0 not in layout.local_shape:  # of no elements torch warns
        return None
    fold = fold_over(layout, axes)
    count = math.prod(layout.shape[dim] for dim in gone)
    name = call.operator.overloadpacket.__name__
    dtypes = [output.dtype for output in outputs]
    shape = outputs[0].local_shape

    def moments(
        tensor: torch.Tensor, *given: Any, correction: float | None = None, **named: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        del given, named  # as in the layouts
        wide = tensor.to(accumulation_dtype(tensor.dtype))
        mean = fold(wide.sum(gone, keepdim=True), ReduceOp.SUM) / count
        away = wide - mean
        squares = fold(away.abs().square().sum(gone), ReduceOp.SUM)
        variance = squares / max(count - (1 if correction is None else correction), 0)
        first = (variance.sqrt() if name.startswith("std") else variance).reshape(shape).to(dtypes[0])
        return (first, mean.reshape(shape).to(dtypes[1])) if name.endswith("mean") else first

    return moments


def _norm(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any] | None:
    """The norm of the parts' norms."""
    gone = reduced_dims(call)
    axes = dividers(inputs[0], gone)
    if not axes:
        return None
    fold = fold_over(inputs[0], axes)
    result = outputs[0].dtype
    wide = accumulation_dtype(result)
    shape = outputs[0].local_shape
    is_empty = any(inputs[0].local_shape[dim] == 0 for dim in gone)

    def norm(tensor: torch.Tensor, ord: float = 2, *given: Any, **named: Any) -> torch.Tensor:  # noqa: A002 # torch's
        del given, named  # as in the layouts
        if is_empty:
            own = torch.full(shape, math.inf if ord < 0 else 0.0, dtype=wide, device="cpu")
        else:
            own = torch.linalg.vector_norm(tensor.to(_same_kind(tensor, wide)), ord, gone).reshape(shape)
        if math.isinf(ord):
            found = fold(own, ReduceOp.MAX if ord > 0 else ReduceOp.MIN)
        elif ord == 0:
            found = fold(own, ReduceOp.SUM)
        else:
            found = fold(own**ord, ReduceOp.SUM) ** (1 / ord)
        return found.to(result)

    return norm


def _same_kind(tensor: torch.Tensor, real: torch.dtype) -> torch.dtype:
    """The dtype of real numbers, or the complex one of them for a complex tensor."""
    return real.to_complex() if tensor.is_complex() else real


def _logsumexp(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any] | None:
    gone = reduced_dims(call)
    axes = dividers(inputs[0], gone)
    if not axes:
        return None
    fold = fold_over(inputs[0], axes)
    result = outputs[0].dtype
    shape = outputs[0].local_shape
    is_empty = any(inputs[0].local_shape[dim] == 0 for dim in gone)
    kept = [1 if dim in gone else size for dim, size in enumerate(inputs[0].local_shape)]

    def logsumexp(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        del given, named  # as in the layouts
        wide = tensor.to(accumulation_dtype(result))
        # Of complex numbers the size of their exponentials is that of the real part's.
        real = wide.real if wide.is_complex() else wide
        own = real.new_full(kept, -math.inf) if is_empty else real.amax(gone, keepdim=True)
        largest = fold(own, ReduceOp.MAX)
        # Infinities would give NaN.
        shift = torch.where(largest.isinf(), 0.0, largest)
        total = fold((wide - shift).exp().sum(gone, keepdim=True), ReduceOp.SUM)
        return (total.log() + shift).reshape(shape).to(result)

    return logsumexp


def _any_norm(tensor: Any, p: Any = 2, *dims: Any, dtype: Any = None) -> Any:
    """``torch.norm``, which leaves the order out for the usual one; ``dims`` are the dims and keepdim."""
    return torch.linalg.vector_norm(tensor, 2 if p is None else p, *dims, dtype=dtype)


def _norm_each(tensors: Sequence[Any], ord: Any = 2, dtype: Any = None) -> list[Any]:  # noqa: A002 # torch's name
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]


_moments_rule = Rule(choices=settled_choices, local=_moments)

RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.var.correction: _moments_rule,
    _aten.std.correction: _moments_rule,
    _aten.var_mean.correction: _moments_rule,
    _aten.std_mean.correction: _moments_rule,
    _aten.linalg_vector_norm.default: Rule(choices=settled_choices, local=_norm),
    _aten.logsumexp.default: Rule(choices=settled_choices, local=_logsumexp),
}

DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    _aten.norm.Scalar: _any_norm,
    _aten.norm.ScalarOpt_dim: _any_norm,
    _aten.norm.ScalarOpt_dim_dtype: _any_norm,
    _aten.norm.ScalarOpt_dtype: _any_norm,
    _aten._foreach_norm.Scalar: _norm_each,
}
