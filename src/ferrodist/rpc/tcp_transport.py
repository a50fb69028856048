"""Agents that reach each other by TCP, each by a connection to each, and whose processes may be started again.

Of two ranks the higher one connects to the lower one: as soon as the store says where that listens (see [Note: the
roster] in `peer_directory.py`), and again when the connection was lost, until a newer process takes its place. When
the connection alone broke that needs no store. The lower one takes the newest connection for the one that counts.

Two ranks that have a connection of their own, as a group.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from ferrodist.backends.mailbox_backend import PeerExit
from ferrodist.backends.tcp.backend import TcpBackend
from ferrodist.deadline import Deadline, check_timeout, resolve_timeout
from ferrodist.errors import DistributedError, InvalidRankError, PeerLostError, ProtocolError, RendezvousError
from ferrodist.rendezvous import Hello, Listener, PrefixStore, connect, enter_job, parse_address
from ferrodist.rendezvous.auth import check_hello
from ferrodist.rendezvous.sockets import disconnect
from ferrodist.rpc.peer_directory import Entry, Roster
from ferrodist.rpc.transport import RpcBackend
from ferrodist.wording import counted

if TYPE_CHECKING:
    import socket

    from typing_extensions import Self

    from ferrodist.backends.base import Backend
    from ferrodist.rendezvous import Membership
    from ferrodist.rendezvous.session import Connection
    from ferrodist.rpc.transport import Peers

_LEFT = PeerExit(what="has left: its agent was closed")


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

    @override
    def describe_rank(self, group_id: int, rank: int) -> tuple[int, str]:
        del group_id
        return self._agents[rank], f"rank {self._agents[rank]}"

    @override
    def peer_left(self, group_id: int, rank: int, departure: PeerExit = _LEFT) -> None:
        self.peer_has_left |= departure is _LEFT
        super().peer_left(group_id, rank, departure)


_log = logging.getLogger(__name__)

_PURPOSE = "rpc"

_DIAL_SECONDS = 5.0
"""How long one attempt to connect may take; closing may have to wait for one."""

_ARRIVAL_SECONDS = 1.0
"""How long after the store's end a higher rank may still be about to connect, which has found this one before."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 5.0
"""Seconds between attempts to connect to a process that may be gone."""


class TcpRpcBackend(RpcBackend):
    """A rank that reaches each other one by a connection of their own, and needs no process group.

    Rank 0's process serves a store through which processes find each other; the constructor waits for that, and for
    nobody else. A rank's process may end in any way and be started again, with the same arguments, any number of times:
    the others' calls to it raise `PeerLostError` until the new one has joined. When rank 0's process has ended, all
    others go on, but nobody can join again; with a store of another process (`from_membership`) rank 0 is like any
    rank. Of two processes with the same rank the one that was started last counts.

    Without arguments it takes all from the launcher's environment, as ``init_process_group`` does; a program that calls
    both needs an address of its own here, for both serve on it.

    Args:
        rank: This rank.
        world_size: How many there are.
        address: "host:port" where rank 0 serves the store, and the others find it.
        secret: The job secret, the same on every rank; None takes the environment's FERRODIST_SECRET. Without one only
            loopback addresses are used, and processes prove that they know their user's.
        timeout: Seconds a call may take that names no timeout itself.
        name: What these agents are called; agents of another name don't see them.
        job: Name of the job.
        connect_timeout: Seconds to wait for the store; None takes ``timeout``.
        listener: For rank 0: a bound, listening socket to serve the store on; the backend closes it.
        membership: In place of all that leads to the store; it stays open.

    Raises:
        RendezvousError: Rank 0 does not serve, or can't.
        AuthenticationError: This rank's secret is not rank 0's, or one is needed.
        InvalidRankError, InvalidWorldSizeError: They don't fit each other, or rank 0's.
    """

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        address: str | None = None,
        *,
        secret: str | bytes | None = None,
        timeout: float | None = None,
        name: str = "rpc",
        job: str | None = None,
        connect_timeout: float | None = None,
        listener: socket.socket | None = None,
        membership: Membership | None = None,
    ) -> None:
        seconds = resolve_timeout(timeout)
        if not isinstance(name, str) or not name:
            raise TypeError(f"name must be a text that is not empty, not {name!r}")
        self._owns = membership is None
        if membership is None:
            patience = seconds if connect_timeout is None else check_timeout(connect_timeout)
            membership = enter_job(
                address,
                rank=rank,
                world_size=world_size,
                timeout=patience,
                secret=secret,
                job=job,
                listener=listener,
            )
        check_hello(_hello(membership, Meeting(name, 1 << 63, "0" * 16, 1 << 63, 1 << 63)))  # names may be too long
        super().__init__(membership.rank, membership.world_size, seconds)
        self.name = name
        self._membership = membership
        self._roster = Roster(PrefixStore(membership.store, f"rpc/{name}"), self.rank, self.world_size, seconds)
        self._listener: Listener | None = None
        self._peers: Peers | None = None
        self._own = Entry(0, "", "")
        self._admitted: dict[int, tuple[int, int]] = {}  # by higher rank: the newest incarnation, and its attempt
        self._found: dict[int, Entry] = {}  # by lower rank: who may be connected to
        self._attempts: dict[int, int] = {}
        self._pairs: dict[int, tuple[Entry, Pair]] = {}  # by lower rank
        self._dialed: dict[int, threading.Thread] = {}  # lower ranks that a thread connects to
        self._dialers: set[threading.Thread] = set()  # these threads, until they end
        self._failures: dict[int, Exception] = {}  # of the last attempts to connect
        self._end = ""  # why nobody can join any more
        self._ended_at = 0.0
        self._changed = threading.Condition()
        self._closed = False
        self._process = os.getpid()

    @classmethod
    def from_membership(cls, membership: Membership, timeout: float | None = None, *, name: str = "rpc") -> Self:
        """Make it of what a rendezvous gave, or with a store of one's own.

        Args:
            membership: The rank's place in the job; it stays open.
            timeout: Seconds a call may take that names no timeout itself.
            name: What these agents are called.
        """
        return cls(membership=membership, timeout=timeout, name=name)

    def open(self, peers: Peers) -> None:
        """See `RpcBackend.open`.

        Raises:
            RuntimeError: It was opened before: each agent needs one of its own.
            DistributedError: The store is gone, or this host can't listen.
        """
        if self._peers is not None:
            raise RuntimeError("a TcpRpcBackend serves one agent: make another one, of another name, for this")
        self._peers = peers
        self._listener = Listener(self._membership.host, 0, secret=self._membership.secret)
        try:
            self._own = self._roster.enter(self._listener.address)
            self._listener.serve(self._admit, self._welcome)
            self._roster.watch(self._find, self._stop_looking)
        except BaseException:
            self.close()
            raise

    def absence(self, peer: int) -> str:
        """See `RpcBackend.absence`."""
        failure = self._failures.get(peer)
        return self._end + ("" if failure is None else f" The last attempt to connect: {failure}.")

    def hopeless(self, peer: int) -> str:
        """See `RpcBackend.hopeless`: without the store no rank finds another; who has may be about to connect."""
        if not self._end or peer in self._found or peer in self._dialed or peer in self._admitted:
            return ""
        is_over = peer < self.rank or time.monotonic() - self._ended_at > _ARRIVAL_SECONDS
        return self._end.strip() if is_over else ""

    def lost(self, peer: int, pair: Backend) -> None:
        """Connect again to a lower rank; a higher one will by itself."""
        with self._changed:
            entry, known = self._pairs.get(peer, (None, None))
            if known is not pair or entry is None:
                return
            del self._pairs[peer]
            if known.peer_has_left and self._found.get(peer) == entry:
                del self._found[peer]
            self._start_dialing(peer)

    def refuse(self) -> None:
        """See `RpcBackend.refuse`."""
        if self._peers is None:
            self.close()

    def close(self) -> None:
        """Take no more connections, make none, and let go of the store."""
        if os.getpid() != self._process:
            return  # in a forked child
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            dialers = self._dialers.copy()
        if self._listener is not None:
            self._listener.close()
        self._roster.leave()
        for thread in dialers:
            if thread is not threading.current_thread():
                thread.join()
        if self._owns:
            self._membership.close()
            self._roster.join(_DIAL_SECONDS)

    # Higher ranks: they connect.

    def _admit(self, hello: Hello) -> None:
        membership, who = self._membership, f"rank {hello.rank}"
        if (hello.purpose, hello.job, hello.world_size) != (_PURPOSE, membership.job, membership.world_size):
            raise RendezvousError(
                f"{who} came for {hello.purpose!r} of job {hello.job!r} with"
                f" {counted(hello.world_size, 'rank')}, but this is"
                f" an agent of job {membership.job!r} with {membership.world_size}"
            )
        meeting = Meeting.from_text(hello.group)
        if not self.rank < hello.rank < self.world_size:
            raise InvalidRankError(f"{who} does not connect to rank {self.rank}", ranks=(hello.rank,))
        if (meeting.name, meeting.sought, meeting.token) != (self.name, self._own.incarnation, self._own.token):
            raise RendezvousError(f"{who} looks for another process than the one that is rank {self.rank} here")
        version = meeting.own, meeting.attempt
        with self._changed:
            if self._closed or version <= self._admitted.get(hello.rank, (0, 0)):
                raise RendezvousError(f"a newer process is {who}, or this one is about to leave", ranks=(hello.rank,))
            self._admitted[hello.rank] = version

    def _welcome(self, sock: Connection, hello: Hello) -> None:
        assert self._peers is not None
        meeting = Meeting.from_text(hello.group)
        pair = Pair(sock, self.rank, hello.rank, name=self.name, timeout=self.timeout)
        self._peers.joined(hello.rank, pair, (meeting.own, meeting.attempt))

    # Lower ranks: they are connected to.

    def _find(self, peer: int, entry: Entry) -> None:
        """Take in what the roster says of a lower rank."""
        with self._changed:
            known = self._found.get(peer)
            pair = self._pairs[peer][1] if peer in self._pairs else None
            if entry == known or (known is not None and known.incarnation > entry.incarnation):
                return
            if not entry.address:
                self._found.pop(peer, None)
                return
            self._found[peer] = entry
            self._changed.notify_all()  # a dialer pauses no longer
            if pair is None:
                self._start_dialing(peer)
        if pair is not None:  # its process lives on, or its end has not been noticed
            pair.abort(PeerLostError(f"rank {peer} was started again", ranks=(peer,)))

    def _stop_looking(self, reason: str) -> None:
        self._ended_at = time.monotonic()
        self._end = reason

    def _start_dialing(self, peer: int) -> None:
        if not self._closed and peer in self._found and peer not in self._dialed:
            name = f"ferrodist-rpc-{self.rank}-dials-{peer}"
            thread = threading.Thread(target=self._run_dialer, args=(peer,), name=name, daemon=True)
            thread.start()
            self._dialed[peer] = thread
            self._dialers.add(thread)

    def _run_dialer(self, peer: int) -> None:
        try:
            self._dial(peer)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody else tells of it
            self._failures[peer] = error
            _log.exception("rank %d can't connect to rank %d", self.rank, peer)
            with self._changed:
                self._found.pop(peer, None)  # so that it is found again when the roster is looked at next
        finally:
            with self._changed:
                if self._dialed.get(peer) is threading.current_thread():
                    del self._dialed[peer]
                self._dialers.discard(threading.current_thread())

    def _dial(self, peer: int) -> None:
        """Connect to a lower rank, however often that takes."""
        pause = _SHORTEST_PAUSE
        while (entry := self._next_target(peer)) is not None:
            try:
                attempt, pair = self._try(peer, entry)
            except (DistributedError, OSError) as error:
                self._failures[peer] = error
                is_new = self._pause(peer, entry, pause)
                pause = _SHORTEST_PAUSE if is_new else min(2 * pause, _LONGEST_PAUSE)
                continue
            with self._changed:
                self._failures.pop(peer, None)
                self._pairs[peer] = entry, pair
                self._dialed.pop(peer, None)
                is_stale, is_late = self._found.get(peer) != entry, self._closed
            if is_late:
                pair.close(0)
                return
            if is_stale:
                pair.abort(PeerLostError(f"rank {peer} was started again", ranks=(peer,)))
            assert self._peers is not None
            self._peers.joined(peer, pair, (entry.incarnation, attempt))
            return

    def _pause(self, peer: int, entry: Entry, seconds: float) -> bool:
        """Wait; whether there is news of a rank, or nothing to be done any more, before that long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or self._found.get(peer) != entry, seconds)

    def _next_target(self, peer: int) -> Entry | None:
        with self._changed:
            entry = None if self._closed else self._found.get(peer)
            if entry is None:
                self._dialed.pop(peer, None)
            return entry

    def _try(self, peer: int, entry: Entry) -> tuple[int, Pair]:
        attempt = self._attempts[peer] = self._attempts.get(peer, 0) + 1
        host, port = parse_address(entry.address)
        membership = self._membership
        meeting = Meeting(self.name, entry.incarnation, entry.token, self._own.incarnation, attempt)
        hello = _hello(membership, meeting, entry.address)
        deadline = Deadline(_DIAL_SECONDS)
        sock = connect(host, port, secret=membership.secret, hello=hello, deadline=deadline, retry_refused=False)
        return attempt, Pair(sock, self.rank, peer, name=self.name, timeout=self.timeout)


def _hello(membership: Membership, meeting: Meeting, address: str = "") -> Hello:
    return Hello(
        purpose=_PURPOSE,
        job=membership.job,
        rank=membership.rank,
        world_size=membership.world_size,
        group=meeting.to_text(),
        address=address,
    )
