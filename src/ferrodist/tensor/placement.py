"""Placements of a tensor along one mesh axis: sharded, replicated, or partial."""

from __future__ import annotations

from dataclasses import dataclass

from ferrodist.collectives.reduce_op import ReduceOp

PARTIAL_OPS = (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
"""The reductions that `Partial` takes."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A dim is sharded over the axis; if its size doesn't divide evenly, the first ranks have one element more.

    Several axes may shard one dim: the first axis of the mesh splits it first, the next one splits each shard.

    Args:
        dim: The dim; negative numbers count from the last.
        blocks: The number of equal blocks of the dim that are each sharded by themselves (strided sharding). Flattening
            dims gives such a sharding where another than the first of them was sharded; so does an axis that shards
            a dim after a later axis did, with ``blocks`` that axis's size.
    """

    dim: int
    blocks: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise TypeError(f"Shard takes the index of a dim, not {self.dim!r}")
        if isinstance(self.blocks, bool) or not isinstance(self.blocks, int):
            raise TypeError(f"blocks is the number of blocks, not {self.blocks!r}")
        if self.blocks < 1:
            raise ValueError(f"a dim has at least one block, not {self.blocks}")

    def __repr__(self) -> str:
        return f"Shard({self.dim})" if self.blocks == 1 else f"Shard({self.dim}, blocks={self.blocks})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis has the full tensor."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank of the axis has a tensor of the full shape, and the full tensor is their reduction.

    Args:
        op: The reduction: SUM, MEAN, MIN, MAX or PRODUCT.
    """

    op: ReduceOp = ReduceOp.SUM

    def __post_init__(self) -> None:
        if self.op not in PARTIAL_OPS:
            names = ", ".join(f"ReduceOp.{op.name}" for op in PARTIAL_OPS)
            raise TypeError(f"Partial takes one of {names}, not {self.op!r}")

    def __repr__(self) -> str:
        return "Partial()" if self.op is ReduceOp.SUM else f"Partial({self.op})"


Placement = Shard | Replicate | Partial


def reductions_commute(one: Partial, other: Partial) -> bool:
    """Return whether a tensor that is partial along two axes may be reduced along either first."""
    return one.op is other.op or {one.op, other.op} == {ReduceOp.SUM, ReduceOp.MEAN}
