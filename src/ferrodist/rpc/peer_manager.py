"""`PeerManager`: the peers that an agent can talk to now."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from ferrodist.deadline import Deadline
from ferrodist.errors import (
    DistributedError,
    DistributedTimeoutError,
    GroupClosedError,
    NoConnectionError,
    PeerLostError,
)
from ferrodist.rpc.executor import SerialExecutor
from ferrodist.rpc.messages import ANNOUNCE_NAME, MET
from ferrodist.rpc.peer import LoopbackPeer, MessageHandler, Peer, PeerOptions, RemotePeer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.rpc.transport import RpcBackend

_GOODBYE_SECONDS = 2.0  # how long `PeerManager.close` waits for all peers together to receive its goodbye

_POLL_INTERVAL_SECONDS = 0.2  # between two checks whether a rank that is waited for can still come


class PeerListener:
    """Listener for peers joining and leaving. For one peer the calls alternate."""

    def on_joined(self, rank: int, incarnation: int) -> None:
        """A peer is there, for the first time or again, as this process of its rank; calls may go to it after this."""

    def on_lost(self, rank: int, error: PeerLostError) -> None:
        """A peer is gone: there will be no response to anything sent to it until now."""


class PeerManager:
    """The peers of one agent; closes the transport."""

    def __init__(self, backend: RpcBackend, name: str) -> None:
        self.rank = backend.rank
        self.world_size = backend.world_size
        self._backend = backend
        self._name = name
        self._disconnects = SerialExecutor(f"ferrodist-rpc-{self.rank}-ends")  # they come where nothing may block
        self._peers: dict[int, Peer] = {}  # those that can be talked to now; read without the lock
        self._versions: dict[int, tuple[int, int]] = {}
        self._ending: set[RemotePeer] = set()
        self._lost: dict[int, PeerLostError] = {}
        self._busy: set[int] = set()  # ranks that listeners are being told of
        self._changed = threading.Condition()
        self._is_closed = self._was_left = False
        self._options: PeerOptions
        self._handler: MessageHandler
        self._listeners: Sequence[PeerListener] = ()

    def start(self, options: PeerOptions, handler: MessageHandler, listeners: Sequence[PeerListener]) -> None:
        """Look for the other ranks from now on, waiting for none; closes the backend if it can't be opened."""
        self._options, self._handler, self._listeners = options, handler, listeners
        self._peers[self.rank] = LoopbackPeer(self.rank, options, handler)
        try:
            self._backend.open(self)
        except BaseException:
            self.stop_waiting()
            self.leave()
            raise

    def get(self, rank: int, timeout: float) -> Peer:
        """A peer that can be talked to; waits for one that has never been there.

        Raises PeerLostError if it is gone, DistributedTimeoutError if it has not come, and NoConnectionError if it
        never can.
        """
        if self._is_closed:
            raise GroupClosedError("the agent was closed")
        peer = self._peers.get(rank)
        if peer is not None:
            return peer
        with self._options.executor.waiting(also_in_event_loop=True):
            return self.wait_for(rank, Deadline(timeout), even_if_lost=False)

    def wait_for(self, rank: int, deadline: Deadline, *, even_if_lost: bool = True) -> Peer:
        """A peer once it is there, also one that was lost, unless that is an error; raises as `get`."""
        with self._changed:
            lost: Mapping[int, PeerLostError] = {} if even_if_lost else self._lost
            while not (self._is_closed or rank in self._peers or rank in lost or deadline.expired):
                reason = self._backend.hopeless(rank)
                if reason:
                    raise NoConnectionError(f"rank {rank} can't come any more: {reason}", ranks=(rank,))
                self._changed.wait(min(deadline.remaining(), _POLL_INTERVAL_SECONDS))
            if self._is_closed:
                raise GroupClosedError("the agent was closed")
            if rank in self._peers:
                return self._peers[rank]
            if rank in lost:
                error = lost[rank]
                text = error.message + self._backend.absence(rank)
                raise PeerLostError(text, ranks=error.ranks) from error.__cause__
        raise DistributedTimeoutError(
            f"rank {rank} was not there within {deadline.timeout:g} s.{self._backend.absence(rank)} Was it started,"
            " with this address, name and secret?",
            ranks=(rank,),
        )

    def is_absent_for_good(self, rank: int) -> bool:
        """Return True if a rank is not there, and can't come any more."""
        return rank not in self._peers and bool(self._backend.hopeless(rank))

    def stop_waiting(self) -> None:
        """Raise `GroupClosedError` for all that wait, and take no more peers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Leave, as below, and close the backend."""
        self.stop_waiting()
        if not self._was_left:
            self._backend.close()
            self.leave()

    def leave(self) -> None:
        """Say goodbye to all peers, and receive nothing more; the backend stays as it is."""
        self._was_left = True
        with self._changed:
            peers = [*self._peers.values(), *self._ending]
        goodbye = Deadline(_GOODBYE_SECONDS)  # for all: ranks that are stopped take no goodbye
        for peer in peers:
            peer.close(goodbye.remaining())
        self._disconnects.close()

    # Called by the backend.

    def joined(self, peer: int, pair: Backend, version: tuple[int, int]) -> None:
        """Take a group of this rank and another one; see `TransportListener`."""
        with self._exclusively(peer) as may_go_on:
            if may_go_on and version > self._versions.get(peer, (-1, -1)):
                self._versions[peer] = version
                remote = RemotePeer(peer, self._options, self._handler, pair, self._disconnected)
                before = self._peers.get(peer)
                if isinstance(before, RemotePeer):
                    text = f"rank {peer} was started again, or has made a new connection for one that broke"
                    error = PeerLostError(text, ranks=(peer,))
                    before.group.abort(error)  # so that its connection ends
                    self._remove(before, error)
                for listener in self._listeners:
                    listener.on_joined(peer, version[0])
                with self._changed:
                    is_published = not self._is_closed
                    if is_published:
                        self._lost.pop(peer, None)
                        self._peers[peer] = remote
                        self._changed.notify_all()
                if is_published:
                    remote.start()
                    remote.notify(MET)
                    remote.notify(ANNOUNCE_NAME, self._name)
                    return
        pair.close(0)

    # Called by peers.

    def _disconnected(self, peer: RemotePeer, error: DistributedError) -> None:
        self._disconnects.submit(lambda: self._handle_disconnect(peer, error))

    def _handle_disconnect(self, peer: RemotePeer, error: DistributedError) -> None:
        lost = lost_error(peer.rank, error)
        with self._exclusively(peer.rank) as may_go_on:
            if may_go_on and self._peers.get(peer.rank) is peer:
                self._remove(peer, lost)
        self._backend.lost(peer.rank, peer.group)
        peer.close(0)
        with self._changed:
            self._ending.discard(peer)

    def _remove(self, peer: RemotePeer, error: PeerLostError) -> None:
        with self._changed:
            del self._peers[peer.rank]
            self._ending.add(peer)
            self._lost[peer.rank] = error
            self._changed.notify_all()
        peer.forget()
        for listener in self._listeners:
            listener.on_lost(peer.rank, error)

    @contextlib.contextmanager
    def _exclusively(self, rank: int) -> Iterator[bool]:
        """Tell listeners of a rank in one thread at a time; False when there is nothing to tell any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or rank not in self._busy)
            may_go_on = not self._is_closed
            if may_go_on:
                self._busy.add(rank)
        try:
            yield may_go_on
        finally:
            if may_go_on:
                with self._changed:
                    self._busy.discard(rank)
                    self._changed.notify_all()


def lost_error(rank: int, error: DistributedError) -> PeerLostError:
    """The error of calls to a peer whose group has ended: groups have errors and ranks of their own."""
    if isinstance(error, PeerLostError) and error.ranks == (rank,):
        return error
    to_blame = rank
    if isinstance(error, NoConnectionError) and error.relay is not None:
        to_blame = error.relay
    return PeerLostError(f"rank {rank} can't be reached any more: {error}", ranks=(to_blame,))
