"""Bytes over a stream socket within a deadline: exact reads, and frames with a bounded length prefix."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import TYPE_CHECKING

from ferrodist.errors import ProtocolError

if TYPE_CHECKING:
    from ferrodist.deadline import Deadline

__all__ = ["arm", "disconnect", "read_exactly", "read_frame", "write", "write_frame"]

_LENGTH = struct.Struct("!I")

# poll() counts milliseconds in an int; longer socket timeouts raise OverflowError.
_LONGEST_SOCKET_TIMEOUT = 20 * 24 * 3600.0


def arm(sock: socket.socket, deadline: Deadline | None) -> None:
    """Limit the next call on a socket to what is left of a deadline; TimeoutError if nothing is."""
    if deadline is None:
        sock.settimeout(None)
        return
    remaining = deadline.remaining()
    if remaining <= 0:
        raise TimeoutError(f"nothing came within {deadline.timeout:.1f} s")
    sock.settimeout(min(remaining, _LONGEST_SOCKET_TIMEOUT))


def read_exactly(sock: socket.socket, size: int, deadline: Deadline | None) -> bytes:
    """Read ``size`` bytes; the limit is on the whole, so a peer that drips bytes gains nothing.

    Raises:
        ConnectionError: The peer closed first.
        TimeoutError: The deadline passed first.
    """
    data = bytearray(size)
    view = memoryview(data)
    got = 0
    while got < size:
        arm(sock, deadline)
        count = sock.recv_into(view[got:])
        if count == 0:
            raise ConnectionResetError(f"the peer closed the connection ({got} of {size} bytes had come)")
        got += count
    return bytes(data)


def write(sock: socket.socket, data: bytes, deadline: Deadline | None) -> None:
    """Send all of ``data``, or raise TimeoutError or OSError."""
    arm(sock, deadline)
    sock.sendall(data)


def read_frame(sock: socket.socket, limit: int, deadline: Deadline | None) -> bytes:
    """Read one frame; a header that announces more than ``limit`` bytes is refused before memory is taken."""
    (size,) = _LENGTH.unpack(read_exactly(sock, _LENGTH.size, deadline))
    if size > limit:
        raise ProtocolError(f"a frame of {size} bytes was announced, the limit is {limit}")
    return read_exactly(sock, size, deadline)


def write_frame(sock: socket.socket, payload: bytes, deadline: Deadline | None) -> None:
    """Send one frame."""
    write(sock, _LENGTH.pack(len(payload)) + payload, deadline)


def disconnect(sock: socket.socket) -> None:
    """Close a connection so that the peer, and a thread of this process blocked on it, notice at once.

    ``close`` alone does neither: a system call in progress keeps the descriptor alive, and so does a forked
    child.
    """
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
