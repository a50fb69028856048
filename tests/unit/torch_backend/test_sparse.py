"""Sums of sparse tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ferrodist.errors import UnsupportedOpError
from ferrodist.testing import run_ranks
from ferrodist.torch_backend.process_group import FerrodistProcessGroup


def embedded(rank, width=()):
    """A tensor of which each rank has other rows, one of them twice; the second rank has none."""
    places = torch.tensor([[], [0, 3, 3], [3]][(rank + 2) % 3], dtype=torch.int64)
    weights = torch.arange(1.0, 1 + places.numel() * torch.Size(width).numel()) + rank
    return torch.sparse_coo_tensor(places.view(1, -1), weights.view(-1, *width), (5, *width), check_invariants=True)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("width", [(), (2,), (2, 3)])
def test_sum(width, is_async):
    """The ranks' tensors are summed in place, whatever rows each has."""

    def program(group):
        tensor = embedded(group.rank, width)
        options = dist.AllreduceOptions()
        options.asyncOp = is_async
        work = FerrodistProcessGroup(group).allreduce([tensor], options)
        work.wait()
        assert tensor.is_sparse
        assert tensor.is_coalesced()
        return tensor.to_dense()

    total = sum(embedded(rank, width).to_dense() for rank in range(3))
    for found in run_ranks(program, 3, timeout=60):
        assert torch.equal(found, total)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_inference", [False, True])
def test_the_sum_can_be_used_as_the_tensor_was(is_inference, is_async):
    """In backward passes and in place, outside of inference mode; and inside of it."""

    def program(group):
        with torch.inference_mode(is_inference):
            tensor = embedded(group.rank)
            options = dist.AllreduceOptions()
            options.asyncOp = is_async
            FerrodistProcessGroup(group).allreduce([tensor], options).wait()
            assert tensor.is_inference() == is_inference
            assert tensor._values().is_inference() == tensor._indices().is_inference() == is_inference
            tensor.mul_(0.5)
            assert tensor.coalesce().values().is_inference() == is_inference
            return tensor.to_dense()

    total = sum(embedded(rank).to_dense() for rank in range(2)) / 2
    for found in run_ranks(program, 2, timeout=60):
        assert torch.equal(found, total)


def test_autograd_does_not_see_the_sum():
    """A tensor that needs a gradient is written to as others are."""

    def program(group):
        tensor = embedded(group.rank).requires_grad_()
        FerrodistProcessGroup(group).allreduce([tensor]).wait()
        assert tensor.grad_fn is None
        return tensor.detach().to_dense()

    total = sum(embedded(rank).to_dense() for rank in range(2))
    for found in run_ranks(program, 2, timeout=60):
        assert torch.equal(found, total)


def test_other_reductions_and_layouts():
    """They are refused, before anything is sent."""

    def program(group):
        made = FerrodistProcessGroup(group)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        with pytest.raises(UnsupportedOpError, match="can only be summed"):
            made.allreduce([embedded(0)], options)

    run_ranks(program, 2, timeout=60)
