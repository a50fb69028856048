"""Tensors as bytes."""

from __future__ import annotations

import torch

__all__ = ["bytes_of", "shares_memory"]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as a flat, writable view of bytes; it keeps the memory alive."""
    if not tensor.numel():  # whose strides may be anything
        return memoryview(bytearray())
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy().data)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the memory that two tensors span overlaps, whoever owns it."""
    if not one.numel() or not other.numel():
        return False
    (start, stop), (other_start, other_stop) = _span(one), _span(other)
    return start < other_stop and other_start < stop


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
