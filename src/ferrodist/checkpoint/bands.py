"""Tensors that are larger than memory, a band at a time."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Protocol

from ferrodist.tensor.regions import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["BAND_BYTES", "BoxSource", "cut_bands"]

BAND_BYTES = 16 << 20
"""Enough that reading a band takes longer than beginning to."""


class BoxSource(Protocol):
    """Whatever has tensors, by key, and gives any box of them."""

    def read_box(self, key: str, box: Box, target: torch.Tensor) -> None:
        """Fill a tensor of the box's shape with a box of a tensor."""


def cut_bands(shape: tuple[int, ...], max_elements: int) -> Iterator[Box]:
    """Boxes that are a tensor together, and follow each other as its elements do, in row-major order.

    The elements of any box of the tensor come in their own row-major order, too, if it is cut by these bands.

    Args:
        shape: Of the tensor.
        max_elements: At least 1; no band has more.
    """
    if prod(shape) <= max_elements:
        yield Box((0,) * len(shape), shape)
        return
    size, *rest = shape
    num_rows = max_elements // prod(rest)
    if num_rows:
        for row in range(0, size, num_rows):
            yield Box((row, *[0] * len(rest)), (min(num_rows, size - row), *rest))
        return
    for row in range(size):
        for band in cut_bands(tuple(rest), max_elements):
            yield Box((row, *band.offsets), (1, *band.shape))
