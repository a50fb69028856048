"""Memory that all ranks of a host share, so that gathering and averaging copy nothing aside."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.symmetric_memory import empty_joined, empty_symmetric

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.native.symmetric_memory import ContiguousSharedView

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatMemory:
    """The memory of `FlatParameters`.

    Args:
        shard: This rank's shard.
        traveller: For what is sent of it, where that has another dtype; else None.
        joined: A view of the shards of all ranks that divide it, where they can be used as they lie; else None.
    """

    shard: torch.Tensor
    traveller: torch.Tensor | None = None
    joined: ContiguousSharedView | None = None


def allocate_shards(
    sizes: Sequence[tuple[int, torch.dtype, torch.dtype]], group: Backend | None, device: torch.device
) -> list[FlatMemory]:
    """Memory for shards, zeros, on the CPU in one piece of symmetric memory; every rank of the group calls this.

    Args:
        sizes: Elements of each shard, in which dtype they are kept and in which gathered; equal on all ranks.
        group: Who divides; None makes it this rank's own.
        device: Where it is made.
    """
    if group is None or device.type != "cpu":
        return [
            FlatMemory(
                shard=torch.zeros(numel, dtype=kept, device=device),
                traveller=None
                if kept is gathered or group is None
                else torch.empty(numel, dtype=gathered, device=device),
            )
            for numel, kept, gathered in sizes
        ]
    if not sizes:
        return []
    starts, joined, end = [], {}, 0
    for place, (numel, kept, gathered) in enumerate(sizes):
        size_bytes = numel * kept.itemsize
        is_joined = kept is gathered and size_bytes % mmap.PAGESIZE == 0
        end += -end % (mmap.PAGESIZE if is_joined else _ALIGNMENT)
        starts.append((end, end + size_bytes))
        if is_joined:
            joined[place] = (end, size_bytes)
        end += size_bytes + (0 if kept is gathered else numel * gathered.itemsize)
    whole, views = empty_joined(end, list(joined.values()), group=group)
    whole.zero_()
    of_place = dict(zip(joined, views, strict=False))
    memories = []
    for place, (numel, kept, gathered) in enumerate(sizes):
        start, after = starts[place]
        shard = whole[start:after].view(kept)
        travelling = whole[after : after + numel * gathered.itemsize].view(gathered)
        traveller = None if kept is gathered else travelling
        memories.append(FlatMemory(shard=shard, traveller=traveller, joined=of_place.get(place)))
    return memories


def same_memory(flat: torch.Tensor) -> torch.Tensor:
    """A tensor with a version counter of its own on the memory of a flat one, which must outlive it.

    Collectives that see a tensor as bytes do so through numpy, after which torch never resizes that tensor's storage:
    on the CPU it has a storage of its own, too.
    """
    if flat.device.type != "cpu":
        return flat.data
    memory = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    return torch.frombuffer(memory, dtype=flat.dtype)


class GradientBuffer:
    """Where gradients wait to be averaged: one piece of symmetric memory, in which units take turns.

    Units come in the same order on all ranks, so that each finds its peers' gradients in the same place.

    Args:
        size_bytes: For the largest unit.
        group: Who averages; None where nobody else does.
        device: Where the gradients are.
    """

    def __init__(self, size_bytes: int, group: Backend | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._memory = self._make(size_bytes)
        self._vacate: Callable[[], None] | None = None

    def take(self, numel: int, dtype: torch.dtype, vacate: Callable[[], None]) -> torch.Tensor:
        """The memory as ``numel`` elements, once who had it before has done without it.

        Args:
            numel: Elements.
            dtype: Theirs.
            vacate: Returns when the elements are not needed any more; called before the next one takes the memory.
        """
        previous, self._vacate = self._vacate, None
        if previous is not None:
            previous()
        self._vacate = vacate
        size_bytes = numel * dtype.itemsize
        if size_bytes > self._memory.numel():  # frozen parameters were unfrozen, on all ranks alike
            self._memory = self._make(size_bytes)
        return self._memory[: numel * dtype.itemsize].view(dtype)

    def forget(self) -> None:
        """Wait for nobody any more: the group has failed."""
        self._vacate = None

    def _make(self, size_bytes: int) -> torch.Tensor:
        if self._group is None or self._device.type != "cpu":
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        return empty_symmetric((size_bytes,), torch.uint8, group=self._group)
