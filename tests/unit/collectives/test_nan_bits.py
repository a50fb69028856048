"""Which NaN a reduction gives: the same bits on every backend, whatever NaNs went in."""

import pytest
import torch

import ferrodist as fd
from ferrodist.testing import run_ranks

BACKENDS = ["simulated", "tcp-threads", "native-threads", "gloo-threads"]

NANS = {
    torch.float64: (torch.int64, 0x7FF8 << 48, [0x7FF8 << 48, -(8 << 48), (0x7FF0 << 48) + 1, -1]),
    torch.float32: (torch.int32, 0x7FC0 << 16, [0x7FC0 << 16, -(0x40 << 16), 0x7F800001, -1]),
    torch.float16: (torch.int16, 0x7E00, [0x7E00, -0x200, 0x7C01, -1, 0x7FFF]),
    torch.bfloat16: (torch.int16, 0x7FC0, [0x7FC0, -0x40, 0x7F81, -1, 0x7FFF]),
    torch.float8_e5m2: (torch.uint8, 0x7F, [0x7D, 0x7E, 0x7F, 0xFD, 0xFF]),
    torch.float8_e4m3fn: (torch.uint8, 0x7F, [0x7F, 0xFF]),
}
"""For each type: that of its bits, those of the NaN of all, and some NaNs of all signs and payloads."""

ARITHMETIC = [fd.ReduceOp.SUM, fd.ReduceOp.MEAN, fd.ReduceOp.PRODUCT, fd.premultiplied_sum(0.5)]
CHOICES = [fd.ReduceOp.MIN, fd.ReduceOp.MAX]


def inputs(dtype, rank, count):
    """NaNs that differ from rank to rank, one's and infinities; the first elements are NaN on each rank alone."""
    kind, _, bits = NANS[dtype]
    nans = torch.tensor([bits[(i + rank) % len(bits)] for i in range(count)], dtype=kind).view(dtype)
    others = torch.tensor([1.0, float("inf"), float("-inf")]).to(dtype)
    which = torch.arange(count) // 3 % 4
    picked = others.view(kind)[(torch.arange(count) + rank) % 3]
    return torch.where((which == rank) | (which == 3), nans.view(kind), picked).view(dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_arithmetic_gives_one_nan(backend, world_size):
    """Sums, means and products that are NaN have one pattern of bits, in each type and at each size."""

    def program(group):
        for dtype, (kind, bits, _) in NANS.items():
            for count in (1, 3, 70, 20_000):
                mine = inputs(dtype, group.rank, count)
                for op in ARITHMETIC:
                    for found in (fd.allreduce(mine, op), fd.reduce_scatter(mine, op)):
                        is_nan = found.float().isnan()
                        assert (found.view(kind)[is_nan] == bits).all(), (dtype, op, count)

    run_ranks(program, world_size, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounding_gives_one_nan(backend):
    """A minimum or maximum of small floats is rounded, and a NaN there is that of sums."""

    def program(group):
        for dtype in (torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn):
            kind, bits, _ = NANS[dtype]
            for count in (1, 70, 20_000):
                for op in CHOICES:
                    found = fd.allreduce(inputs(dtype, group.rank, count), op)
                    assert (found.view(kind)[found.float().isnan()] == bits).all(), (dtype, op, count)

    run_ranks(program, 2, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_choices_keep_the_first_nan(backend):
    """A minimum or maximum that is not rounded is one of the inputs, with its bits."""

    def program(group):
        for dtype in (torch.float64, torch.float32):
            kind = NANS[dtype][0]
            for count in (1, 70, 20_000):
                ranks = [inputs(dtype, rank, count) for rank in range(group.world_size)]
                first = ranks[2].view(kind)
                for tensor in (ranks[1], ranks[0]):
                    first = torch.where(tensor.isnan(), tensor.view(kind), first)
                for op in CHOICES:
                    found = fd.allreduce(ranks[group.rank], op)
                    is_nan = found.isnan()
                    assert torch.equal(found.view(kind)[is_nan], first[is_nan]), (dtype, op, count)

    run_ranks(program, 3, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_arithmetic_gives_one_nan(backend, dtype):
    """Each part of a complex number is a float."""

    def program(group):
        part = torch.view_as_real(torch.empty(0, dtype=dtype)).dtype
        kind, bits, _ = NANS[part]
        mine = torch.view_as_complex(inputs(part, group.rank, 200).view(-1, 2))
        for op in ARITHMETIC:
            found = torch.view_as_real(fd.allreduce(mine, op))
            assert (found.view(kind)[found.isnan()] == bits).all(), op

    run_ranks(program, 3, backend=backend)
