"""Messages between the driver and a rank: a JSON object a line, over a Unix socket.

A rank that waits for one is blocked in the kernel: while others are measured it takes nothing from the processors.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

MAX_LINE_BYTES = 1 << 20
"""A longer line is an error."""


class ChannelClosedError(Exception):
    """The other side has ended."""


class Channel:
    """One end.

    Args:
        sock: A connected stream socket; the channel owns it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pending = b""

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._sock.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            ChannelClosedError: Nobody reads any more.
        """
        self._sock.settimeout(None)
        try:
            self._sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosedError(str(error)) from None

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for one message.

        Args:
            timeout: Seconds; None waits for ever.

        Raises:
            ChannelClosedError: The other side has ended.
            TimeoutError: Nothing came.
            ValueError: What came is no message.
        """
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
