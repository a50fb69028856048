"""The arithmetic of reductions: one definition, which every engine has to match bit for bit.

[Note: fold]
``fold(op, [x_0, ..., x_{p-1}])`` starts with x_0 and takes in x_1, x_2, ... in this order.

- float16, bfloat16 and 8-bit floats are converted to float32, folded there and rounded once, to nearest even.
  What is too large for float8_e4m3fn, which has no infinity, becomes what torch's conversion makes of it.
- MEAN is the sum divided by p, before that rounding. A premultiplied sum multiplies in the accumulation type.
- A NaN that arithmetic or rounding gives is the same for all: torch.nan's bits, without sign and payload. Which of two
  NaNs a sum is, and the sign of infinity - infinity, differ between processors, and torch's own conversions to float16
  and bfloat16 give other NaNs in vectors than one by one.
- MIN and MAX: a NaN wins, the first one of several, with its bits where nothing is rounded; of equal elements (0.0 and
  -0.0) the lowest rank's stays.
- Integers wrap around. On bool SUM and MAX are *or*, PRODUCT and MIN are *and*.
- A complex product is (a*c - b*d, a*d + b*c), each product and difference rounded (no fused multiply-add). A complex
  sum, mean or premultiplied sum is that of both parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.reduce_op import SMALL_FLOATS, Op, PremultipliedSum, ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["accumulation_dtype", "fold", "widen"]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which ``dtype`` is folded."""
    return torch.float32 if dtype in SMALL_FLOATS else dtype


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the type in which its dtype is folded: torch has no arithmetic on 8-bit floats."""
    return tensor.to(accumulation_dtype(tensor.dtype))


def fold(op: Op, inputs: Sequence[torch.Tensor], factors: Sequence[float] | None = None) -> torch.Tensor:
    """Fold one tensor a rank, in rank order.

    Args:
        op: A reduction that is defined for their dtype.
        inputs: Tensors of equal shape and dtype, by rank. They are not changed.
        factors: Each rank's factor, for a premultiplied sum.

    Returns:
        A fresh tensor in the inputs' dtype.
    """
    dtype = inputs[0].dtype
    if dtype.is_complex and op is not ReduceOp.PRODUCT:
        # torch adds complex numbers as a + (1 + 0i) * b, and scales by (factor + 0i): with infinities both give NaN.
        return torch.view_as_complex(fold(op, [torch.view_as_real(tensor) for tensor in inputs], factors))
    working = [widen(tensor) for tensor in inputs]
    if isinstance(op, PremultipliedSum):
        assert factors is not None
        working = [tensor * factor for tensor, factor in zip(working, factors, strict=True)]
    accumulator = working[0].clone()
    step = _step(op, dtype)
    for tensor in working[1:]:
        step(accumulator, tensor)
    if op is ReduceOp.MEAN:
        accumulator.div_(len(inputs))
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype not in SMALL_FLOATS:
        return accumulator
    return _with_one_nan(accumulator, dtype)


def _with_one_nan(accumulator: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``accumulator`` rounded to ``dtype``, with the NaN of all engines."""
    rounded = accumulator.to(dtype)
    if not accumulator.dtype.is_floating_point and not accumulator.dtype.is_complex:
        return rounded
    parts = (rounded, accumulator) if not dtype.is_complex else map(torch.view_as_real, (rounded, accumulator))
    result, exact = parts
    is_nan = exact.isnan()
    if is_nan.any():
        result.view(_BITS[result.dtype]).masked_fill_(is_nan, _NAN_BITS[result.dtype])
    return rounded


_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
_NAN_BITS = {
    torch.float64: 0x7FF8 << 48,
    torch.float32: 0x7FC0 << 16,
    torch.float16: 0x7E00,
    torch.bfloat16: 0x7FC0,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7F,
}
"""What native/kernels writes, too."""


def _step(op: Op, dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], object]:
    if dtype is torch.bool:
        return _BOOL_STEPS[op] if isinstance(op, ReduceOp) else torch.Tensor.logical_or_
    if isinstance(op, PremultipliedSum):
        return torch.Tensor.add_
    if op is ReduceOp.PRODUCT and dtype.is_complex:
        return _multiply_complex
    if dtype.is_floating_point and op in (ReduceOp.MIN, ReduceOp.MAX):
        return _float_min if op is ReduceOp.MIN else _float_max
    return _STEPS[op]


def _float_min(accumulator: torch.Tensor, tensor: torch.Tensor) -> None:
    wins = (tensor < accumulator) | (tensor.isnan() & ~accumulator.isnan())
    torch.where(wins, tensor, accumulator, out=accumulator)


def _float_max(accumulator: torch.Tensor, tensor: torch.Tensor) -> None:
    wins = (tensor > accumulator) | (tensor.isnan() & ~accumulator.isnan())
    torch.where(wins, tensor, accumulator, out=accumulator)


def _multiply_complex(accumulator: torch.Tensor, tensor: torch.Tensor) -> None:
    a, b = torch.view_as_real(accumulator).unbind(-1)
    c, d = torch.view_as_real(tensor).unbind(-1)
    real, imaginary = a * c - b * d, a * d + b * c
    a.copy_(real)
    b.copy_(imaginary)


_STEPS: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], object]] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.MEAN: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MIN: lambda a, x: torch.minimum(a, x, out=a),
    ReduceOp.MAX: lambda a, x: torch.maximum(a, x, out=a),
    ReduceOp.BAND: torch.Tensor.bitwise_and_,
    ReduceOp.BOR: torch.Tensor.bitwise_or_,
    ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}

_BOOL_STEPS: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], object]] = {
    ReduceOp.SUM: torch.Tensor.logical_or_,
    ReduceOp.MAX: torch.Tensor.logical_or_,
    ReduceOp.BOR: torch.Tensor.logical_or_,
    ReduceOp.PRODUCT: torch.Tensor.logical_and_,
    ReduceOp.MIN: torch.Tensor.logical_and_,
    ReduceOp.BAND: torch.Tensor.logical_and_,
    ReduceOp.BXOR: torch.Tensor.logical_xor_,
}
