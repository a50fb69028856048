"""A listening socket that only authenticated peers get past."""

from __future__ import annotations

import collections
import contextlib
import errno
import ipaddress
import math
import os
import selectors
import socket
import threading
from typing import TYPE_CHECKING

from ferrodist.deadline import Deadline
from ferrodist.errors import AuthenticationError, DistributedError, RendezvousError
from ferrodist.rendezvous.fork import close_in_child
from ferrodist.rendezvous.framing import disconnect
from ferrodist.rendezvous.handshake import greet
from ferrodist.rendezvous.resolution import resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.rendezvous.handshake import Hello

__all__ = ["Listener", "format_address", "is_loopback", "parse_address"]

_HANDSHAKE_TIMEOUT = 5.0
_MAX_HANDSHAKES = 128
_REJECTIONS_KEPT = 32
_BACKLOG = 1024

# With every handshake slot taken, one that has lasted this long gives way to a waiting connection: an honest
# peer needs milliseconds, one that sends nothing would hold its slot for the full limit.
_EVICTION_AGE = 0.5

# Out of descriptors: accept() fails at once again and again until some connection is closed.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """Binds an address and hands over connections whose peers proved that they know the job secret.

    Args:
        host: Interface to bind. Without a secret it must be a loopback address.
        port: Port to bind; 0 takes a free one.
        secret: The job secret; may be empty.
        sock: A bound, listening socket to take over (and to close); ``host`` and ``port`` are then not used.
        on_rejection: Told, in a handshake's thread, of each connection that is turned away.
        deadline: When to give up on a name server that does not say which address ``host`` is; None leaves
            that to the system's own limit.

    Raises:
        AuthenticationError: No secret, and the address can be reached from other hosts.
        RendezvousError: The address cannot be bound.

    Attributes:
        host: The address that is bound.
        port: The port that is bound.
        address: Both, as `parse_address` reads them.
        exhaustion: Why the newest connection can't be taken in, when this process or host has no descriptor or memory
            left for it; None when all could. It is tried again.
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
        self._secret = secret
        self._on_rejection = on_rejection
        if sock is None:
            sock = _bind(host, port, secret, Deadline(math.inf) if deadline is None else deadline)
        self._socket = close_in_child(sock)
        self.host, self.port = self._socket.getsockname()[:2]
        self.address = format_address(self.host, self.port)
        if not secret and not is_loopback(self.host):
            self._socket.close()
            raise _secret_needed(self.address)
        self.exhaustion: OSError | None = None
        self._socket.setblocking(False)
        self._wake, self._woken = (close_in_child(end) for end in socket.socketpair())
        self._changed = threading.Condition()
        self._handshakes: dict[socket.socket, Deadline] = {}
        self._threads: set[threading.Thread] = set()
        self._rejections: collections.deque[str] = collections.deque(maxlen=_REJECTIONS_KEPT)
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
        on_connection: Callable[[socket.socket, Hello], None],
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
            target=self._accept, args=(admit, on_connection, dismiss), name="ferrodist-accept", daemon=True
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
        disconnect(self._socket)  # frees the port even if a child that was just forked still holds it
        self._wake.close()
        self._woken.close()

    def _accept(
        self,
        admit: Callable[[Hello], None],
        on_connection: Callable[[socket.socket, Hello], None],
        dismiss: Callable[[Hello], None] | None,
    ) -> None:
        with selectors.PollSelector() as selector:  # which takes no descriptor
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while self._await_slot():
                selector.select()
                try:
                    sock, address = self._socket.accept()
                except OSError as error:
                    if error.errno in _EXHAUSTED:
                        self.exhaustion = error
                        with self._changed:
                            self._changed.wait_for(lambda: self._closed, 0.05)
                    continue
                self.exhaustion = None
                close_in_child(sock)
                thread = threading.Thread(
                    target=self._handshake,
                    args=(sock, format_address(*address[:2]), admit, on_connection, dismiss),
                    name="ferrodist-handshake",
                    daemon=True,
                )
                with self._changed:
                    self._handshakes[sock] = Deadline(_HANDSHAKE_TIMEOUT)
                    try:
                        thread.start()
                        self._threads.add(thread)
                    except RuntimeError:  # this process can start no more threads: the peer will dial again
                        del self._handshakes[sock]
                        disconnect(sock)

    def _await_slot(self) -> bool:
        """Wait until another handshake may start, at the cost of the oldest if need be; False once closed."""
        with self._changed:
            while not self._closed and len(self._handshakes) >= _MAX_HANDSHAKES:
                sock, deadline = next(iter(self._handshakes.items()))
                if deadline.elapsed() >= _EVICTION_AGE:
                    del self._handshakes[sock]
                    _interrupt(sock)
                else:
                    self._changed.wait(_EVICTION_AGE - deadline.elapsed())
            return not self._closed

    def _handshake(
        self,
        sock: socket.socket,
        peer: str,
        admit: Callable[[Hello], None],
        on_connection: Callable[[socket.socket, Hello], None],
        dismiss: Callable[[Hello], None] | None,
    ) -> None:
        try:
            with self._changed:
                gone = self._closed or sock not in self._handshakes
                deadline = Deadline(0.0) if gone else self._handshakes[sock]
            hello = greet(sock, secret=self._secret, admit=admit, deadline=deadline, dismiss=dismiss)
            self._forget(sock)
            on_connection(sock, hello)
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

    def _forget(self, sock: socket.socket) -> None:
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


def format_address(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether a numeric address can only be reached from this host."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _bind(host: str, port: int, secret: bytes, deadline: Deadline) -> socket.socket:
    """Bind the first address of ``host`` that this machine has, IPv4 first, and listen."""
    where = format_address(host, port)
    failure: OSError | None = None
    try:
        found = resolve(host, port, deadline, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise RendezvousError(f"cannot listen at {where}: {error}") from error
    for family, kind, protocol, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        # Refused before it is bound, so that the port is not open for a moment.
        if not secret and not is_loopback(str(address[0])):
            raise _secret_needed(where)
        sock = socket.socket(family, kind, protocol)
        try:
            # A port in TIME_WAIT after a restart is free; a port with a listener still is not.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise RendezvousError(f"cannot listen at {where}: {failure}") from failure


def _secret_needed(where: str) -> AuthenticationError:
    return AuthenticationError(
        f"cannot listen at {where} without a job secret: other hosts can reach that address. Set "
        "FERRODIST_SECRET to the same value on every rank (`python -m ferrodist secret` prints a new one), "
        "or bind a loopback address."
    )


def _interrupt(sock: socket.socket) -> None:
    """End the system call that another thread makes on ``sock``, and leave the closing to that thread."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _reason(error: Exception) -> str:
    if isinstance(error, DistributedError):
        return error.message
    return "no complete handshake in time" if isinstance(error, TimeoutError) else str(error)
