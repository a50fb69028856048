"""Transports of agents: each rank has a group of two with every other rank that is there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from ferrodist.backends.request import LockWaitEvent
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.backends.subgroup import SubBackend

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import WaitEvent


class Peers(Protocol):
    """Who is told which ranks are there. Any thread may call, and must hold no lock."""

    def joined(self, peer: int, pair: Backend, version: tuple[int, int]) -> None:
        """A rank can be talked to.

        Args:
            peer: The rank.
            pair: A new group of this rank and that one, in the order of their numbers. Whoever is told closes it.
            version: Which process of the peer it is, of which later ones have higher numbers, the same for all ranks;
                and which group with that. Of two groups the one of the higher version counts, whichever is told first.
        """


class RpcBackend(ABC):
    """Ranks that can call each other. One agent uses it, and closes it.

    Args:
        rank: This rank.
        world_size: How many there are.
        timeout: Seconds a call may take that names no timeout itself.
    """

    def __init__(self, rank: int, world_size: int, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout

    @abstractmethod
    def open(self, peers: Peers) -> None:
        """Tell, now and until `close`, of each rank that is there; called once. Does not wait for any."""

    def lost(self, peer: int, pair: Backend) -> None:  # noqa: B027 - may stay as it is
        """Be told that a group is of no use any more: the backend may make another. This form does nothing."""

    def absence(self, peer: int) -> str:
        """Why a rank that is not there has not come: sentences with a space in front, or nothing. Takes no lock."""
        del peer
        return ""

    def hopeless(self, peer: int) -> str:
        """Why a rank that is not there can't come any more, or nothing as long as it may. Takes no lock."""
        del peer
        return ""

    def refuse(self) -> None:  # noqa: B027 - may stay as it is
        """Be told that an agent was not made: close, unless another agent has this. This form does nothing."""

    def signal(self) -> WaitEvent:
        """Something for a thread to wait for until messages of the groups bring it; see `Backend.signal`."""
        return LockWaitEvent()

    def close(self) -> None:  # noqa: B027 - may stay as it is
        """Tell of no more ranks, and be reached by none; groups that were told of go on. This form does nothing."""


class GroupRpcBackend(RpcBackend):
    """The ranks of a group, by whatever way its messages go: shared memory within a host, for a native one.

    Args:
        group: The group; it stays open.
    """

    def __init__(self, group: Backend) -> None:
        super().__init__(group.rank, group.world_size, group.timeout)
        self._group = group
        self._has_told = False

    def open(self, peers: Peers) -> None:
        """Tell of all ranks: a sub-group with each, which the end of other ranks does not end."""
        for peer in range(self.world_size):
            if peer != self.rank:
                members = sorted((self.rank, peer))
                name = f"rpc of ranks {members[0]} and {members[1]}"
                peers.joined(peer, SubBackend(self._group, members, label="ferrodist.rpc", name=name), (0, 0))
        self._has_told = True

    def hopeless(self, peer: int) -> str:
        """See `RpcBackend`: all were told of at once."""
        if not self._has_told:
            return ""
        return (
            f"rank {peer} of group {self._group.name!r} was there, and whom a group has lost does not come back to it"
        )

    def signal(self) -> WaitEvent:
        """See `RpcBackend`."""
        return self._group.signal()


class SimulatedRpcBackend(GroupRpcBackend):
    """Ranks that are threads of one process."""

    @classmethod
    def create_group(cls, world_size: int) -> list[SimulatedRpcBackend]:
        """One for each rank."""
        return [cls(group) for group in SimulatedBackend.create_group(world_size)]
