"""Where each element of a unit's parameters lies: pure arithmetic, the same on all ranks.

[Note: flat units]
The parameters of a unit that have one dtype lie end to end in one flat tensor (row-major, or in the order of dims in
which a channels-last weight lies), which is cut into as many equal shards
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
they do along dim 0. From the 32nd on they have the same dim, and each gathering is followed by a token of the flat's
own size, as that of shards that are used where they lie. Rows have sizes of their own, made by padding. A shard's size
depends on nothing but the unit's shapes and the number of ranks, so that a state that was saved fits a model that is
made later.

Names are given back when all ranks have found their layouts gone, which they ask each other when they make the next
FSDP: the garbage collector comes to each rank at another time.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.arguments import offsets_of
from ferrodist.tensor.local_shards import invert_order

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ferrodist.backends.base import Backend

_ALIGNMENT = 16
"""Elements: parameters begin at multiples of 64 bytes or more, if float32, as they would in memory of their own."""

_PAGE_BYTES, _SMALL_BYTES = 4096, 65536
"""Shards that are not small are whole pages, so that they can be mapped one behind the other."""

_NUM_DIMS = 32
"""Half of what torch allows."""

_KEY = "parallel.sharded.names"

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


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
        orders: For each the order of dims in which its elements lie, from `order_of`; None for row-major.
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
        orders: Sequence[tuple[int, ...] | None] | None = None,
        kept: torch.dtype,
        gathered: torch.dtype,
        reduced: torch.dtype,
    ) -> None:
        self.shapes = tuple(shapes)
        self.orders = tuple(orders) if orders is not None else (None,) * len(self.shapes)
        self.numels = tuple(prod(shape) for shape in shapes)
        self.offsets = tuple(offsets_of([_align(numel) for numel in self.numels])[:-1])
        self.num_shards = num_shards
        needed = max(1, -(-sum(_align(numel) for numel in self.numels) // num_shards))
        is_small = needed * kept.itemsize < _SMALL_BYTES
        self.shard_size = _align(needed, _ALIGNMENT if is_small else _PAGE_BYTES // kept.itemsize)
        claims = _claims_of(group)
        names = claims.begin(self)
        place = names.claim(f"{gathered}[{self.shard_size}]", 0)
        self.dim = min(place, _NUM_DIMS - 1)
        """Along which it is joined."""
        self.shares_dim = place >= _NUM_DIMS - 1
        """Whether others of its size may be joined along this dim."""
        self.number = names.claim("flats", 0)
        """Among all of the group."""
        self.row_size = names.claim(f"rows of {reduced}", _align(self.shard_size + len(shapes)), step=_ALIGNMENT)

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

    def flatten(self, parameter: int, value: torch.Tensor) -> torch.Tensor:
        """A whole parameter's elements as they lie in the flat tensor; a view of them where they lie so already."""
        order = self.orders[parameter]
        return value.reshape(-1) if order is None else value.permute(order).reshape(-1)

    def unflatten(self, parameter: int, elements: torch.Tensor) -> torch.Tensor:
        """The opposite: a whole parameter, as a view."""
        shape, order = self.shapes[parameter], self.orders[parameter]
        if order is None:
            return elements.view(shape)
        return elements.view([shape[dim] for dim in order]).permute(invert_order(order))

    def shape_piece(self, parameter: int, elements: torch.Tensor) -> torch.Tensor:
        """Elements of a piece in the shape in which optimizers see it.

        It has as many dims as the parameter, for rules go by them.
        """
        if self.num_shards == 1:
            return self.unflatten(parameter, elements)
        return elements.view(-1, *[1] * (len(self.shapes[parameter]) - 1)) if self.shapes[parameter] else elements


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The order of dims in which the elements of a channels-last tensor lie; None for other tensors.

    Convolutions want their weights so as they want their inputs, or copy them in each call.
    """
    if tensor.ndim not in _CHANNELS_LAST:
        return None
    row_major = torch.empty(tensor.shape, device="meta").stride()
    last = torch.empty(tensor.shape, device="meta", memory_format=_CHANNELS_LAST[tensor.ndim]).stride()
    return (0, *range(2, tensor.ndim), 1) if tensor.stride() == last != row_major else None


class _Names:
    """What one layout has claimed; ranks claim in one order.

    Args:
        taken: What all layouts of the group have, by kind.
        owner: The layout.
    """

    def __init__(self, taken: dict[str, set[int]], owner: FlatLayout) -> None:
        self._taken = taken
        self._own: list[tuple[str, int]] = []
        self._owner = weakref.ref(owner)

    @property
    def is_gone(self) -> bool:
        """Whether this rank has the layout no more."""
        return self._owner() is None

    def claim(self, kind: str, first: int, *, step: int = 1) -> int:
        """The smallest of ``first``, ``first + step``, ... that nobody has."""
        taken = self._taken.setdefault(kind, set())
        number = first
        while number in taken:
            number += step
        taken.add(number)
        self._own.append((kind, number))
        return number

    def release(self) -> None:
        """Give all back."""
        for kind, number in self._own:
            self._taken[kind].discard(number)


class _Claims:
    """The names that a group's layouts have, in the order in which they were made."""

    def __init__(self) -> None:
        self._taken: dict[str, set[int]] = {}
        self.all: list[_Names] = []

    def begin(self, layout: FlatLayout) -> _Names:
        """Names for another layout."""
        self.all.append(_Names(self._taken, layout))
        return self.all[-1]


def find_gone(group: Backend) -> list[int]:
    """Which of the group's layouts this rank has no more, by their places among those that have names."""
    return [place for place, names in enumerate(_claims_of(group).all) if names.is_gone]


def release_names(group: Backend, places: Collection[int]) -> None:
    """Give back the names of layouts that no rank has any more; all ranks give back the same."""
    claims = _claims_of(group)
    for place in places:
        claims.all[place].release()
    claims.all = [names for place, names in enumerate(claims.all) if place not in places]


def _claims_of(group: Backend) -> _Claims:
    claims: _Claims = group.attachments.setdefault(_KEY, _Claims())
    return claims


def _align(size: int, alignment: int = _ALIGNMENT) -> int:
    return -(-size // alignment) * alignment
