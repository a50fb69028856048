"""The listener among strangers: real clients are served whatever the others do."""

import contextlib
import errno
import os
import socket
import sys
import time
from unittest import mock

import msgspec
import pytest

from ferrodist.deadline import Deadline
from ferrodist.errors import AuthenticationError, RendezvousError
from ferrodist.rendezvous import Hello, Listener, auth, connect, listener, sockets

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


def intro(role=b"C", version=auth.PROTOCOL_VERSION):
    return auth._INTRO.pack(auth._MAGIC, role, version)


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
def test_ranks_are_served_while_strangers_stay_connected(serving, until, data):
    """Idle connections of strangers do not block a rank, and none is handed over."""
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
    """The newest 32 rejections are kept, with address and reason."""
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


def test_silent_clients_are_evicted_first(serving, until, monkeypatch):
    """A distant rank keeps its slot, however many silent strangers connect."""
    monkeypatch.setattr(listener, "_MAX_HANDSHAKES", 4)
    monkeypatch.setattr(listener, "_EVICTION_AGES", dict.fromkeys(listener._EVICTION_AGES, 0.0))
    server, admitted = serving
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(stranger(server, intro()))
        until(lambda: [one.progress for one in server._handshakes.values()] == [auth.HandshakeProgress.SPOKEN])
        for _ in range(30):
            stack.enter_context(stranger(server))
        until(lambda: len(server.rejections) >= 20)
        rank.settimeout(20)
        nonces = bytes(32) + rank.recv(auth._INTRO.size + 32, socket.MSG_WAITALL)[-32:]
        rank.sendall(bytes(32) + auth._proof(b"s", b"client", nonces))
        assert rank.recv(1) == auth._ACCEPTED
    assert not admitted


def test_the_order_of_eviction(serving):
    """First silent clients, then those of the most frequent address, then the oldest; never proven ones."""
    server, _ = serving
    silent, spoken, proven = auth.HandshakeProgress
    entries = [("a", proven), ("near", spoken), ("far", spoken), ("near", spoken), ("far", silent), ("near", silent)]
    for number, (source, progress) in enumerate(entries):
        server._handshakes[number] = listener._Handshake(source=source, deadline=Deadline(5), progress=progress)
    order = []
    while (number := server._eviction_candidate()) is not None:
        order.append(number)
        del server._handshakes[number]
    assert order == [5, 4, 1, 2, 3]
    server._handshakes.clear()


def test_a_changed_address_is_detected(serving):
    """A rank with another address than the server has published is refused, whatever its route."""
    server, admitted = serving
    told = msgspec.structs.replace(HELLO, address=server.address)
    connect(server.host, server.port, secret=b"s", hello=told, deadline=Deadline(20)).close()
    changed = msgspec.structs.replace(HELLO, address="127.0.0.1:1")
    with pytest.raises(AuthenticationError, match=r"was told that this group is at 127\.0\.0\.1:1, but it is at"):
        connect(server.host, server.port, secret=b"s", hello=changed, deadline=Deadline(20))
    assert len(admitted) <= 1


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
def test_without_a_secret_only_loopback_is_bound(host):
    """Without a secret other addresses are refused, and the message says how to set one."""
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


def _named(monkeypatch, *addresses):
    """Have every name stand for these addresses."""

    def resolve(host, port, deadline, **options):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(sockets, "resolve", resolve)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has all of 127.0.0.0/8")
def test_every_address_of_a_name_is_bound(monkeypatch):
    """Nobody else can listen at an address that ranks would dial, and ranks are served at each."""
    _named(monkeypatch, "127.0.0.1", "127.0.0.2", "192.0.2.1")  # the last is another host's
    with contextlib.closing(Listener("name", 0, secret=b"s")) as server:
        admitted = []
        server.serve(lambda hello: None, lambda sock, hello: admitted.append(sock.close()))
        for address in ("127.0.0.1", "127.0.0.2"):
            connect(address, server.port, secret=b"s", hello=HELLO, deadline=Deadline(20)).close()
            with pytest.raises(OSError, match="in use"):
                socket.create_server((address, server.port))
    for address in ("127.0.0.1", "127.0.0.2"):
        socket.create_server((address, server.port)).close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has all of 127.0.0.0/8")
def test_a_name_of_which_somebody_has_an_address(monkeypatch):
    """If another process listens at one of a name's addresses, rank 0 does not start, and names it."""
    _named(monkeypatch, "127.0.0.1", "127.0.0.2")
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RendezvousError, match=rf"its address 127\.0\.0\.2:{port}\): .*in use"):
            Listener("name", port, secret=b"s")
        socket.create_server(("127.0.0.1", port)).close()  # and leaves no other bound
        with contextlib.closing(Listener("name", 0, secret=b"s")) as server:
            assert server.port != port


def test_a_name_that_others_reach_needs_a_secret(monkeypatch):
    """Without a secret no address of the name may be one that other hosts reach."""
    _named(monkeypatch, "127.0.0.1", "192.0.2.1")
    with pytest.raises(AuthenticationError, match="FERRODIST_SECRET"):
        Listener("name", 0, secret=b"")


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


def test_a_lack_of_descriptors_frees_the_port(monkeypatch, free_port):
    """A listener that cannot be completed says which limit was hit, and listens no more."""
    port = free_port()
    shortage = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", mock.Mock(side_effect=shortage))
        with pytest.raises(RendezvousError, match=r"cannot listen at 127.0.0.1:\d+: .*ulimit -n") as caught:
            Listener("127.0.0.1", port, secret=b"s")
    Listener("127.0.0.1", port, secret=b"s").close()
    assert caught.value.__cause__ is shortage


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
