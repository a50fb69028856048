"""Bytes over a stream socket within a deadline: exact reads, and frames with a bounded length prefix.

From a host's name to its addresses, within a deadline.

Sockets that belong to one process: a forked child drops its copies of them.

Addresses as text, and binding all that a name has.
"""

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


def resolve(
    host: str, port: int, deadline: Deadline, *, kind: int = socket.SOCK_STREAM, flags: int = 0
) -> list[tuple[Any, ...]]:
    """`socket.getaddrinfo` with a deadline: a name server that does not answer can block it for minutes.

    Args:
        host: Name or address; an address is understood at once, in this thread.
        port: Port to put into the addresses.
        deadline: When to give up. The thread that asks lives on until the system's own limit.
        kind: Socket type.
        flags: Of getaddrinfo.

    Raises:
        TimeoutError: No answer in time.
        OSError: The name has no address.
    """
    numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    try:
        return list(socket.getaddrinfo(host, port, type=kind, flags=flags | numeric))
    except socket.gaierror:
        pass
    found: list[Any] = []

    def look_up() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=kind, flags=flags))
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be encoded
            found.append(error)

    thread = threading.Thread(target=look_up, name="ferrodist-resolve", daemon=True)
    thread.start()
    thread.join(deadline.remaining())
    if not found:
        raise TimeoutError(f"the name {host} could not be resolved in time")
    if isinstance(found[0], Exception):
        raise found[0]
    return list(found[0])


_OWNED: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_hooked = False

_Socket = TypeVar("_Socket", bound="socket.socket")


def close_in_child(sock: _Socket) -> _Socket:
    """Have ``sock`` closed in every child that this process forks from now on; returns ``sock``.

    The child closes its descriptors only: the connections of the parent stay open. A socket whose descriptor
    was detached (handed to someone else) is left alone.
    """
    global _hooked  # noqa: PLW0603 - a process can never unregister a fork hook, so it is registered once
    if not _hooked and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_drop)
        _hooked = True
    _OWNED.add(sock)
    return sock


def _drop() -> None:
    for sock in list(_OWNED):
        sock.close()
    _OWNED.clear()


_BACKLOG = 1024
_ATTEMPTS = 5

# An address of the name that is another host's, or of a family that this host does not have.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)


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
    """Bind every address of ``host`` that this machine has, IPv4 first, all to one port, and listen.

    An address that stays free could be taken by somebody else, whom the ranks that dial the name would then reach.

    Raises:
        AuthenticationError: There is no secret, and one of them is no loopback address.
        RendezvousError: This machine has none of them, or one can't be bound.
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
        raise secret_needed(where)
    for _ in range(_ATTEMPTS if port == 0 and len(ordered) > 1 else 0):
        with contextlib.suppress(RendezvousError):  # what is a free port at one address may not be at another
            return _bind_each(ordered, port, where)
    return _bind_each(ordered, port, where)


def _bind_each(entries: list[tuple[Any, Any]], port: int, where: str) -> list[socket.socket]:
    bound: list[socket.socket] = []
    failure: OSError | None = None
    for family, address in entries:
        try:
            bound.append(_bind(family, (address[0], port, *address[2:]), alone=len(entries) == 1))
        except OSError as error:
            failure = error
            if error.errno in _NOT_HERE:
                continue
            for sock in bound:
                sock.close()
            at = "" if len(entries) == 1 else f" (its address {format_address(str(address[0]), port)})"
            raise RendezvousError(f"cannot listen at {where}{at}: {limit_text(error) or error}") from error
        port = bound[0].getsockname()[1]
    if not bound:
        raise RendezvousError(f"cannot listen at {where}: {failure}") from failure
    return bound


def _bind(family: int, address: tuple[Any, ...], *, alone: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port in TIME_WAIT after a restart is free; a port with a listener still is not.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not alone:  # the IPv4 address is bound by itself
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def secret_needed(where: str) -> AuthenticationError:
    """The error of a listener without a secret that other hosts could reach."""
    return AuthenticationError(
        f"cannot listen at {where} without a job secret: other hosts can reach that address. Set "
        "FERRODIST_SECRET to the same value on every rank (`python -m ferrodist secret` prints a new one), "
        "or bind a loopback address."
    )
