"""Tensors as bytes."""

from __future__ import annotations

import torch

__all__ = ["bytes_of"]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as a flat, writable view of bytes; it keeps the memory alive."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy().data)
