"""Collectives for tensors on GPUs alone, under the names that they have in the crate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.collectives.prepare import check_tensor
from ferrodist.collectives.reduce_op import Op, ReduceOp
from ferrodist.collectives.reductions import allreduce, broadcast
from ferrodist.errors import UnsupportedOpError

if TYPE_CHECKING:
    import torch

    from ferrodist.backends.base import Backend

__all__ = ["gpu_allreduce", "gpu_broadcast"]


def gpu_allreduce(
    tensor: torch.Tensor,
    op: Op = ReduceOp.SUM,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """`allreduce` of a tensor on a GPU, and of no other.

    Raises:
        UnsupportedOpError: ``tensor`` is on the CPU; or the group has no engine for tensors on GPUs, and
            FERRODIST_ENABLE_GPU_FALLBACK is not 1.
        Exception: As for `allreduce`.
    """
    _check_on_gpu(tensor, "allreduce")
    return allreduce(tensor, op, group=group, out=out, timeout=timeout)


def gpu_broadcast(
    tensor: torch.Tensor,
    root: int = 0,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """`broadcast` of a tensor on a GPU, and of no other.

    Raises:
        UnsupportedOpError: As for `gpu_allreduce`.
        Exception: As for `broadcast`.
    """
    _check_on_gpu(tensor, "broadcast")
    return broadcast(tensor, root, group=group, out=out, timeout=timeout)


def _check_on_gpu(tensor: torch.Tensor, name: str) -> None:
    check_tensor(tensor)
    if not tensor.is_cuda:
        raise UnsupportedOpError(f"gpu_{name} is for tensors on a GPU, and this one is on {tensor.device}: use {name}")
