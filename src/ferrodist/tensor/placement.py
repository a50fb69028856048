"""How a tensor lies along one axis of a mesh: divided, whole on every rank, or as parts that add up to it."""

from __future__ import annotations

from dataclasses import dataclass

from ferrodist.collectives.reduce_op import ReduceOp

PARTIAL_OPS = (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
"""What `Partial` may fold by."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A dim is divided over the axis; sizes that don't divide evenly give the first ranks one more.

    Several axes may divide one dim: the first axis of the mesh divides it first, the next one what that left.

    Args:
        dim: The dim; negative numbers count from the last.
        blocks: The dim is this many equal blocks one after the other, and each is divided by itself (strided
            sharding). That is what is left where dims that are joined had another than their first divided, and how an
            axis divides what a later one has divided before it, with ``blocks`` the size of that one.
    """

    dim: int
    blocks: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise TypeError(f"Shard takes the number of a dim, not {self.dim!r}")
        if isinstance(self.blocks, bool) or not isinstance(self.blocks, int):
            raise TypeError(f"blocks is a number of blocks, not {self.blocks!r}")
        if self.blocks < 1:
            raise ValueError(f"a dim has at least one block, not {self.blocks}")

    def __repr__(self) -> str:
        return f"Shard({self.dim})" if self.blocks == 1 else f"Shard({self.dim}, blocks={self.blocks})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis has the whole tensor."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank of the axis has a tensor of the whole shape, and the tensor is what these give folded by ``op``.

    Args:
        op: SUM, MEAN, MIN, MAX or PRODUCT.
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
    """Whether two axes along which a tensor is partial may be folded in any order."""
    return one.op is other.op or {one.op, other.op} == {ReduceOp.SUM, ReduceOp.MEAN}
