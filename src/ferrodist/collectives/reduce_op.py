"""Reduce operations: the dtypes that they are defined for, and their arithmetic.

The arithmetic here is the definition, which every engine matches bit for bit.

[Note: fold]
``fold(op, [x_0, ..., x_{p-1}])`` starts with x_0 and takes in x_1, x_2, ... in this order.

- float16, bfloat16 and 8-bit floats are converted to float32, folded there and rounded once, to nearest even.
  Values too large for float8_e4m3fn, which has no infinity, are converted as torch does it.
- MEAN is the sum divided by p, before that rounding. A premultiplied sum multiplies in the accumulation type.
- A NaN from arithmetic or rounding is the same everywhere: torch.nan's bits, without sign and payload. Which of two
  NaNs a sum is, and the sign of infinity - infinity, differ between processors, and torch's own conversions to float16
  and bfloat16 give other NaNs in vectors than one by one.
- MIN and MAX: a NaN wins, the first one of several, with its bits where nothing is rounded; of equal elements (0.0 and
  -0.0) the lowest rank's stays.
- Integers wrap around. On bool SUM and MAX are *or*, PRODUCT and MIN are *and*.
- A complex product is (a*c - b*d, a*d + b*c), each product and difference rounded (no fused multiply-add). A complex
  sum, mean or premultiplied sum is that of both parts.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, SupportsFloat

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ReduceOp(Enum):
    """Reductions of the ranks' elements. All fold ranks 0, 1, ..., p-1 in this order, on every backend."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    def __init__(self, name: str) -> None:
        del name
        self.number = len(type(self).__members__)
        """The reduction's index, by which engines know it."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class PremultipliedSum:
    """The sum of ``factor * x`` over the ranks, with a factor for each rank. Made by `premultiplied_sum`."""

    factor: float

    @property
    def number(self) -> int:
        """The reduction's index, after those of `ReduceOp`."""
        return len(ReduceOp)

    def __str__(self) -> str:
        return "premultiplied_sum"


Op = ReduceOp | PremultipliedSum


def premultiplied_sum(factor: SupportsFloat) -> PremultipliedSum:
    """The sum of the ranks' elements, this rank's multiplied by ``factor`` before; small floats are rounded once.

    Raises:
        TypeError, ValueError: ``factor`` is not a finite real number.
    """
    if isinstance(factor, bool) or not isinstance(factor, numbers.Real):
        raise TypeError(f"the factor of a premultiplied sum is a real number, not {type(factor).__name__}")
    try:
        number = float(factor)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"the factor of a premultiplied sum is a finite float, not {factor}")
    return PremultipliedSum(number)


SMALL_FLOATS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
"""Accumulated in float32 and rounded once."""

_FLOATS = (torch.float64, torch.float32, *SMALL_FLOATS)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_COMPLEX = (torch.complex64, torch.complex128)

DTYPES = (*_FLOATS, *_INTEGERS, torch.bool, *_COMPLEX)
"""Every dtype a collective carries."""

_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def check_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError unless collectives carry ``dtype``."""
    if dtype not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise TypeError(f"collectives carry {names}; not {dtype}")


def check_reduction(dtype: torch.dtype, op: Op) -> None:
    """Raise TypeError unless ``op`` is defined for ``dtype``, with the reason."""
    check_dtype(dtype)
    if not isinstance(op, (ReduceOp, PremultipliedSum)):
        raise TypeError(f"op must be a ReduceOp or premultiplied_sum(factor), not {op!r}")
    reason = None
    if op in _BITWISE and dtype not in (*_INTEGERS, torch.bool):
        reason = "bitwise operations are for integers and bool"
    elif op in (ReduceOp.MIN, ReduceOp.MAX) and dtype in _COMPLEX:
        reason = "complex numbers have no order"
    elif dtype in (*_INTEGERS, torch.bool):
        kind = "bools" if dtype is torch.bool else "integers"
        if op is ReduceOp.MEAN:
            reason = f"the mean of {kind} is not one of them; convert to a float first"
        elif isinstance(op, PremultipliedSum):
            reason = "a factor is a real number; convert to a float first"
    if reason is not None:
        raise TypeError(f"{op} of {dtype} is not defined: {reason}")


def is_linear(op: Op) -> bool:
    """True if the gradient of the result does not depend on the elements."""
    return op in (ReduceOp.SUM, ReduceOp.MEAN) or isinstance(op, PremultipliedSum)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which elements of ``dtype`` are folded."""
    return torch.float32 if dtype in SMALL_FLOATS else dtype


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """Convert ``tensor`` to its accumulation dtype; torch has no arithmetic on 8-bit floats."""
    return tensor.to(accumulation_dtype(tensor.dtype))


def fold(op: Op, inputs: Sequence[torch.Tensor], factors: Sequence[float] | None = None) -> torch.Tensor:
    """Fold one tensor a rank, in rank order, into a fresh one; ``factors`` of a premultiplied sum are by rank."""
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
        return partial(_float_extremum, torch.lt if op is ReduceOp.MIN else torch.gt)
    return _STEPS[op]


def _float_extremum(
    beats: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], accumulator: torch.Tensor, tensor: torch.Tensor
) -> None:
    wins = beats(tensor, accumulator) | (tensor.isnan() & ~accumulator.isnan())
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
