"""A part of a file of a `Storage` as a Python file, for those who read only these."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ferrodist.checkpoint.storage.base import Storage

__all__ = ["open_view"]


def open_view(storage: Storage, name: str, start: int, size_bytes: int) -> io.BufferedReader:
    """Bytes of a file, to be read and sought in; the file isn't read before."""
    return io.BufferedReader(_View(storage, name, start, size_bytes))


class _View(io.RawIOBase):
    def __init__(self, storage: Storage, name: str, start: int, size_bytes: int) -> None:
        super().__init__()
        self._storage = storage
        self._name = name
        self._start = start
        self._size_bytes = size_bytes
        self._at = 0

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """See `io.RawIOBase`."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        if base + offset < 0:
            raise OSError("a place before the beginning of a file")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        """See `io.RawIOBase`."""
        into = memoryview(buffer).cast("B")
        into = into[: max(0, self._size_bytes - self._at)]
        if len(into):
            self._storage.read(self._name, self._start + self._at, into)
        self._at += len(into)
        return len(into)
