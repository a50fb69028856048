"""Gradients of parts that become parts of gradients, in memory of their own.

Autograd keeps a gradient that nobody else holds as the ``grad`` of a leaf, and later adds to it in place. It counts who
holds a tensor, and not who holds another one around the same memory, as a distributed tensor and its part are.
"""

from __future__ import annotations

import torch

__all__ = ["own"]

_HOLDERS = 2
"""Of the memory of a tensor that nobody else has: the tensor, and what asks for the number."""


def own(tensor: torch.Tensor) -> torch.Tensor:
    """A gradient that a backward function was given, or a copy if others may have its memory. Contiguous."""
    is_alone = (
        tensor._use_count() == 1  # type: ignore[attr-defined]
        and tensor.is_contiguous()
        and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= _HOLDERS
    )
    return tensor if is_alone else tensor.clone(memory_format=torch.contiguous_format)
