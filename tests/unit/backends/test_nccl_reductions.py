"""What NCCL is given for each reduction, and what comes of it, over a fake of NCCL."""

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
"""Of nccl.h."""

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


def test_dtypes_have_ncclss_numbers() -> None:
    """The numbers of dtypes are those of nccl.h, and no other dtype is left to NCCL."""
    assert {_name(dtype): number for dtype, number in NCCL_DTYPES.items()} == _NCCL_NUMBERS


def test_operations_have_nccls_numbers() -> None:
    """Operations have the numbers of nccl.h; what NCCL has none for says so."""
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
def test_every_recipe_is_something_nccl_can_do(dtype: torch.dtype, op: object) -> None:
    """What goes to NCCL has one of its dtypes and operations."""
    for world_size in (1, 2, 3):
        recipe = recipe_of(dtype, op, world_size)
        if recipe.encoding is Encoding.GATHERED:
            assert recipe.fold is not None
        else:
            assert recipe.carrier in NCCL_DTYPES
            assert (recipe.op is None) == (recipe.factor is not None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=_name)
def test_inexact_factors_of_small_floats_are_taken_in_float32(dtype: torch.dtype) -> None:
    """NCCL multiplies by factors in the elements' type: where that can't hold one, float32 does."""
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
    """The same numbers; of 0.0 and -0.0 either, and small floats up to their roundings."""
    if not (actual.is_floating_point() or actual.is_complex()):
        assert torch.equal(actual, expected), what
        return
    loose = {torch.float16: 4e-3, torch.bfloat16: 4e-2}.get(actual.dtype, 1e-6)
    wide = torch.complex128 if actual.is_complex() else torch.float64
    torch.testing.assert_close(actual.to(wide), expected.to(wide), rtol=loose, atol=loose, equal_nan=True)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "op"), _defined(), ids=_name)
def test_reductions_give_the_fold(
    dtype: torch.dtype, op: object, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation on every dtype gives the fold's numbers, in every form, and leaves its input alone."""
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
def test_a_nan_wins(dtype: torch.dtype, op: fd.ReduceOp, monkeypatch: pytest.MonkeyPatch) -> None:
    """In minima and maxima a NaN of any rank wins, as on other backends; NCCL would drop it."""
    send_cpu_tensors_to_nccl(monkeypatch)
    nan, inf = float("nan"), float("inf")
    inputs = [torch.tensor([nan, 1, inf, -inf, -0.5], dtype=dtype), torch.tensor([2, nan, -1, 3, -2], dtype=dtype)]
    least, most = [nan, nan, -1, -inf, -2], [nan, nan, inf, 3, -0.5]

    def program(group: fd.Backend) -> None:
        result = fd.allreduce(inputs[group.rank], op)
        expected = torch.tensor(least if op is fd.ReduceOp.MIN else most, dtype=dtype)
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)

    run_ranks(program, 2, backend=fake_groups)


def test_each_rank_has_its_own_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A premultiplied sum is NCCL's own, made with this rank's factor and given back."""
    send_cpu_tensors_to_nccl(monkeypatch)

    def program(group: fd.Backend) -> int:
        result = fd.allreduce(torch.ones(3), fd.premultiplied_sum(group.rank + 1.5))
        assert result.tolist() == [4.0] * 3
        (communicator,) = [one for one in group.shared.opened if one.rank == group.rank]
        assert not communicator.operations
        return len(communicator.log)

    assert run_ranks(program, 2, backend=fake_groups) == [1, 1]


def test_tensors_without_elements_ask_nothing_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations on no elements are compared, and move nothing."""
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
