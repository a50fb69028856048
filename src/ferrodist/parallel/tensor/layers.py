"""Layers that are made divided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from ferrodist.parallel.tensor.parallelize import apply_style
from ferrodist.parallel.tensor.styles import ColumnParallel, RowParallel, VocabularyParallel
from ferrodist.tensor.placement import Replicate, Shard

if TYPE_CHECKING:
    from ferrodist.mesh import DeviceMesh

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear"]


class ColumnParallelLinear(nn.Linear):
    """``nn.Linear`` divided by its outputs; see `ColumnParallel`.

    It gives what it gets: of a DTensor a DTensor, of a plain tensor, which is whole on every rank, this rank's part.
    Its parameters have the values that ``nn.Linear`` draws on the first rank of the mesh, whose seed counts.

    Args:
        in_features, out_features, bias, dtype: As for ``nn.Linear``.
        mesh: The ranks, along one axis; all of them make the layer.
        gather_output: Whether the output is whole on every rank.
        sequence_dim: The dim of the input along which it comes divided, to be gathered; None is whole.
        blocks, chunks: As for `ColumnParallel`.

    Shape:
        (..., in_features) to (..., out_features), of which a rank has out_features / p.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,  # noqa: FBT001, FBT002 - as nn.Linear
        *,
        mesh: DeviceMesh,
        gather_output: bool = False,
        sequence_dim: int | None = None,
        blocks: int = 1,
        chunks: int = 1,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device="cpu", dtype=dtype)
        given = Replicate() if sequence_dim is None else Shard(sequence_dim)
        outputs = Replicate() if gather_output else Shard(-1)
        apply_style(self, mesh, ColumnParallel(outputs=outputs, blocks=blocks, chunks=chunks), given)


class RowParallelLinear(nn.Linear):
    """``nn.Linear`` divided by its inputs; see `RowParallel`.

    It gives what it gets: of a DTensor a DTensor, of a plain tensor, which is this rank's part of the input, the whole
    output, or its part of it. Its parameters have the values that ``nn.Linear`` draws on the first rank of the mesh.

    Args:
        in_features, out_features, bias, dtype: As for ``nn.Linear``.
        mesh: The ranks, along one axis; all of them make the layer.
        sequence_dim: The dim of the output along which it is divided; None is whole on every rank.

    Shape:
        (..., in_features), of which a rank has in_features / p, to (..., out_features).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,  # noqa: FBT001, FBT002 - as nn.Linear
        *,
        mesh: DeviceMesh,
        sequence_dim: int | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device="cpu", dtype=dtype)
        outputs = Replicate() if sequence_dim is None else Shard(sequence_dim)
        apply_style(self, mesh, RowParallel(outputs=outputs), Shard(-1))


class ParallelEmbedding(nn.Embedding):
    """``nn.Embedding`` divided by its vocabulary; see `VocabularyParallel`.

    It gives what it gets: of a DTensor a DTensor, of a plain tensor, the tokens, the whole output, or this rank's part
    of it. Its weight has the values that ``nn.Embedding`` draws on the first rank of the mesh.

    Args:
        num_embeddings, embedding_dim: As for ``nn.Embedding``.
        mesh: The ranks, along one axis; all of them make the layer.
        sequence_dim: The dim of the output along which it is divided; None is whole on every rank.
        options: The other arguments of ``nn.Embedding``; ``max_norm`` and ``sparse`` are refused.

    Shape:
        (...) of integers to (..., embedding_dim).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mesh: DeviceMesh,
        sequence_dim: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        outputs = Replicate() if sequence_dim is None else Shard(sequence_dim)
        apply_style(self, mesh, VocabularyParallel(outputs=outputs), Replicate())
