"""How agents reach each other: every rank has a group of two with every other one that is there.

Which ranks an agent can talk to now.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from ferrodist.backends.request import LockWaitEvent
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.backends.subgroup import SubBackend
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedTimeoutError, GroupClosedError, NoConnectionError, PeerLostError
from ferrodist.rpc.executor import Errands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import WaitEvent
    from ferrodist.errors import DistributedError


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


_FAREWELL_SECONDS = 2.0
"""How long `Connector.close` waits for all ranks together to take its goodbye."""

_LOOK_SECONDS = 0.2
"""Between two looks whether a rank that is waited for can still come."""

_NO_VERSION = (-1, -1)


class Neighbor(Protocol):
    """A rank that is there, and the link to it."""

    rank: int
    pair: Backend

    def start(self) -> None:
        """Receive from now on."""

    def forget(self) -> None:
        """Have no more to do with objects here."""

    def close(self, seconds: float) -> None:
        """Say goodbye, which may take so long."""


class Owner(Protocol):
    """Who is told of who comes and goes. Of one rank, `joined` and `lost` take turns."""

    def meet(self, peer: int, pair: Backend, ended: Callable[[Neighbor, DistributedError], None]) -> Neighbor:
        """Make a neighbor of a rank, which is started once calls may go to it."""

    def joined(self, peer: int, incarnation: int) -> None:
        """A rank is there, perhaps again, as such a process of it; calls may go to it when this has returned."""

    def lost(self, peer: int, error: PeerLostError) -> None:
        """Nothing more will come for what was sent to a rank until now."""


class Connector:
    """The neighbors of one agent.

    Args:
        backend: How ranks reach each other; closed with this.
        owner: Who is told.
        name: Of the thread that tells of ends.
    """

    def __init__(self, backend: RpcBackend, owner: Owner, name: str) -> None:
        self._backend = backend
        self._owner = owner
        self._ends = Errands(name)  # links tell of theirs where nothing may block
        self.neighbors: dict[int, Neighbor] = {}  # that can be talked to now; read without the lock
        self._versions: dict[int, tuple[int, int]] = {}
        self._ending: set[Neighbor] = set()
        self._lost: dict[int, PeerLostError] = {}
        self._busy: set[int] = set()  # ranks of which the owner is being told
        self._changed = threading.Condition()
        self._closed = False

    def start(self) -> None:
        """Begin to look for the other ranks; waits for none.

        Raises:
            RuntimeError: The backend serves another agent.
            DistributedError: The backend can't be opened; this is closed.
        """
        try:
            self._backend.open(self)
        except BaseException:
            self._refuse()
            self._leave()
            raise

    def neighbor(self, peer: int, deadline: Deadline) -> Neighbor:
        """A rank that can be talked to, waiting for one that has never been there.

        Raises:
            PeerLostError: It was there and is gone.
            DistributedTimeoutError: It has not come in time.
            NoConnectionError: It can't come any more.
            GroupClosedError: This was closed.
        """
        found = self.neighbors.get(peer)
        if found is not None:
            return found
        with self._changed:
            self._await(peer, lambda: self._is_settled(peer) or peer in self._lost, deadline)
            if peer in self._lost and not self._is_settled(peer):
                error = self._lost[peer]
                raise PeerLostError(error.message + self._backend.absence(peer), ranks=error.ranks) from error.__cause__
            return self._found(peer, deadline)

    def wait_for(self, peer: int, deadline: Deadline) -> None:
        """Return when a rank is there: one that was lost, when it is there again.

        Raises:
            DistributedTimeoutError, NoConnectionError, GroupClosedError: As for `neighbor`.
        """
        with self._changed:
            self._await(peer, lambda: self._is_settled(peer), deadline)
            self._found(peer, deadline)

    def _await(self, peer: int, is_known: Callable[[], bool], deadline: Deadline) -> None:
        """Under the lock: return when something is known of a rank, in time or when it can't come any more."""
        while not (is_known() or deadline.expired):
            reason = self._backend.hopeless(peer)
            if reason:
                raise NoConnectionError(f"rank {peer} can't come any more: {reason}", ranks=(peer,))
            self._changed.wait(min(deadline.remaining(), _LOOK_SECONDS))

    def is_absent_for_good(self, peer: int) -> bool:
        """Whether a rank is not there, and can't come any more."""
        return peer not in self.neighbors and bool(self._backend.hopeless(peer))

    def _is_settled(self, peer: int) -> bool:
        return self._closed or peer in self.neighbors

    def _found(self, peer: int, deadline: Deadline) -> Neighbor:
        if self._closed:
            raise GroupClosedError("the agent was closed")
        if peer in self.neighbors:
            return self.neighbors[peer]
        raise DistributedTimeoutError(
            f"rank {peer} was not there within {deadline.timeout:g} s.{self._backend.absence(peer)} Was it started,"
            " with this address, name and secret?",
            ranks=(peer,),
        )

    def close(self) -> None:
        """Say goodbye to all, and receive nothing more."""
        if self._refuse():
            self._backend.close()
            self._leave()

    def _refuse(self) -> bool:
        """Have all that waits, and all that comes from now on, raise; False where that was done before."""
        with self._changed:
            is_first = not self._closed
            self._closed = True
            self._changed.notify_all()
        return is_first

    def _leave(self) -> None:
        with self._changed:
            neighbors = [*self.neighbors.values(), *self._ending]
        farewell = Deadline(_FAREWELL_SECONDS)  # for all: ranks that are stopped take no goodbye
        for neighbor in neighbors:
            neighbor.close(farewell.remaining())
        self._ends.close()

    # What the backend tells.

    def joined(self, peer: int, pair: Backend, version: tuple[int, int]) -> None:
        """See `Peers`."""
        with self._turn(peer) as may_go_on:
            if may_go_on and version > self._versions.get(peer, _NO_VERSION):
                self._versions[peer] = version
                neighbor = self._owner.meet(peer, pair, self._link_ended)
                before = self.neighbors.get(peer)
                if before is not None:
                    self._replace(before)
                self._owner.joined(peer, version[0])
                if self._publish(neighbor):
                    neighbor.start()
                    return
        pair.close(0)

    def _replace(self, neighbor: Neighbor) -> None:
        text = f"rank {neighbor.rank} was started again, or has made a new connection for one that broke"
        error = PeerLostError(text, ranks=(neighbor.rank,))
        neighbor.pair.abort(error)  # so that its link ends
        self._end(neighbor, error)

    def _publish(self, neighbor: Neighbor) -> bool:
        with self._changed:
            if self._closed:
                return False
            self._lost.pop(neighbor.rank, None)
            self.neighbors[neighbor.rank] = neighbor
            self._changed.notify_all()
            return True

    # What links tell.

    def _link_ended(self, neighbor: Neighbor, error: DistributedError) -> None:
        self._ends.put(lambda: self._take_end(neighbor, error))

    def _take_end(self, neighbor: Neighbor, error: DistributedError) -> None:
        peer = neighbor.rank
        lost = lost_error(peer, error)
        with self._turn(peer) as may_go_on:
            if may_go_on and self.neighbors.get(peer) is neighbor:
                self._end(neighbor, lost)
        self._backend.lost(peer, neighbor.pair)
        neighbor.close(0)
        with self._changed:
            self._ending.discard(neighbor)

    def _end(self, neighbor: Neighbor, error: PeerLostError) -> None:
        with self._changed:
            del self.neighbors[neighbor.rank]
            self._ending.add(neighbor)
            self._lost[neighbor.rank] = error
            self._changed.notify_all()
        neighbor.forget()
        self._owner.lost(neighbor.rank, error)

    @contextlib.contextmanager
    def _turn(self, peer: int) -> Iterator[bool]:
        """Tell the owner of a rank in one thread at a time; False when there is nothing to tell any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or peer not in self._busy)
            may_go_on = not self._closed
            if may_go_on:
                self._busy.add(peer)
        try:
            yield may_go_on
        finally:
            if may_go_on:
                with self._changed:
                    self._busy.discard(peer)
                    self._changed.notify_all()


def lost_error(peer: int, error: DistributedError) -> PeerLostError:
    """What the end of a group with a rank means for calls to it: groups have errors and numbers of their own."""
    if isinstance(error, PeerLostError) and error.ranks == (peer,):
        return error
    to_blame = peer
    if isinstance(error, NoConnectionError) and error.relay is not None:
        to_blame = error.relay
    return PeerLostError(f"rank {peer} can't be reached any more: {error}", ranks=(to_blame,))
