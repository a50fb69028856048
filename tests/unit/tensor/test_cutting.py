"""Operators that cut and join dims, on distributed tensors."""

import pytest
import torch
from operator_checks import NUM_RANKS, assert_same, check_everywhere, check_operator, make, spread

import ferrodist as fd
from ferrodist import DeviceMesh, DTensor, Partial, ReduceOp, Replicate, Shard
from ferrodist.testing import run_ranks


def everywhere(*cases, meshes=((2,), (3,))):
    """Check functions of one tensor, all in one run of ranks a mesh."""
    for function, *inputs in cases:
        check_everywhere(function, list(inputs), meshes=meshes)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[1:3],
        lambda x: x[:, ::2],
        lambda x: x[0:4, -2:],
        lambda x: x.narrow(1, 2, 3),
        lambda x: x[2],
        lambda x: x[..., -1],
        lambda x: x[1:1],
        lambda x: x[None, 1:, None, 3],
        lambda x: torch.diagonal(x),
        lambda x: torch.diagonal(x, 1, 1, 0),
        lambda x: x.unfold(1, 3, 2),
        lambda x: torch.flip(x, (0,)),
        lambda x: torch.roll(x, 2, 1),
        lambda x: torch.roll(x, 5),
        lambda x: x.repeat(1, 2),
        lambda x: x.repeat(2, 1, 1),
        lambda x: x.repeat_interleave(2, dim=0),
        lambda x: torch.tril(x),
        lambda x: torch.triu(x, 1),
        lambda x: torch.movedim(x, 0, 1),
        lambda x: x.swapaxes(0, 1),
        lambda x: x.flatten(),
    ],
    ids=str,
)
def test_one_tensor_to_one(function):
    """Of every placement, forward and backward."""
    check_everywhere(function, [make(4, 5)])
