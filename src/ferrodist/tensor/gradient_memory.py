"""Gradients of parts that become parts of gradients, in memory of their own.

Autograd keeps a gradient that nobody else holds as the ``grad`` of a leaf, and later adds to it in place. It counts who
holds a tensor, and not who holds another one around the same memory, as a distributed tensor and its part are.
"""

from __future__ import annotations

import torch

from ferrodist.torch_private.tensors import is_held_once

__all__ = ["own"]


def own(tensor: torch.Tensor) -> torch.Tensor:
    """A gradient that a backward function was given, or a copy if others may have its memory. Contiguous."""
    is_alone = tensor.is_contiguous() and is_held_once(tensor)
    return tensor if is_alone else tensor.clone(memory_format=torch.contiguous_format)
