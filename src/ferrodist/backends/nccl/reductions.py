"""Recipes for doing each reduction with those that NCCL has.

[Note: recipes]
NCCL has sums, products, minima, maxima and averages of some dtypes, and neither bitwise operations nor NaN. A reduction
of ferrodist means the same on every backend (up to NCCL's own order and precision of sums), so a reduction that NCCL
lacks, or defines differently, is converted:

- bool travels as uint8: *or* is its maximum, *and* its minimum; *xor* is the sum's lowest bit. int16 travels as int32,
  8-bit floats as float32, which are rounded once.
- MIN and MAX of floats: NCCL drops NaN, ferrodist propagates it. They travel as integers in the floats' order, with NaN
  at the end that wins; float16 and bfloat16 as float32.
- MEAN and premultiplied sums of float16 and bfloat16 multiply by a factor in that type. Where it can't hold the factor
  they are done in float32, and rounded once.
- Complex numbers are added as pairs of reals. Their products, and bitwise operations, can't be expressed in NCCL: all
  ranks' elements are gathered, and each rank folds them in rank order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.errors import UnsupportedOpError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NCCL_DTYPES: dict[torch.dtype, int] = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""ncclDataType_t of the dtypes whose sums and products NCCL does as they are. It has 8-bit floats, too, but adds them
in their own precision."""

_OPERATIONS = {"sum": 0, "product": 1, "max": 2, "min": 3, "mean": 4}
_HALVES = (torch.float16, torch.bfloat16)
_WIDER = {
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.int16: torch.int32,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_SIGN_BITS = {torch.float32: (torch.int32, 0x7FFFFFFF), torch.float64: (torch.int64, 0x7FFFFFFFFFFFFFFF)}


def reduce_op_to_nccl(op: Any) -> int:
    """The ``ncclRedOp_t`` of a `ReduceOp`, as an int.

    Raises:
        UnsupportedOpError: NCCL has none for bitwise operations, and makes premultiplied sums for one communicator.
            (Collectives do them all the same.)
        TypeError: ``op`` is not a reduction.
    """
    name = str(op)
    if name in _OPERATIONS:
        return _OPERATIONS[name]
    if name in ("band", "bor", "bxor", "premultiplied_sum"):
        raise UnsupportedOpError(f"NCCL has no number for {name}: ncclRedOp_t is {', '.join(_OPERATIONS)}")
    raise TypeError(f"op must be a ReduceOp, not {op!r}")


class Encoding(Enum):
    """Encodings of elements for NCCL."""

    AS_THEY_ARE = "as they are"
    CONVERTED = "converted"
    ORDERED = "as integers in the floats' order"
    GATHERED = "gathered"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionRecipe:
    """The encoding and operation by which NCCL does a reduction."""

    encoding: Encoding
    carrier: torch.dtype  # the dtype given to NCCL
    op: int | None = None  # ncclRedOp_t; None for gathered elements, and for premultiplied sums
    factor: float | None = None  # of this rank's elements
    # For gathered elements: fold(result, elements) adds one rank's.
    fold: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    nan_wins_low: bool = False  # for ordered integers: NaN is below all others, for a minimum
    keeps_lowest_bit: bool = False  # of the result: only that counts

    def pack(self, source: torch.Tensor) -> torch.Tensor:
        """Encode ``source`` for NCCL: ``source`` itself or a new tensor."""
        if self.encoding is Encoding.AS_THEY_ARE:
            return source
        if source.dtype.is_complex:
            source = torch.view_as_real(source).view(-1)
        if self.encoding is Encoding.ORDERED:
            return self._ordered(source)
        return source.to(self.carrier)

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """Decode NCCL's result into ``out``."""
        if packed is out:
            return
        target = torch.view_as_real(out).view(-1) if out.dtype.is_complex else out
        if self.encoding is Encoding.ORDERED:
            packed = self._unordered(packed)
        elif self.keeps_lowest_bit:
            packed = packed & 1
        if packed.data_ptr() != target.data_ptr():
            target.copy_(packed)

    def _ordered(self, source: torch.Tensor) -> torch.Tensor:
        wide = source if source.dtype is torch.float64 else source.to(torch.float32)
        integers, low_bits = _SIGN_BITS[wide.dtype]
        bits = wide.view(integers)
        ordered = torch.where(bits < 0, bits ^ low_bits, bits)  # the larger of two negative floats has smaller bits
        extreme = torch.iinfo(integers).min if self.nan_wins_low else torch.iinfo(integers).max
        return torch.where(wide.isnan(), torch.full_like(ordered, extreme), ordered)

    def _unordered(self, packed: torch.Tensor) -> torch.Tensor:
        floats = torch.float64 if packed.dtype is torch.int64 else torch.float32
        _, low_bits = _SIGN_BITS[floats]
        values = torch.where(packed < 0, packed ^ low_bits, packed).view(floats)
        return torch.where(values.isnan(), torch.full_like(values, math.nan), values)


@lru_cache(maxsize=256)
def recipe_of(dtype: torch.dtype, op: Any, world_size: int) -> ReductionRecipe:
    """The recipe of a `ReduceOp` or premultiplied sum that is defined for ``dtype``; see [Note: recipes]."""
    name, factor = str(op), getattr(op, "factor", None)
    if dtype is torch.bool:
        # A sum wraps around, but its lowest bit, which is xor, is right all the same.
        number = _OPERATIONS[{"bxor": "sum", "sum": "max", "max": "max", "bor": "max"}.get(name, "min")]
        is_xor = name == "bxor"
        return ReductionRecipe(encoding=Encoding.CONVERTED, carrier=torch.uint8, op=number, keeps_lowest_bit=is_xor)
    fold = _complex_product if name == "product" and dtype.is_complex else _BITWISE.get(name)
    if fold is not None:
        return ReductionRecipe(encoding=Encoding.GATHERED, carrier=dtype, fold=fold)
    if name in ("min", "max") and dtype.is_floating_point:
        integers = torch.int64 if dtype is torch.float64 else torch.int32
        return ReductionRecipe(
            encoding=Encoding.ORDERED, carrier=integers, op=_OPERATIONS[name], nan_wins_low=name == "min"
        )
    scale = 1 / world_size if name == "mean" else factor
    carrier = _WIDER.get(dtype, dtype)
    if dtype in _HALVES and scale is not None and not _represents(dtype, scale):
        carrier = torch.float32
    encoding = Encoding.AS_THEY_ARE if carrier is dtype else Encoding.CONVERTED
    return ReductionRecipe(encoding=encoding, carrier=carrier, op=_OPERATIONS.get(name), factor=factor)


def _represents(dtype: torch.dtype, value: float) -> bool:
    """Return whether a float type holds a value exactly, and not as a subnormal, which some arithmetic flushes."""
    rounded = float(torch.tensor(value, dtype=dtype, device="cpu"))
    return rounded == value and (value == 0 or (abs(value) >= torch.finfo(dtype).tiny and math.isfinite(rounded)))


def _complex_product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    a, b = torch.view_as_real(one).unbind(-1)
    c, d = torch.view_as_real(other).unbind(-1)
    return torch.complex(a * c - b * d, a * d + b * c)


_BITWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def fold_gathered(recipe: ReductionRecipe, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Fold gathered elements, by rank, into ``out``, which must not overlap them."""
    assert recipe.fold is not None
    result = parts[0]
    for part in parts[1:]:
        result = recipe.fold(result, part)
    out.copy_(result)
