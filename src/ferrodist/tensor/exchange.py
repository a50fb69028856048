"""One exchange from any way of dividing a tensor to any other: each rank gets what it lacks, and nothing else.

A rank's part is a box: an interval of each dim. What rank s sends to rank r is where the box that s has meets the box
that r shall have; of ranks that have the same box, r hears the one that is where it is along the axes that don't divide
the tensor. No plan sends fewer bytes.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.exchange import all_to_all_single_uneven
from ferrodist.collectives.sharding import compute_shard_sizes, offsets_of
from ferrodist.tensor.placement import Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.tensor.layout import Layout
    from ferrodist.tensor.placement import Placement

__all__ = ["Exchange", "exchange"]

_Box = list[tuple[int, int]]
"""Of each dim, where it begins and ends."""


class Exchange:
    """What goes from where to where.

    Args:
        shape: The tensor's.
        before: How it lies: whole or divided, without blocks, along each axis.
        after: How it shall lie.
        mesh_shape: The number of ranks along each axis.
    """

    def __init__(
        self,
        shape: Sequence[int],
        before: Sequence[Placement],
        after: Sequence[Placement],
        mesh_shape: Sequence[int],
    ) -> None:
        self._shape, self._mesh_shape = shape, mesh_shape
        self._before, self._after = before, after
        self.axes = tuple(
            axis
            for axis, pair in enumerate(zip(before, after, strict=True))
            if any(isinstance(placement, Shard) for placement in pair)
        )
        """The axes along which ranks take part together."""
        self._whole = [axis for axis in self.axes if not isinstance(before[axis], Shard)]

    def coordinates(self, here: Sequence[int]) -> list[tuple[int, ...]]:
        """Where the ranks are that take part with one, in row-major order of the axes."""
        ways = [range(size) if axis in self.axes else [here[axis]] for axis, size in enumerate(self._mesh_shape)]
        return list(itertools.product(*ways))

    def piece(self, sender: Sequence[int], receiver: Sequence[int]) -> _Box:
        """What one rank sends to another, which may be itself; without elements where that is nothing."""
        had = self.box(sender, self._before)
        if any(sender[axis] != receiver[axis] for axis in self._whole):
            return [(0, 0)] * len(had)
        return _meet(had, self.box(receiver))

    def box(self, coordinate: Sequence[int], placements: Sequence[Placement] | None = None) -> _Box:
        """What the rank at a coordinate has in the end, or under other placements."""
        box = [(0, size) for size in self._shape]
        chosen = self._after if placements is None else placements
        for placement, num_ranks, at in zip(chosen, self._mesh_shape, coordinate, strict=True):
            if isinstance(placement, Shard):
                start, stop = box[placement.dim]
                offsets = offsets_of(compute_shard_sizes(stop - start, num_ranks))
                box[placement.dim] = (start + offsets[at], start + offsets[at + 1])
        return box

    def count_sent(self) -> float:
        """How many elements a rank sends to others, on average."""
        ranks = self.coordinates([0] * len(self._mesh_shape))
        had = [self.box(rank, self._before) for rank in ranks]
        kinds = [tuple(rank[axis] for axis in self._whole) for rank in ranks]
        sent = 0
        for receiver, rank in enumerate(ranks):
            wanted = self.box(rank)
            sent += sum(
                _numel(_meet(box, wanted))
                for sender, box in enumerate(had)
                if sender != receiver and kinds[sender] == kinds[receiver]
            )
        return sent / len(ranks)


def _meet(one: _Box, other: _Box) -> _Box:
    return [(max(a, c), max(min(b, d), a, c)) for (a, b), (c, d) in zip(one, other, strict=True)]


def exchange(local: torch.Tensor, before: Layout, after: Layout, group: Backend) -> torch.Tensor:
    """Do it: this rank's part becomes the one that it shall have.

    Args:
        local: This rank's part.
        before: How the tensor lies.
        after: How it shall lie.
        group: The ranks along `Exchange.axes`.
    """
    here = before.coordinate
    way = Exchange(before.shape, before.placements, after.placements, before.mesh.shape)
    ranks = way.coordinates(here)
    mine = way.box(here, before.placements)
    sent = [_cut(local, mine, way.piece(here, rank)).reshape(-1) for rank in ranks]
    pieces = [way.piece(rank, here) for rank in ranks]
    counts = [_numel(piece) for piece in pieces]
    flat = all_to_all_single_uneven(torch.cat(sent), [part.numel() for part in sent], counts, group=group)
    result = local.new_empty(after.local_shape)
    wanted = way.box(here)
    for piece, part in zip(pieces, torch.split(flat, counts), strict=True):
        if part.numel():
            place = _cut(result, wanted, piece)
            place.copy_(part.view(place.shape))
    return result


def _cut(part: torch.Tensor, box: _Box, piece: _Box) -> torch.Tensor:
    """A piece of the part that is the box, as a view; both are places in the whole tensor."""
    for dim, ((begin, _), (start, stop)) in enumerate(zip(box, piece, strict=True)):
        part = part.narrow(dim, start - begin if stop > start else 0, stop - start)
    return part


def _numel(box: _Box) -> int:
    return math.prod(stop - start for start, stop in box)
