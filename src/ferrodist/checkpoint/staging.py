"""Memory that holds a state while it is written and the program goes on changing the original."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ferrodist.checkpoint.planner import Span

__all__ = ["StagingBuffer"]

_ALIGNMENT = 64


class StagingBuffer:
    """Holds what one rank writes. It grows when it must, and is used again for the next save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return self._memory.numel()

    @torch.no_grad()
    def fill(self, views: Mapping[Span, torch.Tensor]) -> Callable[[Span], torch.Tensor]:
        """Copy tensors.

        Args:
            views: What this rank writes.

        Returns:
            A function that gives the copies.
        """
        places: dict[Span, int] = {}
        size = 0
        for span, view in views.items():
            places[span] = size
            size += -(-view.numel() * view.itemsize // _ALIGNMENT) * _ALIGNMENT
        if size > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # not both at a time
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        copies = {}
        for span, view in views.items():
            length = prod(span.shape) * view.itemsize
            copy = self._memory[places[span] :][:length].view(view.dtype).view(span.shape)
            copies[span] = copy.copy_(view)
        return copies.__getitem__
