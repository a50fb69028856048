"""What rules that fold over the ranks themselves are made of: which ranks have parts of a dim, and where these lie."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.reductions import allreduce
from ferrodist.tensor.layout import take_part
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.tensor.recording import note_move

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ferrodist.collectives.reduce_op import ReduceOp
    from ferrodist.tensor.layout import Layout

__all__ = ["dividers", "fold_over", "positions"]


def dividers(layout: Layout, dims: Collection[int]) -> tuple[int, ...]:
    """The axes that divide any of some dims."""
    return tuple(
        axis
        for axis, placement in enumerate(layout.placements)
        if isinstance(placement, Shard) and placement.dim in dims
    )


def fold_over(layout: Layout, axes: tuple[int, ...]) -> Callable[[torch.Tensor, ReduceOp], torch.Tensor]:
    """What folds a tensor over the ranks along some axes of a layout's mesh, so that all of them have the result."""
    if not axes:
        return _same
    part = layout.mesh_along(axes)
    group = part.group

    def fold(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        note_move(tensor, part, Partial(op), Replicate())
        return allreduce(tensor, op, group=group)

    return fold


def _same(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    del op
    return tensor


def positions(layout: Layout, dim: int) -> torch.Tensor:
    """Where in the whole dim the indices of this rank's part lie, in ascending order."""
    num_ranks, coordinate = layout.mesh.shape, layout.coordinate
    axes = dividers(layout, (dim,))
    placements = [layout.placements[axis] for axis in axes]
    blocks = [placement.blocks for placement in placements if isinstance(placement, Shard)]
    cuts = zip(blocks, [num_ranks[axis] for axis in axes], [coordinate[axis] for axis in axes], strict=True)
    return _positions(layout.shape[dim], tuple(cuts))


@functools.lru_cache(maxsize=256)
def _positions(size: int, cuts: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
    """One tensor for all calls that divide a dim alike, as a vocabulary: recipes keep it."""
    found = torch.arange(size, device="cpu")
    for blocks, num_ranks, at in cuts:
        found = take_part(found, Shard(0, blocks), num_ranks, at)
    return found
