"""Recipes of reductions and their results, over a fake of NCCL."""

from __future__ import annotations

import pytest
import torch
from nccl_fakes import fake_groups, send_cpu_tensors_to_nccl

import ferrodist as fd
from ferrodist.backends.nccl.reductions import NCCL_DTYPES, Encoding, recipe_of
from ferrodist.collectives.reduce_op import DTYPES, check_reduction
from ferrodist.testing import run_ranks
from ferrodist.testing.conformance.collectives.oracle import elements, expected_fold

_NCCL_NUMBERS = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "int64": 4,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
"""ncclDataType_t of nccl.h."""

_HALF = fd.premultiplied_sum(0.5)
_THIRD = fd.premultiplied_sum(1 / 3)


def _defined() -> list[tuple[torch.dtype, object]]:
    found = []
    for dtype in DTYPES:
        for op in (*fd.ReduceOp, _THIRD):
            try:
                check_reduction(dtype, op)
            except TypeError:
                continue
            found.append((dtype, op))
    return found


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


def test_dtypes_have_nccls_numbers() -> None:
    """Dtypes have the numbers of nccl.h."""
    assert {_name(dtype): number for dtype, number in NCCL_DTYPES.items()} == _NCCL_NUMBERS


def test_operations_have_nccls_numbers() -> None:
    """Reductions have the numbers of nccl.h, or raise where NCCL lacks them."""
    numbers = {"sum": 0, "product": 1, "max": 2, "min": 3, "mean": 4}
    for op in fd.ReduceOp:
        if str(op) in numbers:
            assert fd.reduce_op_to_nccl(op) == numbers[str(op)]
        else:
            with pytest.raises(fd.UnsupportedOpError, match="NCCL has no number"):
                fd.reduce_op_to_nccl(op)
    with pytest.raises(fd.UnsupportedOpError, match="premultiplied_sum"):
        fd.reduce_op_to_nccl(_HALF)
    with pytest.raises(TypeError, match="ReduceOp"):
        fd.reduce_op_to_nccl("add")


@pytest.mark.parametrize(("dtype", "op"), _defined(), ids=_name)
def test_every_recipe_uses_dtypes_and_operations_of_nccl(dtype: torch.dtype, op: object) -> None:
    """NCCL gets one of its dtypes and operations."""
    for world_size in (1, 2, 3):
        recipe = recipe_of(dtype, op, world_size)
        if recipe.encoding is Encoding.GATHERED:
            assert recipe.fold is not None
        else:
            assert recipe.carrier in NCCL_DTYPES
            assert (recipe.op is None) == (recipe.factor is not None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=_name)
def test_inexact_factors_of_small_floats_use_float32(dtype: torch.dtype) -> None:
    """NCCL multiplies by factors in the elements' dtype: where that can't represent one, float32 is used."""
    assert recipe_of(dtype, fd.ReduceOp.MEAN, 2).carrier is dtype
    assert recipe_of(dtype, fd.ReduceOp.MEAN, 3).carrier is torch.float32
    assert recipe_of(dtype, _HALF, 2).carrier is dtype
    assert recipe_of(dtype, _THIRD, 2).carrier is torch.float32
    assert recipe_of(dtype, fd.premultiplied_sum(1e-7), 2).carrier is torch.float32
    assert recipe_of(dtype, fd.premultiplied_sum(1e9), 2).carrier is torch.float32
    assert recipe_of(dtype, fd.ReduceOp.SUM, 3).carrier is dtype


def _expected(op: object, inputs: list[torch.Tensor]) -> torch.Tensor:
    return expected_fold(op, inputs, [1 / 3] * len(inputs))


def _assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Check for equal values: 0.0 equals -0.0, and small floats may differ by rounding."""
    if not (actual.is_floating_point() or actual.is_complex()):
        assert torch.equal(actual, expected), what
        return
    loose = {torch.float16: 4e-3, torch.bfloat16: 4e-2}.get(actual.dtype, 1e-6)
    wide = torch.complex128 if actual.is_complex() else torch.float64
    torch.testing.assert_close(actual.to(wide), expected.to(wide), rtol=loose, atol=loose, equal_nan=True)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "op"), _defined(), ids=_name)
def test_reductions_equal_the_fold(
    dtype: torch.dtype, op: object, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every reduction of every dtype equals the fold, in every encoding, and leaves its input unchanged."""
    send_cpu_tensors_to_nccl(monkeypatch)
    inputs = [elements(dtype, 53, rank, 1) for rank in range(world_size)]
    expected = _expected(op, inputs)

    def program(group: fd.Backend) -> None:
        own = inputs[group.rank].clone()
        _assert_same(fd.allreduce(own, op), expected, "allreduce")
        assert torch.equal(own.view(torch.uint8), inputs[group.rank].view(torch.uint8)), "the input was written to"
        reduced = fd.reduce(own, world_size - 1, op)
        if group.rank == world_size - 1:
            _assert_same(reduced, expected, "reduce")
        part = fd.reduce_scatter(own, op)
        _assert_same(part, torch.tensor_split(expected, world_size)[group.rank], "reduce_scatter")
        even = own[: 53 // world_size * world_size]
        part = fd.reduce_scatter(even, op)
        _assert_same(part, expected[: even.numel()].chunk(world_size)[group.rank], "even reduce_scatter")
        assert torch.equal(own.view(torch.uint8), inputs[group.rank].view(torch.uint8)), "the input was written to"
        _assert_same(fd.allreduce(own, op, out=own), expected, "allreduce in place")

    run_ranks(program, world_size, backend=fake_groups)


@pytest.mark.parametrize("op", [fd.ReduceOp.MIN, fd.ReduceOp.MAX], ids=_name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=_name)
def test_minima_and_maxima_propagate_nan(dtype: torch.dtype, op: fd.ReduceOp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minima and maxima propagate a NaN of any rank, as on other backends; NCCL would drop it."""
    send_cpu_tensors_to_nccl(monkeypatch)
    nan, inf = float("nan"), float("inf")
    inputs = [torch.tensor([nan, 1, inf, -inf, -0.5], dtype=dtype), torch.tensor([2, nan, -1, 3, -2], dtype=dtype)]
    least, most = [nan, nan, -1, -inf, -2], [nan, nan, inf, 3, -0.5]

    def program(group: fd.Backend) -> None:
        result = fd.allreduce(inputs[group.rank], op)
        expected = torch.tensor(least if op is fd.ReduceOp.MIN else most, dtype=dtype)
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)

    run_ranks(program, 2, backend=fake_groups)


def test_premultiplied_sums_use_each_ranks_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A premultiplied sum is NCCL's own operation, made with this rank's factor and released."""
    send_cpu_tensors_to_nccl(monkeypatch)

    def program(group: fd.Backend) -> int:
        result = fd.allreduce(torch.ones(3), fd.premultiplied_sum(group.rank + 1.5))
        assert result.tolist() == [4.0] * 3
        (communicator,) = [one for one in group.shared.opened if one.rank == group.rank]
        assert not communicator.operations
        return len(communicator.log)

    assert run_ranks(program, 2, backend=fake_groups) == [1, 1]


def test_empty_tensors_do_not_call_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations on empty tensors are compared, and move nothing."""
    send_cpu_tensors_to_nccl(monkeypatch)
    empty = torch.empty(0, 3)

    def program(group: fd.Backend) -> None:
        for op in (fd.ReduceOp.SUM, fd.ReduceOp.MAX):
            assert fd.allreduce(empty, op).shape == (0, 3)
            fd.reduce(empty, 0, op)
            assert fd.reduce_scatter(empty, op).shape == (0, 3)
        assert fd.allreduce(empty.to(torch.int32), fd.ReduceOp.BXOR).shape == (0, 3)
        assert fd.broadcast(empty, 0).shape == (0, 3)
        assert fd.all_gather(empty).shape == (0, 3)
        fd.gather(empty, 0)
        assert fd.all_to_all(empty).shape == (0, 3)
        group.synchronize()
        assert all(communicator.log == [] for communicator in group.shared.opened)

    run_ranks(program, 2, backend=fake_groups)
