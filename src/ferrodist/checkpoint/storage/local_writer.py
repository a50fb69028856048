"""Writing a file to a disk, as fast as it takes it, and for good.

Files of some size go past the page cache (``O_DIRECT``) where the file system can do that: what is written once and
read after a restart would throw out of it what the program needs, and is copied faster to the disk's queue than to the
cache and from there. Such writes need aligned memory, so that bytes are collected in buffers; while some are written by
threads, the next is filled.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_ALIGNMENT = 4096
_BUFFER_BYTES = 4 << 20
_MAX_PENDING = 2
"""How many buffers of a file are written at once, while another one is filled: a disk does not wait for the next."""
_SMALL_BYTES = 1 << 20
"""Files below go through the page cache."""

_spare_buffers: list[mmap.mmap] = []
"""For the next file: memory that is new takes as long to get as to write. At most three for each that may have some."""

_direct_slots = threading.BoundedSemaphore(2)
"""How many files may have buffers at a time; what is written to many at once goes through the page cache."""


class LocalWriter:
    """A `FileWriter` of a new file.

    Args:
        path: The file; what is there is overwritten.
        size_bytes: How long it will be.

    Raises:
        OSError: It can't be made, or there is no room for it.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self._flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._is_direct = False
        self._file: int | None = self._open(size_bytes)
        self._at = 0
        """Bytes that are written, or on their way."""
        self._buffer: mmap.mmap | None = None
        """Is filled."""
        self._filled = 0
        self._pending: deque[tuple[_WriteThread, mmap.mmap]] = deque()
        """Buffers that are written, the oldest first."""
        try:
            if self._is_direct:
                self._buffer = _take_buffer()
            if size_bytes:
                _reserve(self._file, size_bytes)
        except BaseException:
            self.discard()
            raise

    def _open(self, size_bytes: int) -> int:
        if size_bytes >= _SMALL_BYTES and hasattr(os, "O_DIRECT") and _direct_slots.acquire(blocking=False):
            try:
                file = os.open(self.path, self._flags | os.O_DIRECT, 0o666)
            except OSError:  # file systems in memory refuse
                _direct_slots.release()
            else:
                self._is_direct = True
                return file
        return os.open(self.path, self._flags, 0o666)

    def write(self, data: memoryview) -> None:
        """See `FileWriter`."""
        assert self._file is not None, "the file is open"
        left = data.cast("B")
        if not self._is_direct:
            _write_all(self._file, left, self._at)
            self._at += len(left)
            return
        while len(left):
            assert self._buffer is not None, "direct files have one"
            step = min(len(left), _BUFFER_BYTES - self._filled)
            self._buffer[self._filled : self._filled + step] = left[:step]
            self._filled += step
            left = left[step:]
            if self._filled == _BUFFER_BYTES:
                self._start_write(_BUFFER_BYTES)

    def _start_write(self, size: int) -> None:
        """Have a thread write what the buffer has, and go on with another one."""
        full, self._buffer = self._buffer, None
        assert self._file is not None and full is not None, "the file is open"  # noqa: PT018
        # Their places in the file are fixed, so they may end in any order.
        self._pending.append((_WriteThread(self._file, memoryview(full)[:size], self._at), full))
        self._at += size
        self._filled = 0
        self._buffer = self._wait_for_oldest() if len(self._pending) > _MAX_PENDING else _take_buffer()

    def _wait_for_oldest(self) -> mmap.mmap:
        """Wait for the oldest buffer; raise what went wrong."""
        written, buffer = self._pending[0]
        written.finish()
        self._pending.popleft()
        return buffer

    def _wait_for_all(self) -> None:
        while self._pending:
            _spare_buffers.append(self._wait_for_oldest())

    def close(self) -> None:
        """See `FileWriter`."""
        assert self._file is not None, "the file is open"
        try:
            if self._filled:
                size = self._at + self._filled
                padded = -(-self._filled // _ALIGNMENT) * _ALIGNMENT
                assert self._buffer is not None, "direct files have one"
                self._buffer[self._filled : padded] = bytes(padded - self._filled)
                self._start_write(padded)
                self._wait_for_all()
                os.ftruncate(self._file, size)
            self._wait_for_all()
            os.fsync(self._file)
        finally:
            self._release()

    def discard(self) -> None:
        """See `FileWriter`."""
        self._release()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _release(self) -> None:
        # Buffers of what went wrong are not used again: nobody is to be sure of who has them.
        for written, _ in self._pending:
            written.join()  # it needs the file
        self._pending.clear()
        if self._buffer is not None:
            _spare_buffers.append(self._buffer)
        self._buffer = None
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
        if self._is_direct:
            self._is_direct = False
            _direct_slots.release()


def _take_buffer() -> mmap.mmap:
    try:
        return _spare_buffers.pop()
    except IndexError:
        # Private: a forked child has a copy, and none of its parent's memory.
        return mmap.mmap(-1, _BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class _WriteThread(threading.Thread):
    """A write that goes on beside its maker; `finish` waits for it.

    No executor does it: they take no work any more when the program ends, and a save may be under way then.
    """

    def __init__(self, file: int, data: memoryview, at: int) -> None:
        super().__init__(name="ferrodist-checkpoint-file")
        self._job = file, data, at
        self._error: OSError | None = None
        self.start()

    def run(self) -> None:
        """In the thread."""
        try:
            _write_all(*self._job)
        except OSError as error:
            self._error = error

    def finish(self) -> None:
        """Wait until all is written, or raise why it is not."""
        self.join()
        if self._error is not None:
            raise self._error


def _reserve(file: int, size: int) -> None:
    """Have the file system find room for the whole file, and say so at once when there is none."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        # Where the file system can't, libc writes a byte to each block, which files without the page cache refuse.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def _write_all(file: int, data: memoryview, at: int) -> None:
    has_disabled = False
    while len(data):
        try:
            count = os.pwrite(file, data, at)
        except OSError as error:
            # Another thread may have left it meanwhile: then this one tries again, too.
            if error.errno != errno.EINVAL or has_disabled:
                raise
            _disable_direct(file)
            has_disabled = True
            continue
        data, at = data[count:], at + count


def _disable_direct(file: int) -> None:
    """Write by the page cache from now on.

    Some file systems take ``O_DIRECT`` and refuse such writes, or want another alignment, which what is left of a
    write that was cut short lacks too.
    """
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
