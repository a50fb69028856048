"""Memory that torch asks a group for, as FSDP2 does where it is told to: what was used before, for new memory is slow.

A system gives new memory page by page when it is first written to, which takes longer than to copy it.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict, deque

import torch

__all__ = ["Memory"]

_GRAIN_BYTES = 2 << 20  # a large page


class Memory:
    """What a group has lent to tensors, and gets back with them, on the host."""

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[mmap.mmap]] = defaultdict(deque)  # by size; its calls are atomic

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of one dim, whose elements may be anything."""
        size_bytes = numel * dtype.itemsize
        if not size_bytes:
            return torch.empty(0, dtype=dtype, device="cpu")
        room_bytes = -(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES
        free = self._free[room_bytes]
        try:
            block = free.pop()
        except IndexError:
            block = _made(room_bytes)
        lease = memoryview(block)  # which lives as long as the tensor's memory is somebody's
        weakref.finalize(lease, _give_back, free, block).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=numel)


def _made(size_bytes: int) -> mmap.mmap:
    block = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _give_back(free: deque[mmap.mmap], block: mmap.mmap) -> None:
    free.append(block)
