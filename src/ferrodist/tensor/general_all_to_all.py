"""A general all-to-all: one exchange from any sharding of a tensor to any other, with the fewest bytes.

A rank's shard is a box: an interval of each dim. Rank s sends to rank r the overlap of its own box with the box that r
is to have. Of several ranks with the same box, r receives from the one whose coordinate along the unsharded axes is its
own.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.all_to_all import all_to_all_single_uneven
from ferrodist.collectives.arguments import compute_shard_sizes
from ferrodist.tensor.box import Box
from ferrodist.tensor.placement import Placement, Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.tensor.spec import DTensorSpec


class GeneralAllToAll:
    """The box that each rank sends to each other, for placements that are replicated, or sharded without blocks."""

    def __init__(
        self, shape: Sequence[int], before: Sequence[Placement], after: Sequence[Placement], mesh_shape: Sequence[int]
    ) -> None:
        self._shape, self._mesh_shape = shape, mesh_shape
        self._before, self._after = before, after
        self.axes = tuple(
            axis
            for axis, pair in enumerate(zip(before, after, strict=True))
            if any(isinstance(placement, Shard) for placement in pair)
        )
        """The axes along which ranks exchange elements."""
        self._replicated = [axis for axis in self.axes if not isinstance(before[axis], Shard)]

    def coordinates(self, own: Sequence[int]) -> list[tuple[int, ...]]:
        """The coordinates of the ranks that exchange with one, in row-major order of the axes."""
        ranges = [range(size) if axis in self.axes else [own[axis]] for axis, size in enumerate(self._mesh_shape)]
        return list(itertools.product(*ranges))

    def overlap(self, sender: Sequence[int], receiver: Sequence[int]) -> Box | None:
        """The box that one rank sends to another, or to itself; None if it sends nothing."""
        if any(sender[axis] != receiver[axis] for axis in self._replicated):
            return None
        return self.box(sender, self._before).intersect(self.box(receiver))

    def box(self, coordinate: Sequence[int], placements: Sequence[Placement] | None = None) -> Box:
        """The box of the rank at a coordinate, under some placements; None is the new ones."""
        starts, sizes = [0] * len(self._shape), list(self._shape)
        chosen = self._after if placements is None else placements
        for placement, num_ranks, index in zip(chosen, self._mesh_shape, coordinate, strict=True):
            if isinstance(placement, Shard):
                shards = compute_shard_sizes(sizes[placement.dim], num_ranks)
                starts[placement.dim] += sum(shards[:index])
                sizes[placement.dim] = shards[index]
        return Box(tuple(starts), tuple(sizes))

    def count_sent(self) -> float:
        """The average number of elements that a rank sends to others."""
        ranks = self.coordinates([0] * len(self._mesh_shape))
        boxes = [self.box(rank, self._before) for rank in ranks]
        replicas = [tuple(rank[axis] for axis in self._replicated) for rank in ranks]
        sent = 0
        for receiver, rank in enumerate(ranks):
            target = self.box(rank)
            for sender, box in enumerate(boxes):
                if sender != receiver and replicas[sender] == replicas[receiver]:
                    overlap = box.intersect(target)
                    sent += 0 if overlap is None else overlap.numel
        return sent / len(ranks)


def general_all_to_all(local: torch.Tensor, before: DTensorSpec, after: DTensorSpec, group: Backend) -> torch.Tensor:
    """Bring this rank's shard to another spec by a general all-to-all of the ranks along `GeneralAllToAll.axes`."""
    own = before.coordinate
    pattern = GeneralAllToAll(before.shape, before.placements, after.placements, before.mesh.shape)
    ranks = pattern.coordinates(own)
    box = pattern.box(own, before.placements)
    outgoing = [pattern.overlap(own, rank) for rank in ranks]
    sent = [
        local.new_empty(0) if overlap is None else overlap.within(box).take(local).reshape(-1) for overlap in outgoing
    ]
    received = [pattern.overlap(rank, own) for rank in ranks]
    counts = [0 if overlap is None else overlap.numel for overlap in received]
    flat = all_to_all_single_uneven(torch.cat(sent), [part.numel() for part in sent], counts, group=group)
    result = local.new_empty(after.local_shape)
    target = pattern.box(own)
    for overlap, elements in zip(received, torch.split(flat, counts), strict=True):
        if overlap is not None:
            view = overlap.within(target).take(result)
            view.copy_(elements.view(view.shape))
    return result
