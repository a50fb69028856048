"""The oracle of the collective checks: expected results, computed with NumPy from the rules of [Note: fold] alone.

That note is in `ferrodist.collectives.reduce_op`. Nothing here calls ferrodist's arithmetic. Floats of 8 and 16 bits
are decoded and rounded by their definition, from the bits of all their values, so a conversion that torch does
differently would be found too.
"""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

import ferrodist as fd
from ferrodist.backends.subgroup import SubBackend
from ferrodist.collectives.reduce_op import DTYPES, Op, PremultipliedSum, ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from ferrodist.backends.base import Backend

    Array = NDArray[Any]
    CollectiveCheck: TypeAlias = Callable[[Backend], None]


_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)

_SPECIAL_VALUES = (0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1.0)


def defined_reductions(dtype: torch.dtype, factor: float = 0.75) -> list[Op]:
    """The operations that are defined for ``dtype``, with ``factor`` for the premultiplied sum."""
    if dtype in (*_INTEGERS, torch.bool):
        return [op for op in ReduceOp if op is not ReduceOp.MEAN]
    undefined = _BITWISE if dtype not in _PARTS else (*_BITWISE, *_ORDERED)
    return [*(op for op in ReduceOp if op not in undefined), PremultipliedSum(factor)]


def undefined_reductions() -> Iterable[tuple[torch.dtype, Op]]:
    """The pairs that must raise TypeError."""
    every = (*ReduceOp, PremultipliedSum(0.75))
    return [(dtype, op) for dtype in DTYPES for op in every if op not in defined_reductions(dtype)]


def elements(dtype: torch.dtype, count: int, rank: int, seed: int = 0) -> torch.Tensor:
    """``count`` elements of a rank, the same wherever they are computed.

    A third are special values that meet each other in all combinations from rank to rank, a third are arbitrary bits
    (infinities, NaN with all payloads, subnormal numbers, the largest integers), a third are of ordinary size.
    """
    source = random.Random(f"{seed}:{rank}:{dtype}")
    if dtype in _PARTS:
        return torch.view_as_complex(elements(_PARTS[dtype], 2 * count, rank, seed).view(-1, 2))
    if dtype is torch.bool:
        return torch.tensor([source.random() < 0.5 for _ in range(count)], dtype=torch.bool)
    bits = torch.frombuffer(bytearray(source.randbytes(count * dtype.itemsize) or b"\0"), dtype=torch.uint8)
    result = bits[: count * dtype.itemsize].view(dtype)
    if dtype.is_floating_point:
        # Rank r walks through the values 6**r times slower, so that all combinations of the first ranks come up.
        width = len(_SPECIAL_VALUES)
        special = [_SPECIAL_VALUES[i // width ** (rank % 3) % width] for i in range(count // 3)]
        ordinary = [source.uniform(-3, 3) for _ in range(count - count // 3 * 2)]
        head, tail = torch.tensor(special), torch.tensor(ordinary, dtype=torch.float64)
        result[: len(special)] = head.to(dtype)
        result[count - len(ordinary) :] = tail.to(dtype)
    return result


def expected_fold(op: Op, inputs: Sequence[torch.Tensor], factors: Sequence[float] | None = None) -> torch.Tensor:
    """Fold one contiguous tensor a rank, in rank order; ``factors`` are each rank's, for a premultiplied sum."""
    dtype, shape = inputs[0].dtype, inputs[0].shape
    if not inputs[0].numel():
        return torch.empty(shape, dtype=dtype)
    if dtype in _PARTS and op is ReduceOp.PRODUCT:
        product = _with_one_nan(_complex_product([torch.view_as_real(tensor).numpy() for tensor in inputs]))
        return torch.view_as_complex(torch.from_numpy(product)).view(shape)
    if dtype in _PARTS:
        return torch.view_as_complex(expected_fold(op, [torch.view_as_real(tensor) for tensor in inputs], factors))
    working = [_decode(tensor.reshape(-1)) for tensor in inputs]
    with np.errstate(all="ignore"):  # overflow, and NaN from infinities, are part of what is checked
        if isinstance(op, PremultipliedSum):
            assert factors is not None
            working = [array * array.dtype.type(f) for array, f in zip(working, factors, strict=True)]
        result = functools.reduce(_step(op, dtype), working)
        if op is ReduceOp.MEAN:
            result = result / result.dtype.type(len(inputs))
        return _encode(result if op in _ORDERED else _with_one_nan(result), dtype).view(shape)


def _step(op: Op, dtype: torch.dtype) -> Callable[[Array, Array], Array]:
    """One step of a fold: a function of the result so far and the next rank's elements."""
    if isinstance(op, PremultipliedSum):
        return np.add
    if dtype is torch.bool and op is not ReduceOp.BXOR:
        return np.logical_and if op in (ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.BAND) else np.logical_or
    steps: dict[ReduceOp, Callable[[Array, Array], Array]] = {
        ReduceOp.SUM: np.add,
        ReduceOp.MEAN: np.add,
        ReduceOp.PRODUCT: np.multiply,
        ReduceOp.MIN: functools.partial(_take_better, np.less),
        ReduceOp.MAX: functools.partial(_take_better, np.greater),
        ReduceOp.BAND: np.bitwise_and,
        ReduceOp.BOR: np.bitwise_or,
        ReduceOp.BXOR: np.bitwise_xor,
    }
    return steps[op]


def _take_better(better: Callable[[Array, Array], Array], so_far: Array, more: Array) -> Array:
    # NaN compares as neither less nor greater, so of two NaNs, and of 0.0 and -0.0, the first stays.
    return np.where(better(more, so_far) | (_is_nan(more) & ~_is_nan(so_far)), more, so_far)


def _is_nan(array: Array) -> Array:
    return np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, np.bool_)


def _complex_product(inputs: list[Array]) -> Array:
    with np.errstate(all="ignore"):
        result = inputs[0]
        for factor in inputs[1:]:
            a, b, c, d = result[..., 0], result[..., 1], factor[..., 0], factor[..., 1]
            real, imaginary = a * c, a * d
            result = np.stack([real - b * d, imaginary + b * c], axis=-1)
    return np.array(result)


def _with_one_nan(array: Array) -> Array:
    """``array`` with every NaN replaced by the one without sign and payload, as sums must have it."""
    return np.where(np.isnan(array), array.dtype.type(np.nan), array) if array.dtype.kind == "f" else array


def _decode(flat: torch.Tensor) -> Array:
    """The elements in the type of the accumulation."""
    if flat.dtype is torch.bfloat16:
        return (flat.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if flat.dtype in _FORMATS:
        return np.asarray(_FORMATS[flat.dtype].values()[flat.view(torch.uint8).numpy()])
    return flat.numpy().astype(np.float32) if flat.dtype is torch.float16 else flat.numpy()


def _encode(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """Round to ``dtype``, to nearest even; every NaN becomes the one without sign and payload."""
    if dtype is torch.bfloat16:
        bits = array.astype(np.float32).view(np.uint32).astype(np.uint64)
        rounded = np.where(np.isnan(array), 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
        return torch.from_numpy(rounded.astype(np.uint16).view(np.int16)).view(dtype)
    if dtype in _FORMATS:
        return torch.from_numpy(_FORMATS[dtype].round(array)).view(dtype)
    if dtype is torch.float16:
        return torch.from_numpy(_with_one_nan(array.astype(np.float16)))
    return torch.from_numpy(np.array(array))


class _Format8:
    """A floating-point format of 8 bits, as the list of its values.

    Codes from 0 are finite up to ``num_finite``, which stands for larger numbers: infinity if there is one, else NaN.
    """

    def __init__(self, exponent_bits: int, bias: int, num_finite: int, *, has_infinity: bool) -> None:
        self._num_finite = num_finite
        self._has_infinity = has_infinity
        mantissa_bits = 7 - exponent_bits
        steps = 1 << mantissa_bits
        # The magnitude of each code, were the exponent unbounded: the one past the finite codes decides what overflows.
        self._grid = np.array(
            [
                (code % steps if code < steps else steps + code % steps)
                * 2.0 ** (max(code // steps, 1) - bias - mantissa_bits)
                for code in range(num_finite + 1)
            ]
        )

    @functools.cache  # noqa: B019 - there are two, and they live as long as the module
    def values(self) -> Array:
        """The values of the 256 codes."""
        half = np.full(128, np.nan, np.float32)
        half[: self._num_finite] = self._grid[: self._num_finite]
        if self._has_infinity:
            half[self._num_finite] = np.inf
        return np.concatenate([half, -half])

    def round(self, array: Array) -> Array:
        """The nearest code of each number; of two equally near ones the even."""
        magnitude = np.abs(array.astype(np.float64))
        upper = np.clip(np.searchsorted(self._grid, magnitude), 1, self._num_finite)
        lower = upper - 1
        up, down = self._grid[upper] - magnitude, magnitude - self._grid[lower]
        code = np.where((up < down) | ((up == down) & (upper % 2 == 0)), upper, lower)
        code = np.where(magnitude >= self._grid[-1], self._num_finite, code)
        if not self._has_infinity and not torch.tensor(1e6).to(torch.float8_e4m3fn).isnan():
            code = np.minimum(code, self._num_finite - 1)  # newer versions of torch saturate, older ones give NaN
        signed = code | np.where(np.signbit(array), 128, 0)
        return np.where(np.isnan(magnitude), 127, signed).astype(np.uint8)


_FORMATS = {
    torch.float8_e4m3fn: _Format8(4, 7, 127, has_infinity=False),
    torch.float8_e5m2: _Format8(5, 15, 124, has_infinity=True),
}


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes, in order."""
    if not tensor.numel():  # such a tensor may have any stride
        return torch.empty(0, dtype=torch.uint8)
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def check_bits(actual: torch.Tensor, expected: torch.Tensor, what: str, *, any_nan: bool = False) -> None:
    """Assert equal shape, dtype and bits; with ``any_nan`` every NaN counts as every other."""
    assert actual.dtype is expected.dtype, f"{what}: {actual.dtype} in place of {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} in place of {tuple(expected.shape)}"
    size = expected.dtype.itemsize
    differs = (raw_bytes(actual).view(-1, size) != raw_bytes(expected).view(-1, size)).any(dim=1)
    if any_nan and expected.dtype.is_complex:
        got, wanted = (torch.view_as_real(tensor.detach().resolve_conj()) for tensor in (actual, expected))
        check_bits(got, wanted, what, any_nan=True)
        return
    if any_nan and expected.dtype.is_floating_point:
        both = [tensor.detach().resolve_neg().reshape(-1).to(torch.float64).isnan() for tensor in (actual, expected)]
        differs &= ~(both[0] & both[1])
    if differs.any():
        place = int(differs.nonzero()[0])
        values = [tensor.detach().reshape(-1)[place].item() for tensor in (actual, expected)]
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {expected.numel()} elements differ; element {place} is {values[0]!r}, not"
            f" {values[1]!r} (bytes {raw_bytes(actual).view(-1, size)[place].tolist()}, not"
            f" {raw_bytes(expected).view(-1, size)[place].tolist()})"
        )


def check_into(out: torch.Tensor, result: object, expected: torch.Tensor, what: str) -> None:
    """Assert that a call with ``out=`` returned that tensor, with the same bits as ``expected``."""
    assert result is out, f"{what} returned another tensor than out="
    check_bits(out, expected, what)


# The sizes at which the reference implementation changes its algorithm. Other engines have other thresholds; checks on
# both sides of these suit any.
PAYLOAD_BYTES = 108  # `MAX_PAYLOAD` of backends/signature.py
ONE_STEP_BYTES = 64 * 1024  # as in collectives/engines/reference.py
SEGMENT_BYTES = 4 << 20  # as in collectives/engines/reference.py


def counts_around_thresholds(dtype: torch.dtype) -> list[int]:
    """Counts 0 to 3, and one below, at and above each of the smaller thresholds."""
    edges = [limit // dtype.itemsize for limit in (PAYLOAD_BYTES, ONE_STEP_BYTES)]
    return [0, 1, 2, 3, *(edge + i for edge in edges for i in (-1, 0, 1))]


COLLECTIVE_SLACK_SECONDS = 1.5
"""Seconds past its deadline at which a call may return, on a busy machine with more ranks than cores."""


def rank_inputs(group: Backend, dtype: torch.dtype, count: int, seed: int = 0) -> list[torch.Tensor]:
    """The inputs of all ranks to a collective."""
    return [elements(dtype, count, rank, seed) for rank in range(group.world_size)]


def rank_factor(rank: int) -> float:
    """A rank's factor in a premultiplied sum, with more digits than a float32 has."""
    return (rank + 1) / 3 - 0.9


def check_fold(
    group: Backend, actual: torch.Tensor, op: Op, inputs: Sequence[torch.Tensor], what: str, *, root: int | None = None
) -> None:
    """Assert that ``actual`` is the fold of ``inputs``, bit for bit. With ``root`` other ranks have an empty tensor."""
    dtype = str(actual.dtype).removeprefix("torch.")
    what = f"{what} of {inputs[0].numel()} {dtype} with {op}, rank {group.rank} of {group.world_size}"
    if root not in (None, group.rank):
        assert actual.shape == (0,), f"{what}, not its root {root}: shape {tuple(actual.shape)}"
        return
    factors = [rank_factor(rank) for rank in range(group.world_size)]
    check_bits(actual.reshape(-1), expected_fold(op, inputs, factors), what)


def check_gathered(group: Backend, root: int, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Assert that the root has the bits of ``expected``, and other ranks an empty tensor."""
    if group.rank == root:
        check_bits(actual, expected, what)
    else:
        assert actual.shape == (0,), f"{what}: rank {group.rank} got shape {tuple(actual.shape)}"


def own_shards(group: Backend, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's shard of each of the tensors."""
    sizes = fd.compute_shard_sizes(len(inputs[0]), group.world_size)
    return [tensor.split_with_sizes(sizes)[group.rank] for tensor in inputs]


def duplicate_group(group: Backend) -> Backend:
    """A sub-group of all ranks, which a check may let fail."""
    return SubBackend(group, range(group.world_size))
