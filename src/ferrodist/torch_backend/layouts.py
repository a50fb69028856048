"""torch's tensors as engines take them, flat and contiguous; other tensors are copied in the call's turn."""

from __future__ import annotations

import math

import torch

from ferrodist.backends.cuda_streams import record_use_on_streams
from ferrodist.collectives.arguments import elements_overlap, shares_memory
from ferrodist.collectives.reduce_op import DTYPES


def source_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in order: its own memory if it is contiguous, else a copy."""
    # `data`, because autograd must not see what collectives do, as with torch's own backends.
    return tensor.data.resolve_conj().resolve_neg().contiguous().view(-1)


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """View a flat tensor as bytes if engines don't know its dtype; for collectives that compute nothing."""
    if flat.dtype in DTYPES:
        return flat
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element may have any stride


def elements_per_item(tensor: torch.Tensor) -> int:
    """The number of elements that `as_bytes` makes of one."""
    return 1 if tensor.dtype in DTYPES else tensor.element_size()


class Source:
    """The input of a collective: one tensor or more of one dtype, concatenated; ``counts`` are their elements."""

    __slots__ = ("_tensors", "counts")

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = [tensor.data for tensor in tensors]
        self.counts = [tensor.numel() for tensor in tensors]

    def read(self) -> torch.Tensor:
        """The current elements, flat: the memory of a single contiguous tensor, else a copy."""
        parts = [source_of(tensor) for tensor in self._tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Target:
    """The output of a collective: one tensor or more of one dtype, concatenated; ``counts`` are their elements.

    If ``input_tensor`` shares memory with the tensors, they are written after it has been read. Raises ValueError for a
    tensor whose elements share memory.
    """

    __slots__ = ("_flat", "_is_direct", "_tensors", "counts")

    def __init__(self, *tensors: torch.Tensor, input_tensor: torch.Tensor | None = None) -> None:
        for tensor in tensors:
            if not tensor.is_contiguous() and elements_overlap(tensor):
                raise ValueError(
                    "a tensor that is written to has elements that share memory (expand, as_strided): pass one of its"
                    " own memory"
                )
        self._tensors = [tensor.data for tensor in tensors]
        self.counts = [tensor.numel() for tensor in tensors]
        first = self._tensors[0]
        self._is_direct = (
            len(tensors) == 1
            and first.is_contiguous()
            and not first.is_conj()
            and not first.is_neg()
            and (input_tensor is None or not shares_memory(first, input_tensor))
        )
        self._flat: torch.Tensor | None = first.view(-1) if self._is_direct else None

    @property
    def flat(self) -> torch.Tensor:
        """The memory that the engine writes: that of a single contiguous tensor, else a buffer."""
        if self._flat is None:
            first = self._tensors[0]
            self._flat = torch.empty(sum(self.counts), dtype=first.dtype, device=first.device)
        return self._flat

    def finish(self) -> None:
        """Copy the result to the tensors, if the engine wrote to a buffer."""
        if not self._is_direct:
            for tensor, part in zip(self._tensors, torch.split(self.flat, self.counts), strict=True):
                tensor.copy_(part.view(tensor.shape))
                record_use_on_streams(tensor)


def row_size(tensor: torch.Tensor) -> int:
    """The number of elements of one row, an index of the first dim."""
    return math.prod(tensor.shape[1:])
