"""Messages between the driver and a rank, and a barrier of a peer's ranks that needs no library.

A message is a line of JSON over a Unix socket. A rank that waits for one is blocked in the kernel: while others are
measured it takes no processor time.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket
    from pathlib import Path

MAX_LINE_BYTES = 1 << 20  # a longer line is an error

_CACHE_LINE_WORDS = 8  # of 8 bytes


class ChannelClosedError(Exception):
    """The other side has ended."""


class Channel:
    """One end of a connection, which owns its connected stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pending = b""

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._sock.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; ChannelClosedError if the other side has ended."""
        self._sock.settimeout(None)
        try:
            self._sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosedError(str(error)) from None

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for one message, for ``timeout`` seconds or for ever; ValueError if the line is not a message."""
        end = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._pending:
            if len(self._pending) > MAX_LINE_BYTES:
                raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes is no message")
            self._sock.settimeout(None if end is None else max(1e-6, end - time.monotonic()))
            try:
                received = self._sock.recv(65536)
            except ConnectionError as error:
                raise ChannelClosedError(str(error)) from None
            if not received:
                raise ChannelClosedError("the connection has ended")
            self._pending += received
        line, _, self._pending = self._pending.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"{message!r} is no message")  # noqa: TRY004 - what a peer sent is a value, not an argument
        return message

    def close(self) -> None:
        """End the connection."""
        self._sock.close()


class FileBarrier:
    """A barrier of counters in a file that all ranks have mapped; the first rank that comes creates the file."""

    def __init__(self, path: Path, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks, self._generation = rank, num_ranks, 0
        size_bytes = 8 * _CACHE_LINE_WORDS * num_ranks
        with path.open("a+b") as file:
            file.truncate(size_bytes)
            self._memory = mmap.mmap(file.fileno(), size_bytes)
        self._counters = memoryview(self._memory).cast("Q")

    def wait(self) -> None:
        """Wait until all ranks have come."""
        self._generation += 1
        self._counters[self._rank * _CACHE_LINE_WORDS] = self._generation
        for rank in range(self._num_ranks):
            while self._counters[rank * _CACHE_LINE_WORDS] < self._generation:
                os.sched_yield()

    def close(self) -> None:
        """Free the memory."""
        self._counters.release()
        self._memory.close()
