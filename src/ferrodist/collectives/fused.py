"""allreduce_add_rms_norm: an allreduce, the residual's addition and an RMS norm, as a tensor-parallel layer ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ferrodist.backends.native.binding import compiled
from ferrodist.collectives.profiling import is_recorded, record
from ferrodist.collectives.reduce import allreduce
from ferrodist.torch_private.compilers import is_compiling
from ferrodist.torch_private.profiling import is_profiling

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend


def allreduce_add_rms_norm(
    tensor: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float | None = None,
    *,
    group: Backend | None = None,
    timeout: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum a tensor over all ranks, add the residual to it, and normalize the rows by their root mean square.

    The same bits as of ``total = fd.allreduce(tensor) + residual`` and
    ``torch.nn.functional.rms_norm(total, weight.shape, weight, eps)``, but for those of a NaN. Without gradients the
    residual is added where the ranks' elements are summed, without a tensor in between. For other ranks the call is an
    `allreduce`. Graphs of torch.compile have its operator, and the compiler fuses what follows it.

    Args:
        tensor: This rank's part of a sum, of floating point, shape (..., features); equal shapes on all ranks.
        residual: The tensor to add on this rank, of ``tensor``'s shape and dtype; equal on all ranks if their results
            are to be.
        weight: The norm's weight, of shape (features,) and ``tensor``'s dtype.
        eps: The number to add to the mean square; None is the dtype's epsilon, as in `torch.nn.functional.rms_norm`.
        group: The group, on all of whose ranks this is called; None is the default group.
        timeout: Seconds; None takes the group's.

    Returns:
        The normalized rows, and the sum with the residual. Differentiable.

    Raises:
        TypeError: ``tensor`` is not of floating point, or another tensor has another dtype; before anything is sent.
        ValueError: ``residual`` or ``weight`` has another shape; before anything is sent.
        As `allreduce`.
    """
    if is_profiling() and not is_recorded():
        return record(allreduce_add_rms_norm, tensor, residual, weight, eps, group=group, timeout=timeout)
    total = None
    if not is_compiling() and _may_be_plain(tensor, weight, eps):
        total = compiled.fast_allreduce_add(tensor, residual, group, timeout)
    if total is None:
        _check(tensor, residual, weight, eps)
        total = allreduce(tensor, group=group, timeout=timeout) + residual
    return functional.rms_norm(total, weight.shape, weight, eps), total


def _may_be_plain(tensor: torch.Tensor, weight: torch.Tensor, eps: float | None) -> bool:
    """Return whether all is right that the compiled function does not check: it knows the tensor and the residual."""
    return (
        isinstance(tensor, torch.Tensor)
        and isinstance(weight, torch.Tensor)
        and weight.is_cpu
        and weight.dtype is tensor.dtype
        and weight.shape == tensor.shape[-1:] != ()
        and tensor.is_floating_point()
        and (eps is None or isinstance(eps, float))
    )


def _check(tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float | None) -> None:
    if eps is not None and not isinstance(eps, float | int):
        raise TypeError(f"eps must be a number or None, not {eps!r}")
    for name, one in (("tensor", tensor), ("residual", residual), ("weight", weight)):
        if not isinstance(one, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, not {one!r}")
        if not one.is_floating_point():
            raise TypeError(f"{name} must have a dtype of floating point, not {one.dtype}")
        if one.dtype is not tensor.dtype or one.device != tensor.device:
            raise TypeError(
                f"tensor, residual and weight must have one dtype, on one device: {name} is {one.dtype} on"
                f" {one.device}, and tensor {tensor.dtype} on {tensor.device}"
            )
    if not tensor.dim() or weight.shape != tensor.shape[-1:]:
        raise ValueError(
            f"weight must have an element for each feature, the last dim of tensor {tuple(tensor.shape)}, and has shape"
            f" {tuple(weight.shape)}"
        )
    if residual.shape != tensor.shape:
        raise ValueError(f"residual must have tensor's shape {tuple(tensor.shape)}, and has {tuple(residual.shape)}")
