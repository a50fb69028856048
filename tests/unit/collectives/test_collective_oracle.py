"""Random collectives over random groups agree with the oracle bit for bit; and the oracle with itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrodist as fd
from ferrodist.collectives.reduce_op import DTYPES, PremultipliedSum
from ferrodist.testing import run_ranks
from ferrodist.testing.conformance.collectives import oracle
from ferrodist.testing.conformance.collectives.oracle import (
    check_bits,
    check_fold,
    defined_reductions,
    elements,
    rank_factor,
)

_DTYPES = st.sampled_from(DTYPES)
_SHAPES = st.one_of(
    st.lists(st.integers(0, 12), max_size=3), st.tuples(st.integers(1, 3), st.integers(20_000, 90_000)).map(list)
)
_BACKENDS = st.sampled_from(["simulated", "tcp-threads"])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=_DTYPES, shape=_SHAPES, world_size=st.integers(1, 5), backend=_BACKENDS)
def test_reductions_agree_with_the_oracle(data, dtype, shape, world_size, backend) -> None:
    """allreduce, reduce and reduce_scatter of any dtype, operation, shape and world size, on both backends."""
    op = data.draw(st.sampled_from(defined_reductions(dtype)), label="op")
    root = data.draw(st.integers(0, world_size - 1), label="root")
    dim = data.draw(st.integers(-len(shape), len(shape) - 1), label="dim") if shape else None
    seed = data.draw(st.integers(0, 2**16), label="seed")

    def on_rank(group):
        mine_op = fd.premultiplied_sum(rank_factor(group.rank)) if isinstance(op, PremultipliedSum) else op
        flat = [elements(dtype, math.prod(shape), rank, seed) for rank in range(world_size)]
        mine = flat[group.rank].view(shape)
        result = fd.allreduce(mine, mine_op)
        assert result.shape == mine.shape
        check_fold(group, result, op, flat, "allreduce")
        reduced = fd.reduce(mine, root, mine_op)
        if group.rank == root:
            check_fold(group, reduced, op, flat, "reduce")
        if dim is not None:
            sizes = fd.compute_shard_sizes(shape[dim], world_size)
            parts = [tensor.view(shape).split(sizes, dim)[group.rank].reshape(-1) for tensor in flat]
            check_fold(group, fd.reduce_scatter(mine, mine_op, dim=dim), op, parts, "reduce_scatter")

    run_ranks(on_rank, world_size, backend=backend)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), dtype=_DTYPES, world_size=st.integers(1, 5), backend=_BACKENDS)
def test_movement_keeps_bits(data, dtype, world_size, backend) -> None:
    """Gathering, scattering and exchanging any shapes, even and uneven, on both backends."""
    ranks = range(world_size)
    inner = data.draw(st.lists(st.integers(0, 5), max_size=2), label="inner shape")
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size), label="rows")
    counts = data.draw(
        st.lists(
            st.lists(st.integers(0, 4), min_size=world_size, max_size=world_size),
            min_size=world_size,
            max_size=world_size,
        ),
        label="counts",
    )
    root = data.draw(st.integers(0, world_size - 1), label="root")
    row = math.prod(inner)

    def on_rank(group):
        rank = group.rank
        parts = [elements(dtype, rows * row, r).view(rows, *inner) for r, rows in enumerate(sizes)]
        whole = torch.cat(parts)
        check_bits(fd.all_gather_uneven(parts[rank]), whole, "all_gather_uneven")
        gathered = fd.gather(parts[rank], root)
        if rank == root:
            check_bits(gathered, whole, "gather")
        shards = whole.split(fd.compute_shard_sizes(len(whole), world_size))
        check_bits(fd.scatter(whole if rank == root else None, root), shards[rank], "scatter")
        sent = [
            elements(dtype, sum(counts[r]) * row, r, seed=1).view(-1, *inner)
            if sum(counts[r]) * row
            else torch.empty(sum(counts[r]), *inner, dtype=dtype)
            for r in ranks
        ]
        received = fd.all_to_all_single_uneven(sent[rank], counts[rank], [counts[r][rank] for r in ranks])
        expected = torch.cat([sent[r].split(counts[r])[rank] for r in ranks])
        check_bits(received, expected, "all_to_all_single_uneven")

    run_ranks(on_rank, world_size, backend=backend)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=lambda d: str(d)[6:]
)
def test_the_oracle_knows_small_floats(dtype: torch.dtype) -> None:
    """Its conversions are those of torch, for every value of the format, and for half a million of float32."""
    codes = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
    values = codes.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype)
    decoded = torch.from_numpy(oracle._decode(values).copy())
    check_bits(decoded, values.to(torch.float32), f"the values of {dtype}", any_nan=True)
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31 - 1, (500_000,), generator=generator, dtype=torch.int32)
    floats = torch.cat([bits.view(torch.float32), torch.randn(50_000, generator=generator) * 300])
    with np.errstate(all="ignore"):
        encoded = oracle._encode(floats.numpy(), dtype)
    check_bits(encoded, floats.to(dtype), f"rounding to {dtype}", any_nan=True)


def test_same_bits_tells_zeros_and_nans_apart() -> None:
    """The comparison that everything rests on sees the sign of zero and the payload of NaN."""
    with pytest.raises(AssertionError, match=r"1 of 2 elements differ; element 1 is -0\.0, not 0\.0"):
        check_bits(torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0]), "zeros")
    nan = torch.tensor([0x7FC00001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    with pytest.raises(AssertionError, match="1 of 1 elements differ"):
        check_bits(nan[:1], nan[1:], "NaN")
    check_bits(nan[:1], nan[1:], "NaN", any_nan=True)
    check_bits(torch.complex(nan[:1], nan[1:]), torch.complex(nan[1:], nan[1:]), "complex NaN", any_nan=True)
    with pytest.raises(AssertionError, match="shape"):
        check_bits(torch.zeros(2, 0), torch.zeros(0, 2), "shapes")
    with pytest.raises(AssertionError, match=r"torch\.int32 in place of"):
        check_bits(torch.zeros(2, dtype=torch.int32), torch.zeros(2), "dtypes")
