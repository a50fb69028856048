"""Distributed data parallelism: every rank has the whole model and a share of each batch."""

from ferrodist.parallel.ddp import comm_hooks
from ferrodist.parallel.ddp.bucket import GradientBucket
from ferrodist.parallel.ddp.ddp import DDP

__all__ = ["DDP", "GradientBucket", "comm_hooks"]


def __dir__() -> list[str]:
    return sorted(__all__)
