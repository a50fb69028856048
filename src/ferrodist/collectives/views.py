"""Tensors as bytes."""

from __future__ import annotations

import torch

__all__ = ["bytes_of", "elements_overlap", "shares_memory"]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as a flat, writable view of bytes; it keeps the memory alive."""
    if not tensor.numel():  # whose strides may be anything
        return memoryview(bytearray())
    # As strided: a single element may have any stride, such as the 0 of an expanded one.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy().data)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the memory that two tensors span overlaps, whoever owns it."""
    if not one.numel() or not other.numel():
        return False
    (start, stop), (other_start, other_stop) = _span(one), _span(other)
    return start < other_stop and other_start < stop


def elements_overlap(*tensors: torch.Tensor) -> bool:
    """Whether two elements, of one tensor or of two, share memory: exact for any strides."""
    ordered = sorted((tensor for tensor in tensors if tensor.numel()), key=torch.Tensor.data_ptr)
    clusters: list[list[torch.Tensor]] = []
    end = 0
    for tensor in ordered:
        start, stop = _span(tensor)
        if clusters and start < end:
            clusters[-1].append(tensor)
        else:
            clusters.append([tensor])
        end = max(end, stop)
    return any(_meet(cluster) for cluster in clusters if len(cluster) > 1 or not _is_nested(cluster[0]))


def _is_nested(tensor: torch.Tensor) -> bool:
    """Whether each dim steps over all elements of the dims with smaller steps: true of whatever slicing makes."""
    reach = 0
    for stride, size in sorted(_steps(tensor)):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def _meet(tensors: list[torch.Tensor]) -> bool:
    """Whether two elements meet, by marking every byte: at the cost of the memory that the tensors span."""
    start, stop = min(_span(tensor)[0] for tensor in tensors), max(_span(tensor)[1] for tensor in tensors)
    total = sum(tensor.nbytes for tensor in tensors)
    if total > stop - start or any(stride == 0 for tensor in tensors for stride, _ in _steps(tensor)):
        return True
    marks = torch.zeros(stop - start, dtype=torch.bool, device="cpu")
    for tensor in tensors:
        item = tensor.element_size()
        strides = [stride * item for stride in tensor.stride()]
        marks.as_strided((*tensor.shape, item), (*strides, 1), tensor.data_ptr() - start).fill_(True)
    return int(marks.sum()) < total


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and size of the dims that have steps."""
    return [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
