"""Addresses as text, and binding all that a name has."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from typing import TYPE_CHECKING, Any

from ferrodist.errors import AuthenticationError, RendezvousError
from ferrodist.limits import limit_text
from ferrodist.rendezvous.resolution import resolve

if TYPE_CHECKING:
    from ferrodist.deadline import Deadline

__all__ = ["bind_all", "format_address", "is_loopback", "secret_needed"]

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
