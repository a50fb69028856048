"""Where each element of a unit's parameters lies: pure arithmetic, the same on all ranks.

[Note: flat units]
The parameters of a unit that have one dtype lie end to end in one flat tensor, which is cut into as many equal shards
as there are ranks to divide it, wherever the cuts fall. So a unit is gathered by one all_gather straight to where its
parameters are used, with no copy after it, and no shape or number of ranks is special: padding makes up at most a few
elements a unit. A parameter that a cut goes through has a *piece* on two or more ranks; a rank's piece may be empty.

Gradients travel in *rows*, one for each rank that divides the unit: the rank's shard, and behind it one element for
each parameter, its *presence*: 1 from a rank that has a gradient for it, else 0. So what no rank has stays None, as in
one process, and optimizers skip it.

[Note: names]
Ranks whose forwards took different ways must not compute with each other's parameters. Each collective compares its
count of elements and the dim that it joins along, always; both serve as names here, and no message is added. Flats of
one size are joined along different dims, of which all but the last of a flat have size 1, so that the elements lie as
they do along dim 0. Rows have sizes of their own, made by padding. A shard's size depends on nothing but the unit's
shapes and the number of ranks, so that a state that was saved fits a model that is made later.
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

__all__ = ["FlatLayout", "Piece", "claim_size", "count_up"]

_ALIGNMENT = 16
"""Elements: parameters begin at multiples of 64 bytes or more, if float32, as they would in memory of their own."""

_PAGE_BYTES, _SMALL_BYTES = 4096, 65536
"""Shards that are not small are whole pages, so that they can be mapped one behind the other."""

_NUM_DIMS = 32
"""Half of what torch allows. Of flats of one size every 32nd has the same dim."""

_KEY = "parallel.sharded.names"


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
        group: Has its flats told apart; see [Note: names].
        kept: The dtype of the shards.
        gathered: The dtype in which they are gathered.
        reduced: The dtype in which their gradients are averaged.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        num_shards: int,
        group: Backend,
        *,
        kept: torch.dtype,
        gathered: torch.dtype,
        reduced: torch.dtype,
    ) -> None:
        self.shapes = tuple(shapes)
        self.numels = tuple(prod(shape) for shape in shapes)
        self.offsets = tuple(offsets_of([_align(numel) for numel in self.numels])[:-1])
        self.num_shards = num_shards
        needed = max(1, -(-sum(_align(numel) for numel in self.numels) // num_shards))
        is_small = needed * kept.itemsize < _SMALL_BYTES
        self.shard_size = _align(needed, _ALIGNMENT if is_small else _PAGE_BYTES // kept.itemsize)
        self.dim = count_up(group, f"{gathered}[{self.shard_size}]") % _NUM_DIMS
        """Along which it is joined."""
        self.number = count_up(group, "flats")
        """Among all of the group."""
        self.row_size = claim_size(group, f"rows of {reduced}", self.shard_size + len(shapes))

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


def count_up(group: Backend, what: str) -> int:
    """How often the group has counted this before; ranks count in one order."""
    counts: dict[str, int] = group.attachments.setdefault(_KEY, {})
    counts[what] = counts.get(what, -1) + 1
    return counts[what]


def claim_size(group: Backend, what: str, minimum: int) -> int:
    """The smallest aligned size from ``minimum`` that the group has not claimed; ranks claim in one order."""
    size = _align(minimum)
    while count_up(group, f"{what}: {size}"):
        size += _ALIGNMENT
    return size


def _align(size: int, alignment: int = _ALIGNMENT) -> int:
    return -(-size // alignment) * alignment
