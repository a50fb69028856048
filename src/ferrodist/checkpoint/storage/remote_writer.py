"""Writing a file of a file system of fsspec's, part by part."""

from __future__ import annotations

import contextlib
import errno
import logging
from typing import Any

from fsspec.spec import AbstractBufferedFile

from ferrodist.checkpoint.storage.remote_errors import as_os_errors

__all__ = ["RemoteWriter"]

_logger = logging.getLogger(__name__)


class RemoteWriter:
    """A `FileWriter` that sends a part when it has one; in object stores the file is there when it is closed.

    Args:
        fs: The file system.
        path: The file, as it names it.
        where: The file, for messages.
        part_bytes: How much is kept until it is sent.

    Raises:
        OSError: The file system refuses.
    """

    def __init__(self, fs: Any, path: str, where: str, part_bytes: int) -> None:
        self._fs = fs
        self._path = path
        self._where = where
        self._part_bytes = part_bytes
        with as_os_errors(where):
            self._file: Any = fs.open(path, "wb", block_size=part_bytes)

    def write(self, data: memoryview) -> None:
        """See `FileWriter`."""
        flat = data.cast("B")
        with as_os_errors(self._where):
            for start in range(0, len(flat), self._part_bytes):
                self._file.write(flat[start : start + self._part_bytes])

    def close(self) -> None:
        """See `FileWriter`."""
        with as_os_errors(self._where):
            if self._file.closed:  # fsspec closes what it could not begin to send
                raise OSError(errno.EIO, "It was closed before, or its upload has failed")
            self._file.close()

    def discard(self) -> None:
        """See `FileWriter`."""
        try:
            with as_os_errors(self._where), contextlib.suppress(FileNotFoundError):
                self._give_up()
        except OSError as error:
            # Raised, it would hide why the file is given up. The next save to the folder removes what stays.
            _logger.warning("what was sent of %s can't be removed: %s", self._where, error)

    def _give_up(self) -> None:
        try:
            if isinstance(self._file, AbstractBufferedFile):
                self._file.closed = True  # closing it, which it does by itself when it is forgotten, would complete it
                with contextlib.suppress(FileNotFoundError):
                    self._file.discard()
            else:
                self._file.close()
        finally:
            # Stores without uploads have it already; and an upload may be complete of which the answer was lost.
            self._fs.rm_file(self._path)
