"""From a host's name to its addresses, within a deadline."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ferrodist.deadline import Deadline

__all__ = ["resolve"]


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
