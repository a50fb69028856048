"""torch's tensors as engines take them: flat and contiguous. What they write into others is copied from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.reduce_op import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Joined", "Target", "moved", "row_size", "source_of"]


def source_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in order: its own memory where it is contiguous."""
    # `data`, for autograd is to see nothing of what collectives do, as it does not with torch's own backends.
    return tensor.data.resolve_conj().resolve_neg().contiguous().view(-1)


def moved(flat: torch.Tensor) -> torch.Tensor:
    """A flat tensor for collectives that compute nothing: of a dtype that engines don't know, its bytes."""
    return flat if flat.dtype in DTYPES else flat.view(torch.uint8)


class Target:
    """Where a tensor's elements are written.

    Args:
        tensor: It.

    Attributes:
        flat: What engines write: its memory where it is contiguous, else other one.
    """

    __slots__ = ("_tensor", "flat")

    def __init__(self, tensor: torch.Tensor) -> None:
        data = tensor.data
        self._tensor: torch.Tensor | None = None
        if data.is_contiguous() and not data.is_conj() and not data.is_neg():
            self.flat = data.view(-1)
        else:
            self._tensor = data
            self.flat = torch.empty(data.numel(), dtype=data.dtype, device=data.device)

    def finish(self) -> None:
        """Bring to the tensor what was written."""
        if self._tensor is not None:
            self._tensor.copy_(self.flat.view(self._tensor.shape))


class Joined:
    """Tensors one after the other in one memory.

    Args:
        tensors: At least one, of one dtype.

    Attributes:
        counts: How many elements each has.
        flat: The memory.
    """

    __slots__ = ("_tensors", "counts", "flat")

    def __init__(self, tensors: Sequence[torch.Tensor], *, is_read: bool) -> None:
        first = tensors[0]
        for tensor in tensors:
            if tensor.dtype is not first.dtype or tensor.device != first.device:
                raise ValueError(
                    f"the tensors of a list must be of one dtype, on one device: there are {first.dtype} on"
                    f" {first.device} and {tensor.dtype} on {tensor.device}"
                )
        self._tensors = [tensor.data for tensor in tensors]
        self.counts = [tensor.numel() for tensor in tensors]
        if is_read:
            self.flat = torch.cat([source_of(tensor) for tensor in tensors])
        else:
            self.flat = torch.empty(sum(self.counts), dtype=first.dtype, device=first.device)

    def finish(self) -> None:
        """Bring to the tensors what was written."""
        for tensor, part in zip(self._tensors, torch.split(self.flat, self.counts), strict=True):
            tensor.copy_(part.view(tensor.shape))


def row_size(tensor: torch.Tensor) -> int:
    """How many elements there are in one place along the first dim."""
    return math.prod(tensor.shape[1:])
