"""Communication hooks: functions from a `GradientBucket` to a `PendingCollective`, which reduce a bucket of gradients.

::

    compression.py      allreduce, float16_compression, bfloat16_compression
    power_sgd.py        PowerSGD: low-rank matrices, with error feedback
    top_k.py            TopK: the largest elements, with error feedback
    continued.py        Continued: a collective, then a function of its result; for custom hooks too
    error_feedback.py   the part of gradients that a lossy hook has not sent so far

A custom hook starts one or more collectives on ``bucket.tensor`` (all gradients, flat), ``bucket.gradients`` (one
tensor for each parameter) or copies of them, with ``group=bucket.group, timeout=bucket.timeout``, and returns a
`PendingCollective` whose ``wait()`` returns the average of each element, flat. It is called in the same order on all
ranks, and so are the waits.
Ranks compare hooks when a DDP is made: by name, or by the text of their method ``describe()``, where they have one.
"""

from ferrodist.parallel.ddp.comm_hooks.compression import (
    allreduce,
    bfloat16_compression,
    float16_compression,
)
from ferrodist.parallel.ddp.comm_hooks.continued import Continued
from ferrodist.parallel.ddp.comm_hooks.power_sgd import PowerSGD
from ferrodist.parallel.ddp.comm_hooks.top_k import TopK

__all__ = ["Continued", "PowerSGD", "TopK", "allreduce", "bfloat16_compression", "float16_compression"]


def __dir__() -> list[str]:
    return sorted(__all__)
