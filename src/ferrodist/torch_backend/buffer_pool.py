"""Reused memory for the tensors that torch asks a group for, as FSDP2 does when it is told to.

The operating system provides new memory page by page at the first write, which takes longer than a copy.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict, deque

import torch

_GRANULARITY_BYTES = 2 << 20  # a huge page


class BufferPool:
    """Host memory for tensors, which is reused once no tensor has it any more."""

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[mmap.mmap]] = defaultdict(deque)  # by size; its calls are atomic

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Make an uninitialized one-dimensional tensor."""
        size_bytes = numel * dtype.itemsize
        if not size_bytes:
            return torch.empty(0, dtype=dtype, device="cpu")
        mapped_bytes = -(-size_bytes // _GRANULARITY_BYTES) * _GRANULARITY_BYTES
        free = self._free[mapped_bytes]
        try:
            block = free.pop()
        except IndexError:
            block = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                block.madvise(mmap.MADV_HUGEPAGE)
        lease = memoryview(block)  # lives as long as any tensor has this memory
        weakref.finalize(lease, free.append, block).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=numel)
