"""The assignment of tensors to DDP's buckets: a pure function."""

import math

import pytest
import torch

from ferrodist.parallel.ddp.bucket import compute_bucket_assignment


def tensors(*sizes, dtype=torch.float32):
    return [torch.empty(size, dtype=dtype) for size in sizes]


def members(plan):
    return [bucket.members for bucket in plan]


def test_buckets_are_filled_in_order():
    """A bucket takes tensors while they fit, and the next one starts with the first that does not."""
    assert members(compute_bucket_assignment(tensors(1, 2, 3, 1, 1), 12)) == [(0, 1), (2,), (3, 4)]


def test_a_tensor_may_fill_a_bucket_exactly():
    """The limit itself is allowed."""
    assert members(compute_bucket_assignment(tensors(1, 2, 1), 12)) == [(0, 1), (2,)]


def test_a_large_tensor_has_a_bucket_of_its_own():
    """A tensor larger than a bucket travels alone, between those before and after it."""
    assert members(compute_bucket_assignment(tensors(1, 100, 1, 1), 12)) == [(0,), (1,), (2, 3)]


def test_each_dtype_has_its_own_buckets():
    """Tensors of two dtypes never share a bucket, and a bucket goes on over one of another dtype."""
    mixed = [*tensors(1), *tensors(1, dtype=torch.float64), *tensors(1), *tensors(1, dtype=torch.float64)]
    plan = compute_bucket_assignment(mixed, math.inf)
    assert [(bucket.dtype, bucket.members) for bucket in plan] == [(torch.float32, (0, 2)), (torch.float64, (1, 3))]


def test_buckets_come_in_the_order_in_which_they_become_complete():
    """A bucket whose last tensor comes early precedes one that was begun before it."""
    mixed = [*tensors(1), *tensors(1, dtype=torch.float64), *tensors(1)]
    assert members(compute_bucket_assignment(mixed, math.inf)) == [(1,), (0, 2)]


def test_each_device_has_its_own_buckets():
    """Tensors of two devices never share a bucket."""
    assert members(compute_bucket_assignment([torch.empty(1), torch.empty(1, device="meta")], math.inf)) == [(0,), (1,)]


@pytest.mark.parametrize("max_bytes", [1, 8, 24, 100, math.inf])
def test_every_tensor_is_in_one_bucket(max_bytes):
    """Nothing is lost or sent twice, tensors without elements included."""
    planned = [*tensors(0, 3, 5, 0, 1), *tensors(2, 0, dtype=torch.int64), *tensors(7)]
    plan = compute_bucket_assignment(planned, max_bytes)
    assert sorted(position for bucket in plan for position in bucket.members) == list(range(len(planned)))
    for bucket in plan:
        size_bytes = sum(planned[position].nbytes for position in bucket.members)
        assert len(bucket.members) == 1 or size_bytes <= max_bytes


def test_no_tensors_make_no_buckets():
    """A module without parameters has no buckets."""
    assert compute_bucket_assignment([], 1) == []
