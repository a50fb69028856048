"""Where the ranks of a peer meet without its library."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_LINE_WORDS = 8  # of 8 bytes


class Meeting:
    """A barrier of counters in a file that all ranks have mapped.

    Args:
        path: The file, for this meeting only; the first rank that comes makes it.
        rank: This one.
        num_ranks: How many there are.
    """

    def __init__(self, path: Path, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks, self._times = rank, num_ranks, 0
        size_bytes = 8 * _LINE_WORDS * num_ranks
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, size_bytes)
            self._memory = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
        self._counters = memoryview(self._memory).cast("Q")

    def wait(self) -> None:
        """Wait until all ranks have come."""
        self._times += 1
        self._counters[self._rank * _LINE_WORDS] = self._times
        for rank in range(self._num_ranks):
            while self._counters[rank * _LINE_WORDS] < self._times:
                os.sched_yield()

    def close(self) -> None:
        """Free the memory."""
        self._counters.release()
        self._memory.close()
