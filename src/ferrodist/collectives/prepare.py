"""What users pass, turned into what engines take: flat, contiguous tensors on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.process_group import resolve_group
from ferrodist.collectives.reduce_op import check_dtype
from ferrodist.collectives.views import shares_memory
from ferrodist.deadline import check_timeout
from ferrodist.errors import InvalidRankError, UnsupportedOpError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend

__all__ = ["Target", "check_dim", "check_root", "check_tensor", "flatten", "group_and_timeout", "prepare_out"]


def group_and_timeout(group: Backend | None, timeout: float | None) -> tuple[Backend, float]:
    """The group and the seconds that a call means."""
    chosen = resolve_group(group)
    return chosen, chosen.timeout if timeout is None else check_timeout(timeout)


def check_root(group: Backend, rank: int, name: str) -> None:
    """Raise unless ``rank`` is a rank of ``group``."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < group.world_size:
        raise InvalidRankError(f"{name}={rank!r} is not in 0..{group.world_size - 1} of group {group.name!r}")


def check_dim(tensor: torch.Tensor, dim: int) -> int:
    """``dim`` as a number from 0; raises IndexError outside of the tensor's dims, ValueError for a 0-dim tensor."""
    if tensor.dim() == 0:
        raise ValueError("a zero-dimensional tensor has no dim to divide or join along: reshape it to (1,) first")
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"dim {dim} is not a dim of a tensor of shape {tuple(tensor.shape)}")
    return dim % tensor.dim()


def check_tensor(tensor: torch.Tensor, name: str = "tensor") -> None:
    """Raise unless collectives can carry ``tensor``."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise UnsupportedOpError(f"{name} has layout {tensor.layout}: pass a dense tensor (to_dense())")
    if tensor.device.type != "cpu":
        raise UnsupportedOpError(f"{name} is on {tensor.device}: this backend carries CPU tensors, pass {name}.cpu()")
    check_dtype(tensor.dtype)


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in order, as one dimension: the tensor's own memory when it is contiguous, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a result goes.

    Args:
        flat: What the engine writes.
        result: What the user gets, with the result's shape.
        is_copy: Whether ``flat`` is not the memory of ``result``.
    """

    flat: torch.Tensor
    result: torch.Tensor
    is_copy: bool = False

    def finish(self) -> torch.Tensor:
        """Bring what the engine wrote to the user's tensor."""
        if self.is_copy:
            with torch.no_grad():
                self.result.copy_(self.flat.view(self.result.shape))
        elif not self.result.is_inference():
            # The engine wrote raw memory: autograd must learn that what it may have saved has changed.
            torch.autograd.graph.increment_version(self.result)
        return self.result


def prepare_out(
    out: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, source: torch.Tensor | None = None
) -> Target:
    """Make or check the tensor a result goes to.

    Args:
        out: The user's, or None for a fresh one.
        shape: The result's shape.
        dtype: The result's dtype.
        source: The call's input, if any.

    Raises:
        ValueError: ``out`` has another shape, or is an expanded tensor whose elements share memory.
        TypeError: ``out`` has another dtype.
        RuntimeError: Gradients would be lost: an input or ``out`` requires grad while grad mode is on.
    """
    if out is None:
        result = torch.empty(tuple(shape), dtype=dtype)
        return Target(flat=result.view(-1), result=result)
    check_tensor(out, "out")
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"out has shape {tuple(out.shape)}, the result has {tuple(shape)}")
    if out.dtype is not dtype:
        raise TypeError(f"out is {out.dtype}, the result is {dtype}")
    if torch.is_grad_enabled() and (out.requires_grad or (source is not None and source.requires_grad)):
        raise RuntimeError(
            "out= does not support automatic differentiation: use the result of the functional form, or torch.no_grad()"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError("out has elements that share memory (it was expanded): pass a tensor of its own memory")
    if out.is_contiguous() and not out.is_conj() and not out.is_neg() and not _shifted(out, source):
        return Target(flat=out.detach().view(-1), result=out)
    return Target(flat=torch.empty(out.numel(), dtype=dtype), result=out, is_copy=True)


def _shifted(out: torch.Tensor, source: torch.Tensor | None) -> bool:
    """Whether writing ``out`` may change what is still to be read: the two share memory, but are not the same."""
    if source is None or not shares_memory(out, source):
        return False
    return out.data_ptr() != source.data_ptr() or out.shape != source.shape
