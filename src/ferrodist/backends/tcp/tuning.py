"""Kernel settings of a group's connections."""

from __future__ import annotations

import socket

__all__ = ["tune"]

# These end a connection to a host that has vanished without closing it: probes after 5 idle seconds, one a second,
# given up after five. A killed process is seen at once, by its closed connection; a stopped one answers probes.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5))

# Data that is not taken for this long ends the connection too. The kernel can't tell a vanished host from a process
# that is stopped, so it is not before a call with the group's own timeout may run out of time. A call that names a
# longer one changes nothing here: the connection that waits for it may be another rank's. A host that has vanished is
# noticed after five minutes all the same, though calls may take half an hour.
_SHORTEST_UNTAKEN_SECONDS = 10.0
_LONGEST_UNTAKEN_SECONDS = 300.0


def tune(sock: socket.socket, timeout: float, buffer_bytes: int | None) -> None:
    """Set how a connection notices that its other end is gone, and how much the kernel buffers.

    Args:
        sock: The connection.
        timeout: Seconds a blocking call of the group may take when it names no timeout itself.
        buffer_bytes: Size of each of the kernel's buffers, None for its own tuning.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        untaken = min(max(timeout, _SHORTEST_UNTAKEN_SECONDS), _LONGEST_UNTAKEN_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(untaken * 1000))
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):  # Linux has all of them, other systems some
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
