"""Two ranks that have a connection of their own, as a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ferrodist.backends.mailbox_backend import Departure
from ferrodist.backends.tcp.backend import TcpBackend
from ferrodist.errors import ProtocolError
from ferrodist.rendezvous.framing import disconnect

if TYPE_CHECKING:
    import socket

    from ferrodist.deadline import Deadline
    from ferrodist.rendezvous.session import Connection

__all__ = ["Meeting", "Pair"]

_LEFT = Departure(what="has left: its agent was closed")


class Meeting(msgspec.Struct, frozen=True, array_like=True):
    """What the higher of two ranks says when it connects: which process it is, and which it looks for.

    Args:
        name: What the agents are called.
        sought: Incarnation of the lower rank.
        token: Of that process.
        own: Incarnation of the higher rank.
        attempt: How often it has tried to connect, with this time.
    """

    name: str
    sought: int
    token: str
    own: int
    attempt: int

    def to_text(self) -> str:
        """As the name of a group."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_text(cls, text: str) -> Meeting:
        """Undo `to_text`.

        Raises:
            ProtocolError: The text is something else.
        """
        try:
            return _DECODER.decode(text)
        except ValueError as error:
            raise ProtocolError(f"{text[:100]!r} names no two agents: {error}") from None


_DECODER = msgspec.json.Decoder(Meeting)


class Pair(TcpBackend):
    """A group of two ranks over a connection that is there, whose errors number them as their agents do.

    Args:
        sock: The connection, authenticated; this closes it.
        rank: This rank's number among the agents.
        peer: The other's.
        name: What the agents are called.
        timeout: As for any group.
    """

    def __init__(self, sock: Connection, rank: int, peer: int, *, name: str, timeout: float) -> None:
        self._sock = sock
        self._agents = min(rank, peer), max(rank, peer)
        self.peer_has_left = False
        title = f"{name} of ranks {self._agents[0]} and {self._agents[1]}"
        try:
            super().__init__(self._agents.index(rank), 2, "", secret=b"", timeout=timeout, name=title)
        except BaseException:
            disconnect(sock)
            raise

    def _connect(
        self, address: str, secret: bytes, job: str, listener: socket.socket | None, deadline: Deadline
    ) -> None:
        del address, secret, job, listener, deadline
        self._begin({1 - self.rank: self._sock})

    def _describe(self, group_id: int, rank: int) -> tuple[int, str]:
        del group_id
        return self._agents[rank], f"rank {self._agents[rank]}"

    def _peer_left(self, group_id: int, rank: int, departure: Departure = _LEFT) -> None:
        self.peer_has_left |= departure is _LEFT
        super()._peer_left(group_id, rank, departure)
