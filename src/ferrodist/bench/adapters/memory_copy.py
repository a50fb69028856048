"""The limit: the ranks copy as many bytes as a rank's tensor has, all at once, each its own."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from typing import TYPE_CHECKING, Any

from ferrodist.bench.adapters.base import NotOfferedError
from ferrodist.bench.arrays import NumpyArrays
from ferrodist.bench.cases import Case, Collective

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.bench.adapters.base import Place
    from ferrodist.bench.arrays import Arrays

__all__ = ["MemoryCopyAdapter"]

_LINE_WORDS = 8  # of 8 bytes


class MemoryCopyAdapter:
    """A process that copies; see `Adapter`. The ranks meet by counters in a file that all have mapped."""

    copies = True

    def __init__(self, place: Place) -> None:
        self.arrays: Arrays = NumpyArrays()
        self.rank, self.num_ranks = place.rank, place.num_ranks
        self.versions = {"libc": " ".join(platform.libc_ver())}
        size_bytes = 8 * _LINE_WORDS * place.num_ranks
        descriptor = os.open(place.folder / "counters", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, size_bytes)
            self._memory = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
        self._counters = memoryview(self._memory).cast("Q")
        self._num_barriers = 0

    def make_call(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        """See `Adapter.make_call`."""
        if case.collective is Collective.BARRIER:
            raise NotOfferedError("a barrier moves no bytes")
        copy, size_bytes = ctypes.memmove, source.nbytes  # libc's, without the GIL
        to, from_ = ctypes.c_void_p(target.ctypes.data), ctypes.c_void_p(source.ctypes.data)
        return lambda: copy(to, from_, size_bytes)

    def barrier(self) -> None:
        """See `Adapter.barrier`."""
        self._num_barriers += 1
        self._counters[self.rank * _LINE_WORDS] = self._num_barriers
        for rank in range(self.num_ranks):
            while self._counters[rank * _LINE_WORDS] < self._num_barriers:
                os.sched_yield()

    def close(self) -> None:
        """See `Adapter.close`."""
        self._counters.release()
        self._memory.close()
