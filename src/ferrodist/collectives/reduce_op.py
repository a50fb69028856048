"""Reduce operations, and which dtypes they are defined for."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from enum import Enum
from typing import SupportsFloat

import torch

__all__ = [
    "DTYPES",
    "Op",
    "PremultipliedSum",
    "ReduceOp",
    "check_dtype",
    "check_reduction",
    "premultiplied_sum",
]


class ReduceOp(Enum):
    """How the ranks' elements become one. Every operation folds rank 0, 1, ..., p-1, whatever the backend."""

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
        """Its place among the reductions, by which engines know it."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class PremultipliedSum:
    """The sum of ``factor * x`` over the ranks; each rank gives its own factor. Made by `premultiplied_sum`."""

    factor: float

    @property
    def number(self) -> int:
        """Its place among the reductions: after those of `ReduceOp`."""
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
_REASONS = {
    "no order": "complex numbers have no order",
    "bits": "bitwise operations are for integers and bool",
    "mean": "the mean of {kind} is not one of them; convert to a float first",
    "factor": "a factor is a real number; convert to a float first",
}


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
        reason = _REASONS["bits"]
    elif op in (ReduceOp.MIN, ReduceOp.MAX) and dtype in _COMPLEX:
        reason = _REASONS["no order"]
    elif dtype in (*_INTEGERS, torch.bool):
        kind = "bools" if dtype is torch.bool else "integers"
        if op is ReduceOp.MEAN:
            reason = _REASONS["mean"].format(kind=kind)
        elif isinstance(op, PremultipliedSum):
            reason = _REASONS["factor"]
    if reason is not None:
        raise TypeError(f"{op} of {dtype} is not defined: {reason}")


def is_linear(op: Op) -> bool:
    """Whether the result's gradient does not depend on the elements."""
    return op in (ReduceOp.SUM, ReduceOp.MEAN) or isinstance(op, PremultipliedSum)
