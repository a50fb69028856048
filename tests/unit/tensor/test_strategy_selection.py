"""Selection of the strategy that moves the fewest bytes."""

import pytest
import torch
from operator_checks import make, spread

import ferrodist as fd
from ferrodist import DeviceMesh, Partial, Replicate, Shard
from ferrodist.tensor.redistribute_plan import RedistributeKind
from ferrodist.testing import run_ranks


@pytest.mark.parametrize(
    ("function", "shapes", "placements", "result", "moves"),
    [
        # Partial sums are scattered if the operator can take shards: half the bytes of an allreduce.
        (torch.relu, [(4, 6)], [Partial()], Shard(0), [RedistributeKind.REDUCE_SCATTER]),
        # But not unevenly, which nobody asked for.
        (torch.relu, [(3, 6)], [Partial()], Shard(1), [RedistributeKind.REDUCE_SCATTER]),
        (torch.relu, [(3, 5)], [Partial()], Replicate(), [RedistributeKind.ALLREDUCE]),
        # Another input has this sharding: it is not gathered.
        (torch.mul, [(3, 5), (3, 5)], [Shard(0), Replicate()], Shard(0), [RedistributeKind.SLICE]),
        # The smaller one moves, and to another dim in less than to all ranks.
        (torch.mm, [(64, 8), (8, 2)], [Shard(0), Shard(0)], Shard(0), [RedistributeKind.ALL_GATHER]),
        (torch.mm, [(2, 8), (8, 64)], [Shard(0), Shard(1)], Shard(1), [RedistributeKind.ALL_GATHER]),
        (torch.mm, [(64, 8), (8, 64)], [Shard(1), Shard(0)], Partial(), []),
        (torch.add, [(4, 6), (4, 6)], [Shard(0), Shard(1)], Shard(0), [RedistributeKind.ALL_TO_ALL]),
        # Whole is the first of several that send nothing.
        (torch.add, [(4, 6), (4, 6)], [Replicate(), Replicate()], Replicate(), []),
        (torch.add, [(4, 6), (4, 6)], [Partial(), Replicate()], Partial(), [RedistributeKind.MAKE_PARTIAL]),
    ],
)
def test_the_strategy_with_the_fewest_bytes_is_selected(function, shapes, placements, result, moves):
    def compute(group):
        mesh = DeviceMesh(group, (2,))
        inputs = [spread(make(*shape), mesh, where) for shape, where in zip(shapes, placements, strict=True)]
        with fd.record_redistributions() as steps:
            got = function(*inputs)
        return got.placements, [step.kind for step in steps]

    assert run_ranks(compute, 2) == [((result,), moves)] * 2
