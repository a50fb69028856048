"""What a command says: on standard output, and on standard error, which may be full, closed, or without a reader."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

__all__ = ["complain", "discard", "say"]


def say(text: str, file: SupportsWrite[str] | None = None) -> None:
    """Write to a file, by default standard output. Raises OSError when that is closed, or does not take it."""
    file = file or sys.stdout
    if file is None:
        raise OSError(errno.EBADF, "standard output is closed")
    file.write(text)


def complain(text: str) -> None:
    """Write whole lines to standard error, if they can be written: never a reason to fail."""
    if sys.stderr is None:  # started with standard error closed
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def discard(stream: IO[str] | None) -> None:
    """Let what is left in the stream's buffer, which the interpreter will flush at exit, go nowhere."""
    if stream is None:
        return
    with contextlib.suppress(OSError):  # a stream without a descriptor: nothing to do
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
