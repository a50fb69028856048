"""Memory that all ranks of a host share, so that gathering and averaging copy nothing aside."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.symmetric import empty_symmetric

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

__all__ = ["RowBuffer", "allot", "same_memory"]

_ALIGNMENT = 64


def allot(sizes: list[tuple[int, torch.dtype]], group: Backend | None) -> list[torch.Tensor]:
    """Flat tensors of zeros in one piece of symmetric memory; every rank of the group calls this.

    Args:
        sizes: Elements and dtype of each, equal on all ranks.
        group: Who shares the memory; None makes it this rank's own.
    """
    starts, end = [], 0
    for numel, dtype in sizes:
        starts.append(end)
        end += -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    whole = torch.empty(end, dtype=torch.uint8, device="cpu")
    if group is not None and end:
        whole = empty_symmetric((end,), torch.uint8, group=group)
    whole.zero_()
    return [
        whole[start : start + numel * dtype.itemsize].view(dtype)
        for start, (numel, dtype) in zip(starts, sizes, strict=True)
    ]


def same_memory(flat: torch.Tensor) -> torch.Tensor:
    """A tensor with a storage of its own on the memory of a flat one, which must outlive it.

    Collectives that see a tensor as bytes do so through numpy, after which torch never resizes the tensor's storage again.
    """
    memory = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    return torch.frombuffer(memory, dtype=flat.dtype)


class RowBuffer:
    """Where gradients wait to be averaged: one piece of symmetric memory, in which units take turns.

    Units come in the same order on all ranks, so that each finds its peers' gradients in the same place.

    Args:
        size_bytes: For the largest unit.
        group: Who averages; None where nobody else does.
    """

    def __init__(self, size_bytes: int, group: Backend | None) -> None:
        self._group = group
        (self._memory,) = allot([(size_bytes, torch.uint8)], group)
        self._vacate: Callable[[], None] | None = None

    def take(self, numel: int, dtype: torch.dtype, vacate: Callable[[], None]) -> torch.Tensor:
        """The memory as ``numel`` elements, once who had it before has done without it.

        Args:
            numel: Elements.
            dtype: Theirs.
            vacate: Returns when the elements are not needed any more; called before the next one takes the memory.
        """
        previous, self._vacate = self._vacate, None
        if previous is not None:
            previous()
        self._vacate = vacate
        size_bytes = numel * dtype.itemsize
        if size_bytes > self._memory.numel():  # frozen parameters were unfrozen, on all ranks alike
            (self._memory,) = allot([(size_bytes, torch.uint8)], self._group)
        return self._memory[: numel * dtype.itemsize].view(dtype)

    def forget(self) -> None:
        """Wait for nobody any more: the group has failed."""
        self._vacate = None
