"""A contiguous view of all ranks' symmetric memory on one host."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_NO_ACCESS, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000  # Linux values that Python's mmap lacks
_ENTRY = np.dtype(np.uint64)  # see proc_pid_pagemap(5), also for the bits: present or swapped; of a file
_IN_USE, _OF_FILE = np.uint64(0b11 << 62), np.uint64(1 << 61)
_FAILED = ctypes.c_void_p(-1).value


class ContiguousSharedView:
    """Parts of a memory file as one contiguous tensor; writes to the tensor stay in this view.

    Pages are shared with other mappings of the file until one is written to, which copies it (see mmap(2),
    MAP_PRIVATE). On Linux, a page that was not copied shows what others write to the file. Offsets and sizes are whole
    pages, in bytes; the descriptor may be closed afterwards. Raises OSError if the system refuses.
    """

    def __init__(self, descriptor: int | None, offsets: Sequence[int], part_bytes: int) -> None:
        assert descriptor is not None
        self._size_bytes = len(offsets) * part_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._address = _map(None, self._size_bytes, _NO_ACCESS, flags, -1, 0)
        kind: Any = type("_Memory", (ctypes.c_char * self._size_bytes,), {})  # its base takes no weak references
        memory = kind.from_address(self._address)
        # The tensor's storage keeps ``memory`` alive, and what autograd saves keeps the storage alive.
        weakref.finalize(memory, _libc().munmap, self._address, self._size_bytes).atexit = False
        for index, offset in enumerate(offsets):
            flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE  # few pages will ever be copied
            access = mmap.PROT_READ | mmap.PROT_WRITE
            _map(self._address + index * part_bytes, part_bytes, access, flags, descriptor, offset)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)  # all parts, as bytes

    @property
    def has_own_pages(self) -> bool:
        """Return whether something was written to this view; False if the system does not report that."""
        try:
            with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
                pages.seek(self._address // mmap.PAGESIZE * _ENTRY.itemsize)
                entries = np.frombuffer(pages.read(self._size_bytes // mmap.PAGESIZE * _ENTRY.itemsize), _ENTRY)
        except OSError:
            return False
        return bool(((entries & _IN_USE != 0) & (entries & _OF_FILE == 0)).any())

    def restore(self) -> None:
        """Show the content of the file again, in place of the data written here."""
        _check(_libc().madvise(self._address, self._size_bytes, mmap.MADV_DONTNEED), "madvise")


def _map(address: int | None, size_bytes: int, access: int, flags: int, descriptor: int, offset: int) -> int:  # noqa: PLR0917 - mmap(2)'s
    found = _libc().mmap(address, size_bytes, access, flags, descriptor, offset)
    _check(-1 if found == _FAILED else 0, "mmap")
    return int(found)


def _check(result: int, name: str) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
