"""How DDP may reduce a bucket of gradients: functions from a `GradientBucket` to a `PendingCollective`.

::

    compression.py   allreduce, float16_compression, bfloat16_compression
    power_sgd.py     PowerSGD      low-rank matrices, with error feedback
    top_k.py         TopK          the largest elements, with error feedback
    continued.py     Continued     what more is to be done when a collective has ended
    residuals.py     Residuals     what PowerSGD and TopK have not sent so far

A hook of one's own starts one or more collectives on ``bucket.tensor`` (all gradients, flat), ``bucket.gradients`` (one
tensor for each parameter) or copies of them, with ``group=bucket.group``, and returns a `PendingCollective` whose
``wait()`` gives the average of each element, flat. It is called in the same order on all ranks, and so are the waits.
Ranks compare hooks when a DDP is made: by name, or by what their method ``describe()`` gives, where they have one.
"""

from __future__ import annotations

from ferrodist.parallel.ddp.comm_hooks.compression import (
    Continued,
    allreduce,
    bfloat16_compression,
    float16_compression,
)
from ferrodist.parallel.ddp.comm_hooks.power_sgd import PowerSGD
from ferrodist.parallel.ddp.comm_hooks.top_k import TopK

__all__ = ["Continued", "PowerSGD", "TopK", "allreduce", "bfloat16_compression", "float16_compression"]


def __dir__() -> list[str]:
    return sorted(__all__)
