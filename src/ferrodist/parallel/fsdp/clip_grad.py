"""Global gradient norm and inf check over sharded gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.reduce import allreduce
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.parallel.fsdp.dtensor_params import count_replicas
from ferrodist.torch_private.modules import found_infinities
from ferrodist.torch_private.tensors import plain_functions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.parallel.fsdp.config import ShardAxes
    from ferrodist.parallel.fsdp.flat_param import FlatParameters


@torch.no_grad()
def clip_gradients(
    flats: Sequence[FlatParameters], axes: ShardAxes, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scale the gradients of shards so that the norm of all ranks' together is at most ``max_norm``.

    Powers are added in float64, and those of the ranks in rank order by one allreduce of 8 bytes, so that all scale by
    the same factor. For DTensors another one over their mesh's group precedes it, in which elements that several ranks
    have are counted in shares.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)  # as torch does, which takes "inf" too
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be at least 0, not {max_norm}")
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, not {norm_type}")
    gradients = [shard.grad for flat in flats for shard in flat.parameters if shard.grad is not None]
    is_largest = math.isinf(norm_type)
    with plain_functions(), axes.in_collective("adding up norms in clip_grad_norm_()"):
        total = _sum_powers(flats, axes, norm_type)
    if not is_largest:
        total = total ** (1 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"the norm of the gradients is {float(total)}, so they can't be clipped")
    factor = min(1.0, max_norm / (float(total) + 1e-6)) if bool(torch.isfinite(total)) else max_norm / float(total)
    if factor != 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
    kinds = {gradient.dtype for gradient in gradients}
    dtype = kinds.pop() if len(kinds) == 1 else torch.float32
    return total.to(dtype if dtype.is_floating_point else torch.float32)


def _sum_powers(flats: Sequence[FlatParameters], axes: ShardAxes, norm_type: float) -> torch.Tensor:
    """The sum of the powers of all gradients' elements, or the largest element, on every rank."""
    is_largest = math.isinf(norm_type)
    op, fold = (ReduceOp.MAX, torch.maximum) if is_largest else (ReduceOp.SUM, torch.add)
    # Plain parameters are equal on all ranks of the first DTensor mesh. They are reduced over it too, and divided by
    # its size: all its ranks then get the same bits, as they add the same terms in the same order.
    default = axes.other_groups[0] if axes.other_groups else None
    device = flats[0].shard.device if flats else torch.device("cpu")
    powers: dict[Backend | None, torch.Tensor] = {
        group: torch.zeros((), dtype=torch.float64, device=device) for group in axes.other_groups or (None,)
    }
    for flat in flats:
        for shard, spec in zip(flat.parameters, flat.dtensor_specs, strict=True):
            if shard.grad is None or not shard.grad.numel():
                continue
            wide = torch.complex128 if shard.grad.is_complex() else torch.float64
            norm = torch.linalg.vector_norm(shard.grad, norm_type, dtype=wide).double()
            if spec is None or spec.mesh.size == 1:
                group = default
                num_copies = 1 if default is None else default.world_size
            else:
                group, num_copies = spec.mesh.group, count_replicas(spec)
            power = norm if is_largest else norm**norm_type / num_copies
            powers[group] = fold(powers[group], power)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for group, own in powers.items():
        total = fold(total, own if group is None else allreduce(own, op, group=group))
    return total if axes.shard is None else allreduce(total, op, group=axes.shard)


@torch.no_grad()
def unscale_gradients(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, axes: ShardAxes, device: torch.device
) -> None:
    """Unscale this rank's gradients, and let all ranks find infinities of any rank. See `FSDP.unscale_`."""
    scaler.unscale_(optimizer)
    if not scaler.is_enabled():
        return
    found = found_infinities(scaler, optimizer)
    flag = found.setdefault(device, torch.zeros(1, device=device))
    with axes.in_collective("looking for infinities in unscale_()"):
        for group in (axes.world, *axes.other_groups):
            allreduce(flag, ReduceOp.MAX, group=group, out=flag)
