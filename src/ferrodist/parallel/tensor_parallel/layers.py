"""Parallel layers: linear, embedding and attention layers that are sharded when they are made."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from ferrodist.parallel.tensor_parallel.parallelize import apply_style, check_mesh, shard_module
from ferrodist.parallel.tensor_parallel.styles import (
    ColumnParallel,
    IOPlacements,
    RowParallel,
    Style,
    VocabularyParallel,
)
from ferrodist.parallel.tensor_parallel.wrapped_forwards import ShardedForward
from ferrodist.tensor.placement import Replicate, Shard
from ferrodist.wording import counted

if TYPE_CHECKING:
    from ferrodist.mesh import DeviceMesh


class ParallelAttention(nn.Module):
    """Multi-head self-attention whose heads are sharded over the ranks; also grouped-query attention.

    Queries, keys and values come from column-parallel layers, the output from a row-parallel one: forward takes one
    allreduce, and so does backward. Keys and values may have fewer heads than queries, as in J. Ainslie et al., "GQA",
    2023; if the ranks can't shard these, each computes all of them.

    A DTensor gives a DTensor, a plain tensor a plain one.

    Args:
        embed_dim: The number of features in and out.
        num_heads: The number of heads of queries, a multiple of the number of ranks.
        mesh: The ranks, along one axis; all of them make the layer.
        num_kv_heads: The number of heads of keys and values, a divisor of ``num_heads``; None is ``num_heads``.
        bias: Whether the four linear layers have biases.
        is_causal: Whether a position attends only to itself and those before it.
        dropout: The dropout probability of the attention weights, in training.
        sequence_dim: 1 if inputs and outputs are sharded along the sequence; None if they are replicated.
        dtype: The dtype of the parameters.

    Shape:
        (B, T, embed_dim) to the same.

    Raises:
        ValueError: The sizes don't divide evenly, or the mesh has several axes.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        mesh: DeviceMesh,
        num_kv_heads: int | None = None,
        bias: bool = True,
        is_causal: bool = False,
        dropout: float = 0.0,
        sequence_dim: int | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.is_causal = is_causal
        self.dropout = dropout
        self._check(embed_dim, mesh)
        self.head_dim = embed_dim // num_heads
        # The number of times that heads of keys and values are repeated, to be sharded as the queries are.
        self._repeats = mesh.size // math.gcd(mesh.size, self.num_kv_heads)
        width = self.num_kv_heads * self.head_dim
        options = {"bias": bias, "device": "cpu", "dtype": dtype}
        self.queries = nn.Linear(embed_dim, embed_dim, **options)
        self.keys = nn.Linear(embed_dim, width, **options)
        self.values = nn.Linear(embed_dim, width, **options)
        self.output = nn.Linear(embed_dim, embed_dim, **options)
        given = Replicate() if sequence_dim is None else Shard(sequence_dim)
        # The input is gathered once for the three layers, and its gradients are reduced once.
        kv_style = ColumnParallel() if self._repeats == 1 else Style()
        for layer, style in ((self.queries, ColumnParallel()), (self.keys, kv_style), (self.values, kv_style)):
            shard_module(layer, mesh, {"": style})
        apply_style(self.output, mesh, RowParallel(outputs=given), Shard(-1))
        self.forward = ShardedForward(self.forward, mesh, IOPlacements(wanted=Replicate()), given)  # type: ignore[method-assign]

    def _check(self, embed_dim: int, mesh: DeviceMesh) -> None:
        check_mesh(mesh)
        if self.num_heads < 1 or self.num_kv_heads < 1:
            raise ValueError(
                f"there is at least one head: num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
            )
        if embed_dim % self.num_heads:
            raise ValueError(f"embed_dim={embed_dim} is not a multiple of num_heads={self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.num_heads % mesh.size:
            raise ValueError(f"num_heads={self.num_heads} can't be sharded over {counted(mesh.size, 'rank')}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the attention."""
        if x.dim() != 3:
            raise ValueError(f"ParallelAttention takes an input of shape (B, T, embed_dim), not {tuple(x.shape)}")
        batch, length, width = x.shape
        queries = self.queries(x).view(batch, length, self.num_heads, self.head_dim)
        keys = self._repeat_heads(self.keys(x).view(batch, length, self.num_kv_heads, self.head_dim))
        values = self._repeat_heads(self.values(x).view(batch, length, self.num_kv_heads, self.head_dim))
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal,
            enable_gqa=self.num_kv_heads * self._repeats != self.num_heads,
        )
        result: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return result

    def _repeat_heads(self, heads: torch.Tensor) -> torch.Tensor:
        return heads if self._repeats == 1 else heads.repeat_interleave(self._repeats, dim=2)


class ColumnParallelLinear(nn.Linear):
    """``nn.Linear`` sharded by its outputs; see `ColumnParallel`.

    A DTensor gives a DTensor; a plain input, which is replicated, gives this rank's shard as a plain tensor. The
    parameters have the values that ``nn.Linear`` draws on the mesh's rank 0, whose seed counts.

    Args:
        in_features, out_features, bias, dtype: The arguments of ``nn.Linear``.
        mesh: The ranks, along one axis; all of them make the layer.
        gather_output: Whether the output is replicated.
        sequence_dim: The dim along which the input is sharded, to be gathered; None if it is replicated.
        blocks, chunks: The arguments of `ColumnParallel`.

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
    """``nn.Linear`` sharded by its inputs; see `RowParallel`.

    A DTensor gives a DTensor; a plain input, which is this rank's shard, gives the full output, or this rank's shard of
    it, as a plain tensor. The parameters have the values that ``nn.Linear`` draws on the mesh's rank 0.

    Args:
        in_features, out_features, bias, dtype: The arguments of ``nn.Linear``.
        mesh: The ranks, along one axis; all of them make the layer.
        sequence_dim: The dim along which the output is sharded; None if it is replicated.

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
    """``nn.Embedding`` sharded by its vocabulary; see `VocabularyParallel`.

    A DTensor gives a DTensor; plain tokens, which are replicated, give the full output, or this rank's shard of it,
    as a plain tensor. The weight has the values that ``nn.Embedding`` draws on the mesh's rank 0.

    Args:
        num_embeddings, embedding_dim: The arguments of ``nn.Embedding``.
        mesh: The ranks, along one axis; all of them make the layer.
        sequence_dim: The dim along which the output is sharded; None if it is replicated.
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
