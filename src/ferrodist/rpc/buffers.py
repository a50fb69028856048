"""Memory that large tensors arrive in, used again once nobody has them any more.

Fresh memory has to be mapped and filled with zeros, page by page, which takes longer than to receive into it.
"""

from __future__ import annotations

import threading
import weakref

import torch

__all__ = ["Buffers"]

_LEAST_BYTES = 1 << 20
"""What is smaller the allocator keeps by itself."""

_MOST_KEPT_BYTES = 128 << 20


class Buffers:
    """Makes tensors whose memory comes back, of which so much is kept; threads share it."""

    def __init__(self, most_kept_bytes: int = _MOST_KEPT_BYTES) -> None:
        self._most_kept_bytes = most_kept_bytes
        self._lock = threading.Lock()
        self._kept: dict[int, list[torch.Tensor]] = {}  # by their sizes, none empty
        self._num_kept_bytes = 0

    def make(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of any content."""
        size = dtype.itemsize
        for dim in shape:
            size *= dim
        if not _LEAST_BYTES <= size <= self._most_kept_bytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with self._lock:
            memory = self._kept[size].pop() if size in self._kept else None
            if memory is not None:
                self._num_kept_bytes -= size
                if not self._kept[size]:
                    del self._kept[size]
        if memory is None:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        # Whatever is made of the tensor holds this, and through it the memory.
        holder = memory.numpy()
        weakref.finalize(holder, self._take_back, memory).atexit = False
        return torch.from_numpy(holder).view(dtype).view(shape)

    def _take_back(self, memory: torch.Tensor) -> None:
        """Runs wherever the last one let go of it: where somebody has the lock, who may be this thread, it is freed."""
        size = memory.nbytes
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._num_kept_bytes + size > self._most_kept_bytes:
                self._kept.clear()  # of sizes that may not be wanted any more
                self._num_kept_bytes = 0
            self._num_kept_bytes += size
            self._kept.setdefault(size, []).append(memory)
        finally:
            self._lock.release()
