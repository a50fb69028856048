"""A mesh as text."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["draw_grid"]

_MOST_RANKS = 1024
"""A larger grid is only described."""


def draw_grid(shape: Sequence[int], axis_names: Sequence[str], ranks: Sequence[int], own: int, group: str) -> str:
    r"""Draw a grid of ranks, the last axis to the right, the one before downwards, the others as slabs.

    ::

        DeviceMesh of group 'world': replicate 2 x shard 3, this is rank 4 in brackets
        replicate \ shard  0   1   2
                        0  0   1   2
                        1  3  [4]  5

    Args:
        shape: The sizes of the axes.
        axis_names: Their names.
        ranks: In row-major order.
        own: The rank to mark.
        group: The name of its group.
    """
    sizes = " x ".join(f"{name} {size}" for name, size in zip(axis_names, shape, strict=True))
    place = f"this is rank {own} in brackets" if own in ranks else f"without this rank, {own}"
    lines = [f"DeviceMesh of group {group!r}: {sizes}, {place}"]
    if len(ranks) > _MOST_RANKS:
        return lines[0]
    num_columns = shape[-1]
    num_rows = shape[-2] if len(shape) > 1 else 1
    corner = f"{axis_names[-2]} \\ {axis_names[-1]}" if len(shape) > 1 else axis_names[-1]
    width = max(len(str(number)) for number in (*ranks, num_columns)) + 3
    slab_size = num_rows * num_columns
    for number, outer in enumerate(itertools.product(*map(range, shape[:-2]))):
        if outer:
            lines.append(", ".join(f"{name} {at}" for name, at in zip(axis_names, outer, strict=False)) + ":")
        lines.append(corner + "".join(f" {column} ".rjust(width) for column in range(num_columns)))
        slab = ranks[number * slab_size :][:slab_size]
        for row in range(num_rows):
            cells = slab[row * num_columns :][:num_columns]
            head = str(row) if len(shape) > 1 else ""
            marked = [f"[{rank}]" if rank == own else f" {rank} " for rank in cells]
            lines.append(head.rjust(len(corner)) + "".join(cell.rjust(width) for cell in marked))
    return "\n".join(line.rstrip() for line in lines)
