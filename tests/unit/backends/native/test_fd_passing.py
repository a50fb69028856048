"""Passing of a descriptor on a host: which processes receive it, and which don't."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import threading
from types import SimpleNamespace

import pytest

from ferrodist.backends.native import fd_passing
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedTimeoutError, GroupAbortedError

_NONCE = b"s" * fd_passing.NONCE_BYTES
_GROUP = SimpleNamespace(failure=None, rank=0, name="g")


@contextlib.contextmanager
def _meeting():
    """A name, and a listener of that name."""
    name = secrets.token_bytes(16)
    with fd_passing.listen(name) as listener:
        yield name, listener


def _hand_out(listener, ranks, *, users=None, timeout=20.0, group=_GROUP):
    users = {os.geteuid()} if users is None else users
    reader, writer = os.pipe()
    try:
        fd_passing.send_fd(group, listener, _NONCE, reader, ranks=ranks, users=users, deadline=Deadline(timeout))
    finally:
        os.close(reader)
        os.close(writer)


def _fetch_in_thread(name, rank, found):
    def fetch():
        group = SimpleNamespace(failure=None, rank=rank, name="g")
        with fd_passing.make_socket() as sock:
            try:
                found[rank] = fd_passing.recv_fd(
                    group, sock, 0, name, _NONCE, user=os.geteuid(), deadline=Deadline(20.0)
                )
            except OSError as error:
                found[rank] = error

    thread = threading.Thread(target=fetch)
    thread.start()
    return thread


def _stranger(name, sent=None):
    sock = fd_passing.make_socket()
    sock.connect(fd_passing._address(name))
    if sent is not None:
        sock.sendall(sent)
    return sock


def test_strangers_hold_nobody_up():
    """Processes that send nothing, nonsense or another nonce, and those that close, get nothing; all ranks do."""
    found = {}
    with _meeting() as (name, listener), contextlib.ExitStack() as stack:
        for sent in (
            None,
            b"x",
            b"x" * 200,
            fd_passing._GREETING.pack(b"w" * 16, 1),
            fd_passing._GREETING.pack(_NONCE, 7),
        ):
            stack.enter_context(_stranger(name, sent))
        _stranger(name).close()
        threads = [_fetch_in_thread(name, rank, found) for rank in (1, 2)]
        _hand_out(listener, [1, 2])
        for thread in threads:
            thread.join()
    assert sorted(found) == [1, 2]
    for descriptor in found.values():
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)


def test_other_users_are_turned_away(monkeypatch):
    """A process of a user that no rank has is refused before it sends anything, and ranks come after it."""
    monkeypatch.setattr(fd_passing, "_ROOT", -1)
    found = {}
    with _meeting() as (name, listener):
        thread = _fetch_in_thread(name, 1, found)
        with pytest.raises(DistributedTimeoutError, match="rank 1 did not connect to rank 0"):
            _hand_out(listener, [1], users={os.geteuid() + 1}, timeout=0.3)
        thread.join()
    assert isinstance(found[1], ConnectionError)
    assert str(found[1]) == "rank 0 did not hand out the memory"


def test_a_lowest_rank_that_does_not_answer_is_named():
    """It listens, and is stopped before it passes the memory on."""
    group = SimpleNamespace(failure=None, rank=1, name="g")
    with (
        _meeting() as (name, _),
        fd_passing.make_socket() as sock,
        pytest.raises(DistributedTimeoutError, match="rank 0 did not answer rank 1 within") as caught,
    ):
        fd_passing.recv_fd(group, sock, 0, name, _NONCE, user=os.geteuid(), deadline=Deadline(0.1))
    assert caught.value.ranks == (0,)


def test_nothing_is_taken_from_another_user(monkeypatch):
    """A process that has taken the name of a lowest rank that has gone learns no nonce, and passes no memory."""
    monkeypatch.setattr(fd_passing, "_ROOT", -1)
    with _meeting() as (name, listener), fd_passing.make_socket() as sock:
        with pytest.raises(ConnectionError, match="rank 0 did not hand out the memory"):
            fd_passing.recv_fd(_GROUP, sock, 0, name, _NONCE, user=os.geteuid() + 1, deadline=Deadline(20.0))
        sock.close()
        with listener.accept()[0] as visitor:
            assert visitor.recv(100) == b""


def test_a_full_backlog_is_waited_for():
    """A rank that finds the backlog full tries again."""
    found = {}
    with _meeting() as (name, listener), contextlib.ExitStack() as stack:
        listener.listen(1)
        result = 0
        while result != errno.EAGAIN:
            sock = stack.enter_context(fd_passing.make_socket())
            sock.setblocking(False)
            result = sock.connect_ex(fd_passing._address(name))
        thread = _fetch_in_thread(name, 1, found)
        _hand_out(listener, [1])
        thread.join()
    os.close(found[1])


def test_the_end_of_the_group_ends_the_wait():
    """Neither side waits on when the group has failed; ranks notice a closed listener."""
    failed = SimpleNamespace(failure=GroupAbortedError("over"), rank=0, name="g")
    with _meeting() as (name, listener), fd_passing.make_socket() as sock:
        with pytest.raises(GroupAbortedError, match="over"):
            _hand_out(listener, [1], group=failed)
        with pytest.raises(GroupAbortedError, match="over"):
            fd_passing.recv_fd(failed, sock, 0, name, _NONCE, user=os.geteuid(), deadline=Deadline(20.0))
    found = {}
    _fetch_in_thread(name, 1, found).join()
    assert isinstance(found[1], ConnectionError)


def test_a_descriptor_that_does_not_fit_is_no_fault_of_the_other_side(monkeypatch):
    """Data that the system has cut off is reported of this process."""

    def receive(*_):
        return b"\0", [], socket.MSG_CTRUNC, None

    monkeypatch.setattr(socket, "recv_fds", receive)
    with _meeting() as (name, _), fd_passing.make_socket() as sock, pytest.raises(OSError, match="MSG_CTRUNC"):
        fd_passing.recv_fd(_GROUP, sock, 0, name, _NONCE, user=os.geteuid(), deadline=Deadline(20.0))
