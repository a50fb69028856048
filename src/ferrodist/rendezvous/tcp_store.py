"""A store that one process serves to others over TCP.

Each request and each reply is one frame of MessagePack. A connection carries one call at a time; the client opens
further connections for its other threads. Frames are authenticated: see [Note: session keys] in `session.py`.
"""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import msgspec
from typing_extensions import override

from ferrodist.deadline import Deadline
from ferrodist.errors import (
    AuthenticationError,
    DistributedError,
    DistributedTimeoutError,
    InvalidRankError,
    InvalidWorldSizeError,
    NoConnectionError,
    ProtocolError,
    RendezvousError,
    error_from_wire,
    error_to_wire,
)
from ferrodist.rendezvous.auth import Hello, connect
from ferrodist.rendezvous.listener import Listener, parse_address
from ferrodist.rendezvous.sockets import disconnect, interrupt
from ferrodist.rendezvous.store import (
    DEFAULT_STORE_TIMEOUT,
    MAX_VALUE_BYTES,
    MemoryStore,
    Store,
    check_amount,
    check_key,
    check_keys,
    check_value,
    missing_keys_error,
)
from ferrodist.resource_limits import limit_text
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ferrodist.rendezvous.session import Connection

# A value, its key and the envelope.
_MAX_FRAME_BYTES = MAX_VALUE_BYTES + 1024 * 1024

# Seconds past its deadline that a client waits for the server's reply, which names the missing keys.
_REPLY_GRACE = 0.15

# The interval in seconds at which a waiting server thread checks that its client is still connected.
_PEER_CHECK_PERIOD = 1.0

_MAX_IDLE_CONNECTIONS = 4


class _Operation(enum.IntEnum):
    SET = 1
    GET = 2
    WAIT = 3
    ADD = 4
    COMPARE_SET = 5
    DELETE = 6


class _Request(msgspec.Struct, frozen=True, array_like=True):
    operation: _Operation
    keys: list[str]
    timeout: float
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0


class _Reply(msgspec.Struct, frozen=True, array_like=True):
    value: bytes = b""
    error: tuple[str, str, tuple[int, ...]] | None = None


_REQUEST_DECODER = msgspec.msgpack.Decoder(_Request)
_REPLY_DECODER = msgspec.msgpack.Decoder(_Reply)


class TcpStoreServer:
    """Serves a `MemoryStore` to the ranks of one job, with a thread for each connection.

    Args:
        host: The interface to bind; see `Listener`.
        port: The port to bind; 0 takes a free one.
        secret: The job secret.
        job: The name of the job; ranks of other jobs are refused.
        world_size: The number of ranks; ranks with another number are refused.
        sock: A bound, listening socket to use.
        max_connections: The most concurrent connections; more are refused.
        on_rejection: Called with the store and the reason each time a connection is rejected.
        on_shortage: Called with the store and an error when this process can't accept more connections.
        deadline: The deadline for resolving ``host``; see `Listener`.

    Raises:
        RendezvousError, AuthenticationError: As `Listener` does; or no thread can be started.

    Attributes:
        store: The keys, for the serving process itself.
        host: The bound address.
        port: The bound port.
        address: Both, as `TcpStore` takes them.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        secret: bytes,
        job: str,
        world_size: int,
        sock: socket.socket | None = None,
        max_connections: int = 4096,
        on_rejection: Callable[[Store, str], None] | None = None,
        on_shortage: Callable[[Store, RendezvousError], None] | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        self._job = job
        self._world_size = world_size
        self._max_connections = max_connections
        self._changed = threading.Condition()
        self._connections: dict[Connection, threading.Thread] = {}
        self._served_ranks: set[int] = set()
        self._closed = False
        self._process = os.getpid()
        self.store = MemoryStore()
        self._on_rejection = on_rejection
        self._on_shortage = on_shortage
        self._listener = Listener(host, port, secret=secret, sock=sock, on_rejection=self._reject, deadline=deadline)
        self.host, self.port, self.address = self._listener.host, self._listener.port, self._listener.address
        try:
            self._listener.serve(self._admit, self._on_connection)
        except RuntimeError as error:
            self._listener.close()
            raise RendezvousError(f"cannot listen at {self.address}: {limit_text(error) or error}") from error

    @property
    def rejections(self) -> list[str]:
        """The newest rejected connections; see `Listener.rejections`."""
        return self._listener.rejections

    def close(self, *, linger: float = 0.0) -> None:
        """Stop serving: waiting and later calls of clients raise RendezvousError.

        Args:
            linger: Seconds to continue for clients that are still connected, and, out of descriptors, for ranks that
                were not refused yet; ends early once all have gone.
        """
        if os.getpid() != self._process:
            return  # see Listener.close
        with self._changed:
            self._changed.wait_for(self._has_no_clients, Deadline(linger).remaining())
            if self._closed:
                return
            self._closed = True
        self._listener.close()
        self.store.close()
        with self._changed:
            connections = dict(self._connections)
        for sock, thread in connections.items():
            interrupt(sock)
            if thread is not threading.current_thread():  # which ends once its call has
                thread.join()

    def _has_no_clients(self) -> bool:
        """True if no client is connected, nor may still connect to learn of a shortage."""
        if self._connections:
            return False
        return (
            self._listener.shortage is None or len(self._served_ranks | self._listener.refused) >= self._world_size - 1
        )

    def _admit(self, hello: Hello) -> None:
        who = f"rank {hello.rank}"
        if hello.purpose != "store":
            raise ProtocolError(f"{who} asked for a {hello.purpose!r}, but a store listens at {self.address}")
        if hello.job != self._job:
            raise RendezvousError(
                f"{who} belongs to job {hello.job!r}, but {self.address} serves job {self._job!r}; give each "
                "job an address of its own, or all ranks the same FERRODIST_JOB",
                ranks=(hello.rank,),
            )
        if hello.world_size != self._world_size:
            raise InvalidWorldSizeError(
                f"{who} was started with world size {hello.world_size}, rank 0 with {self._world_size}; "
                "start every rank with the same world size",
                ranks=(hello.rank,),
            )
        if not 0 <= hello.rank < self._world_size:
            raise InvalidRankError(
                f"{who} is not in a job of {counted(self._world_size, 'rank')}; ranks go from 0 to"
                f" {self._world_size - 1}",
                ranks=(hello.rank,),
            )
        with self._changed:
            if len(self._connections) >= self._max_connections:
                raise RendezvousError(
                    f"the store at {self.address} serves {self._max_connections} connections, its limit:"
                    " close some, or start the job with a larger limit"
                )

    def _reject(self, reason: str) -> None:
        shortage = self._listener.shortage
        if shortage is not None and self._on_shortage is not None:
            with contextlib.suppress(RendezvousError):
                self._on_shortage(self.store, shortage)
        if self._on_rejection is not None:
            with contextlib.suppress(RendezvousError):  # the store was closed meanwhile
                self._on_rejection(self.store, reason)
        with self._changed:
            self._changed.notify_all()

    def _on_connection(self, sock: Connection, hello: Hello) -> None:
        thread = threading.Thread(
            target=self._serve_connection, args=(sock,), name=f"ferrodist-store-{hello.rank}", daemon=True
        )
        with self._changed:
            thread.start()
            self._connections[sock] = thread
            self._served_ranks.add(hello.rank)

    def _serve_connection(self, sock: Connection) -> None:
        try:
            while True:
                try:
                    request = _REQUEST_DECODER.decode(sock.receive_frame(_MAX_FRAME_BYTES, None))
                except AuthenticationError as error:
                    altered = AuthenticationError(f"the store at {self.address} refused a request: {error.message}")
                    _send(sock, _Reply(error=error_to_wire(altered)))
                    return
                except (ProtocolError, ValueError) as error:
                    refusal = ProtocolError(f"the store at {self.address} cannot read this request: {error}")
                    _send(sock, _Reply(error=error_to_wire(refusal)))
                    return
                _send(sock, self._handle(request, sock))
        except (OSError, MemoryError):
            pass
        finally:
            disconnect(sock)
            with self._changed:
                self._connections.pop(sock, None)
                self._changed.notify_all()

    def _handle(self, request: _Request, sock: socket.socket) -> _Reply:
        try:
            return _Reply(self._execute(request, sock))
        except RendezvousError:
            gone = RendezvousError(f"the store of rank 0 at {self.address} went away: it was closed", ranks=(0,))
            return _Reply(error=error_to_wire(gone))
        except (DistributedError, TypeError) as error:
            return _Reply(error=error_to_wire(error))
        except ValueError as error:  # an argument that only the server can check
            return _Reply(error=(ValueError.__name__, str(error), ()))

    def _execute(self, request: _Request, sock: socket.socket) -> bytes:
        store, operation = self.store, request.operation
        if operation is _Operation.WAIT:
            self._await(check_keys(request.keys), request.timeout, sock)
            return b""
        if len(request.keys) != 1:
            raise ProtocolError(f"{operation.name} takes one key, not {len(request.keys)}")
        key = check_key(request.keys[0])
        if operation is _Operation.GET:
            return self._await([key], request.timeout, sock)[0]
        if operation is _Operation.SET:
            store.set(key, request.value)
            return b""
        if operation is _Operation.ADD:
            return b"%d" % store.add(key, request.amount)
        if operation is _Operation.COMPARE_SET:
            return store.compare_set(key, request.expected, request.value)
        return b"1" if store.delete(key) else b""

    def _await(self, keys: list[str], timeout: float, sock: socket.socket) -> list[bytes]:
        deadline = Deadline(timeout)
        while True:
            with contextlib.suppress(DistributedTimeoutError):
                return self.store.get_all(keys, timeout=min(deadline.remaining(), _PEER_CHECK_PERIOD))
            if deadline.expired:
                raise missing_keys_error(f"store at {self.address}", self.store.missing(keys) or keys, deadline)
            if _has_disconnected(sock):
                raise ConnectionResetError("the client left while it waited")


class TcpStore(Store):
    """A client of rank 0's `TcpStoreServer`.

    Calls of different threads use different connections, so that a waiting call does not block others. A
    `DistributedTimeoutError` names rank 0 if the server did not answer, and no rank if a key is missing.

    Args:
        address: The server's address, "host:port".
        secret: The job secret.
        job: The name of the job.
        rank: This process's rank.
        world_size: The number of ranks.
        timeout: The default timeout of a call, in seconds.
        deadline: The deadline of connecting; None is ``timeout`` from now.

    Raises:
        DistributedError: As `connect` does.

    Attributes:
        local_host: The local address of the connection, which the server's host can reach.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: bytes,
        job: str,
        rank: int,
        world_size: int,
        timeout: float = DEFAULT_STORE_TIMEOUT,
        deadline: Deadline | None = None,
    ) -> None:
        self.address = address
        self._host, self._port = parse_address(address)
        self._secret = secret
        self._hello = Hello(purpose="store", job=job, rank=rank, world_size=world_size, group="")
        self._timeout = timeout
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._lost: str | None = None
        deadline = Deadline(timeout) if deadline is None else deadline
        sock = connect(self._host, self._port, secret=secret, hello=self._hello, deadline=deadline)
        self.local_host: str = sock.getsockname()[0]
        self._idle.append(sock)

    @override
    def set(self, key: str, value: bytes, *, timeout: float | None = None) -> None:
        self._call(_Operation.SET, [check_key(key)], timeout, value=check_value(value))

    @override
    def get(self, key: str, *, timeout: float | None = None) -> bytes:
        return self._call(_Operation.GET, [check_key(key)], timeout)

    @override
    def wait(self, keys: Iterable[str], *, timeout: float | None = None) -> None:
        self._call(_Operation.WAIT, check_keys(keys), timeout)

    @override
    def add(self, key: str, amount: int, *, timeout: float | None = None) -> int:
        return int(self._call(_Operation.ADD, [check_key(key)], timeout, amount=check_amount(amount)))

    @override
    def compare_set(self, key: str, expected: bytes, desired: bytes, *, timeout: float | None = None) -> bytes:
        expected, desired = check_value(expected), check_value(desired)
        return self._call(_Operation.COMPARE_SET, [check_key(key)], timeout, value=desired, expected=expected)

    @override
    def delete(self, key: str, *, timeout: float | None = None) -> bool:
        return self._call(_Operation.DELETE, [check_key(key)], timeout) == b"1"

    @override
    def close(self) -> None:
        if os.getpid() == self._process:  # see Listener.close
            self._fail("was closed")

    def _call(self, operation: _Operation, keys: list[str], timeout: float | None, **fields: Any) -> bytes:
        limit = Deadline(self._timeout if timeout is None else timeout).timeout
        deadline = Deadline(limit + _REPLY_GRACE)
        request = msgspec.msgpack.encode(_Request(operation, keys, limit, **fields))
        if len(request) > _MAX_FRAME_BYTES:
            raise ValueError(f"a store request of {len(request)} bytes exceeds the limit of {_MAX_FRAME_BYTES}")
        with self._connection(deadline) as sock:
            try:
                sock.send_frame(request, deadline)
                reply = _REPLY_DECODER.decode(sock.receive_frame(_MAX_FRAME_BYTES, deadline))
            except TimeoutError:
                raise DistributedTimeoutError(
                    f"the store at {self.address} did not answer {operation.name} {', '.join(keys[:4])} within "
                    f"{deadline.elapsed():.2f} s (limit {limit:.2f} s); is rank 0, which serves it, stopped?",
                    ranks=(0,),
                ) from None
            except AuthenticationError as error:
                raise AuthenticationError(
                    f"the store of rank 0 at {self.address}: its answer to {operation.name} {', '.join(keys[:4])} can't"
                    f" be trusted: {error.message}. Who passes on this connection must change nothing of it."
                ) from error
            except (OSError, ProtocolError, ValueError) as error:
                raise self._fail(f"went away: {error}") from error
        if reply.error is not None:
            name, message, ranks = reply.error
            raise ValueError(message) if name == ValueError.__name__ else error_from_wire(name, message, ranks)
        return reply.value

    @contextlib.contextmanager
    def _connection(self, deadline: Deadline) -> Iterator[Connection]:
        """Provide a connection that no other thread uses; it is closed after an error, and kept otherwise."""
        sock = self._check_out(deadline)
        is_kept = False
        try:
            yield sock
            is_kept = True
        finally:
            with self._lock:
                self._busy.discard(sock)
                is_kept = is_kept and self._lost is None and len(self._idle) < _MAX_IDLE_CONNECTIONS
                if is_kept:
                    self._idle.append(sock)
            if not is_kept:
                disconnect(sock)

    def _check_out(self, deadline: Deadline) -> Connection:
        """Return a connection that no other thread uses."""
        if os.getpid() != self._process:
            raise RendezvousError(
                f"the store at {self.address} was opened by process {self._process}, before this one was "
                "forked from it; open another TcpStore in the child"
            )
        with self._lock:
            self._check_usable()
            if self._idle:
                sock = self._idle.pop()
                self._busy.add(sock)
                return sock
        try:
            sock = connect(
                self._host,
                self._port,
                secret=self._secret,
                hello=self._hello,
                deadline=deadline,
                retry_refused=False,
            )
        except DistributedTimeoutError as error:
            raise DistributedTimeoutError(error.message, ranks=(0,)) from error
        except NoConnectionError as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                raise self._fail(f"went away: {error}") from error
            # This process has no descriptor left: calls on open connections go on.
            raise RendezvousError(f"no further connection to the store of rank 0: {error.message}") from error
        try:
            with self._lock:
                self._check_usable()
                self._busy.add(sock)
        except RendezvousError:
            disconnect(sock)
            raise
        return sock

    def _fail(self, reason: str) -> RendezvousError:
        """Make this call and all others fail, for the first reason."""
        with self._lock:
            self._lost = self._lost or reason
            idle, self._idle = self._idle, []
            busy = list(self._busy)
            error = self._lost_error()
        for sock in idle:
            disconnect(sock)
        for sock in busy:
            interrupt(sock)
        return error

    def _check_usable(self) -> None:
        if self._lost is not None:
            raise self._lost_error()

    def _lost_error(self) -> RendezvousError:
        return RendezvousError(f"the store of rank 0 at {self.address} {self._lost}", ranks=(0,))


def _send(sock: Connection, reply: _Reply) -> None:
    sock.send_frame(msgspec.msgpack.encode(reply), None)


def _has_disconnected(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
