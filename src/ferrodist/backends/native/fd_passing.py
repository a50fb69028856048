"""How the lowest rank of a host hands a memory without a name to the others: over a Unix socket.

Any process of the host can find the socket and connect to it, and take its name once it is closed. Who is let in, and
from whom a memory is taken, is a process of a user that a rank has told to be its own; the memory gets who shows the
nonce that only ranks have.
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
_POLL_SECONDS = 0.05
_FULL_SECONDS = 0.005
_BACKLOG = 1024
_GREETING = struct.Struct(f"<{NONCE_BYTES}sI")  # nonce, rank
_CREDENTIALS = struct.Struct("=iII")  # `struct ucred`: process, user, group
_ROOT = 0


def make_socket() -> socket.socket:
    """What a rank connects with."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def listen(name: bytes) -> socket.socket:
    """What the lowest rank waits at."""
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
    """The lowest rank of a host: give the memory to the others.

    Args:
        group: The group.
        listener: From `listen`.
        nonce: What ranks show.
        descriptor: Of the memory.
        ranks: Who gets it.
        users: Whose processes they are.
        deadline: For all of it.

    Raises:
        DistributedTimeoutError: A rank did not come.
        OSError: There are no descriptors left.
    """
    missing = set(ranks)
    with selectors.PollSelector() as selector, contextlib.ExitStack() as stack:
        selector.register(listener, selectors.EVENT_READ)
        while missing:
            for key, _ in selector.select(min(_POLL_SECONDS, deadline.remaining())):
                if key.fileobj is listener:
                    visitor = _accept(listener, users)
                    if visitor is not None:
                        stack.enter_context(visitor)
                        selector.register(visitor, selectors.EVENT_READ)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    selector.unregister(key.fileobj)
                    with key.fileobj as visitor:
                        missing.discard(_serve(visitor, nonce, descriptor, missing))
            _check(group, sorted(missing), deadline)


def _accept(listener: socket.socket, users: Collection[int]) -> socket.socket | None:
    """Who has come, unless it is a stranger."""
    try:
        visitor = listener.accept()[0]
    except BlockingIOError:  # it has gone again
        return None
    visitor.setblocking(False)
    if _is_stranger(visitor, users):
        visitor.close()
        return None
    return visitor


def _is_stranger(sock: socket.socket, users: Collection[int]) -> bool:
    """Whether the process on the other side is of another user."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return user != _ROOT and user not in users


def _serve(visitor: socket.socket, nonce: bytes, descriptor: int, missing: Collection[int]) -> int:
    """Answer what a process has sent; returns the rank that has got the memory, or -1."""
    try:
        greeting = visitor.recv(_GREETING.size + 1)
        if len(greeting) != _GREETING.size:
            return -1
        shown, rank = _GREETING.unpack(greeting)
        if not secrets.compare_digest(shown, nonce) or rank not in missing:
            return -1
        visitor.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
    except OSError:  # that one has gone: the others come all the same
        return -1
    return int(rank)


def recv_fd(
    group: Backend, sock: socket.socket, leader: int, name: bytes, nonce: bytes, *, user: int, deadline: Deadline
) -> int:
    """Every other rank: get the memory's descriptor, which is the caller's.

    Args:
        group: The group.
        sock: From `make_socket`.
        leader: The lowest rank of this host.
        name: Of its socket.
        nonce: What to show there.
        user: Whose process the lowest rank is.
        deadline: For all of it.

    Raises:
        ConnectionError: The lowest rank hands out nothing, or somebody else has its name.
        DistributedTimeoutError: It did not answer.
        OSError: There is no descriptor left.
    """
    try:
        _connect(group, sock, leader, name, deadline)
        if _is_stranger(sock, (user,)):
            raise ConnectionRefusedError
        sock.sendall(_GREETING.pack(nonce, group.rank))
        while True:
            sock.settimeout(min(_POLL_SECONDS, deadline.remaining()))
            try:
                data, descriptors, flags, _ = socket.recv_fds(sock, 1, 1)
            except (TimeoutError, BlockingIOError):
                _check(group, [leader], deadline)
                continue
            break
    except ConnectionError:  # the same words on all ranks: it is for the lowest one to say why
        raise ConnectionError(f"rank {leader} did not hand out the memory") from None
    if flags & socket.MSG_CTRUNC:
        os.close(os.dup(sock.fileno()))  # raises what the system has not told here, unless it has changed since
        raise OSError("the system did not let it take the memory's descriptor (MSG_CTRUNC)")
    if not data or not descriptors:
        raise ConnectionError(f"rank {leader} did not hand out the memory")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def _connect(group: Backend, sock: socket.socket, leader: int, name: bytes, deadline: Deadline) -> None:
    sock.setblocking(False)
    while (error := sock.connect_ex(_address(name))) == errno.EAGAIN:  # many come at the same time: the backlog is full
        _check(group, [leader], deadline)
        time.sleep(min(_FULL_SECONDS, deadline.remaining()))
    if error:
        raise OSError(error, os.strerror(error))  # of the class of its number, as ConnectionRefusedError


def _check(group: Backend, missing: Sequence[int], deadline: Deadline) -> None:
    """Raise when the group has ended, or when there is no time left for ``missing``."""
    if not missing:
        return
    if group.failure is not None:
        raise group.failure.fresh()
    if deadline.expired:
        raise DistributedTimeoutError(
            f"sharing memory in group {group.name!r}: {ranks_text(missing)} did not meet rank {group.rank} for it"
            f" within {deadline.timeout:g} s. Look at what is going on there, or pass a larger timeout. Reported by"
            f" rank {group.rank}.",
            ranks=tuple(missing),
        )


def _address(name: bytes) -> bytes:
    return b"\0ferrodist-" + name.hex().encode()
