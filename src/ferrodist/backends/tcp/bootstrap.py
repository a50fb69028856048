"""The bootstrap of a star: rank 0 listens, the others dial it, and both sides prove that they know the secret."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from ferrodist.errors import (
    DistributedError,
    DistributedTimeoutError,
    InvalidRankError,
    InvalidWorldSizeError,
    ProtocolError,
    RendezvousError,
    ranks_text,
)
from ferrodist.rendezvous.auth import Hello, check_hello, connect
from ferrodist.rendezvous.listener import Listener, parse_address
from ferrodist.rendezvous.sockets import format_address
from ferrodist.resource_limits import check_descriptors, naming_limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.deadline import Deadline
    from ferrodist.rendezvous import Membership
    from ferrodist.rendezvous.session import Connection

_ADDRESS_KEY = "tcp/address"
_REFUSAL = b"!"  # begins what rank 0 puts into the store in place of its address when it can't listen

_OWN_DESCRIPTORS = 16
"""Descriptors that rank 0 needs while ranks connect: of its listener and its loop, and some to spare."""

_POLL_INTERVAL_SECONDS = 0.2
_SHORTAGE_SECONDS = 2.0  # how long a rank 0 that can accept no more connections goes on saying so to ranks that dial


class _PublishedAddress(str):
    """An address that rank 0 has published itself, as opposed to the user's, which may lead to it by other routes."""

    __slots__ = ()


def read_published(data: bytes) -> str:
    """Decode the address that rank 0 has put into a store; RendezvousError says why rank 0 can't listen."""
    if data.startswith(_REFUSAL):
        raise RendezvousError(data.removeprefix(_REFUSAL).decode(errors="replace"), ranks=(0,))
    try:
        parse_address(data.decode())
    except ValueError:
        raise ProtocolError(f"the store has {data[:100]!r} where rank 0 writes its address", ranks=(0,)) from None
    return _PublishedAddress(data.decode())


def gather_links(
    own: Hello, address: str, secret: bytes, listener: socket.socket | None, deadline: Deadline
) -> tuple[dict[int, Connection], DistributedError | None]:
    """Rank 0: wait for all others; the connections of those that came, and an error that names the rest."""
    host, port = parse_address(address)
    world_size = own.world_size
    check_hello(replace(own, rank=world_size - 1))
    connections: dict[int, Connection] = {}
    admitted: set[int] = set()  # those, and ranks that are about to be notified of their admission
    changed = threading.Condition()

    def admit(hello: Hello) -> None:
        if (hello.purpose, hello.job, hello.group) != (own.purpose, own.job, own.group):
            raise RendezvousError(
                f"rank {hello.rank} came for {hello.purpose} {hello.group!r} of job {hello.job!r}, but this is"
                f" group {own.group!r} of job {own.job!r}: two jobs share an address"
            )
        if hello.world_size != world_size:
            raise InvalidWorldSizeError(
                f"rank {hello.rank} was told a world size of {hello.world_size}, rank 0 one of {world_size}:"
                " start every rank with the same"
            )
        if not 1 <= hello.rank < world_size:
            raise InvalidRankError(f"rank {hello.rank} is not in 1..{world_size - 1}, the ranks that rank 0 waits for")
        with changed:
            if hello.rank in admitted:
                raise RendezvousError(
                    f"rank {hello.rank} is here already: two processes were started with this rank",
                    ranks=(hello.rank,),
                )
            admitted.add(hello.rank)

    def dismiss(hello: Hello) -> None:
        with changed:
            admitted.discard(hello.rank)

    unreturned = contextlib.ExitStack()  # closes the connections if this raises, as their ranks wait for this one

    def take(sock: Connection, hello: Hello) -> None:
        with changed:
            connections[hello.rank] = unreturned.enter_context(sock)
            changed.notify()

    server = Listener(host, port, secret=secret, sock=listener, deadline=deadline)
    with unreturned:
        try:
            server.serve(admit, take, dismiss)
            with changed:
                while not (len(connections) == world_size - 1 or server.shortage is not None or deadline.expired):
                    changed.wait(min(deadline.remaining(), _POLL_INTERVAL_SECONDS))
                if server.shortage is not None:  # reported to the ranks that dial now
                    changed.wait_for(lambda: len(connections) == world_size - 1, _SHORTAGE_SECONDS)
        finally:
            server.close()
        unreturned.pop_all()
    return connections, _error_of_missing(server, connections, world_size, own.group, deadline)


def _error_of_missing(
    server: Listener, connections: dict[int, Connection], world_size: int, group: str, deadline: Deadline
) -> RendezvousError | None:
    missing = tuple(rank for rank in range(1, world_size) if rank not in connections)
    if not missing:
        return None
    if server.shortage is not None:
        return RendezvousError(f"rank 0 of group {group!r}: {server.shortage.message}", ranks=(0,))
    turned_away = f" Turned away: {'; '.join(server.rejections)}." if server.rejections else ""
    names = f"{ranks_text(missing)} {'has' if len(missing) == 1 else 'have'}"
    return RendezvousError(
        f"{names} not connected to rank 0 of group {group!r} at {server.address} within {deadline.timeout:g} s."
        f"{turned_away} Check that every rank was started, with this address, world size and secret.",
        ranks=missing,
    )


def dial_hub(hello: Hello, address: str, secret: bytes, deadline: Deadline) -> Connection:
    """Every other rank: connect to rank 0."""
    host, port = parse_address(address)
    if isinstance(address, _PublishedAddress):
        hello = replace(hello, address=str(address))
    try:
        return connect(host, port, secret=secret, hello=hello, deadline=deadline)
    except DistributedTimeoutError as error:
        raise RendezvousError(
            f"rank 0 of group {hello.group!r} did not take rank {hello.rank}'s connection: {error.message}", ranks=(0,)
        ) from error


_Group = TypeVar("_Group")


def join_members(make: Callable[..., _Group], membership: Membership, timeout: float, deadline: Deadline) -> _Group:
    """Make the group of all ranks that met; ``make`` takes the arguments of `TcpBackend`.

    See `TcpBackend.from_membership`.
    """
    store = membership.store
    listener = None
    try:
        if membership.rank == 0 and membership.world_size > 1:
            listener = _listen(membership)
            host, port = listener.getsockname()[:2]
            store.set(_ADDRESS_KEY, format_address(host, port).encode(), timeout=deadline.remaining())
        is_alone = membership.world_size == 1
        address = "" if is_alone else read_published(store.get(_ADDRESS_KEY, timeout=deadline.remaining()))
        return make(
            membership.rank,
            membership.world_size,
            address,
            secret=membership.secret,
            timeout=timeout,
            job=membership.job,
            listener=listener,
            connect_timeout=deadline.remaining(),
        )
    except BaseException:
        if listener is not None:
            listener.close()
        raise


def _listen(membership: Membership) -> socket.socket:
    """Listen as rank 0, if it can have as many connections as there are ranks; else report that to all ranks."""
    family = socket.AF_INET6 if ":" in membership.host else socket.AF_INET
    try:
        with naming_limits(f"rank 0 can't connect {membership.world_size} ranks", (0,)):
            check_descriptors(membership.world_size + _OWN_DESCRIPTORS)
            return socket.create_server((membership.host, 0), family=family)
    except RendezvousError as error:
        membership.store.set(_ADDRESS_KEY, _REFUSAL + error.message.encode())
        raise
