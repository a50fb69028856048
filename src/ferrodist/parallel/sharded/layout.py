"""Where each element of a unit's parameters lies: pure arithmetic, the same on all ranks.

[Note: flat units]
The parameters of a unit that have one dtype lie end to end in one flat tensor, which is cut into as many equal shards
as there are ranks to divide it, wherever the cuts fall. So a unit is gathered by one all_gather straight to where its
parameters are used, with no copy after it, and no shape or number of ranks is special: padding makes up at most a few
elements a unit. A parameter that a cut goes through has a *piece* on two or more ranks; a rank's piece may be empty.

Gradients travel in *rows*, one for each rank that divides the unit: the rank's shard, and behind it one element for
each parameter, its *presence*: 1 from a rank that has a gradient for it, else 0. So what no rank has stays None, as in
one process, and optimizers skip it.

[Note: sizes as names]
Each collective tells the ranks' element counts apart, always. So no two units of a group are given shards, or rows, of
one size: a rank that gathers another unit than its peers, because its forward took another way, gets
`CollectiveMismatchError` as they do, and no element is added to a message for it but padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ferrodist.collectives.sharding import offsets_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ferrodist.backends.base import Backend

__all__ = ["FlatLayout", "Piece", "claim_size"]

_ALIGNMENT = 16
"""Elements: parameters begin at multiples of 64 bytes or more, if float32, as they would in memory of their own."""

_KEY = "parallel.sharded.sizes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of a parameter that one rank holds.

    Args:
        rank: That rank, among those that divide the unit.
        start: Where it begins in the parameter, in elements.
        offset: Where it begins in the rank's shard.
        size: Its elements; may be 0.
    """

    rank: int
    start: int
    offset: int
    size: int


class FlatLayout:
    """Places of some parameters in a flat tensor, and of its shards; see [Note: flat units].

    Args:
        shapes: The parameters' shapes.
        num_shards: Number of equal shards.
        group: Has its sizes told apart; see [Note: sizes as names].
        gathered: The dtype in which they are gathered.
        reduced: The dtype in which their gradients are averaged.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        num_shards: int,
        group: Backend,
        *,
        gathered: torch.dtype,
        reduced: torch.dtype,
    ) -> None:
        self.shapes = tuple(shapes)
        self.numels = tuple(prod(shape) for shape in shapes)
        self.offsets = tuple(offsets_of([_align(numel) for numel in self.numels])[:-1])
        self.num_shards = num_shards
        total = sum(_align(numel) for numel in self.numels)
        self.shard_size = claim_size(group, f"gather {gathered}", -(-total // num_shards))
        self.row_size = claim_size(group, f"reduce {reduced}", self.shard_size + len(shapes))

    @property
    def total_size(self) -> int:
        """Elements of the flat tensor, with its padding."""
        return self.num_shards * self.shard_size

    def piece(self, parameter: int, rank: int) -> Piece:
        """What a rank holds of a parameter."""
        first = self.offsets[parameter]
        last = first + self.numels[parameter]
        begin = min(max(first, rank * self.shard_size), last)
        end = max(min(last, (rank + 1) * self.shard_size), begin)
        offset = min(max(begin - rank * self.shard_size, 0), self.shard_size)
        return Piece(rank=rank, start=begin - first, offset=offset, size=end - begin)

    def pieces(self, parameter: int) -> list[Piece]:
        """The pieces of a parameter that have elements, in their order."""
        return [piece for rank in range(self.num_shards) if (piece := self.piece(parameter, rank)).size]

    def piece_shape(self, parameter: int, piece: Piece) -> tuple[int, ...]:
        """The shape in which optimizers see a piece: with as many dims as the parameter, for rules go by them."""
        shape = self.shapes[parameter]
        if self.num_shards == 1:
            return tuple(shape)
        return (piece.size, *[1] * (len(shape) - 1))


def claim_size(group: Backend, purpose: str, minimum: int) -> int:
    """The smallest size from ``minimum`` that the group doesn't have for this purpose yet; ranks claim in one order."""
    claimed: set[int] = group.attachments.setdefault(_KEY, {}).setdefault(purpose, set())
    size = _align(max(minimum, 1))
    while size in claimed:
        size += _ALIGNMENT
    claimed.add(size)
    return size


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
