"""How the ranks of a star come together: rank 0 listens, the others dial, all prove themselves."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ferrodist.errors import (
    DistributedError,
    DistributedTimeoutError,
    InvalidRankError,
    InvalidWorldSizeError,
    ProtocolError,
    RendezvousError,
    ranks_text,
)
from ferrodist.rendezvous.handshake import Hello, check_hello, connect
from ferrodist.rendezvous.listener import Listener, parse_address

if TYPE_CHECKING:
    import socket

    from ferrodist.deadline import Deadline
    from ferrodist.rendezvous.session import Connection

__all__ = ["dial_hub", "gather_links", "read_published", "refusal_of"]

_PURPOSE = "group"
_REFUSAL = b"!"

_LOOK_SECONDS = 0.2
_SHORTAGE_SECONDS = 2.0
"""How long rank 0, which can take in no more connections, goes on telling so those that come."""


def refusal_of(error: DistributedError) -> bytes:
    """What rank 0 puts into a store in place of its address, when it can't listen."""
    return _REFUSAL + error.message.encode()


class _PublishedAddress(str):
    """Where rank 0 listens, as it has told itself; not where the user has the ranks find it, by whatever ways."""

    __slots__ = ()


def read_published(data: bytes) -> str:
    """The address that rank 0 has put into a store.

    Raises:
        RendezvousError: It is why there is none.
        ProtocolError: It is none.
    """
    if data.startswith(_REFUSAL):
        raise RendezvousError(data.removeprefix(_REFUSAL).decode(errors="replace"), ranks=(0,))
    try:
        parse_address(data.decode())
    except ValueError:
        raise ProtocolError(f"the store has {data[:100]!r} where rank 0 writes its address", ranks=(0,)) from None
    return _PublishedAddress(data.decode())


def gather_links(
    world_size: int,
    address: str,
    *,
    secret: bytes,
    job: str,
    group: str,
    listener: socket.socket | None,
    deadline: Deadline,
) -> tuple[dict[int, Connection], DistributedError | None]:
    """Rank 0: wait for every other rank.

    Returns:
        The authenticated connection of each rank that came, and why the others did not, if any are missing.
    """
    host, port = parse_address(address)
    check_hello(Hello(purpose=_PURPOSE, job=job, rank=world_size - 1, world_size=world_size, group=group))
    connections: dict[int, Connection] = {}
    admitted: set[int] = set()  # those, and ranks that are about to be told that they are let in
    changed = threading.Condition()

    def admit(hello: Hello) -> None:
        if hello.purpose != _PURPOSE or hello.job != job or hello.group != group:
            raise RendezvousError(
                f"rank {hello.rank} came for {hello.purpose} {hello.group!r} of job {hello.job!r}, but this is"
                f" group {group!r} of job {job!r}: two jobs share an address"
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

    def take(sock: Connection, hello: Hello) -> None:
        with changed:
            connections[hello.rank] = sock
            changed.notify()

    server = Listener(host, port, secret=secret, sock=listener, deadline=deadline)
    try:
        server.serve(admit, take, dismiss)
        with changed:
            while not _is_over(server, deadline, len(connections) == world_size - 1):
                changed.wait(min(deadline.remaining(), _LOOK_SECONDS))
            if server.shortage is not None:  # which peers that dial now are told
                changed.wait_for(lambda: len(connections) == world_size - 1, _SHORTAGE_SECONDS)
    finally:
        server.close()
    return connections, _error_of_missing(server, connections, world_size, group, deadline)


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


def _is_over(server: Listener, deadline: Deadline, are_all_there: bool) -> bool:  # noqa: FBT001 - found out under a lock
    return are_all_there or server.shortage is not None or deadline.expired


def dial_hub(
    rank: int, world_size: int, address: str, *, secret: bytes, job: str, group: str, deadline: Deadline
) -> Connection:
    """Every other rank: connect to rank 0."""
    host, port = parse_address(address)
    told = str(address) if isinstance(address, _PublishedAddress) else ""
    hello = Hello(purpose=_PURPOSE, job=job, rank=rank, world_size=world_size, group=group, address=told)
    try:
        return connect(host, port, secret=secret, hello=hello, deadline=deadline)
    except DistributedTimeoutError as error:
        raise RendezvousError(
            f"rank 0 of group {group!r} did not take rank {rank}'s connection: {error.message}", ranks=(0,)
        ) from error
