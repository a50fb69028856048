"""Data parallelism: every rank has the whole model and a part of each batch."""

from __future__ import annotations

from ferrodist.parallel.data.ddp import DDP
from ferrodist.parallel.data.sync_batch_norm import (
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    convert_sync_batchnorm,
)

__all__ = ["DDP", "SyncBatchNorm1d", "SyncBatchNorm2d", "SyncBatchNorm3d", "convert_sync_batchnorm"]
