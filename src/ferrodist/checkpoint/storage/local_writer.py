"""Durable writing of large files at a disk's full speed.

Files above a size bypass the page cache (``O_DIRECT``) where the file system supports it: data that is written once and
read after a restart would evict what the program needs, and the direct path is faster. Direct writes need aligned
memory, so bytes are collected in buffers; while threads write some, the next is filled.
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

from typing_extensions import override

from ferrodist.checkpoint.storage.base import FileWriter

if TYPE_CHECKING:
    from pathlib import Path

_ALIGNMENT = 4096
_BUFFER_BYTES = 4 << 20
_MAX_PENDING = 2
"""The number of buffers of a file that are written while another one is filled, so that the disk is never idle."""
_SMALL_BYTES = 1 << 20
"""Smaller files go through the page cache."""

_spare_buffers: list[mmap.mmap] = []
"""Buffers to reuse: new memory takes as long to get as to write. At most three for each direct slot."""

_direct_slots = threading.BoundedSemaphore(2)
"""The number of files that may be written directly at a time; others go through the page cache."""


class LocalFileWriter(FileWriter):
    """A `FileWriter` of a local file."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self._flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._is_direct = False
        self._descriptor: int | None = self._open(size_bytes)
        self._offset = 0
        """The number of bytes written or being written."""
        self._buffer: mmap.mmap | None = None
        """The buffer being filled."""
        self._filled = 0
        self._pending: deque[tuple[_WriteThread, mmap.mmap]] = deque()
        """Buffers being written, oldest first."""
        try:
            if self._is_direct:
                self._buffer = _take_buffer()
            if size_bytes:
                _reserve(self._descriptor, size_bytes)
        except BaseException:
            self.discard()
            raise

    def _open(self, size_bytes: int) -> int:
        if size_bytes >= _SMALL_BYTES and hasattr(os, "O_DIRECT") and _direct_slots.acquire(blocking=False):
            try:
                descriptor = os.open(self.path, self._flags | os.O_DIRECT, 0o666)
            except OSError:  # file systems in memory refuse
                _direct_slots.release()
            else:
                self._is_direct = True
                return descriptor
        return os.open(self.path, self._flags, 0o666)

    @override
    def write(self, data: memoryview) -> None:
        assert self._descriptor is not None, "the file is open"
        remaining = data.cast("B")
        if not self._is_direct:
            _write_all(self._descriptor, remaining, self._offset)
            self._offset += len(remaining)
            return
        while len(remaining):
            assert self._buffer is not None, "direct files have one"
            step = min(len(remaining), _BUFFER_BYTES - self._filled)
            self._buffer[self._filled : self._filled + step] = remaining[:step]
            self._filled += step
            remaining = remaining[step:]
            if self._filled == _BUFFER_BYTES:
                self._start_write(_BUFFER_BYTES)

    def _start_write(self, size: int) -> None:
        """Write the full buffer in a thread, and continue with another one."""
        full, self._buffer = self._buffer, None
        assert self._descriptor is not None and full is not None, "the file is open"  # noqa: PT018
        # Offsets are fixed, so that writes may end in any order.
        self._pending.append((_WriteThread(self._descriptor, memoryview(full)[:size], self._offset), full))
        self._offset += size
        self._filled = 0
        self._buffer = self._wait_for_oldest() if len(self._pending) > _MAX_PENDING else _take_buffer()

    def _wait_for_oldest(self) -> mmap.mmap:
        """Wait for the oldest buffer; raise its error."""
        written, buffer = self._pending[0]
        written.finish()
        self._pending.popleft()
        return buffer

    def _wait_for_all(self) -> None:
        while self._pending:
            _spare_buffers.append(self._wait_for_oldest())

    @override
    def close(self) -> None:
        assert self._descriptor is not None, "the file is open"
        try:
            if self._filled:
                size = self._offset + self._filled
                padded = -(-self._filled // _ALIGNMENT) * _ALIGNMENT
                assert self._buffer is not None, "direct files have one"
                self._buffer[self._filled : padded] = bytes(padded - self._filled)
                self._start_write(padded)
                self._wait_for_all()
                os.ftruncate(self._descriptor, size)
            self._wait_for_all()
            os.fsync(self._descriptor)
        finally:
            self._release()

    @override
    def discard(self) -> None:
        self._release()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _release(self) -> None:
        # Buffers of failed writes are not reused: they may still be in use.
        for written, _ in self._pending:
            written.join()  # it needs the file
        self._pending.clear()
        if self._buffer is not None:
            _spare_buffers.append(self._buffer)
        self._buffer = None
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        if self._is_direct:
            self._is_direct = False
            _direct_slots.release()


def _take_buffer() -> mmap.mmap:
    try:
        return _spare_buffers.pop()
    except IndexError:
        # Private: a forked child gets a copy of the memory.
        return mmap.mmap(-1, _BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class _WriteThread(threading.Thread):
    """A write in a thread of its own: executors refuse work once the program ends, when a save may be in progress."""

    def __init__(self, descriptor: int, data: memoryview, at: int) -> None:
        super().__init__(name="ferrodist-checkpoint-file")
        self._job = descriptor, data, at
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Write the data."""
        try:
            _write_all(*self._job)
        except BaseException as error:  # noqa: BLE001 - raised by `finish`: a file with a gap must not count as written
            self._error = error

    def finish(self) -> None:
        """Wait for the write, and raise its error."""
        self.join()
        if self._error is not None:
            raise self._error


def _reserve(descriptor: int, size: int) -> None:
    """Reserve the space of the full file, to fail at once on a full disk."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        # Without file system support libc writes a byte to each block, which direct files refuse.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def _write_all(descriptor: int, data: memoryview, at: int) -> None:
    has_disabled = False
    while len(data):
        try:
            count = os.pwrite(descriptor, data, at)
        except OSError as error:
            # Also if another thread has disabled it meanwhile.
            if error.errno != errno.EINVAL or has_disabled:
                raise
            # Some file systems accept O_DIRECT but refuse such writes, or want another alignment, which the rest of a
            # short write lacks too: through the page cache from now on.
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
            has_disabled = True
            continue
        data, at = data[count:], at + count
