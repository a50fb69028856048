"""Sockets within deadlines: exact reads and frames, name resolution, binding, and closing after a fork."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from ferrodist.errors import AuthenticationError, ProtocolError, RendezvousError
from ferrodist.resource_limits import limit_text

if TYPE_CHECKING:
    from ferrodist.deadline import Deadline

_LENGTH = struct.Struct("!I")

# poll() counts milliseconds in an int; longer socket timeouts raise OverflowError.
_MAX_SOCKET_TIMEOUT = 20 * 24 * 3600.0


def apply_deadline(sock: socket.socket, deadline: Deadline | None) -> None:
    """Set a socket's timeout to the rest of a deadline; TimeoutError if it has passed."""
    if deadline is None:
        sock.settimeout(None)
        return
    remaining = deadline.remaining()
    if remaining <= 0:
        raise TimeoutError(f"nothing came within {deadline.timeout:.1f} s")
    sock.settimeout(min(remaining, _MAX_SOCKET_TIMEOUT))


def read_exactly(sock: socket.socket, size: int, deadline: Deadline | None) -> bytes:
    """Read ``size`` bytes; the deadline is for all of them, so that a peer can't prolong it byte by byte."""
    data = bytearray(size)
    view = memoryview(data)
    received = 0
    while received < size:
        apply_deadline(sock, deadline)
        count = sock.recv_into(view[received:])
        if count == 0:
            raise ConnectionResetError(f"the peer closed the connection ({received} of {size} bytes had come)")
        received += count
    return bytes(data)


def write(sock: socket.socket, data: bytes, deadline: Deadline | None) -> None:
    """Send all of ``data``, or raise TimeoutError or OSError."""
    apply_deadline(sock, deadline)
    sock.sendall(data)


def read_frame(sock: socket.socket, limit: int, deadline: Deadline | None) -> bytes:
    """Read one frame; one that announces more than ``limit`` bytes is refused before memory is allocated."""
    (size,) = _LENGTH.unpack(read_exactly(sock, _LENGTH.size, deadline))
    if size > limit:
        raise ProtocolError(f"a frame of {size} bytes was announced, the limit is {limit}")
    return read_exactly(sock, size, deadline)


def write_frame(sock: socket.socket, payload: bytes, deadline: Deadline | None) -> None:
    """Send one frame."""
    write(sock, _LENGTH.pack(len(payload)) + payload, deadline)


def disconnect(sock: socket.socket) -> None:
    """Close a connection so that the peer, and a thread of this process blocked on it, notice at once.

    ``close`` alone does neither: a system call in progress, or a forked child, keeps the descriptor open.
    """
    interrupt(sock)
    sock.close()


def interrupt(sock: socket.socket) -> None:
    """Interrupt another thread's system call on ``sock``; that thread closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def resolve(
    host: str, port: int, deadline: Deadline, *, kind: int = socket.SOCK_STREAM, flags: int = 0
) -> list[tuple[Any, ...]]:
    """Call `socket.getaddrinfo` with a deadline: an unresponsive name server can block it for minutes.

    An address is parsed at once; a name in another thread, which continues up to the system's own limit. TimeoutError:
    no answer arrived in time. OSError: the name has no address.
    """
    numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    try:
        return list(socket.getaddrinfo(host, port, type=kind, flags=flags | numeric))
    except socket.gaierror:
        pass
    except UnicodeError as error:
        raise OSError(f"{host!r} is no valid host name: {error}") from error
    found: list[Any] = []

    def query() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=kind, flags=flags))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=query, name="ferrodist-resolve", daemon=True)
    thread.start()
    thread.join(deadline.remaining())
    if not found:
        raise TimeoutError(f"the name {host} could not be resolved in time")
    if isinstance(found[0], Exception):
        raise found[0]
    return list(found[0])


_CLOSED_IN_CHILD: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_hooked = False

_Socket = TypeVar("_Socket", bound="socket.socket")


def close_in_child(sock: _Socket) -> _Socket:
    """Close ``sock``, which is returned, in later forked children only; a detached one is left alone."""
    global _hooked  # noqa: PLW0603 - a process can never unregister a fork hook, so it is registered once
    if not _hooked and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_all)
        _hooked = True
    _CLOSED_IN_CHILD.add(sock)
    return sock


def _close_all() -> None:
    for sock in list(_CLOSED_IN_CHILD):
        sock.close()
    _CLOSED_IN_CHILD.clear()


_BACKLOG = 1024
_MAX_ATTEMPTS = 5

# The address is another host's, or of a family that this host lacks.
_UNAVAILABLE_ERRNOS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)


def format_address(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether a numeric address can only be reached from this host."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def bind_all(host: str, port: int, secret: bytes, deadline: Deadline) -> list[socket.socket]:
    """Bind every address of ``host`` on this machine, IPv4 first, all to one port, and listen.

    Another process could take an address left free, and ranks that connect by name would reach it.
    """
    where = format_address(host, port)
    try:
        found = resolve(host, port, deadline, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise RendezvousError(f"cannot listen at {where}: {limit_text(error) or error}") from error
    entries = {(family, address): None for family, _, _, _, address in found}
    ordered = sorted(entries, key=lambda entry: entry[0] != socket.AF_INET)
    # Refused before any is bound, so that the port is not open for a moment.
    if not secret and not all(is_loopback(str(address[0])) for _, address in ordered):
        raise missing_secret_error(where)
    for _ in range(_MAX_ATTEMPTS if port == 0 and len(ordered) > 1 else 0):
        with contextlib.suppress(RendezvousError):  # a port that is free at one address may be taken at another
            return _bind_each(ordered, port, where)
    return _bind_each(ordered, port, where)


def _bind_each(entries: list[tuple[Any, Any]], port: int, where: str) -> list[socket.socket]:
    bound: list[socket.socket] = []
    failure: OSError | None = None
    for family, address in entries:
        try:
            bound.append(_bind(family, (address[0], port, *address[2:]), is_only=len(entries) == 1))
        except OSError as error:
            failure = error
            if error.errno in _UNAVAILABLE_ERRNOS:
                continue
            for sock in bound:
                sock.close()
            at = "" if len(entries) == 1 else f" (its address {format_address(str(address[0]), port)})"
            raise RendezvousError(f"cannot listen at {where}{at}: {limit_text(error) or error}") from error
        port = bound[0].getsockname()[1]
    if not bound:
        raise RendezvousError(f"cannot listen at {where}: {failure}") from failure
    return bound


def _bind(family: int, address: tuple[Any, ...], *, is_only: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Allows a port in TIME_WAIT after a restart; a port with a listener is still refused.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not is_only:  # the IPv4 address is bound by itself
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def missing_secret_error(where: str) -> AuthenticationError:
    """Return the error of a listener without a secret that other hosts could reach."""
    return AuthenticationError(
        f"cannot listen at {where} without a job secret: other hosts can reach that address. Set "
        "FERRODIST_SECRET to the same value on every rank (`python -m ferrodist secret` prints a new one), "
        "or bind a loopback address."
    )
