"""A command's own output, to streams that may be full, closed, or without a reader."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


def write_stdout(text: str, file: SupportsWrite[str] | None = None) -> None:
    """Write to a file, by default standard output; OSError if it is closed or refuses."""
    file = file or sys.stdout
    if file is None:
        raise OSError(errno.EBADF, "standard output is closed")
    file.write(text)


def print_warning(text: str) -> None:
    """Write lines to standard error if possible; never fails."""
    if sys.stderr is None:  # started with standard error closed
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard_buffer(sys.stderr)


def discard_buffer(stream: IO[str] | None) -> None:
    """Redirect a stream to the null device, so that flushing its buffer at exit doesn't fail."""
    if stream is None:
        return
    with contextlib.suppress(OSError):  # a stream without a descriptor: nothing to do
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
