"""Shards and gradients in memory that all ranks of a host share, so that collectives need no staging copy.

Shards from 64 KiB on are whole pages (`flat_layout.py`), and smaller ones may happen to be. Where all ranks are on one
host, and compute in the shards' own dtype, each rank maps such shards of all ranks one behind the other: this *shared
view* is the unit's full parameters, and no all_gather copies them. Other shards, and those that are cast, are gathered
as between hosts.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, NamedTuple

import torch

from ferrodist.collectives.symmetric_memory import empty_symmetric, empty_with_views

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.native.shared_view import ContiguousSharedView
    from ferrodist.parallel.fsdp.flat_layout import FlatLayout

_ALIGNMENT = 64


class FlatMemory(NamedTuple):
    """The memory of `FlatParameters`: this rank's shard, and a buffer for it in the dtype in which it is sent.

    ``shared_view`` is a contiguous view of the shards of all ranks, where they can be used in shared memory.
    """

    shard: torch.Tensor
    cast_buffer: torch.Tensor | None = None
    shared_view: ContiguousSharedView | None = None


def allocate_shards(layouts: Sequence[FlatLayout], group: Backend | None, device: torch.device) -> list[FlatMemory]:
    """Allocate shards of zeros, on the CPU in one region of symmetric memory; every rank of the group calls this."""
    if group is None or device.type != "cpu":
        return [
            FlatMemory(
                shard=torch.zeros(layout.shard_size, dtype=layout.shard_dtype, device=device),
                cast_buffer=None
                if layout.shard_dtype is layout.param_dtype or group is None
                else torch.empty(layout.shard_size, dtype=layout.param_dtype, device=device),
            )
            for layout in layouts
        ]
    if not layouts:
        return []
    slices, shared, end = [], {}, 0
    for index, layout in enumerate(layouts):
        is_cast = layout.shard_dtype is not layout.param_dtype
        size_bytes = layout.shard_size * layout.shard_dtype.itemsize
        is_shared = not is_cast and size_bytes % mmap.PAGESIZE == 0
        start = end + -end % (mmap.PAGESIZE if is_shared else _ALIGNMENT)
        if is_shared:
            shared[index] = (start, size_bytes)
        end = start + size_bytes + (layout.shard_size * layout.param_dtype.itemsize if is_cast else 0)
        slices.append((slice(start, start + size_bytes), slice(start + size_bytes, end)))
    region, views = empty_with_views(end, list(shared.values()), group=group)
    region.zero_()
    views_by_index = dict(zip(shared, views, strict=False))
    return [
        FlatMemory(
            shard=region[shard].view(layout.shard_dtype),
            cast_buffer=region[cast].view(layout.param_dtype) if cast.start < cast.stop else None,
            shared_view=views_by_index.get(index),
        )
        for index, (layout, (shard, cast)) in enumerate(zip(layouts, slices, strict=True))
    ]


def alias_memory(flat: torch.Tensor) -> torch.Tensor:
    """A tensor with its own version counter on the memory of a flat tensor, which must outlive it.

    Collectives that view a tensor as bytes do so through numpy, after which torch never resizes that tensor's storage:
    so on the CPU the alias has a storage of its own.
    """
    if flat.device.type != "cpu":
        return flat.data
    memory = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    return torch.frombuffer(memory, dtype=flat.dtype)


class GradientBuffer:
    """Symmetric memory in which units average their gradients in turn, in the same order on all ranks."""

    def __init__(self, size_bytes: int, group: Backend | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._memory = self._allocate(size_bytes)
        self._release: Callable[[], None] | None = None

    def acquire_after_previous(self, numel: int, dtype: torch.dtype, release: Callable[[], None]) -> torch.Tensor:
        """Call the previous user's ``release``, which waits for its collective, and return the memory.

        The next user, or nobody, calls ``release`` of this one.
        """
        previous, self._release = self._release, None
        if previous is not None:
            previous()
        self._release = release
        size_bytes = numel * dtype.itemsize
        if size_bytes > self._memory.numel():  # frozen parameters were unfrozen, on all ranks alike
            self._memory = self._allocate(size_bytes)
        return self._memory[:size_bytes].view(dtype)

    def reset(self) -> None:
        """Drop the present user, after a failure of the group."""
        self._release = None

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        """Allocate zeros: units send padding too, to which none of them writes."""
        if self._group is None or self._device.type != "cpu":
            return torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)
        return empty_symmetric((size_bytes,), torch.uint8, group=self._group).zero_()
