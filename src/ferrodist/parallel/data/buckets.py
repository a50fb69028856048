"""Which tensors travel together: a pure function of their sizes, so that every rank comes to the same plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["Bucket", "plan_buckets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors that travel as one message.

    Args:
        dtype: Of all of them.
        device: Of all of them.
        members: Their positions in the planned sequence, ascending.
        size_bytes: Of all of them together.
    """

    dtype: torch.dtype
    device: torch.device
    members: tuple[int, ...]
    size_bytes: int


def plan_buckets(
    tensors: Sequence[torch.Tensor], max_bytes: float, *, first_bytes: float | None = None
) -> list[Bucket]:
    """Divide tensors into buckets of one dtype and device each, keeping their order within a bucket.

    A bucket is filled until the next tensor of its kind would make it larger than ``max_bytes``; a tensor that
    is larger by itself has a bucket of its own. Tensors without elements belong to buckets too.

    Args:
        tensors: Only their dtype, device and size are read.
        max_bytes: Above 0; infinity gives one bucket for each kind.
        first_bytes: The same for the first bucket of each kind; None is ``max_bytes``. A small one starts early.

    Returns:
        Buckets ordered by their last member: when tensors become ready in the order of the sequence, buckets
        become complete in the order of the plan, whatever the mixture of dtypes.
    """
    plan: list[Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    limits: dict[tuple[torch.dtype, torch.device], float] = {}

    def close(kind: tuple[torch.dtype, torch.device]) -> None:
        members, size_bytes = filling.pop(kind)
        limits[kind] = max_bytes
        plan.append(Bucket(dtype=kind[0], device=kind[1], members=tuple(members), size_bytes=size_bytes))

    for place, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device)
        limit = limits.get(kind, max_bytes if first_bytes is None else min(first_bytes, max_bytes))
        if kind in filling and filling[kind][1] + tensor.nbytes > limit:
            close(kind)
        members, size_bytes = filling.setdefault(kind, ([], 0))
        members.append(place)
        filling[kind] = (members, size_bytes + tensor.nbytes)
    for kind in list(filling):
        close(kind)
    return sorted(plan, key=lambda bucket: bucket.members[-1])
