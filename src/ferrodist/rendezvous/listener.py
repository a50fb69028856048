"""A listening socket that lets only authenticated peers through.

[Note: eviction]
When all handshake slots are taken, the least credible handshake is evicted: first one whose client has sent nothing,
then one whose client has not proved the secret, among these from the address with the most handshakes, and then the
oldest. A client that has proved the secret is never evicted. So local strangers, however many, can't keep out a distant
rank.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import socket
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, RendezvousError
from ferrodist.rendezvous.auth import HandshakeProgress, Hello, check_address, greet
from ferrodist.rendezvous.secret import user_secret
from ferrodist.rendezvous.session import Connection
from ferrodist.rendezvous.sockets import (
    bind_all,
    close_in_child,
    disconnect,
    format_address,
    interrupt,
    is_loopback,
    missing_secret_error,
)
from ferrodist.resource_limits import limit_text

if TYPE_CHECKING:
    from collections.abc import Callable


_HANDSHAKE_TIMEOUT = 5.0
_MAX_HANDSHAKES = 128
_MAX_REJECTIONS = 32

# Seconds after which a handshake may be evicted, by its progress. A rank's first bytes arrive right after its
# connection; its proof takes another round trip. See [Note: eviction].
_EVICTION_AGES = {HandshakeProgress.SILENT: 0.1, HandshakeProgress.SPOKEN: 0.5}

_SHORTAGE_SECONDS = 1.0  # seconds without resources for connections after which peers are refused
_REFUSAL_TIMEOUT = 1.0  # the limit of one such refusal, in seconds

# accept() fails with these again and again until some connection is closed.
_EXHAUSTION_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, kw_only=True)
class _Handshake:
    """A handshake in progress."""

    source: str
    deadline: Deadline
    progress: HandshakeProgress = HandshakeProgress.SILENT


class Listener:
    """Binds an address and hands over connections of peers that have proved the job secret.

    Args:
        host: The interface to bind; of a name all addresses of this host, so that nobody else can listen at one of
            them. Without a secret they must be loopback addresses.
        port: The port to bind; 0 takes a free one.
        secret: The job secret; if empty, peers prove that they know this user's.
        sock: A bound, listening socket to take over (and to close); ``host`` and ``port`` are then unused.
        on_rejection: Called in a handshake's thread with the reason of each rejected connection.
        deadline: The deadline for resolving ``host``; None leaves it to the system's limit.

    Raises:
        AuthenticationError: The secret is missing, and other hosts can reach the address.
        RendezvousError: An address can't be bound.

    Attributes:
        host: The bound address, the first of several.
        port: The bound port.
        address: Both, as `parse_address` reads them.
        exhaustion: The error for which the newest connection can't be accepted, for lack of descriptors or memory; None
            if it could. It is retried.
        shortage: The error with which peers are refused once that has lasted.
        refused: The ranks that were refused so.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        secret: bytes,
        sock: socket.socket | None = None,
        on_rejection: Callable[[str], None] | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        self._on_rejection = on_rejection
        if sock is None:
            bound = bind_all(host, port, secret, Deadline(math.inf) if deadline is None else deadline)
        else:
            bound = [sock]
        self._sockets = [close_in_child(listening) for listening in bound]
        self.host, self.port = bound[0].getsockname()[:2]
        self.address = format_address(self.host, self.port)
        with contextlib.ExitStack() as on_error:
            for listening in bound:
                on_error.callback(listening.close)
            if not secret and not is_loopback(self.host):
                raise missing_secret_error(self.address)
            self._secret = secret or user_secret()
            try:
                # A descriptor that is freed to refuse a peer for lack of descriptors.
                self._spare: IO[bytes] | None = on_error.enter_context(Path(os.devnull).open("rb"))
                self._wakeup_writer, self._wakeup_reader = map(close_in_child, socket.socketpair())
            except OSError as error:
                raise RendezvousError(f"cannot listen at {self.address}: {limit_text(error) or error}") from error
            on_error.pop_all()
        self.exhaustion: OSError | None = None
        self.shortage: RendezvousError | None = None
        self.refused: set[int] = set()
        self._short_since = self._short_until = -_SHORTAGE_SECONDS
        for listening in bound:
            listening.setblocking(False)
        self._changed = threading.Condition()
        self._handshakes: dict[Connection, _Handshake] = {}
        self._threads: set[threading.Thread] = set()
        self._rejections: deque[str] = deque(maxlen=_MAX_REJECTIONS)
        self._closed = False
        self._process = os.getpid()
        self._acceptor: threading.Thread | None = None

    @property
    def rejections(self) -> list[str]:
        """The newest rejected connections, oldest first: "127.0.0.1:5000: wrong job secret"."""
        with self._changed:
            return list(self._rejections)

    def serve(
        self,
        admit: Callable[[Hello], None],
        on_connection: Callable[[Connection, Hello], None],
        dismiss: Callable[[Hello], None] | None = None,
    ) -> None:
        """Start to accept connections, each handshake in a short-lived thread of its own.

        Args:
            admit: See `greet`.
            on_connection: Called in the handshake's thread; takes ownership of the connection and must return soon.
            dismiss: Called in place of ``on_connection`` for an admitted peer whose handshake then failed.
        """
        if self._acceptor is not None:
            raise RuntimeError("serve was called before")
        self._admit, self._on_connection, self._dismiss = admit, on_connection, dismiss
        acceptor = threading.Thread(target=self._accept, name="ferrodist-accept", daemon=True)
        acceptor.start()
        self._acceptor = acceptor

    def close(self) -> None:
        """Stop listening, drop unfinished handshakes and join the threads; connections handed over stay open."""
        if os.getpid() != self._process:
            return  # in a forked child the sockets are closed, there is no thread, and the lock may be held
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for sock in self._handshakes:
                interrupt(sock)
            self._changed.notify_all()
        self._wakeup_writer.send(b"\0")
        if self._acceptor is not None:
            self._acceptor.join()
        with self._changed:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        for listening in self._sockets:
            disconnect(listening)  # frees the port even if a child that was just forked still holds it
        self._wakeup_writer.close()
        self._wakeup_reader.close()
        if self._spare is not None:
            self._spare.close()

    def _accept(self) -> None:
        with selectors.PollSelector() as selector:  # needs no descriptor
            for sock in (*self._sockets, self._wakeup_reader):
                selector.register(sock, selectors.EVENT_READ)
            while self._await_slot():
                for key, _ in selector.select():
                    if (
                        isinstance(key.fileobj, socket.socket)
                        and key.fileobj is not self._wakeup_reader
                        and self._await_slot()
                    ):
                        self._accept_one(key.fileobj)

    def _accept_one(self, listening: socket.socket) -> None:
        """Accept one connection and start its handshake."""
        try:
            accepted, address = listening.accept()
        except OSError as error:
            if error.errno in _EXHAUSTION_ERRNOS:
                self._record_shortage(error)
                self.exhaustion = error
                self._refuse_with_spare(listening)
            return
        self.exhaustion = None
        sock = close_in_child(Connection.take_over(accepted))
        thread = threading.Thread(
            target=self._handshake,
            args=(sock, format_address(*address[:2])),
            name="ferrodist-handshake",
            daemon=True,
        )
        with self._changed:
            self._handshakes[sock] = _Handshake(source=address[0], deadline=Deadline(_HANDSHAKE_TIMEOUT))
            try:
                thread.start()
                self._threads.add(thread)
            except RuntimeError as error:  # this process can't start another thread: the peer will retry
                del self._handshakes[sock]
                self._record_shortage(error)
                self._refuse(sock, address)

    def _record_shortage(self, error: OSError | RuntimeError) -> None:
        """Record that a connection can't be accepted; if that lasts, peers are refused and stop retrying."""
        now = time.monotonic()
        if now - self._short_until > _SHORTAGE_SECONDS:
            self._short_since = now
        self._short_until = now
        if now - self._short_since > _SHORTAGE_SECONDS:
            text = limit_text(error) or str(error)
            self.shortage = RendezvousError(f"the process that listens at {self.address} can't take in more: {text}")

    def _refuse_with_spare(self, listening: socket.socket) -> None:
        """Use the spare descriptor to refuse a peer with the reason, or else wait briefly."""
        if self.shortage is None:
            self._wait_briefly()
            return
        if self._spare is not None:
            self._spare.close()
        try:
            accepted, address = listening.accept()
            self._refuse(Connection.take_over(accepted), address)
        except OSError as error:
            if error.errno in _EXHAUSTION_ERRNOS:  # another thread has taken the spare descriptor
                self._reject(self.shortage.message)
                self._wait_briefly()
        with contextlib.suppress(OSError):
            self._spare = Path(os.devnull).open("rb")  # noqa: SIM115 - closed in close()

    def _wait_briefly(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, 0.05)

    def _refuse(self, sock: Connection, address: tuple[str, int]) -> None:
        """Refuse a peer with the shortage, if that has lasted, and close its connection."""
        shortage = self.shortage
        if shortage is not None:

            def admit(hello: Hello) -> None:
                self.refused.add(hello.rank)
                raise shortage.fresh()

            with contextlib.suppress(DistributedError, OSError):
                greet(sock, secret=self._secret, admit=admit, deadline=Deadline(_REFUSAL_TIMEOUT))
            self._reject(f"{format_address(*address[:2])}: {shortage.message}")
        disconnect(sock)

    def _await_slot(self) -> bool:
        """Wait until another handshake may start, if need be by evicting one; False once closed."""
        with self._changed:
            while not self._closed and len(self._handshakes) >= _MAX_HANDSHAKES:
                sock = self._eviction_candidate()
                if sock is None:
                    self._changed.wait()
                    continue
                left = _EVICTION_AGES[self._handshakes[sock].progress] - self._handshakes[sock].deadline.elapsed()
                if left <= 0:
                    del self._handshakes[sock]
                    interrupt(sock)
                else:
                    self._changed.wait(left)
            return not self._closed

    def _eviction_candidate(self) -> Connection | None:
        """Return the handshake to evict first; see [Note: eviction]."""
        num_by_source = Counter(handshake.source for handshake in self._handshakes.values())
        unproven = [sock for sock, handshake in self._handshakes.items() if handshake.progress in _EVICTION_AGES]

        def rank_key(sock: Connection) -> tuple[int, int]:
            handshake = self._handshakes[sock]
            return handshake.progress, -num_by_source[handshake.source]

        return min(unproven, key=rank_key, default=None)  # of equals the first, which is the oldest

    def _handshake(self, sock: Connection, peer: str) -> None:
        def on_progress(progress: HandshakeProgress) -> None:
            with self._changed:
                if sock in self._handshakes:
                    self._handshakes[sock].progress = progress

        def admit(hello: Hello) -> None:
            check_address(hello, self.address)
            self._admit(hello)

        try:
            with self._changed:
                is_dropped = self._closed or sock not in self._handshakes
                deadline = Deadline(0.0) if is_dropped else self._handshakes[sock].deadline
            hello = greet(
                sock,
                secret=self._secret,
                admit=admit,
                deadline=deadline,
                dismiss=self._dismiss,
                progress=on_progress,
            )
            self._remove_handshake(sock)
            self._on_connection(sock, hello)
        except (DistributedError, OSError) as error:
            disconnect(sock)
            self._reject(f"{peer}: {_reason(error)}")
        except BaseException:
            disconnect(sock)
            raise
        finally:
            self._remove_handshake(sock)
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _remove_handshake(self, sock: Connection) -> None:
        with self._changed:
            self._handshakes.pop(sock, None)
            self._changed.notify_all()

    def _reject(self, reason: str) -> None:
        with self._changed:
            self._rejections.append(reason)
            closed = self._closed
        if self._on_rejection is not None and not closed:
            self._on_rejection(reason)


def parse_address(address: str) -> tuple[str, int]:
    """Split "host:port" or "[ipv6]:port" into its parts.

    Raises:
        ValueError: The host or port is missing or invalid, or an IPv6 address lacks brackets.
    """
    host, colon, digits = address.rpartition(":")
    if not colon or not host or not digits:
        raise ValueError(f"{address!r} is not an address: write host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r} is ambiguous: put the IPv6 address in brackets, [address]:port")
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(f"{address!r} has no valid host name: {host!r} has an empty or too long label") from None
    if not (digits.isascii() and digits.isdigit() and int(digits) <= 65535):
        raise ValueError(f"{address!r} has no valid port: {digits!r} is not a number from 0 to 65535")
    return host, int(digits)


def _reason(error: Exception) -> str:
    if isinstance(error, DistributedError):
        return error.message
    return "no complete handshake in time" if isinstance(error, TimeoutError) else str(error)
