"""How agents reach each other: every rank has a group of two with every other one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ferrodist.backends.listening import LockSignal
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.backends.sub import SubBackend

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.backends.listening import Signal

__all__ = ["GroupRpcBackend", "RpcBackend", "SimulatedRpcBackend"]


class RpcBackend(ABC):
    """Ranks that can call each other.

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
    def connect(self, peer: int) -> Backend:
        """A new group of this rank and another one, in the order of their numbers; only `Link` communicates in it."""

    def signal(self) -> Signal:
        """Something for a thread to wait for until messages of the groups bring it; see `Backend.signal`."""
        return LockSignal()


class GroupRpcBackend(RpcBackend):
    """The ranks of a group, by whatever way its messages go: shared memory within a host, for a native one.

    Args:
        group: The group; it stays open.
    """

    def __init__(self, group: Backend) -> None:
        super().__init__(group.rank, group.world_size, group.timeout)
        self._group = group

    def connect(self, peer: int) -> Backend:
        """A sub-group, which the end of other ranks does not end."""
        members = sorted((self.rank, peer))
        return SubBackend(
            self._group, members, label="ferrodist.rpc", name=f"rpc of ranks {members[0]} and {members[1]}"
        )

    def signal(self) -> Signal:
        """See `RpcBackend`."""
        return self._group.signal()


class SimulatedRpcBackend(GroupRpcBackend):
    """Ranks that are threads of one process."""

    @classmethod
    def create_group(cls, world_size: int) -> list[SimulatedRpcBackend]:
        """One for each rank."""
        return [cls(group) for group in SimulatedBackend.create_group(world_size)]
