"""Boxes: rectangular parts of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import sub
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: the first index and the size in each dim."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The intersection with another box, or None if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape)]  # noqa: B905 - hot
        shape = tuple(map(sub, ends, offsets))
        return None if min(shape, default=1) <= 0 else Box(offsets, shape)

    def within(self, outer: Box) -> Box:
        """The same elements, with offsets relative to an enclosing box."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.shape)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The box's elements of a tensor, as a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.shape, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor
