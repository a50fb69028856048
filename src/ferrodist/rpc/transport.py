"""Transports of agents: each rank has a group of two with every other rank that is there.

A group lives as long as its connection; frames go by its ``try_send`` where they can, other messages by ``isend``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from ferrodist.backends.persistent_recv import LockWaitEvent, WaitEvent
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.backends.subgroup import SubBackend

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend


class TransportListener(Protocol):
    """Listener for groups with other ranks. `PeerManager` implements it. Any thread may call it, holding no lock."""

    def joined(self, peer: int, pair: Backend, version: tuple[int, int]) -> None:
        """Take a group with a rank.

        Args:
            peer: The rank.
            pair: A new group of this rank and that one, in the order of their ranks; the listener closes it.
            version: The peer's incarnation, which grows from process to process and is the same on all ranks; and the
                number of the group with that process. Of two groups the one with the higher version counts, whichever
                comes first.
        """


class RpcBackend(ABC):
    """A transport between ranks. One agent uses it, and closes it.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        timeout: Default timeout of calls in seconds.
    """

    def __init__(self, rank: int, world_size: int, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout

    @abstractmethod
    def open(self, peers: TransportListener) -> None:
        """Give a group with each rank that is there to the listener, now and until `close`; called once.

        Does not wait for any rank.
        """

    def lost(self, peer: int, pair: Backend) -> None:  # noqa: B027 - may stay as it is
        """Note that a group has ended: the transport may make another one. By default nothing is done."""

    def absence(self, peer: int) -> str:
        """Why a rank that is not there has not come: sentences with a space in front, or nothing. Takes no lock."""
        del peer
        return ""

    def hopeless(self, peer: int) -> str:
        """Why a rank that is not there can't come any more, or nothing as long as it may. Takes no lock."""
        del peer
        return ""

    def refuse(self) -> None:  # noqa: B027 - may stay as it is
        """Note that an agent was not made: close, unless another agent uses this. By default nothing is done."""

    def make_wait_event(self) -> WaitEvent:
        """An event for a thread that waits for messages of the groups; see `Backend.make_wait_event`."""
        return LockWaitEvent()

    def close(self) -> None:  # noqa: B027 - may stay as it is
        """Make no more groups; those that there are stay open. By default nothing is done."""


class GroupRpcBackend(RpcBackend):
    """A transport over a group, by its own messages: shared memory within a host, for a native group.

    Args:
        group: The group; it stays open.
    """

    def __init__(self, group: Backend) -> None:
        super().__init__(group.rank, group.world_size, group.timeout)
        self._group = group
        self._is_open = False

    def open(self, peers: TransportListener) -> None:
        """Make a sub-group with each rank, which the end of other ranks does not end."""
        for peer in range(self.world_size):
            if peer != self.rank:
                members = sorted((self.rank, peer))
                name = f"rpc of ranks {members[0]} and {members[1]}"
                peers.joined(peer, SubBackend(self._group, members, label="ferrodist.rpc", name=name), (0, 0))
        self._is_open = True

    def hopeless(self, peer: int) -> str:
        """See `RpcBackend.hopeless`: all groups are made at once."""
        if not self._is_open:
            return ""
        return (
            f"group {self._group.name!r} has lost rank {peer}, and a rank can't join a group again: make a new group,"
            " or use a TcpRpcBackend, which takes ranks that are started again"
        )

    @override
    def make_wait_event(self) -> WaitEvent:
        return self._group.make_wait_event()


class SimulatedRpcBackend(GroupRpcBackend):
    """A transport between ranks that are threads of one process."""

    @classmethod
    def create_group(cls, world_size: int) -> list[SimulatedRpcBackend]:
        """Make a transport for each rank."""
        return [cls(group) for group in SimulatedBackend.create_group(world_size)]
