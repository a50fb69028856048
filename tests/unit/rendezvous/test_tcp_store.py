"""The TCP store: threads of one client, hostile requests, and a server that goes away."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import msgspec
import pytest

from ferrodist.deadline import Deadline
from ferrodist.errors import (
    AuthenticationError,
    DistributedTimeoutError,
    InvalidRankError,
    InvalidWorldSizeError,
    ProtocolError,
    RendezvousError,
)
from ferrodist.rendezvous import Hello, TcpStore, TcpStoreServer, auth, connect, tcp_store


@pytest.fixture
def server():
    """A server for a job of two ranks."""
    server = TcpStoreServer("127.0.0.1", 0, secret=b"s", job="j", world_size=2)
    yield server
    server.close()


@pytest.fixture
def client(server):
    """Rank 1's client."""
    client = open_client(server)
    yield client
    client.close()


def open_client(server, *, rank=1, world_size=2, job="j", timeout=20.0):
    return TcpStore(server.address, secret=b"s", job=job, rank=rank, world_size=world_size, timeout=timeout)


def raw(server, purpose="store"):
    """A proven connection on which a test sends what it likes."""
    hello = Hello(purpose=purpose, job="j", rank=0, world_size=2, group="")
    return connect(server.host, server.port, secret=b"s", hello=hello, deadline=Deadline(20))


def reply_to(sock, payload):
    sock.send_frame(payload, Deadline(20))
    return msgspec.msgpack.decode(sock.receive_frame(1 << 20, Deadline(20)))


def test_waits_do_not_stall_other_threads(server, client, in_threads, until):
    """While several threads wait, others of the same client go on, and their sets end the waits."""

    def release():
        until(lambda: len(server.store._waiters) == 6)
        for index in range(6):
            client.set(f"k{index}", b"%d" % index)
        return client.add("n", 1)

    waits = [lambda index=index: client.get(f"k{index}") for index in range(6)]
    assert in_threads(*waits, release) == [*(b"%d" % index for index in range(6)), 1]
    until(lambda: len(server._connections) <= tcp_store._MAX_IDLE_CONNECTIONS)


def test_the_server_sees_what_clients_set(server, client):
    """The serving process reads and writes the same keys without a connection."""
    client.set("k", b"v")
    assert server.store.get("k") == b"v"
    server.store.set("l", b"w")
    assert client.get("l") == b"w"
    assert client.local_host == "127.0.0.1"


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"job": "other"}, RendezvousError, "job 'other'.*serves job 'j'"),
        ({"world_size": 3}, InvalidWorldSizeError, "world size 3, rank 0 with 2"),
        ({"rank": 2}, InvalidRankError, "rank 2 is not in a job of 2"),
    ],
)
def test_foreign_clients_are_refused_with_a_reason(server, client, until, options, kind, message):
    """A client of another job, size or rank range is refused at once, and the others are served."""
    with pytest.raises(kind, match=message):
        open_client(server, **options)
    client.set("k", b"v")
    until(lambda: server.rejections)
    assert any(str(value) in server.rejections[0] for value in options.values())


def test_a_group_connection_is_not_a_store_connection(server):
    """A connection that is meant for a group is refused."""
    with pytest.raises(ProtocolError, match=r"a store listens"):
        raw(server, purpose="group")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1",
        msgspec.msgpack.encode([99, ["k"], 0.0]),
        msgspec.msgpack.encode([1, "k", 0.0]),
        b"\x93\x01\x91\xa2\xff\xfe\xcb" + bytes(8),
        b"\x91" * 5000,
        b"\xff\xff\xff\xff",
        (tcp_store._MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
    ],
    ids=["empty", "no msgpack", "http", "operation", "types", "bad text", "nested", "4 GiB", "one too many"],
)
def test_a_request_that_cannot_be_read_ends_its_connection_only(server, client, request_bytes):
    """A malformed or oversized request is answered with ProtocolError, from its header alone, and not served."""
    with raw(server) as sock:
        if request_bytes[:1] == b"\xff" or len(request_bytes) == 4:  # a length alone
            sock.sendall(request_bytes)
            _, error = msgspec.msgpack.decode(sock.receive_frame(1 << 20, Deadline(20)))
        else:
            _, error = reply_to(sock, request_bytes)
        assert error[0] == "ProtocolError"
        assert sock.recv(1) == b""
    client.set("k", b"v")
    assert client.get("k") == b"v"


@pytest.mark.parametrize(
    ("request_fields", "name"),
    [
        ([1, [], 0.0], "ProtocolError"),
        ([2, ["a", "b"], 0.0], "ProtocolError"),
        ([1, [""], 0.0], "ValueError"),
        ([1, ["k" * 5000], 0.0], "ValueError"),
        ([2, ["k"], -1.0], "ValueError"),
        ([2, ["k"], float("nan")], "ValueError"),
        ([3, ["k"] * 1000, 0.0], "DistributedTimeoutError"),
    ],
)
def test_a_request_with_wrong_arguments_keeps_its_connection(server, request_fields, name):
    """A request that can be read but not performed is answered with an error, and the next one is served."""
    with raw(server) as sock:
        _, error = reply_to(sock, msgspec.msgpack.encode(request_fields))
        assert error[0] == name
        assert reply_to(sock, msgspec.msgpack.encode([4, ["n"], 0.0, b"", b"", 2])) == [b"2", None]


def test_slow_and_broken_clients_do_not_block_others(server, client, until):
    """A client that stops inside a request, or leaves inside one, costs its own connection."""
    with raw(server) as slow, raw(server) as leaver:
        slow.sendall(b"\0\0")
        leaver.sendall(b"\0\0\0\x64" + b"x" * 50)
        leaver.shutdown(socket.SHUT_RDWR)
        client.set("k", b"v")
        until(lambda: len(server._connections) == 2)
    until(lambda: len(server._connections) == 1)


def test_a_client_that_leaves_while_it_waits_is_noticed(server, until, monkeypatch):
    """The server's thread of a wait ends soon after its client has gone, not at the end of the wait."""
    monkeypatch.setattr(tcp_store, "_PEER_CHECK_PERIOD", 0.02)
    with raw(server) as sock:
        sock.send_frame(msgspec.msgpack.encode([2, ["never"], 1e6]), None)
        until(lambda: server.store._waiters)
    until(lambda: not server._connections)


def test_too_many_connections_are_refused(until):
    """Past the limit a client is refused with the limit named, and let in once another has left."""
    server = TcpStoreServer("127.0.0.1", 0, secret=b"s", job="j", world_size=2, max_connections=2)
    first, second = open_client(server), open_client(server)
    until(lambda: len(server._connections) == 2)
    with pytest.raises(RendezvousError, match=r"2 connections, its limit"):
        open_client(server)
    first.set("k", b"v")
    second.close()
    until(lambda: len(server._connections) == 1)
    third = open_client(server)
    assert third.get("k") == b"v"
    third.close()
    first.close()
    server.close()


def test_a_lack_of_threads_frees_the_port(monkeypatch, free_port):
    """A server that can start no thread says which limit was hit, and listens no more."""
    port = free_port()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RendezvousError, match=r"cannot listen at 127.0.0.1:\d+: .*start no more threads"):
            TcpStoreServer("127.0.0.1", port, secret=b"s", job="j", world_size=2)
    TcpStoreServer("127.0.0.1", port, secret=b"s", job="j", world_size=2).close()


def test_a_lack_of_descriptors_is_no_loss_of_the_server(server, client, in_threads, until, monkeypatch):
    """A call that can open no connection fails alone, and says why: others go on, as do later ones."""

    def call():
        until(lambda: server.store._waiters)
        error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        with monkeypatch.context() as patch:
            patch.setattr(auth, "_attempt", mock.Mock(side_effect=error))
            with pytest.raises(RendezvousError, match=r"no further connection .* see `ulimit -n`"):
                client.set("k", b"early")
        client.set("k", b"v")

    assert in_threads(lambda: client.get("k"), call) == [b"v", None]


def test_pending_and_later_calls_raise_when_the_server_closes(server, client, in_threads, until):
    """A server that closes ends each call that waits, and all later ones, saying that it went away."""

    def close():
        until(lambda: len(server.store._waiters) == 2)
        server.close()

    calls = [lambda: client.get("a"), lambda: client.wait(["b"]), close]
    for error in in_threads(*calls)[:2]:
        assert isinstance(error, RendezvousError)
        assert "went away" in error.message
        assert error.ranks == (0,)
    started = time.monotonic()
    for call in (lambda: client.set("k", b""), lambda: client.get("k")):
        with pytest.raises(RendezvousError, match=r"went away"):
            call()
    assert time.monotonic() - started < 2


_SERVE = """
import sys
from ferrodist.rendezvous import TcpStoreServer
server = TcpStoreServer("127.0.0.1", 0, secret=b"s", job="j", world_size=2)
print(server.address, flush=True)
sys.stdin.read()
"""


def test_a_server_that_is_killed(in_threads):
    """A killed server is reported by calls in progress and later ones, long before their timeouts."""
    command = [sys.executable, "-c", _SERVE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        address = process.stdout.readline().decode().strip()
        client = TcpStore(address, secret=b"s", job="j", rank=1, world_size=2, timeout=60)
        blocked = threading.Event()

        def kill():
            assert blocked.wait(10)
            process.kill()

        def get():
            blocked.set()
            client.get("never")

        error = in_threads(get, kill)[0]
        assert isinstance(error, RendezvousError)
        assert "went away" in error.message
        with pytest.raises(RendezvousError, match=r"went away"):
            client.add("n", 1)
        client.close()


def test_a_server_that_is_stopped_costs_the_timeout_and_no_more():
    """A server that does not answer at all is told from a missing key: the error carries rank 0."""
    command = [sys.executable, "-c", _SERVE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        address = process.stdout.readline().decode().strip()
        client = TcpStore(address, secret=b"s", job="j", rank=1, world_size=2, timeout=60)
        process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(DistributedTimeoutError, match=r"did not answer GET k") as caught:
            client.get("k", timeout=0.1)
        assert time.monotonic() - started < 2
        assert caught.value.ranks == (0,)
        with pytest.raises(DistributedTimeoutError, match=r"could not connect") as caught:  # the first one was closed
            client.get("k", timeout=0.1)
        assert caught.value.ranks == (0,)
        process.send_signal(signal.SIGCONT)
        client.set("k", b"v")
        assert client.get("k") == b"v"
        client.close()
        process.kill()


def test_a_server_closed_by_one_of_its_own_threads(server, client, monkeypatch, until):
    """A thread that serves a connection can close the server: it does not wait for itself."""
    closed = []

    def close(*_):
        server.close()
        closed.append(threading.current_thread().name)

    monkeypatch.setattr(server.store, "set", close)
    with pytest.raises(RendezvousError, match=r"went away"):
        client.set("k", b"v")
    until(lambda: closed)  # the client hears of it while the server is still closing
    assert closed == ["ferrodist-store-1"]


def test_close_lingers_until_the_clients_have_gone(server, in_threads, until):
    """A lingering close serves on, and ends with the last client rather than with the time."""
    client = open_client(server)
    until(lambda: server._connections)  # it takes the connection when the client has it already

    def leave():
        until(lambda: server._changed._waiters)
        client.set("k", b"v")
        client.close()

    started = time.monotonic()
    assert in_threads(lambda: server.close(linger=60), leave) == [None, None]
    assert time.monotonic() - started < 30


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_cannot_use_the_parents_store(server, client, until):
    """In a forked child the client says to open another one, and the child holds no connection open."""
    client.set("k", b"v")
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(write_end)
            client.get("k")
        except RendezvousError as error:
            code = 0 if "forked" in error.message else 2
            client.close()
            os.read(read_end, 1)
        finally:
            os._exit(code)
    os.close(read_end)
    try:
        assert client.get("k") == b"v"
        client.close()
        until(lambda: not server._connections)
    finally:
        os.close(write_end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("tamper", ["a bit", "repeat", "reflect"])
def test_a_request_that_was_changed_on_its_way(server, client, tamper):
    """The server refuses it, says so, and serves others; nothing of it is done."""
    with raw(server) as sock:
        request = msgspec.msgpack.encode([1, ["k"], 0.0, b"v"])
        tag = sock.session.outgoing.tag(len(request).to_bytes(4, "big"), request)
        if tamper == "a bit":
            request = request.replace(b"v", b"w")
        elif tamper == "repeat":
            sock.send_frame(msgspec.msgpack.encode([1, ["other"], 0.0, b"v"]), None)
            sock.receive_frame(100, Deadline(20))
        else:
            tag = sock.session.incoming.tag(len(request).to_bytes(4, "big"), request)
        sock.sendall(len(request).to_bytes(4, "big") + tag + request)
        _, error = msgspec.msgpack.decode(sock.receive_frame(1 << 20, Deadline(20)))
        assert error[0] == "AuthenticationError"
        assert sock.recv(1) == b""
    with pytest.raises(DistributedTimeoutError):
        client.get("k", timeout=0)


def test_an_answer_that_was_changed_on_its_way(server, client, monkeypatch):
    """The client raises AuthenticationError, which names the store and the call, and not another value."""
    client.set("k", b"v")

    def send(sock, reply):
        payload = msgspec.msgpack.encode(reply)
        length = len(payload).to_bytes(4, "big")
        tag = sock.session.outgoing.tag(length, payload)
        sock.session.outgoing.advance()
        sock.sendall(length + tag + payload.replace(b"v", b"w"))

    monkeypatch.setattr(tcp_store, "_send", send)
    with pytest.raises(AuthenticationError, match=r"the store of rank 0 at .* its answer to GET k can't be trusted"):
        client.get("k")
    monkeypatch.undo()
    assert client.get("k") == b"v"
