"""The handshake: two processes authenticate each other before either reads anything else.

::

    client                                     server
    "ferrodist" "C" version            ->
                                       <-      "ferrodist" "S" version, server nonce
    client nonce, proof("client")      ->
                                       <-      verdict byte, proof("server")
    seal(Hello)                        ->
                                       <-      seal(JoinReply)

``proof(role)`` is HMAC-SHA256 under the job secret over the role, the protocol version and both nonces, so a proof can
be neither replayed (fresh nonces of 32 bytes) nor reflected (roles). Every message up to the proofs has a fixed length.
``seal`` adds an HMAC under a key of this one connection. The client proves itself first: an unauthenticated peer gets
no HMAC out of a server. Without a job secret both prove that they know their user's (`user_secret`).

The handshake may pass through proxies and port forwards, which learn no key from it. What follows is authenticated by
`Session` (see [Note: session keys] in `session.py`) where it carries addresses or digests of them. A client that
got the server's address from the server itself, through a store or a collective, puts it into its Hello, so that the
server detects an address that was changed in between.

Nothing is encrypted.
"""

from __future__ import annotations

import enum
import errno
import hmac
import logging
import math
import os
import secrets
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import msgspec

from ferrodist.deadline import Deadline, Elapsed, long_wait
from ferrodist.errors import (
    AuthenticationError,
    DistributedError,
    DistributedTimeoutError,
    NoConnectionError,
    ProtocolError,
    error_from_wire,
    error_to_wire,
)
from ferrodist.rendezvous.secret import user_secret
from ferrodist.rendezvous.session import Connection, Session
from ferrodist.rendezvous.sockets import (
    apply_deadline,
    close_in_child,
    disconnect,
    format_address,
    read_exactly,
    read_frame,
    resolve,
    write,
    write_frame,
)

if TYPE_CHECKING:
    from collections.abc import Callable


class JoinReply(msgspec.Struct, frozen=True, array_like=True):
    """The reply to a Hello, or the outcome of a rendezvous; ``error`` is `error_to_wire`'s, and None accepts."""

    error: tuple[str, str, tuple[int, ...]] | None = None

    def check(self) -> None:
        """Raise the refusal, if this is one."""
        if self.error is not None:
            raise error_from_wire(*self.error)


JOIN_REPLY_DECODER = msgspec.msgpack.Decoder(JoinReply)

_log = logging.getLogger(__name__)

PROTOCOL_VERSION = 3

_MAGIC = b"ferrodist"
_INTRO = struct.Struct(f"!{len(_MAGIC)}s1sH")
_CLIENT, _SERVER = b"C", b"S"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_ACCEPTED, _REFUSED = b"\x01", b"\x00"
_MAX_HELLO_BYTES = 4096
# A Hello above its limit is still read up to here: closing with unread bytes could destroy the refusal.
_MAX_READ_HELLO_BYTES = 64 * 1024
_MAX_REPLY_BYTES = 64 * 1024

# The wait for a server's first bytes: a connection to a process that died under load, or that was never accepted, can
# stay silent for ever. After them the server answers within its own limit.
_ATTEMPT_TIMEOUT = 5.0
_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.01, 0.2


class HandshakeProgress(enum.IntEnum):
    """A client's progress in its handshake."""

    SILENT = 0
    SPOKEN = 1  # as a ferrodist client
    PROVEN = 2  # it knows the secret


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The client's introduction.

    Args:
        purpose: "store" or "group".
        job: The name of the job.
        rank: The client's rank.
        world_size: The number of ranks, according to the client.
        group: The name of the group, for purpose "group".
        address: The address that the server itself has published; empty if the user gave it.
    """

    purpose: str
    job: str
    rank: int
    world_size: int
    group: str
    address: str = ""


_HELLO_DECODER = msgspec.msgpack.Decoder(Hello)


def connect(
    host: str, port: int, *, secret: bytes, hello: Hello, deadline: Deadline, retry_refused: bool = True
) -> Connection:
    """Connect to a server that calls `greet`, retrying until it is there.

    Args:
        host: The server's name or address; all addresses of a name are tried.
        port: The server's port.
        secret: The job secret; if empty, this user's.
        hello: This process's introduction.
        deadline: When to stop trying.
        retry_refused: Whether the server may not have started yet; if not, a refused connection is an error.

    Returns:
        A blocking connection with no timeout and TCP_NODELAY set. Forked children do not inherit it.

    Raises:
        AuthenticationError: One side does not know the other's secret.
        ProtocolError: Another program has that port, or another version of ferrodist.
        NoConnectionError: The connection was refused and ``retry_refused`` is false; or this process has no descriptor
            left.
        DistributedTimeoutError: No server answered in time.
        DistributedError: The server refused this rank, with an error of this class.
        ValueError: The names in ``hello`` are too long.
    """
    check_hello(hello)
    where = f"{hello.purpose} at {format_address(host, port)}"
    backoff = _MIN_BACKOFF_SECONDS
    failure: OSError | None = None
    warning = long_wait()
    while not deadline.expired:
        try:
            return _attempt(host, port, secret, hello, deadline)
        except DistributedError:  # sent by the server; DistributedTimeoutError is an OSError too
            raise
        except ConnectionRefusedError as error:
            if not retry_refused:
                raise NoConnectionError(f"{where}: connection refused") from error
            failure = error
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise NoConnectionError(f"{where}: {error} in this process; see `ulimit -n`") from error
            failure = error
        if warning.expired:
            _log.warning(
                "rank %s waits for the %s, which is not there yet, after %s; the last attempt: %s. %s",
                *(hello.rank, where, Elapsed.of(deadline), failure, _explain_failure(failure, host, port)),
            )
            warning = Deadline(math.inf)
        time.sleep(min(backoff, deadline.remaining()))
        backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)
    raise DistributedTimeoutError(
        f"rank {hello.rank} could not connect to the {where} within {deadline.elapsed():.2f} s (limit "
        f"{deadline.timeout:.2f} s); the last attempt: {failure or 'none was possible'}."
        f" {_explain_failure(failure, host, port)}"
    )


def _explain_failure(failure: OSError | None, host: str, port: int) -> str:
    """What an attempt to connect that failed so may mean, and what to check; a sentence."""
    if isinstance(failure, ConnectionRefusedError):
        return (
            f"The host answers, and nothing listens at its port {port}: check that the process that should has started"
            " and still runs there, and that no firewall rejects the port."
        )
    if isinstance(failure, socket.gaierror):
        return f"This host does not know the name {host!r}: check its spelling, or give the address."
    if isinstance(failure, TimeoutError):  # also of a host that does not answer
        return (
            f"Nothing answers at {host}: check the address, that the host can be reached from this one (ping), that no"
            f" firewall drops TCP connections to port {port}, and that no other program listens there."
        )
    if failure is not None and failure.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"There is no way from this host to {host}: check the address, and the interface that leads there."
    return "Check that the process that should listen there runs, and that this host can reach it."


def check_hello(hello: Hello) -> None:
    """Raise ValueError if a server would refuse ``hello`` for its length."""
    excess = len(msgspec.msgpack.encode(hello)) + _PROOF_BYTES - _MAX_HELLO_BYTES
    if excess > 0:
        job, group = len(hello.job.encode()), len(hello.group.encode())
        raise ValueError(
            f"the name of the job has {job} bytes and that of the group {group}; together they may have "
            f"{job + group - excess}: choose shorter names"
        )


def check_address(hello: Hello, address: str) -> None:
    """Raise AuthenticationError if the client was given another address than the server has published."""
    if hello.address and hello.address != address:
        raise AuthenticationError(
            f"rank {hello.rank} was told that this {hello.purpose} is at {hello.address}, but it is at {address}:"
            " somebody who can write to the store through which the ranks meet has changed the address",
            ranks=(hello.rank,),
        )


def greet(
    sock: Connection,
    *,
    secret: bytes,
    admit: Callable[[Hello], None],
    deadline: Deadline,
    dismiss: Callable[[Hello], None] | None = None,
    progress: Callable[[HandshakeProgress], None] | None = None,
) -> Hello:
    """Run the server's side of the handshake on an accepted connection.

    Args:
        sock: The connection; afterwards blocking, with no timeout, TCP_NODELAY set, and a session. Not closed on
            failure.
        secret: The job secret; if empty, this user's.
        admit: Called with the authenticated client's Hello; a DistributedError it raises is sent to the client, then
            raised.
        deadline: The deadline of the whole handshake.
        dismiss: Called with an admitted Hello if the reply can't be sent, so that `greet` raises.
        progress: Called each time the client has advanced.

    Raises:
        AuthenticationError: The client does not know the secret.
        ProtocolError: The client is not ferrodist, or another version.
        OSError: The client closed the connection or was too slow.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    secret = secret or user_secret()
    version = _read_intro(sock, _CLIENT, deadline)
    if progress is not None:
        progress(HandshakeProgress.SPOKEN)
    server_nonce = secrets.token_bytes(_NONCE_BYTES)
    intro = _INTRO.pack(_MAGIC, _SERVER, PROTOCOL_VERSION)
    write(sock, intro + server_nonce, deadline)
    _check_version(version, "the client")

    answer = read_exactly(sock, _NONCE_BYTES + _PROOF_BYTES, deadline)
    nonces = answer[:_NONCE_BYTES] + server_nonce
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(secret, b"client", nonces)):
        write(sock, _REFUSED + bytes(_PROOF_BYTES), deadline)
        raise AuthenticationError("wrong job secret")
    if progress is not None:
        progress(HandshakeProgress.PROVEN)
    write(sock, _ACCEPTED + _proof(secret, b"server", nonces), deadline)

    key = _proof(secret, b"session", nonces)
    try:
        sealed = read_frame(sock, _MAX_READ_HELLO_BYTES, deadline)
        if len(sealed) > _MAX_HELLO_BYTES:
            raise ProtocolError(f"the hello has {len(sealed)} bytes, the limit is {_MAX_HELLO_BYTES}")
        hello = _HELLO_DECODER.decode(_unseal(key, b"hello", sealed))
        admit(hello)
    except (DistributedError, ValueError) as error:
        refusal = error if isinstance(error, DistributedError) else ProtocolError(f"malformed hello: {error}")
        name, message, ranks = error_to_wire(refusal)
        _send_sealed(sock, key, b"verdict", JoinReply((name, message[:8192], ranks[:1024])), deadline)
        raise refusal from None
    try:
        _send_sealed(sock, key, b"verdict", JoinReply(), deadline)
        sock.session = Session(key, is_server=True)
        sock.settimeout(None)
    except BaseException:
        if dismiss is not None:
            dismiss(hello)
        raise
    return hello


def _attempt(host: str, port: int, secret: bytes, hello: Hello, deadline: Deadline) -> Connection:
    """Try each address of the server once: another program at one of them must not hide the server at another."""
    where = format_address(host, port)
    failures: list[Exception] = []
    for address_info in resolve(host, port, Deadline(min(deadline.remaining(), _ATTEMPT_TIMEOUT))):
        attempt_deadline = Deadline(min(deadline.remaining(), _ATTEMPT_TIMEOUT))
        family, kind, protocol, _, address = address_info
        sock: Connection | None = None
        try:
            sock = close_in_child(Connection(family, kind, protocol))
            _connect_socket(sock, address, where, attempt_deadline)
            try:
                key = _prove_secret(sock, where, secret, hello, (attempt_deadline, deadline))
            except (AuthenticationError, ProtocolError) as error:
                disconnect(sock)
                failures.append(error)
                continue
            _exchange_hello(sock, where, key, hello, deadline)
            sock.settimeout(None)
        except BaseException as error:
            if sock is not None:
                disconnect(sock)
            if not isinstance(error, OSError) or isinstance(error, DistributedError):  # the latter sent by the server
                raise
            failures.append(error)
        else:
            return sock
    raise min(failures, key=_relevance, default=ConnectionRefusedError(f"{host} has no address"))


def _relevance(failure: Exception) -> int:
    """Return a failure's relevance among those at a server's addresses; the lowest is raised."""
    return 0 if isinstance(failure, DistributedError) else 2 if isinstance(failure, ConnectionRefusedError) else 1


def _prove_secret(
    sock: Connection, where: str, secret: bytes, hello: Hello, deadlines: tuple[Deadline, Deadline]
) -> bytes:
    """Run the client's side up to the proofs, and return the connection's key."""
    attempt_deadline, deadline = deadlines
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    write(sock, _INTRO.pack(_MAGIC, _CLIENT, PROTOCOL_VERSION), attempt_deadline)
    version = _read_intro(sock, _SERVER, attempt_deadline, where=where)
    _check_version(version, f"the server at {where}")
    server_nonce = read_exactly(sock, _NONCE_BYTES, deadline)

    client_nonce = secrets.token_bytes(_NONCE_BYTES)
    nonces = client_nonce + server_nonce
    shared_secret = secret or user_secret()
    write(sock, client_nonce + _proof(shared_secret, b"client", nonces), deadline)
    answer = read_exactly(sock, 1 + _PROOF_BYTES, deadline)
    is_proven = hmac.compare_digest(answer[1:], _proof(shared_secret, b"server", nonces))
    if answer[:1] != _ACCEPTED or not is_proven:
        unset = "" if secret else f" None is set here, so this process has the one of user {os.geteuid()} on this host."
        raise AuthenticationError(
            f"rank {hello.rank} and the {hello.purpose} at {where} do not have the same job secret.{unset} Set"
            " FERRODIST_SECRET to the same value on every rank (`python -m ferrodist secret` prints a new one)."
        )
    return _proof(shared_secret, b"session", nonces)


def _exchange_hello(sock: Connection, where: str, key: bytes, hello: Hello, deadline: Deadline) -> None:
    """Send the Hello and check the reply."""
    _send_sealed(sock, key, b"hello", hello, deadline)
    try:
        reply = JOIN_REPLY_DECODER.decode(_unseal(key, b"verdict", read_frame(sock, _MAX_REPLY_BYTES, deadline)))
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the server at {where} sent a malformed verdict: {error}") from error
    reply.check()
    sock.session = Session(key, is_server=False)


def _read_intro(sock: socket.socket, role: bytes, deadline: Deadline, *, where: str | None = None) -> int:
    """Read the peer's first bytes and return its protocol version."""
    intro = read_exactly(sock, _INTRO.size, deadline)
    magic, its_role, version = _INTRO.unpack(intro)
    if magic != _MAGIC or its_role != role:
        who = f"what listens at {where}" if where else "the peer"
        raise ProtocolError(
            f"{who} does not speak ferrodist (it began with {intro!r})"
            + ("; choose a port that no other program uses" if where else "")
        )
    return int(version)


def _check_version(version: int, who: str) -> None:
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"{who} speaks version {version} of the ferrodist protocol, this process version "
            f"{PROTOCOL_VERSION}; install the same release on every host"
        )


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"%s %d %s\0" % (_MAGIC, PROTOCOL_VERSION, role) + nonces, "sha256")


def _send_sealed(sock: socket.socket, key: bytes, label: bytes, message: msgspec.Struct, deadline: Deadline) -> None:
    payload = msgspec.msgpack.encode(message)
    write_frame(sock, hmac.digest(key, label + b"\0" + payload, "sha256") + payload, deadline)


def _unseal(key: bytes, label: bytes, sealed: bytes) -> bytes:
    payload = sealed[_PROOF_BYTES:]
    tag = hmac.digest(key, label + b"\0" + payload, "sha256")
    if not hmac.compare_digest(sealed[:_PROOF_BYTES], tag):
        raise AuthenticationError(f"the {label.decode()} was altered on its way")
    return payload


def _connect_socket(sock: Connection, address: Any, where: str, deadline: Deadline) -> None:
    apply_deadline(sock, deadline)
    sock.connect(address)
    # A connection to a free ephemeral port can reach itself (TCP simultaneous open), and would then hold the very port
    # that the server is about to bind.
    if sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError(f"nobody listens at {where}")
