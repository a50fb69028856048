"""What is asked of all gradients together, of which each rank has a part: their norm, and whether they are finite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.explain import explain_errors
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.collectives.reductions import allreduce

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.parallel.sharded.strategy import Axes

__all__ = ["clip_gradients", "unscale_gradients"]


@torch.no_grad()
def clip_gradients(
    pieces: Sequence[torch.nn.Parameter],
    axes: Axes,
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Scale the gradients of pieces so that the norm of all ranks' together is at most ``max_norm``.

    Each rank adds the powers of its elements in float64; one allreduce of 8 bytes adds those of the ranks, in rank
    order, so that all scale by the same factor. See `FSDP.clip_grad_norm_`.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be a number from 0, not {max_norm}")
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, not {norm_type}")
    gradients = [piece.grad for piece in pieces if piece.grad is not None]
    is_largest = math.isinf(norm_type)
    own = torch.zeros((), dtype=torch.float64, device="cpu")
    for gradient in gradients:
        if gradient.numel():
            norm = torch.linalg.vector_norm(gradient, norm_type, dtype=_wide(gradient.dtype)).double()
            own = torch.maximum(own, norm) if is_largest else own + norm**norm_type
    if axes.shard is not None:
        with explain_errors(
            lambda: f"Rank {axes.whole.rank} was adding up norms in clip_grad_norm_().", "Every rank must call it."
        ):
            own = allreduce(own, ReduceOp.MAX if is_largest else ReduceOp.SUM, group=axes.shard)
    total = own if is_largest else own ** (1 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"the norm of the gradients is {float(total)}, so they can't be clipped")
    factor = min(1.0, max_norm / (float(total) + 1e-6)) if bool(torch.isfinite(total)) else max_norm / float(total)
    if factor != 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
    return total.to(_narrow(gradients))


@torch.no_grad()
def unscale_gradients(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, axes: Axes) -> None:
    """Unscale this rank's gradients, and have all ranks find infinities where one does. See `FSDP.unscale_`."""
    scaler.unscale_(optimizer)
    if not scaler.is_enabled():
        return
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]  # noqa: SLF001 - as torch's own FSDP
    flag = found.setdefault(torch.device("cpu"), torch.zeros(1, device="cpu"))
    with explain_errors(
        lambda: f"Rank {axes.whole.rank} was looking for infinities in unscale_().", "Every rank must call it."
    ):
        allreduce(flag, ReduceOp.MAX, group=axes.whole, out=flag)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _narrow(gradients: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype of the norm that torch would return."""
    kinds = {gradient.dtype for gradient in gradients}
    dtype = kinds.pop() if len(kinds) == 1 else torch.float32
    return dtype if dtype.is_floating_point else torch.float32
