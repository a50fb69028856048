"""`WorkerNames`: the names of ranks, beside their numbers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from typing_extensions import override

from ferrodist.errors import GroupClosedError, InvalidRankError, PeerLostError
from ferrodist.rpc.messages import ANNOUNCE_NAME, Call
from ferrodist.rpc.peer_manager import PeerListener, PeerManager

if TYPE_CHECKING:
    from ferrodist.deadline import Deadline
    from ferrodist.rpc.peer import IncomingCall
    from ferrodist.rpc.server import RpcServer

_POLL_INTERVAL_SECONDS = 0.2  # between two checks whether a rank may still come, which nothing notifies of


class WorkerNames(PeerListener):
    """The names that ranks have announced.

    A name belongs to the rank that is there. A lost rank keeps its name until another one takes it, so that calls by
    that name raise at once.
    """

    def __init__(self, own_name: str, peers: PeerManager, server: RpcServer) -> None:
        self._peers = peers
        self._server = server
        self._changed = threading.Condition()
        self._names: dict[int, str] = {}
        self._announced: set[int] = set()
        self._lost: dict[str, int] = {}  # the last rank that had a name
        self._is_closed = False
        self.add(peers.rank, own_name)
        server.register_internal(ANNOUNCE_NAME, self._on_announced_name)

    def close(self) -> None:
        """Let no thread wait for a name any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def add(self, rank: int, name: str) -> None:
        """Note a rank's name; an empty one for none."""
        with self._changed:
            self._announced.add(rank)
            if name:
                self._names[rank] = name
            self._changed.notify_all()

    @override
    def on_joined(self, rank: int, incarnation: int) -> None:
        with self._changed:
            self._forget(rank)

    @override
    def on_lost(self, rank: int, error: PeerLostError) -> None:
        with self._changed:
            name = self._names.get(rank)
            self._forget(rank)
            if name is not None:
                self._lost[name] = rank
                self._changed.notify_all()

    def find(self, name: str, deadline: Deadline, *, among_lost: bool = True) -> int:
        """The rank with a name, waiting for one that has not been there yet; raises InvalidRankError.

        If the last one was lost, it is that rank, or this waits for the next one.
        """

        def is_known() -> bool:
            is_there = name in self._names.values() or (among_lost and name in self._lost)
            return self._is_closed or is_there or self._are_complete()

        with self._changed:
            while not (is_known() or deadline.expired):
                self._changed.wait(min(deadline.remaining(), _POLL_INTERVAL_SECONDS))
            if self._is_closed:
                raise GroupClosedError("the agent was closed")
            ranks = [rank for rank, each in self._names.items() if each == name]
            if not ranks and among_lost and name in self._lost:
                return self._lost[name]
            if len(ranks) == 1:
                return ranks[0]
            known = ", ".join(f"{each!r} (rank {rank})" for rank, each in sorted(self._names.items())) or "none"
        if ranks:
            raise InvalidRankError(f"ranks {sorted(ranks)} are all called {name!r}: give each a name of its own")
        when = f"was there within {deadline.timeout:g} s" if deadline.expired else "is there, and none can come"
        raise InvalidRankError(
            f"no rank called {name!r} {when}; the names are {known}: agents are given theirs when they are made"
        )

    def _forget(self, rank: int) -> None:
        self._names.pop(rank, None)
        self._announced.discard(rank)
        self._lost = {name: each for name, each in self._lost.items() if each != rank}

    def _on_announced_name(self, incoming: IncomingCall, call: Call) -> None:
        if len(call.arguments) == 1 and isinstance(call.arguments[0], str):
            self.add(incoming.peer.rank, call.arguments[0])
        self._server.respond(incoming, None)

    def _are_complete(self) -> bool:
        """Return True if no more names can come: all ranks that are there have announced theirs, and none can join."""
        ranks = range(self._peers.world_size)
        return all(rank in self._announced or self._peers.is_absent_for_good(rank) for rank in ranks)
