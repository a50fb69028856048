"""`TcpRpcBackend`: a transport with a TCP connection for each two ranks, whose processes may be started again.

Of two ranks the higher one connects to the lower one: as soon as the store has its address (see [Note: peer directory]
in `tcp_directory.py`), and again when the connection is lost, until a newer process takes its place. If only the
connection broke that needs no store. For the lower rank the newest connection is the one that counts. Each connection
becomes a `PairGroup`, a group of two.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

import msgspec
from typing_extensions import Self, override

from ferrodist.arguments import check_type
from ferrodist.backends.group_observer import PeerExit
from ferrodist.backends.tcp.backend import TcpBackend
from ferrodist.deadline import Deadline, check_timeout, resolve_timeout
from ferrodist.errors import DistributedError, InvalidRankError, PeerLostError, ProtocolError, RendezvousError
from ferrodist.rendezvous import Hello, Listener, Membership, PrefixStore, connect, enter_job, parse_address
from ferrodist.rendezvous.auth import check_hello
from ferrodist.rendezvous.sockets import disconnect
from ferrodist.rpc.tcp_directory import PeerDirectory, PeerRecord
from ferrodist.rpc.transport import RpcBackend, TransportListener
from ferrodist.wording import counted

if TYPE_CHECKING:
    import socket

    from ferrodist.backends.base import Backend
    from ferrodist.rendezvous.session import Connection

_log = logging.getLogger(__name__)

_PURPOSE = "rpc"

_CONNECT_SECONDS = 5.0  # timeout of one attempt to connect; closing may have to wait for one

_ARRIVAL_SECONDS = 1.0  # how long after the store's end a higher rank that had found this one may still connect

_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.02, 5.0
"""Pause between attempts to connect to a process that may be gone."""

_LEFT = PeerExit(what="has left: its agent was closed")


class PairRequest(msgspec.Struct, frozen=True, array_like=True):
    """The request of the higher of two ranks that connects: which process it is, and which it looks for."""

    name: str
    sought_incarnation: int
    token: str
    own_incarnation: int
    attempt: int

    @classmethod
    def from_text(cls, text: str) -> PairRequest:
        """Decode the name of a group; raises ProtocolError for another text."""
        try:
            return _DECODER.decode(text)
        except ValueError as error:
            raise ProtocolError(f"{text[:100]!r} names no two agents: {error}") from None


_DECODER = msgspec.json.Decoder(PairRequest)


class PairGroup(TcpBackend):
    """A group of two ranks over an open connection, whose errors have their ranks among the agents."""

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

    @override
    def _connect(
        self, address: str, secret: bytes, job: str, listener: socket.socket | None, deadline: Deadline
    ) -> None:
        self._begin({1 - self.rank: self._sock})

    @override
    def describe_rank(self, group_id: int, rank: int) -> tuple[int, str]:
        return self._agents[rank], f"rank {self._agents[rank]}"

    @override
    def peer_left(self, group_id: int, rank: int, peer_exit: PeerExit = _LEFT) -> None:
        self.peer_has_left |= peer_exit is _LEFT
        super().peer_left(group_id, rank, peer_exit)


class TcpRpcBackend(RpcBackend):
    """A transport with a TCP connection to each other rank, which needs no process group.

    Rank 0's process serves a store through which processes find each other; the constructor waits for that, and for no
    other rank. A rank's process may end in any way and be started again, with the same arguments, any number of times:
    calls to it raise `PeerLostError` until the new one has joined. When rank 0's process has ended, all others go on,
    but none can join again; with a store of another process (`from_membership`) rank 0 is like any rank. Of two
    processes with the same rank the one that was started last counts.

    Without arguments everything is taken from the launcher's environment, as by ``init_process_group``; a program that
    calls both needs another address here, for both serve on it.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        address: "host:port" where rank 0 serves the store, and the others find it.
        secret: The job secret, the same on every rank; None takes the environment's FERRODIST_SECRET. Without one only
            loopback addresses are used, and processes prove that they know their user's secret.
        timeout: Default timeout of calls in seconds.
        name: The name of these agents; agents of another name don't see them.
        job: The job's name.
        connect_timeout: Seconds to wait for the store; None takes ``timeout``.
        listener: For rank 0: a bound, listening socket to serve the store on; the backend closes it.
        membership: A membership in place of the arguments that lead to the store; it stays open.

    Raises:
        RendezvousError: Rank 0 does not serve the store, or can't.
        AuthenticationError: This rank's secret is not rank 0's, or one is needed.
        InvalidRankError, InvalidWorldSizeError: Rank and world size don't fit each other, or rank 0's.
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
        self._owns = membership is None
        with contextlib.ExitStack() as undo:
            if listener is not None:
                undo.callback(listener.close)
            seconds = resolve_timeout(timeout)
            if not isinstance(name, str) or not name:
                raise TypeError(f"name must be a text that is not empty, not {name!r}")
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
                undo.callback(membership.close)
            check_type(membership, Membership, "membership must be a Membership, which a rendezvous returns")
            # The longest hello with this name must fit: fail here, not at the first connection.
            check_hello(_hello(membership, PairRequest(name, 1 << 63, "0" * 16, 1 << 63, 1 << 63)))
            undo.pop_all()
        super().__init__(membership.rank, membership.world_size, seconds)
        self.name = name
        self._membership = membership
        self._directory = PeerDirectory(
            PrefixStore(membership.store, f"rpc/{name}"), self.rank, self.world_size, seconds
        )
        self._listener: Listener | None = None
        self._peers: TransportListener | None = None
        self._own = PeerRecord(0, "", "")
        self._admitted: dict[int, tuple[int, int]] = {}  # by higher rank: the newest incarnation and attempt
        self._found: dict[int, PeerRecord] = {}  # by lower rank: processes to connect to
        self._attempts: dict[int, int] = {}
        self._groups: dict[int, tuple[PeerRecord, PairGroup]] = {}  # by lower rank
        self._connecting: dict[int, threading.Thread] = {}  # by lower rank: the thread that connects to it
        self._connector_threads: set[threading.Thread] = set()  # these, until they end
        self._failures: dict[int, Exception] = {}  # of the last attempts
        self._end = ""  # why no process can join any more
        self._ended_at = 0.0
        self._changed = threading.Condition()
        self._closed = False
        self._process = os.getpid()

    @classmethod
    def from_membership(cls, membership: Membership, timeout: float | None = None, *, name: str = "rpc") -> Self:
        """Make a transport from the result of a rendezvous, or with a store of one's own.

        Args:
            membership: The rank's membership of the job; it stays open.
            timeout: Default timeout of calls in seconds.
            name: The name of these agents.
        """
        return cls(membership=membership, timeout=timeout, name=name)

    def open(self, peers: TransportListener) -> None:
        """Find the other ranks; raises RuntimeError for a second agent, DistributedError for a lost store."""
        if self._peers is not None:
            raise RuntimeError("a TcpRpcBackend serves one agent: make another one, of another name, for this")
        self._peers = peers
        try:
            self._listener = Listener(self._membership.host, 0, secret=self._membership.secret)
            self._own = self._directory.enter(self._listener.address)
            self._listener.serve(self._admit, self._welcome)
            self._directory.watch(self._find, self._stop_connecting)
        except BaseException:
            self.close()
            raise

    @override
    def absence(self, peer: int) -> str:
        failure = self._failures.get(peer)
        return self._end + ("" if failure is None else f" The last attempt to connect: {failure}.")

    def hopeless(self, peer: int) -> str:
        """See `RpcBackend.hopeless`: without the store only ranks that have found each other may still connect."""
        if not self._end or peer in self._found or peer in self._connecting or peer in self._admitted:
            return ""
        is_over = peer < self.rank or time.monotonic() - self._ended_at > _ARRIVAL_SECONDS
        return self._end.strip() if is_over else ""

    def lost(self, peer: int, pair: Backend) -> None:
        """Connect again to a lower rank; a higher one connects by itself."""
        with self._changed:
            record, known = self._groups.get(peer, (None, None))
            if known is not pair or record is None:
                return
            del self._groups[peer]
            if known.peer_has_left and self._found.get(peer) == record:
                del self._found[peer]
            self._start_connecting(peer)

    @override
    def refuse(self) -> None:
        if self._peers is None:
            self.close()

    def close(self) -> None:
        """Accept no more connections, make none, and leave the store."""
        if os.getpid() != self._process:
            return  # in a forked child
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            threads = self._connector_threads.copy()
        if self._listener is not None:
            self._listener.close()
        self._directory.leave()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        if self._owns:
            self._membership.close()
            self._directory.join(_CONNECT_SECONDS)

    # Higher ranks, which connect to this one.

    def _admit(self, hello: Hello) -> None:
        membership, who = self._membership, f"rank {hello.rank}"
        if (hello.purpose, hello.job, hello.world_size) != (_PURPOSE, membership.job, membership.world_size):
            raise RendezvousError(
                f"{who} came for {hello.purpose!r} of job {hello.job!r} with"
                f" {counted(hello.world_size, 'rank')}, but this is"
                f" an agent of job {membership.job!r} with {membership.world_size}"
            )
        request = PairRequest.from_text(hello.group)
        if not self.rank < hello.rank < self.world_size:
            raise InvalidRankError(f"{who} does not connect to rank {self.rank}", ranks=(hello.rank,))
        if (request.name, request.sought_incarnation, request.token) != (
            self.name,
            self._own.incarnation,
            self._own.token,
        ):
            raise RendezvousError(f"{who} looks for another process than the one that is rank {self.rank} here")
        version = request.own_incarnation, request.attempt
        with self._changed:
            if self._closed or version <= self._admitted.get(hello.rank, (0, 0)):
                raise RendezvousError(f"a newer process is {who}, or this one is about to leave", ranks=(hello.rank,))
            self._admitted[hello.rank] = version

    def _welcome(self, sock: Connection, hello: Hello) -> None:
        assert self._peers is not None
        request = PairRequest.from_text(hello.group)
        pair = PairGroup(sock, self.rank, hello.rank, name=self.name, timeout=self.timeout)
        self._peers.joined(hello.rank, pair, (request.own_incarnation, request.attempt))

    # Lower ranks, which this one connects to.

    def _find(self, peer: int, record: PeerRecord) -> None:
        """Connect to a lower rank's newest process."""
        with self._changed:
            known = self._found.get(peer)
            pair = self._groups[peer][1] if peer in self._groups else None
            if record == known or (known is not None and known.incarnation > record.incarnation):
                return
            if not record.address:
                self._found.pop(peer, None)
                return
            self._found[peer] = record
            self._changed.notify_all()  # ends a connector's pause
            if pair is None:
                self._start_connecting(peer)
        if pair is not None:  # the process lives on, or its end was not noticed
            pair.abort(PeerLostError(f"rank {peer} was started again", ranks=(peer,)))

    def _stop_connecting(self, reason: str) -> None:
        self._ended_at = time.monotonic()
        self._end = reason

    def _start_connecting(self, peer: int) -> None:
        if not self._closed and peer in self._found and peer not in self._connecting:
            name = f"ferrodist-rpc-{self.rank}-connects-{peer}"
            thread = threading.Thread(target=self._run_connector, args=(peer,), name=name, daemon=True)
            thread.start()
            self._connecting[peer] = thread
            self._connector_threads.add(thread)

    def _run_connector(self, peer: int) -> None:
        try:
            self._connect(peer)
        except Exception as error:  # noqa: BLE001 - no other thread reports it
            self._failures[peer] = error
            _log.exception("rank %d can't connect to rank %d", self.rank, peer)
            with self._changed:
                self._found.pop(peer, None)  # so that the next reading of the directory finds it again
        finally:
            with self._changed:
                if self._connecting.get(peer) is threading.current_thread():
                    del self._connecting[peer]
                self._connector_threads.discard(threading.current_thread())

    def _connect(self, peer: int) -> None:
        """Connect to a lower rank, in as many attempts as it takes."""
        pause = _MIN_PAUSE_SECONDS
        while True:
            with self._changed:
                record = None if self._closed else self._found.get(peer)
                if record is None:
                    self._connecting.pop(peer, None)
                    return
            try:
                attempt, pair = self._attempt(peer, record)
            except (DistributedError, OSError) as error:
                self._failures[peer] = error
                is_new = self._pause(peer, record, pause)
                pause = _MIN_PAUSE_SECONDS if is_new else min(2 * pause, _MAX_PAUSE_SECONDS)
                continue
            with self._changed:
                self._failures.pop(peer, None)
                self._groups[peer] = record, pair
                self._connecting.pop(peer, None)
                is_stale, is_closed = self._found.get(peer) != record, self._closed
            if is_closed:
                pair.close(0)
                return
            if is_stale:
                pair.abort(PeerLostError(f"rank {peer} was started again", ranks=(peer,)))
            assert self._peers is not None
            self._peers.joined(peer, pair, (record.incarnation, attempt))
            return

    def _pause(self, peer: int, record: PeerRecord, seconds: float) -> bool:
        """Wait; returns whether a newer process was found, or this was closed, before the time was over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or self._found.get(peer) != record, seconds)

    def _attempt(self, peer: int, record: PeerRecord) -> tuple[int, PairGroup]:
        attempt = self._attempts[peer] = self._attempts.get(peer, 0) + 1
        host, port = parse_address(record.address)
        membership = self._membership
        request = PairRequest(self.name, record.incarnation, record.token, self._own.incarnation, attempt)
        hello = _hello(membership, request, record.address)
        deadline = Deadline(_CONNECT_SECONDS)
        sock = connect(host, port, secret=membership.secret, hello=hello, deadline=deadline, retry_refused=False)
        return attempt, PairGroup(sock, self.rank, peer, name=self.name, timeout=self.timeout)


def _hello(membership: Membership, request: PairRequest, address: str = "") -> Hello:
    return Hello(
        purpose=_PURPOSE,
        job=membership.job,
        rank=membership.rank,
        world_size=membership.world_size,
        group=msgspec.json.encode(request).decode(),
        address=address,
    )
