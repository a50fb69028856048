"""Whether boxes are a whole tensor together, each element once."""

from __future__ import annotations

import itertools
from collections import Counter
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Side = tuple[int, int]
    """Where a box begins and ends along a dim."""

__all__ = ["covers_once"]

_MAX_CORNERS_DIMS = 8
"""A box has a corner for each choice of its sides: 256 of them."""


def covers_once(boxes: Iterable[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> bool:
    """Whether each element of a tensor is in exactly one of some boxes.

    In one dim, intervals are an interval together if their ends cancel out, but for two: begins count 1, ends -1. In
    several, corners do, with the product of their sides' signs. For n boxes divided along d dims this takes n * 2**d
    steps, where looking at each pair would take n**2.

    Args:
        boxes: Offsets and shape of each; all lie within the tensor.
        shape: The tensor's.
    """
    found = [
        tuple((begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        for offsets, sizes in boxes
        if 0 not in sizes
    ]
    if sum(prod(end - begin for begin, end in box) for box in found) != prod(shape):
        return False
    divided = [dim for dim, size in enumerate(shape) if any(box[dim] != (0, size) for box in found)]
    if not divided:
        return True  # and there is one, or none of no elements
    sides = [tuple(box[dim] for dim in divided) for box in found]
    if len(divided) > _MAX_CORNERS_DIMS:
        return not _has_overlap(sides)
    corners: Counter[tuple[int, ...]] = Counter()
    for box in sides:
        _count_corners(corners, box, 1)
    _count_corners(corners, [(0, shape[dim]) for dim in divided], -1)
    return not any(corners.values())


def _count_corners(corners: Counter[tuple[int, ...]], box: Sequence[Side], sign: int) -> None:
    for ends in itertools.product((0, 1), repeat=len(box)):
        corner = tuple(side[end] for side, end in zip(box, ends, strict=True))
        corners[corner] += -sign if sum(ends) % 2 else sign


def _has_overlap(boxes: Sequence[tuple[Side, ...]]) -> bool:
    """Whether two boxes have an element in common; each is compared with those that begin before it ends."""
    open_ones: list[tuple[Side, ...]] = []
    for box in sorted(boxes):
        open_ones = [other for other in open_ones if other[0][1] > box[0][0]]
        for other in open_ones:
            if all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)):
                return True
        open_ones.append(box)
    return False
