"""Tensor parallelism: each layer is sharded over the ranks of a mesh axis.

::

    parallelize.py    a plan applied to a module       plan.py              the style of each module, by name
    styles.py         Style and the styles of layers   wrapped_forwards.py  inputs and outputs with placements
    layers.py         layers that are made sharded     async_linear.py      gathering overlapped with products
"""

from ferrodist.parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelEmbedding,
    RowParallelLinear,
)
from ferrodist.parallel.tensor_parallel.parallelize import parallelize
from ferrodist.parallel.tensor_parallel.styles import (
    ColumnParallel,
    RowParallel,
    SequenceParallel,
    Style,
    VocabularyParallel,
)

__all__ = [
    "ColumnParallel",
    "ColumnParallelLinear",
    "ParallelAttention",
    "ParallelEmbedding",
    "RowParallel",
    "RowParallelLinear",
    "SequenceParallel",
    "Style",
    "VocabularyParallel",
    "parallelize",
]


def __dir__() -> list[str]:
    return sorted(__all__)
