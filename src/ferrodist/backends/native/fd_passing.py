"""Passing the descriptor of an anonymous shared memory from a host's lowest rank to the others, over a Unix socket.

Any process of the host can find the socket and connect to it, and can take its name once it is closed. So both sides
accept only processes of the users that ranks have announced as their own, and the descriptor goes to a process that
knows the nonce, which only ranks do.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import secrets
import selectors
import socket
import struct
import time
from typing import TYPE_CHECKING

from ferrodist.errors import DistributedTimeoutError, ranks_text

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline

NONCE_BYTES = 16
_POLL_INTERVAL_SECONDS = 0.05
_RETRY_INTERVAL_SECONDS = 0.005
_BACKLOG = 1024
_GREETING = struct.Struct(f"<{NONCE_BYTES}sI")  # nonce, rank
_CREDENTIALS = struct.Struct("=iII")  # `struct ucred`: process, user, group
_ROOT = 0


def make_socket() -> socket.socket:
    """Make the socket that a rank connects with."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def listen(name: bytes) -> socket.socket:
    """Make the socket that the lowest rank listens on."""
    listener = make_socket()
    try:
        listener.bind(_address(name))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def send_fd(
    group: Backend,
    listener: socket.socket,
    nonce: bytes,
    descriptor: int,
    *,
    ranks: Sequence[int],
    users: Collection[int],
    deadline: Deadline,
) -> None:
    """Pass the memory to the other ranks of the host; its lowest rank calls this.

    They are processes of ``users`` and must present ``nonce``. Raises DistributedTimeoutError if one did not come,
    OSError if there are no descriptors left.
    """
    missing = set(ranks)
    with selectors.PollSelector() as selector, contextlib.ExitStack() as stack:
        selector.register(listener, selectors.EVENT_READ)
        while missing:
            for key, _ in selector.select(min(_POLL_INTERVAL_SECONDS, deadline.remaining())):
                if key.fileobj is listener:
                    connection = _accept(listener, users)
                    if connection is not None:
                        stack.enter_context(connection)
                        selector.register(connection, selectors.EVENT_READ)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    selector.unregister(key.fileobj)
                    with key.fileobj as connection:
                        missing.discard(_serve(connection, nonce, descriptor, missing))
            _check(group, sorted(missing), deadline, "connect to")


def _accept(listener: socket.socket, users: Collection[int]) -> socket.socket | None:
    """Accept a connection, or None if its process is another user's."""
    try:
        connection = listener.accept()[0]
    except BlockingIOError:  # it has been closed again
        return None
    connection.setblocking(False)
    if _is_stranger(connection, users):
        connection.close()
        return None
    return connection


def _is_stranger(sock: socket.socket, users: Collection[int]) -> bool:
    """Return whether the peer's process is another user's."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return user != _ROOT and user not in users


def _serve(connection: socket.socket, nonce: bytes, descriptor: int, missing: Collection[int]) -> int:
    """Answer a process; returns the rank that received the memory, or -1."""
    try:
        greeting = connection.recv(_GREETING.size + 1)
        if len(greeting) != _GREETING.size:
            return -1
        presented, rank = _GREETING.unpack(greeting)
        if not secrets.compare_digest(presented, nonce) or rank not in missing:
            return -1
        connection.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
    except OSError:  # it has gone; the others still come
        return -1
    return int(rank)


def recv_fd(
    group: Backend, sock: socket.socket, leader: int, name: bytes, nonce: bytes, *, user: int, deadline: Deadline
) -> int:
    """Receive the memory's descriptor, which the caller owns; every other rank of the host calls this.

    ``leader`` is the lowest rank of this host, a process of ``user`` that listens at ``name``. Raises ConnectionError
    if it passes nothing on, or another process has its name; DistributedTimeoutError if it did not answer; OSError if
    there is no descriptor left.
    """
    try:
        _connect(group, sock, leader, name, deadline)
        if _is_stranger(sock, (user,)):
            raise ConnectionRefusedError
        sock.sendall(_GREETING.pack(nonce, group.rank))
        while True:
            sock.settimeout(min(_POLL_INTERVAL_SECONDS, deadline.remaining()))
            try:
                data, descriptors, flags, _ = socket.recv_fds(sock, 1, 1)
            except (TimeoutError, BlockingIOError):
                _check(group, [leader], deadline, "answer")
                continue
            break
    except ConnectionError:  # the same words on all ranks: the lowest one says why
        raise ConnectionError(f"rank {leader} did not hand out the memory") from None
    if flags & socket.MSG_CTRUNC:
        os.close(os.dup(sock.fileno()))  # raises the system's reason, unless it no longer applies
        raise OSError("the system did not let it take the memory's descriptor (MSG_CTRUNC)")
    if not data or not descriptors:
        raise ConnectionError(f"rank {leader} did not hand out the memory")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def _connect(group: Backend, sock: socket.socket, leader: int, name: bytes, deadline: Deadline) -> None:
    sock.setblocking(False)
    while (error := sock.connect_ex(_address(name))) == errno.EAGAIN:  # the backlog is full
        _check(group, [leader], deadline, "take the connection of")
        time.sleep(min(_RETRY_INTERVAL_SECONDS, deadline.remaining()))
    if error:
        raise OSError(error, os.strerror(error))  # of the subclass of its errno, as ConnectionRefusedError


def _check(group: Backend, missing: Sequence[int], deadline: Deadline, due: str) -> None:
    """Raise if the group has ended, or if no time is left for the ranks ``missing`` to do what is ``due``."""
    if not missing:
        return
    if group.failure is not None:
        raise group.failure.fresh()
    if deadline.expired:
        raise DistributedTimeoutError(
            f"sharing memory in group {group.name!r}: {ranks_text(missing)} did not {due} rank {group.rank}"
            f" within {deadline.timeout:g} s. Look at what is going on there, or pass a larger timeout. Reported by"
            f" rank {group.rank}.",
            ranks=tuple(missing),
        )


def _address(name: bytes) -> bytes:
    return b"\0ferrodist-" + name.hex().encode()
