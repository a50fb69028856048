"""Reduce gradients as they are, or in 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.collectives.reductions import async_allreduce

if TYPE_CHECKING:
    from ferrodist.collectives.pending import PendingCollective
    from ferrodist.parallel.data.gradient_bucket import GradientBucket

__all__ = ["allreduce", "bfloat16_compression", "float16_compression"]

_WIDE = (torch.float32, torch.float64)


def allreduce(bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
    """What DDP does without a hook, to compare hooks with."""
    return async_allreduce(bucket.tensor, ReduceOp.MEAN, group=bucket.group, out=bucket.tensor)


def bfloat16_compression(bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
    """Round gradients to bfloat16, which has float32's range and 8 bits: half of float32's bytes.

    Ranks' values are rounded, added up in float32, and their mean is rounded again. Other dtypes than float32 and
    float64 travel as they are.
    """
    return _in(torch.bfloat16, bucket)


def float16_compression(bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
    """Round gradients to float16, which has 11 bits, and infinity from 65520 on; see `bfloat16_compression`."""
    return _in(torch.float16, bucket)


def _in(dtype: torch.dtype, bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
    if bucket.tensor.dtype not in _WIDE:
        return allreduce(bucket)
    small = bucket.tensor.to(dtype)
    return async_allreduce(small, ReduceOp.MEAN, group=bucket.group, out=small)
