"""Tensor parallelism: each layer is sharded over the ranks of a mesh axis."""

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
