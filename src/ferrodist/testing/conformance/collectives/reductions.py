"""Checks of arithmetic: allreduce, reduce, reduce_scatter against the oracle, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import ferrodist as fd
from ferrodist.collectives.reduce_op import DTYPES, Op, PremultipliedSum
from ferrodist.testing.conformance.collectives.oracle import (
    ONE_STEP_BYTES,
    SEGMENT_BYTES,
    check_bits,
    check_fold,
    check_gathered,
    counts_around_thresholds,
    defined_reductions,
    own_shards,
    rank_factor,
    rank_inputs,
    raw_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrodist.backends.base import Backend

_INF, _NAN = float("inf"), float("nan")


def _every_reduction(group: Backend) -> Iterator[tuple[torch.dtype, Op]]:
    for dtype in DTYPES:
        for op in defined_reductions(dtype, rank_factor(group.rank)):
            yield dtype, op


def allreduce_of_every_dtype_and_operation(group: Backend) -> None:
    """An allreduce gives the fold in rank order, for every dtype and every operation it has, few and many elements."""
    for dtype, op in _every_reduction(group):
        for count in (5, 203):
            inputs = rank_inputs(group, dtype, count, seed=count)
            check_fold(group, fd.allreduce(inputs[group.rank], op), op, inputs, "allreduce")


def reduce_of_every_dtype_and_operation(group: Backend) -> None:
    """A reduce gives its root the fold in rank order, whichever rank is the root, and others an empty tensor."""
    for index, (dtype, op) in enumerate(_every_reduction(group)):
        root = index % group.world_size
        for count in (5, 203):
            inputs = rank_inputs(group, dtype, count, seed=index)
            check_fold(group, fd.reduce(inputs[group.rank], root, op), op, inputs, "reduce", root=root)


def reduce_scatter_of_every_dtype_and_operation(group: Backend) -> None:
    """reduce_scatter gives each rank its part of the fold, also where the parts differ in size."""
    for dtype, op in _every_reduction(group):
        for count in (5, 203):
            inputs = rank_inputs(group, dtype, count, seed=count)
            scattered = fd.reduce_scatter(inputs[group.rank], op)
            check_fold(group, scattered, op, own_shards(group, inputs), "reduce_scatter")


def reductions_of_every_size(group: Backend) -> None:
    """Sizes 0, 1, odd ones, and one below, at and above each threshold give the same bits as any other."""
    for dtype, op in ((torch.float32, fd.ReduceOp.SUM), (torch.uint8, fd.ReduceOp.BXOR)):
        for count in counts_around_thresholds(dtype):
            inputs = rank_inputs(group, dtype, count, seed=count)
            mine = inputs[group.rank]
            check_fold(group, fd.allreduce(mine, op), op, inputs, "allreduce")
            check_fold(group, fd.reduce_scatter(mine, op), op, own_shards(group, inputs), "reduce_scatter")
            root = count % group.world_size
            check_fold(group, fd.reduce(mine, root, op), op, inputs, "reduce", root=root)


def reductions_of_several_segments(group: Backend) -> None:
    """Chunks that are larger than a segment, and not a multiple of it, are folded whole and each element once."""
    size = min(group.world_size, 4)  # more ranks would only make it slower: their chunks stay below a segment
    count = size * (SEGMENT_BYTES // 4) + 2 * size + 1

    def input_of(rank: int) -> torch.Tensor:
        block = torch.arange(1021, dtype=torch.float32).mul_(0.37 * (rank + 1)).sub_(31 * rank)
        return block.repeat(count // len(block) + 1)[:count]

    expected = input_of(0)
    for rank in range(1, group.world_size):
        expected += input_of(rank)
    mine = input_of(group.rank)
    [shard] = own_shards(group, [expected])
    check_bits(fd.reduce_scatter(mine), shard, "a reduce_scatter of several segments")
    root = group.world_size - 1
    check_gathered(group, root, fd.reduce(mine, root), expected, "a reduce of several segments")
    check_bits(fd.allreduce(mine, out=mine), expected, "an allreduce of several segments in place")


def small_floats_round_once(group: Backend) -> None:
    """Floats of 8 and 16 bits are summed in float32: what is lost in steps of their own precision is not lost here."""
    p = group.world_size
    for dtype, large in ((torch.float16, 2048.0), (torch.bfloat16, 256.0), (torch.float8_e4m3fn, 16.0)):
        # Half a unit in the last place: each one alone would vanish, for ties go to the even neighbour.
        mine = torch.full((40,), large if group.rank == 0 else 1.0).to(dtype)
        check_bits(fd.allreduce(mine), torch.full((40,), large + p - 1).to(dtype), f"a sum of {dtype}")
        mean = torch.full((40,), large + p - 1).div(p).to(dtype)
        check_bits(fd.allreduce(mine, fd.ReduceOp.MEAN), mean, f"a mean of {dtype}")
    # The largest float16 is 65504: the sum of two is infinite, the mean of any number is not.
    mine = torch.full((40,), 65504.0, dtype=torch.float16)
    check_bits(fd.allreduce(mine, fd.ReduceOp.MEAN), mine, "the mean of the largest float16")


def extremes_follow_the_rules(group: Backend) -> None:
    """In MIN and MAX a NaN wins, and of 0.0 and -0.0 the lowest rank's stays."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn):
        last = group.world_size - 1
        mine = torch.ones(50, dtype=torch.float32)
        mine[0] = _NAN if group.rank == last else 1.0
        mine[1] = 0.0 if group.rank == 0 else -0.0
        mine[2] = -0.0 if group.rank == 0 else 0.0
        for op in (fd.ReduceOp.MIN, fd.ReduceOp.MAX):
            result = fd.allreduce(mine.to(dtype), op).to(torch.float32)
            assert result[0].isnan(), f"the {op} of 1 and NaN is {result[0]} in {dtype}"
            assert not result[1].signbit(), f"the {op} of 0.0 (rank 0) and -0.0 is -0.0 in {dtype}"
            assert result[2].signbit(), f"the {op} of -0.0 (rank 0) and 0.0 is 0.0 in {dtype}"


def infinities_follow_the_rules(group: Backend) -> None:
    """Sums with infinities are infinite or NaN as in IEEE arithmetic; a complex sum treats its parts apart."""
    if group.world_size < 2:
        return
    sign = -1.0 if group.rank == 1 else 1.0
    result = fd.allreduce(torch.tensor([_INF, sign * _INF, 1.0]))
    assert result[0] == _INF, f"inf + inf is {result[0]}"
    assert result[1].isnan(), f"inf - inf is {result[1]}"
    for count in (1, 70):
        mine = torch.full((count,), complex(_INF, 2.0), dtype=torch.complex64)
        for op in (fd.ReduceOp.SUM, fd.ReduceOp.MEAN, fd.premultiplied_sum(1.0)):
            parts = torch.view_as_real(fd.allreduce(mine, op))
            imaginary = 2.0 if op is fd.ReduceOp.MEAN else 2.0 * group.world_size
            expected = torch.tensor([_INF, imaginary]).expand(count, 2)
            check_bits(parts, expected, f"the {op} of inf+2i")


def integers_wrap_around(group: Backend) -> None:
    """Integer sums and products are those modulo 2**bits."""
    p = group.world_size
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
        info, bits = torch.iinfo(dtype), 8 * dtype.itemsize

        def wrapped(value: int, bits: int = bits, least: int = info.min) -> int:
            return (value - least) % (1 << bits) + least

        mine = torch.full((30,), info.max, dtype=dtype)
        check_bits(fd.allreduce(mine), torch.full((30,), wrapped(info.max * p), dtype=dtype), f"a sum of {dtype}")
        product = torch.full((30,), wrapped(info.max**p), dtype=dtype)
        check_bits(fd.allreduce(mine, fd.ReduceOp.PRODUCT), product, f"a product of {dtype}")


def factors_are_each_ranks_own(group: Backend) -> None:
    """A premultiplied sum uses the factor of each rank for its elements, for tensors of all sizes."""
    op = fd.premultiplied_sum(rank_factor(group.rank))
    assert isinstance(op, PremultipliedSum)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64):
        for count in (0, 1, 2, 20, ONE_STEP_BYTES // dtype.itemsize + 1):
            inputs = rank_inputs(group, dtype, count, seed=count)
            check_fold(group, fd.allreduce(inputs[group.rank], op), op, inputs, "allreduce")
            root = count % group.world_size
            check_fold(group, fd.reduce(inputs[group.rank], root, op), op, inputs, "reduce", root=root)


def all_ranks_get_the_same_bits(group: Backend) -> None:
    """The result of an allreduce is the same on every rank to the last bit, NaN included."""
    for count in (9, 301, ONE_STEP_BYTES):
        for op in (fd.ReduceOp.SUM, fd.ReduceOp.MAX):
            mine = rank_inputs(group, torch.float32, count, seed=count)[group.rank]
            bits = raw_bytes(fd.allreduce(mine, op))
            everyone = fd.all_gather(bits.unsqueeze(0))
            for rank, theirs in enumerate(everyone):
                check_bits(theirs, bits, f"the bytes of an allreduce with {op} on rank {rank}")
