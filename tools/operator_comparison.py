"""Distributed tensors made of plain ones for comparisons, and the differences between results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import ferrodist as fd
from ferrodist.tensor.placement import Partial, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.placement import Placement


def is_made_by_torch(value: Any) -> bool:
    """Return whether a value is a plain tensor of zeros: torch makes some results and gradients without operators."""
    return isinstance(value, torch.Tensor) and not isinstance(value, fd.DTensor) and not value.any()


def gather(value: Any) -> Any:
    """The full plain tensor of a distributed one; other values as they are."""
    if not isinstance(value, fd.DTensor):
        return value
    detached: Any = value.detach()
    return detached.full_tensor()


def spread(tensor: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> torch.Tensor:
    """The tensor with a placement; the shards of a partial one are twice it, or four times, and its negatives."""
    full = tensor.detach().clone()
    if placement != Partial():
        made = fd.distribute(full, mesh, placement, src=None)
    else:
        num_ranks, rank = mesh.shape[0], mesh.coords(mesh.parent.rank)[0]
        factors = ((1 << num_ranks - 1), *[-(1 << at) for at in reversed(range(num_ranks - 1))])
        factor = factors[rank]
        local = full * factor
        if full.dtype.is_floating_point or full.dtype.is_complex:
            is_large = ~(full.abs() < 1e3)  # a sum of large shards would be rounded, or overflow
            local = torch.where(is_large, full if rank == 0 else torch.zeros_like(full), local)
        made = fd.DTensor.from_local(local, mesh, placement, shape=full.shape)
    return made.detach().requires_grad_(tensor.requires_grad)


def make_out(expected: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """A tensor for ``out=``, placed as the first argument if that is sharded along a dim that both have."""
    wanted = placements[0] if placements else Replicate()
    fits = isinstance(wanted, Shard) and wanted.dim < expected.dim()
    return fd.distribute(torch.zeros_like(expected), mesh, wanted if fits else Replicate(), src=None)


def layout_problem(values: Sequence[Any]) -> str:
    """A tensor that is not distributed, or whose shard does not fit its spec; the same on all ranks."""
    for value in values:
        if isinstance(value, torch.Tensor) and not isinstance(value, fd.DTensor):
            return f"a plain tensor of shape {tuple(value.shape)}"
        if isinstance(value, fd.DTensor):
            local, spec = value.to_local(), value._spec  # noqa: SLF001 - there is no public way to the spec
            if tuple(local.shape) != spec.local_shape or local.dtype != value.dtype:
                return f"a shard {local.dtype}{list(local.shape)} of {spec}"
    return ""


def differences(found: Sequence[Any], expected: Sequence[Any], *, only_shapes: bool = False) -> str:
    """The first difference between two lists of values, or an empty text."""
    if len(found) != len(expected):
        return f"{len(found)} results instead of {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor) and isinstance(one, torch.Tensor):
            if one.shape != other.shape or one.dtype != other.dtype:
                return f"{one.dtype}{list(one.shape)} instead of {other.dtype}{list(other.shape)}"
            if only_shapes:
                continue
            wide = torch.complex128 if other.dtype.is_complex else torch.float64
            actual, plain = one.detach().to(wide), other.detach().to(wide)
            largest = plain[plain.isfinite()].abs().max().item() if plain.isfinite().any() else 0.0
            if not torch.allclose(actual, plain, rtol=1e-4, atol=1e-5 * max(1.0, largest), equal_nan=True):
                return f"elements differ by {(actual - plain).abs().max().item() if plain.numel() else 0:.3g}"
        elif (one is None) != (other is None) or (not only_shapes and one != other and one == one):  # noqa: PLR0124
            return f"{one!r} instead of {other!r}"[:200]
    return ""
