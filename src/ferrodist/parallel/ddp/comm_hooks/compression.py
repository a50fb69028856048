"""Hooks that reduce gradients as they are or in 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.reduce import async_allreduce
from ferrodist.collectives.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferrodist.collectives.work import PendingCollective
    from ferrodist.parallel.ddp.bucket import GradientBucket

_COMPRESSED = (torch.float32, torch.float64)


def allreduce(bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
    """Average a bucket as DDP does without a hook, for comparison."""
    return async_allreduce(bucket.tensor, ReduceOp.MEAN, group=bucket.group, out=bucket.tensor, timeout=bucket.timeout)


def bfloat16_compression(bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
    """Round gradients to bfloat16, which has float32's range and 8 bits: half of float32's bytes.

    Ranks' values are rounded, added up in float32, and their mean is rounded again. Dtypes other than float32 and
    float64 are sent as they are.
    """
    return _allreduce_as(torch.bfloat16, bucket)


def float16_compression(bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
    """Round gradients to float16, which has 11 bits, and infinity from 65520 on; see `bfloat16_compression`."""
    return _allreduce_as(torch.float16, bucket)


def _allreduce_as(dtype: torch.dtype, bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
    if bucket.tensor.dtype not in _COMPRESSED:
        return allreduce(bucket)
    rounded = bucket.tensor.to(dtype)
    return async_allreduce(rounded, ReduceOp.MEAN, group=bucket.group, out=rounded, timeout=bucket.timeout)
