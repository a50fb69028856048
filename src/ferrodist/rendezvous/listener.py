"""A listening socket that only authenticated peers get past.

[Note: who gives way]
With every place for handshakes taken, the one that deserves it least makes room: who has said nothing before who has
spoken, among these who comes from the address that holds most places, and then the oldest. Who has proved to know the
secret never does. So a rank that is far away is not kept out by strangers that are near and many.
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
from ferrodist.errors import AuthenticationError, DistributedError, RendezvousError
from ferrodist.rendezvous.auth import Progress, check_address, greet
from ferrodist.rendezvous.secret import secret_or_users
from ferrodist.rendezvous.session import Connection
from ferrodist.rendezvous.sockets import (
    bind_all,
    close_in_child,
    disconnect,
    format_address,
    is_loopback,
    secret_needed,
)
from ferrodist.resource_limits import limit_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.rendezvous.auth import Hello

_HANDSHAKE_TIMEOUT = 5.0
_MAX_HANDSHAKES = 128
_REJECTIONS_KEPT = 32

# Seconds after which a handshake gives way to a waiting connection when every place is taken, by how far it has come.
# A rank's first bytes come right behind its connection; its proof takes a round trip more. See [Note: who gives way].
_EVICTION_AGES = {Progress.SILENT: 0.1, Progress.SPOKEN: 0.5}

_SHORT_SECONDS = 1.0
"""How long connections can't be taken in before peers are told so."""

_REFUSAL_SECONDS = 1.0
"""How long telling one of them may take."""

# Out of descriptors: accept() fails at once again and again until some connection is closed.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, kw_only=True)
class _Handshake:
    """One that is under way."""

    source: str
    deadline: Deadline
    progress: Progress = Progress.SILENT


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reception:
    """The arguments of `Listener.serve`."""

    admit: Callable[[Hello], None]
    on_connection: Callable[[Connection, Hello], None]
    dismiss: Callable[[Hello], None] | None


class Listener:
    """Binds an address and hands over connections whose peers proved that they know the job secret.

    Args:
        host: Interface to bind; of a name all addresses that this host has, so that nobody else can listen at one of
            them. Without a secret they must be loopback addresses.
        port: Port to bind; 0 takes a free one.
        secret: The job secret; where it is empty, peers prove that they know this user's.
        sock: A bound, listening socket to take over (and to close); ``host`` and ``port`` are then not used.
        on_rejection: Told, in a handshake's thread, of each connection that is turned away.
        deadline: When to give up on a name server that does not say which address ``host`` is; None leaves
            that to the system's own limit.

    Raises:
        AuthenticationError: No secret, and the address can be reached from other hosts.
        RendezvousError: An address cannot be bound.

    Attributes:
        host: The address that is bound, the first of several.
        port: The port that is bound.
        address: Both, as `parse_address` reads them.
        exhaustion: Why the newest connection can't be taken in, when this process or host has no descriptor or memory
            left for it; None when all could. It is tried again.
        shortage: The error that peers are turned away with, once that has lasted.
        refused: The ranks that were told of it.
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
        try:
            if not secret and not is_loopback(self.host):
                raise secret_needed(self.address)
            self._secret = secret_or_users(secret)
        except AuthenticationError:
            for listening in bound:
                listening.close()
            raise
        self.exhaustion: OSError | None = None
        self.shortage: RendezvousError | None = None
        self.refused: set[int] = set()
        self._short_since = self._short_until = -_SHORT_SECONDS
        # Given up to tell a peer that there are no more.
        self._spare: IO[bytes] | None = Path(os.devnull).open("rb")  # noqa: SIM115 - closed in close()
        for listening in bound:
            listening.setblocking(False)
        self._wake, self._woken = (close_in_child(end) for end in socket.socketpair())
        self._changed = threading.Condition()
        self._handshakes: dict[Connection, _Handshake] = {}
        self._threads: set[threading.Thread] = set()
        self._rejections: deque[str] = deque(maxlen=_REJECTIONS_KEPT)
        self._closed = False
        self._process = os.getpid()
        self._acceptor: threading.Thread | None = None

    @property
    def rejections(self) -> list[str]:
        """The newest connections that were turned away, oldest first: "127.0.0.1:5000: wrong job secret"."""
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
            on_connection: Called in the handshake's thread; takes ownership of the connection and returns
                soon.
            dismiss: Called in place of ``on_connection`` for an admitted peer whose handshake failed after all.
        """
        if self._acceptor is not None:
            raise RuntimeError("serve was called before")
        self._acceptor = threading.Thread(
            target=self._accept,
            args=(_Reception(admit=admit, on_connection=on_connection, dismiss=dismiss),),
            name="ferrodist-accept",
            daemon=True,
        )
        self._acceptor.start()

    def close(self) -> None:
        """Stop listening, drop unfinished handshakes and join the threads; connections handed over stay."""
        if os.getpid() != self._process:
            return  # in a forked child the sockets are closed, there is no thread, and the lock may be held
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for sock in self._handshakes:
                _interrupt(sock)
            self._changed.notify_all()
        self._wake.send(b"\0")
        if self._acceptor is not None:
            self._acceptor.join()
        with self._changed:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        for listening in self._sockets:
            disconnect(listening)  # frees the port even if a child that was just forked still holds it
        self._wake.close()
        self._woken.close()
        if self._spare is not None:
            self._spare.close()

    def _accept(self, reception: _Reception) -> None:
        with selectors.PollSelector() as selector:  # which takes no descriptor
            for sock in (*self._sockets, self._woken):
                selector.register(sock, selectors.EVENT_READ)
            while self._await_slot():
                for key, _ in selector.select():
                    if isinstance(key.fileobj, socket.socket) and key.fileobj is not self._woken and self._await_slot():
                        self._take_in(key.fileobj, reception)

    def _take_in(self, listening: socket.socket, reception: _Reception) -> None:
        """Accept one connection and start its handshake."""
        try:
            accepted, address = listening.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._run_short(error)
                self.exhaustion = error
                self._turn_away(listening)
            return
        self.exhaustion = None
        sock = close_in_child(Connection.take_over(accepted))
        thread = threading.Thread(
            target=self._handshake,
            args=(sock, format_address(*address[:2]), reception),
            name="ferrodist-handshake",
            daemon=True,
        )
        with self._changed:
            self._handshakes[sock] = _Handshake(source=address[0], deadline=Deadline(_HANDSHAKE_TIMEOUT))
            try:
                thread.start()
                self._threads.add(thread)
            except RuntimeError as error:  # this process can start no more threads: the peer will dial again
                del self._handshakes[sock]
                self._run_short(error)
                self._refuse(sock, address)
                disconnect(sock)

    def _run_short(self, error: OSError | RuntimeError) -> None:
        """Note that a connection can't be taken in; when that goes on, peers are told so and dial no more."""
        now = time.monotonic()
        if now - self._short_until > _SHORT_SECONDS:
            self._short_since = now
        self._short_until = now
        if now - self._short_since > _SHORT_SECONDS:
            text = limit_text(error) or str(error)
            self.shortage = RendezvousError(f"the process that listens at {self.address} can't take in more: {text}")

    def _turn_away(self, listening: socket.socket) -> None:
        """Use the spare descriptor to tell a peer why it can't be taken in, or else wait a moment."""
        if self.shortage is None:
            self._pause()
            return
        if self._spare is not None:
            self._spare.close()
        try:
            accepted, address = listening.accept()
            sock = Connection.take_over(accepted)
            self._refuse(sock, address)
            disconnect(sock)
        except OSError as error:
            if error.errno in _EXHAUSTED:  # another thread has taken the spare one
                self._reject(self.shortage.message)
                self._pause()
        with contextlib.suppress(OSError):
            self._spare = Path(os.devnull).open("rb")  # noqa: SIM115 - closed in close()

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, 0.05)

    def _refuse(self, sock: Connection, address: tuple[str, int]) -> None:
        """Tell a peer of a shortage."""
        shortage = self.shortage
        if shortage is None:
            return

        def admit(hello: Hello) -> None:
            self.refused.add(hello.rank)
            raise shortage.fresh()

        with contextlib.suppress(DistributedError, OSError):
            greet(sock, secret=self._secret, admit=admit, deadline=Deadline(_REFUSAL_SECONDS))
        self._reject(f"{format_address(*address[:2])}: {shortage.message}")

    def _await_slot(self) -> bool:
        """Wait until another handshake may start, at the cost of another if need be; False once closed."""
        with self._changed:
            while not self._closed and len(self._handshakes) >= _MAX_HANDSHAKES:
                sock = self._least_deserving()
                if sock is None:
                    self._changed.wait()
                    continue
                left = _EVICTION_AGES[self._handshakes[sock].progress] - self._handshakes[sock].deadline.elapsed()
                if left <= 0:
                    del self._handshakes[sock]
                    _interrupt(sock)
                else:
                    self._changed.wait(left)
            return not self._closed

    def _least_deserving(self) -> Connection | None:
        """Which handshake gives way first; see [Note: who gives way]."""
        crowds = Counter(handshake.source for handshake in self._handshakes.values())
        unproven = [sock for sock, handshake in self._handshakes.items() if handshake.progress in _EVICTION_AGES]

        def merit(sock: Connection) -> tuple[int, int]:
            handshake = self._handshakes[sock]
            return handshake.progress, -crowds[handshake.source]

        return min(unproven, key=merit, default=None)  # of equals the first, which is the oldest

    def _handshake(self, sock: Connection, peer: str, reception: _Reception) -> None:
        def note(progress: Progress) -> None:
            with self._changed:
                if sock in self._handshakes:
                    self._handshakes[sock].progress = progress

        def admit(hello: Hello) -> None:
            check_address(hello, self.address)
            reception.admit(hello)

        try:
            with self._changed:
                gone = self._closed or sock not in self._handshakes
                deadline = Deadline(0.0) if gone else self._handshakes[sock].deadline
            hello = greet(
                sock,
                secret=self._secret,
                admit=admit,
                deadline=deadline,
                dismiss=reception.dismiss,
                progress=note,
            )
            self._forget(sock)
            reception.on_connection(sock, hello)
        except (DistributedError, OSError) as error:
            disconnect(sock)
            self._reject(f"{peer}: {_reason(error)}")
        except BaseException:
            disconnect(sock)
            raise
        finally:
            self._forget(sock)
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _forget(self, sock: Connection) -> None:
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
        ValueError: It has no host, no port, a port that is no number from 0 to 65535, or an IPv6 address
            without brackets.
    """
    host, colon, digits = address.rpartition(":")
    if not colon or not host or not digits:
        raise ValueError(f"{address!r} is not an address: write host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r} is ambiguous: put the IPv6 address in brackets, [address]:port")
    if not (digits.isascii() and digits.isdigit() and int(digits) <= 65535):
        raise ValueError(f"{address!r} has no valid port: {digits!r} is not a number from 0 to 65535")
    return host, int(digits)


def _interrupt(sock: socket.socket) -> None:
    """End the system call that another thread makes on ``sock``, and leave the closing to that thread."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _reason(error: Exception) -> str:
    if isinstance(error, DistributedError):
        return error.message
    return "no complete handshake in time" if isinstance(error, TimeoutError) else str(error)
