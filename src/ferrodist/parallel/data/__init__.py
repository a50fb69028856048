"""Data parallelism: every rank has the whole model and a part of each batch."""

from __future__ import annotations

from ferrodist.parallel.data import comm_hooks
from ferrodist.parallel.data.ddp import DDP
from ferrodist.parallel.data.gradient_bucket import GradientBucket
from ferrodist.parallel.data.local_sgd import DiLoCo, LocalSGD
from ferrodist.parallel.data.sync_batch_norm import (
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    convert_sync_batchnorm,
)

__all__ = [
    "DDP",
    "DiLoCo",
    "GradientBucket",
    "LocalSGD",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "comm_hooks",
    "convert_sync_batchnorm",
]


def __dir__() -> list[str]:
    return sorted(__all__)
