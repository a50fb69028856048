"""Distributed data parallelism: every rank has the whole model and a share of each batch.

::

    ddp.py             DDP, the wrapper                         config.py        its options, checked
    autograd_hooks.py  a gradient is ready; unused parameters   model_sync.py    ranks begin with one model
    reducer.py         Reducer, and the round of one backward   join.py          ranks with fewer batches
    bucket.py          GradientBucket: memory, allreduce        fingerprints.py  models and buckets told apart
    comm_hooks/        compression of gradients
"""

from ferrodist.parallel.ddp import comm_hooks
from ferrodist.parallel.ddp.bucket import GradientBucket
from ferrodist.parallel.ddp.ddp import DDP

__all__ = ["DDP", "GradientBucket", "comm_hooks"]


def __dir__() -> list[str]:
    return sorted(__all__)
