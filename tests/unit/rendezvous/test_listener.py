"""The listener among strangers: real clients are served whatever the others do."""

import contextlib
import os
import socket
import time

import pytest

from ferrodist.deadline import Deadline
from ferrodist.errors import AuthenticationError, RendezvousError
from ferrodist.rendezvous import Hello, Listener, connect, handshake, listener

HELLO = Hello(purpose="group", job="j", rank=1, world_size=2, group="g")


def has_ipv6_loopback():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.fixture
def serving():
    """A listener that keeps what it is handed, and its connections."""
    admitted = []
    server = Listener("127.0.0.1", 0, secret=b"s")
    server.serve(lambda hello: None, lambda sock, hello: admitted.append((sock, hello)))
    yield server, admitted
    server.close()
    for sock, _ in admitted:
        sock.close()


def meet(server, *, secret=b"s", timeout=20.0):
    sock = connect(server.host, server.port, secret=secret, hello=HELLO, deadline=Deadline(timeout))
    sock.close()


def stranger(server, data=b""):
    sock = socket.create_connection((server.host, server.port))
    sock.sendall(data)
    return sock


def intro(role=b"C", version=handshake.PROTOCOL_VERSION):
    return handshake._INTRO.pack(handshake._MAGIC, role, version)


HOSTILE = {
    "silence": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": bytes(range(256)) * 64,
    "truncated intro": intro()[:5],
    "intro alone": intro(),
    "server's role": intro(b"S"),
    "old version": intro(version=0),
    "zero proof": intro() + bytes(64),
    "truncated proof": intro() + bytes(40),
    "oversized hello": intro() + bytes(64) + b"\xff" * 4,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_real_clients_are_served_while_strangers_hold_on(serving, until, data):
    """Connections of strangers, left open, do not hold up a real client, and none is handed over."""
    server, admitted = serving
    strangers = [stranger(server, data) for _ in range(5)]
    try:
        meet(server)
        meet(server)
    finally:
        for sock in strangers:
            sock.close()
    until(lambda: len(admitted) == 2)  # a client is told a moment before the server is
    assert [hello for _, hello in admitted] == [HELLO, HELLO]


def test_rejections_name_the_peer_and_the_reason(serving, until):
    """What was turned away is kept, the newest 32, with address and reason."""
    server, _ = serving
    with pytest.raises(AuthenticationError):
        meet(server, secret=b"wrong")
    until(lambda: server.rejections)
    assert server.rejections[0].startswith("127.0.0.1:")
    assert server.rejections[0].endswith(": wrong job secret")
    with stranger(server, b"GET / HTTP/1.0\r\n\r\n"):
        until(lambda: len(server.rejections) == 2)
    assert "does not speak ferrodist" in server.rejections[1]
    for count in range(40):
        with stranger(server, intro(version=9)):
            until(lambda count=count: len(server.rejections) == min(32, count + 3))
    until(lambda: all("version 9" in reason for reason in server.rejections))


def test_more_strangers_than_handshakes(serving, until):
    """With every handshake slot taken by silence the oldest give way, so a real client gets through."""
    server, admitted = serving
    strangers = [stranger(server) for _ in range(listener._MAX_HANDSHAKES + 40)]
    try:
        started = time.monotonic()
        meet(server)
        assert time.monotonic() - started < listener._HANDSHAKE_TIMEOUT
        assert len(server._handshakes) <= listener._MAX_HANDSHAKES
    finally:
        for sock in strangers:
            sock.close()
    until(lambda: len(admitted) == 1)


def test_silence_ends_at_the_limit(serving, until, monkeypatch):
    """A connection that says nothing is closed at the limit, with the reason kept."""
    monkeypatch.setattr(listener, "_HANDSHAKE_TIMEOUT", 0.1)
    server, _ = serving
    with stranger(server) as sock:
        sock.settimeout(20)
        assert sock.recv(1) == b""
    until(lambda: server.rejections)
    assert "no complete handshake in time" in server.rejections[0]


def test_close_is_prompt_with_handshakes_under_way(serving, until):
    """Closing does not wait for silent peers, leaves no thread, and may be repeated."""
    server, _ = serving
    with stranger(server), stranger(server):
        until(lambda: len(server._handshakes) == 2)
        started = time.monotonic()
        server.close()
        assert time.monotonic() - started < 2
    server.close()
    with pytest.raises(ConnectionRefusedError):
        stranger(server)


def test_a_listener_that_never_served_closes():
    """Closing before serving frees the port."""
    server = Listener("127.0.0.1", 0, secret=b"")
    server.close()
    Listener("127.0.0.1", server.port, secret=b"").close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_no_secret_no_open_door(host):
    """Without a secret only loopback may be bound, and the message says how to set one."""
    with pytest.raises(AuthenticationError, match=r"FERRODIST_SECRET.*python -m ferrodist secret"):
        Listener(host, 0, secret=b"")
    with socket.create_server(("0.0.0.0", 0)) as sock, pytest.raises(AuthenticationError):
        Listener("", 0, secret=b"", sock=sock)


def test_binding():
    """Names and addresses are bound, a taken port and a foreign host are errors."""
    for host in ("127.0.0.1", "localhost"):
        with contextlib.closing(Listener(host, 0, secret=b"")) as server:
            assert server.port > 0
            assert server.address.endswith(f":{server.port}")
            with pytest.raises(RendezvousError, match=rf"cannot listen at {host}:{server.port}.*in use"):
                Listener(host, server.port, secret=b"")
    with contextlib.closing(Listener("0.0.0.0", 0, secret=b"s")) as server:
        assert server.host == "0.0.0.0"
    with pytest.raises(RendezvousError, match=r"cannot listen at 192.0.2.1:0"):
        Listener("192.0.2.1", 0, secret=b"s")


def test_a_name_that_does_not_resolve_costs_the_deadline(silent_name_server):
    """A name server that does not answer cannot hold a listener past its deadline."""
    with pytest.raises(RendezvousError, match=r"cannot listen at stuck.invalid:0.*not be resolved in time"):
        Listener(silent_name_server, 0, secret=b"s", deadline=Deadline(0.1))


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback address")
def test_ipv6():
    """An IPv6 listener has a bracketed address that clients can use."""
    server = Listener("::1", 0, secret=b"")
    admitted = []
    server.serve(lambda hello: None, lambda sock, hello: admitted.append(sock))
    with contextlib.closing(server):
        assert server.address == f"[::1]:{server.port}"
        meet(server, secret=b"")
    admitted[0].close()


def test_taking_over_a_socket():
    """A bound, listening socket is used as it is, and closed with the listener."""
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    admitted = []
    server = Listener("ignored", 0, secret=b"", sock=sock)
    server.serve(lambda hello: None, lambda sock, hello: admitted.append(sock))
    assert (server.host, server.port) == ("127.0.0.1", port)
    meet(server, secret=b"")
    server.close()
    assert sock.fileno() == -1
    admitted[0].close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_holds_nothing_open(serving):
    """After the parent closes, neither the port nor a connection lives on in a child that was forked before."""
    server, _ = serving
    client = connect(server.host, server.port, secret=b"s", hello=HELLO, deadline=Deadline(20))
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0 if client.fileno() == -1 else 1)
    os.close(read_end)
    try:
        server.close()
        client.close()
        Listener("127.0.0.1", server.port, secret=b"s").close()
    finally:
        os.close(write_end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
