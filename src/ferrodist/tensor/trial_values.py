"""Random values for distributed tensors, with which code is tried out."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.placement import Replicate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_MOST_SEEDS = 1 << 20
"""A number that is larger than all seeds."""


def random_like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """A leaf like a distributed tensor of floats, the same for a seed; others are returned as they are."""
    assert isinstance(tensor, DTensor), "others have no shards"
    if not tensor.is_floating_point():
        return tensor
    made = DTensor._wrap(_random_shard(tensor, seed), tensor._spec)
    made.requires_grad_(tensor.requires_grad)
    return made


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """A distributed tensor of floats without memory, for `random_like`; others are returned detached."""
    if not isinstance(tensor, DTensor) or not tensor.is_floating_point():
        return tensor.detach()
    made = DTensor._wrap(torch.empty_like(tensor._local, device="meta"), tensor._spec)
    return made.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def with_random_values(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """A block in which distributed tensors have random values, in memory of their own."""
    before = [one._local for one in tensors if isinstance(one, DTensor)]
    distributed = [one for one in tensors if isinstance(one, DTensor)]
    try:
        for number, one in enumerate(distributed):
            if one.is_floating_point():
                # Of a size with which layers of any width have results of about one.
                scale = one.shape[-1] ** -0.5 if one.dim() > 1 and one.numel() else 1.0
                one._local = _random_shard(one, _MOST_SEEDS - 1 - number, scale)
        yield
    finally:
        for one, local in zip(distributed, before, strict=True):
            one._local = local


def _random_shard(tensor: DTensor, seed: int, scale: float = 1.0) -> torch.Tensor:
    is_replicated = all(isinstance(one, Replicate) for one in tensor.placements)
    place = 0 if is_replicated else 1 + sum(tensor._spec.coordinate)
    generator = torch.Generator().manual_seed(seed + _MOST_SEEDS * place)
    values = torch.randn(tensor._local.shape, generator=generator, dtype=torch.float32)
    return (values * scale).to(tensor.dtype)
