"""What a command says on standard error, which may be full, closed, or without a reader: never a reason to fail."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO

__all__ = ["complain", "discard"]


def complain(text: str) -> None:
    """Write whole lines to standard error, if they can be written."""
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
