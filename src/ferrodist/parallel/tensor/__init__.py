"""Tensor parallelism: every rank has a part of each layer."""

from __future__ import annotations

from ferrodist.parallel.tensor.attention import ParallelAttention
from ferrodist.parallel.tensor.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from ferrodist.parallel.tensor.parallelize import parallelize
from ferrodist.parallel.tensor.styles import (
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
