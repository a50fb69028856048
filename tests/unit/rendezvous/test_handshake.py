"""The handshake: both directions, and each way in which it can fail."""

import contextlib
import errno
import socket
import threading
import time

import pytest

from ferrodist.deadline import Deadline
from ferrodist.errors import (
    AuthenticationError,
    DistributedTimeoutError,
    InvalidWorldSizeError,
    NoConnectionError,
    ProtocolError,
    RendezvousError,
)
from ferrodist.rendezvous import Hello, auth, connect, greet
from ferrodist.rendezvous.session import Connection

HELLO = Hello(purpose="group", job="j", rank=1, world_size=2, group="g")


def dial(port, *, secret=b"s", hello=HELLO, timeout=10.0, **options):
    return connect("127.0.0.1", port, secret=secret, hello=hello, deadline=Deadline(timeout), **options)


@pytest.fixture
def listening():
    """A listening socket and its port."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def accept_and(listening, script):
    """Return a call that accepts one connection and runs ``script`` on it."""

    def call():
        with Connection.take_over(listening.accept()[0]) as sock:
            return script(sock)

    return call


def greeting(secret=b"s", admit=lambda hello: None, timeout=10.0):
    return lambda sock: greet(sock, secret=secret, admit=admit, deadline=Deadline(timeout))


def run_pair(in_threads, listening, script, **options):
    """Run a server script and a client; returns what each returned or raised."""

    def client():
        sock = dial(listening.getsockname()[1], **options)
        with sock:
            return sock.gettimeout(), sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0

    return in_threads(accept_and(listening, script), client)


@pytest.mark.parametrize("secret", [b"", b"s", b"long" * 1000])
def test_both_sides_agree(in_threads, listening, secret):
    """With one secret, also an empty one, the server learns the Hello and the client gets a plain socket."""
    server, client = run_pair(in_threads, listening, greeting(secret), secret=secret)
    assert server == HELLO
    assert client == (None, True)


def test_bytes_after_the_handshake_are_untouched(in_threads, listening):
    """Neither side reads past the handshake: bytes sent at once afterwards arrive."""

    def serve(sock):
        greeting()(sock)
        sock.sendall(b"from server")
        return sock.recv(100)

    def client():
        with dial(listening.getsockname()[1]) as sock:
            sock.sendall(b"from client")
            return sock.recv(100)

    assert in_threads(accept_and(listening, serve), client) == [b"from client", b"from server"]


@pytest.mark.parametrize(("server_secret", "client_secret"), [(b"s", b"t"), (b"s", b""), (b"", b"s")])
def test_a_wrong_secret_fails_on_both_sides(in_threads, listening, server_secret, client_secret):
    """Whichever side has the wrong secret, both raise, and the client's error says what to set."""
    admitted = []
    script = greeting(server_secret, admit=admitted.append)
    server, client = run_pair(in_threads, listening, script, secret=client_secret)
    assert isinstance(server, AuthenticationError)
    assert isinstance(client, AuthenticationError)
    assert "FERRODIST_SECRET" in client.message
    assert admitted == []


def fake_server(answer):
    """A server that plays along without the secret; ``answer`` makes its proof from the client's."""

    def script(sock):
        sock.recv(auth._INTRO.size)
        sock.sendall(auth._INTRO.pack(auth._MAGIC, b"S", auth.PROTOCOL_VERSION) + bytes(32))
        nonce_and_proof = sock.recv(64, socket.MSG_WAITALL)
        sock.sendall(answer(nonce_and_proof))
        with contextlib.suppress(OSError):
            return sock.recv(1)  # nothing may follow

    return script


@pytest.mark.parametrize(
    "answer",
    [
        lambda sent: b"\x01" + sent[32:],
        lambda sent: b"\x01" + sent[:32],
        lambda sent: b"\x01" + bytes(32),
        lambda sent: b"\x00" + bytes(32),
        lambda sent: b"\x02" + sent[32:],
    ],
    ids=["reflected proof", "reflected nonce", "zeros", "refusal", "unknown"],
)
def test_a_server_without_the_secret_learns_nothing(in_threads, listening, answer):
    """A server that cannot prove itself gets no Hello, whatever it sends back."""
    server, client = run_pair(in_threads, listening, fake_server(answer))
    assert not server
    assert isinstance(client, AuthenticationError)


def test_an_echo_server_is_refused(in_threads, listening):
    """The role in the proofs distinguishes it from a server."""

    def echo(sock):
        while data := sock.recv(4096):
            sock.sendall(data)

    _, client = run_pair(in_threads, listening, echo)
    assert isinstance(client, ProtocolError)
    assert "does not speak ferrodist" in client.message


@pytest.mark.parametrize("greeting_bytes", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", bytes(64)])
def test_another_program_has_the_port(in_threads, listening, greeting_bytes):
    """Something that is not ferrodist ends the attempt at once, with the advice to choose another port."""

    def serve(sock):
        sock.sendall(greeting_bytes)
        with contextlib.suppress(OSError):
            sock.recv(100)

    _, client = run_pair(in_threads, listening, serve)
    assert isinstance(client, ProtocolError)
    assert "choose a port" in client.message


def test_another_version_is_named_on_both_sides(in_threads, listening, monkeypatch):
    """A peer of another version is told from a stranger: each side names both versions."""
    theirs = auth._INTRO.pack(auth._MAGIC, b"S", 7) + bytes(32)

    def serve(sock):
        sock.recv(auth._INTRO.size)
        sock.sendall(theirs)
        with contextlib.suppress(OSError):
            sock.recv(1)

    _, client = run_pair(in_threads, listening, serve)
    assert isinstance(client, ProtocolError)
    assert "version 7" in client.message
    assert f"version {auth.PROTOCOL_VERSION}" in client.message

    def old_client():
        with socket.create_connection(listening.getsockname()) as sock:
            sock.sendall(auth._INTRO.pack(auth._MAGIC, b"C", 7))
            return sock.recv(auth._INTRO.size, socket.MSG_WAITALL)

    server, seen = in_threads(accept_and(listening, greeting()), old_client)
    assert isinstance(server, ProtocolError)
    assert "version 7" in server.message
    assert auth._INTRO.unpack(seen) == (auth._MAGIC, b"S", auth.PROTOCOL_VERSION)


@pytest.mark.parametrize("kind", [InvalidWorldSizeError, RendezvousError, DistributedTimeoutError])
def test_a_refusal_arrives_with_class_message_and_ranks(in_threads, listening, kind):
    """An error raised by admit is raised by greet, and again by connect, at once."""

    def admit(hello):
        raise kind(f"no room for {hello.rank}", ranks=(hello.rank,))

    started = time.monotonic()
    for error in run_pair(in_threads, listening, greeting(admit=admit), timeout=60):
        assert type(error) is kind
        assert (error.message, error.ranks) == ("no room for 1", (1,))
    assert time.monotonic() - started < 30


def raw_client(port, payload, *, secret=b"s", tamper=False):
    """Prove the secret, then send ``payload`` as the sealed hello."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(auth._INTRO.pack(auth._MAGIC, b"C", auth.PROTOCOL_VERSION))
        intro = sock.recv(auth._INTRO.size + 32, socket.MSG_WAITALL)
        nonces = bytes(32) + intro[-32:]
        sock.sendall(bytes(32) + auth._proof(secret, b"client", nonces))
        sock.recv(33, socket.MSG_WAITALL)
        key = auth._proof(secret, b"session", nonces)
        tag = auth.hmac.digest(key, b"hello\0" + payload, "sha256")
        if tamper:
            payload = payload[:-1] + b"\0"
        sealed = tag + payload
        sock.sendall(len(sealed).to_bytes(4, "big") + sealed)
        with contextlib.suppress(OSError):
            sock.recv(4096)


@pytest.mark.parametrize(
    ("payload", "tamper", "kind"),
    [
        (b"\xc1", False, ProtocolError),
        (b"\x80", False, ProtocolError),
        (auth.msgspec.msgpack.encode({"purpose": 1}), False, ProtocolError),
        (auth.msgspec.msgpack.encode(HELLO), True, AuthenticationError),
        (b"\x80" * 5000, False, ProtocolError),
    ],
    ids=["no msgpack", "fields missing", "wrong type", "altered", "too long"],
)
def test_a_hello_that_cannot_be_read(in_threads, listening, payload, tamper, kind):
    """A proven peer's malformed, altered or oversized hello is an error of its own class."""
    port = listening.getsockname()[1]
    server, _ = in_threads(accept_and(listening, greeting()), lambda: raw_client(port, payload, tamper=tamper))
    assert type(server) is kind


def test_a_name_that_is_too_long_is_refused_before_dialling():
    """A hello that no server would read is a ValueError at once, with the number of bytes there are."""
    with pytest.raises(ValueError, match=r"job has 1 bytes and that of the group 5000; together they may have (\d+):"):
        dial(1, hello=Hello(purpose="group", job="j", rank=1, world_size=2, group="g" * 5000))


@pytest.mark.parametrize("excess", [0, 1])
def test_the_longest_name_is_accepted(in_threads, listening, excess):
    """Client and server draw the line at the same byte."""
    empty = len(auth.msgspec.msgpack.encode(Hello(purpose="group", job="", rank=1, world_size=2, group="")))
    room = auth._MAX_HELLO_BYTES - auth._PROOF_BYTES - empty - 2  # a long text has a longer header
    hello = Hello(purpose="group", job="", rank=1, world_size=2, group="g" * (room + excess))
    if excess:
        with pytest.raises(ValueError, match=rf"together they may have {room}:"):
            dial(1, hello=hello)
    else:
        assert run_pair(in_threads, listening, greeting(), hello=hello)[0] == hello


@pytest.mark.parametrize("size", [5000, 60_000])
def test_a_hello_that_is_too_long_is_answered(in_threads, listening, monkeypatch, size):
    """A client that sends it all the same is told why, and does not dial again until its deadline."""
    monkeypatch.setattr(auth, "check_hello", lambda hello: None)
    hello = Hello(purpose="group", job="j", rank=1, world_size=2, group="g" * size)
    for error in run_pair(in_threads, listening, greeting(), hello=hello, timeout=60):
        assert type(error) is ProtocolError
        assert "the limit is 4096" in error.message


def test_a_replayed_proof_is_refused(in_threads, listening):
    """A client's recorded messages are worth nothing on the next connection, whose nonce differs."""
    recorded = []

    def record(sock):
        genuine = greeting()

        class Recorder:
            def __getattr__(self, name):
                return getattr(sock, name)

            def recv_into(self, view):
                count = sock.recv_into(view)
                recorded.append(bytes(view[:count]))
                return count

        return genuine(Recorder())

    server, _ = run_pair(in_threads, listening, record)
    assert server == HELLO

    def replay():
        with socket.create_connection(listening.getsockname()) as sock:
            sock.sendall(b"".join(recorded))
            with contextlib.suppress(OSError):
                while sock.recv(4096):
                    pass

    server, _ = in_threads(accept_and(listening, greeting()), replay)
    assert isinstance(server, AuthenticationError)


def test_greet_keeps_its_deadline_against_dripping(in_threads, listening):
    """A client that sends a byte now and then is cut off at the deadline of the whole exchange."""
    done = threading.Event()

    def drip():
        with socket.create_connection(listening.getsockname()) as sock:
            for byte in auth._MAGIC:
                with contextlib.suppress(OSError):
                    sock.sendall(bytes([byte]))
                if done.wait(0.05):
                    break

    def serve():
        try:
            return accept_and(listening, greeting(timeout=0.2))()
        finally:
            done.set()

    started = time.monotonic()
    server, _ = in_threads(serve, drip)
    assert isinstance(server, TimeoutError)
    assert time.monotonic() - started < 5


def test_connect_waits_for_a_server_that_starts_later(in_threads, free_port, until):
    """A refused client dials again until the server is there."""
    port, tried = free_port(), threading.Event()

    def client():
        tried.set()
        with dial(port):
            return "connected"

    def server():
        assert tried.wait(10)
        with socket.create_server(("127.0.0.1", port)) as late:
            return accept_and(late, greeting())()

    assert in_threads(client, server) == ["connected", HELLO]


def test_connect_names_what_it_could_not_reach(free_port):
    """At the deadline the error says where, for how long, and how the last attempt ended."""
    port = free_port()
    started = time.monotonic()
    with pytest.raises(DistributedTimeoutError, match=rf"127.0.0.1:{port} .*limit 0.20 s.*refused"):
        dial(port, timeout=0.2)
    assert time.monotonic() - started < 5
    with pytest.raises(NoConnectionError, match=r"refused"):
        dial(port, timeout=60, retry_refused=False)


@pytest.mark.parametrize(
    ("failure", "advice"),
    [
        (ConnectionRefusedError(111, "refused"), "The host answers, and nothing listens at its port 7: "),
        (socket.gaierror(-2, "unknown"), "This host does not know the name 'there': "),
        (TimeoutError("timed out"), "Nothing answers at there: .* no firewall drops TCP connections to port 7"),
        (OSError(errno.ETIMEDOUT, "timed out"), "Nothing answers at there: "),
        (OSError(errno.EHOSTUNREACH, "no route"), "There is no way from this host to there: "),
        (ConnectionResetError(104, "reset"), "Check that the process that should listen there runs"),
    ],
)
def test_connect_says_what_a_failure_may_mean(failure, advice, monkeypatch):
    """Each kind of failure has something else to check."""

    def fail(*_args):
        raise failure

    monkeypatch.setattr(auth, "_attempt", fail)
    with pytest.raises(DistributedTimeoutError, match=rf"group at there:7 .* the last attempt: .*\. {advice}"):
        connect("there", 7, secret=b"s", hello=HELLO, deadline=Deadline(0.05))


def test_connect_names_an_ipv6_address_in_brackets(free_port):
    """An address without them could not be told from the port, and is none that users can pass."""
    port = free_port()
    with pytest.raises(DistributedTimeoutError, match=rf"group at \[::1\]:{port}"):
        connect("::1", port, secret=b"s", hello=HELLO, deadline=Deadline(0.1))


@pytest.mark.parametrize("accepts", [True, False])
def test_connect_keeps_its_deadline_against_silence(in_threads, listening, accepts):
    """A server that says nothing, or never accepts, costs the deadline and no more."""
    done = threading.Event()
    started = time.monotonic()

    def client():
        try:
            return dial(listening.getsockname()[1], timeout=0.2)
        finally:
            done.set()

    calls = [client]
    if accepts:
        calls.append(accept_and(listening, lambda sock: done.wait(10)))
    assert isinstance(in_threads(*calls)[0], DistributedTimeoutError)
    assert time.monotonic() - started < 5


def test_a_name_that_does_not_resolve_costs_the_deadline(silent_name_server):
    """A name server that does not answer cannot hold a client past its deadline."""
    with pytest.raises(DistributedTimeoutError, match=r"stuck.invalid"):
        connect(silent_name_server, 1, secret=b"", hello=HELLO, deadline=Deadline(0.1))


def test_a_self_connection_is_refused(monkeypatch, free_port):
    """A connection to itself on a free ephemeral port counts as refused, and frees the port."""
    port = free_port()
    genuine = socket.socket.connect

    def meet(self, address):
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind(address)
        genuine(self, address)

    monkeypatch.setattr(socket.socket, "connect", meet)
    with pytest.raises(NoConnectionError):
        dial(port, retry_refused=False)
    monkeypatch.undo()
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("says", [None, b"220 mail.example.com\r\n", b""], ids=["silence", "something else", "nothing"])
def test_the_server_is_found_behind_a_stranger(in_threads, listening, monkeypatch, says):
    """Another program at one address of a name does not keep ranks from the server at another."""
    monkeypatch.setattr(auth, "_ATTEMPT_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:
        entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", sock.getsockname()) for sock in (other, listening)]
        monkeypatch.setattr(auth, "resolve", lambda *_, **__: entries)

        def stranger():
            sock, _ = other.accept()
            with sock:
                if says is not None:
                    sock.sendall(says.ljust(auth._INTRO.size) if says else b"")
                else:
                    sock.recv(1000)
                    sock.recv(1000)

        def client():
            dial(1).close()

        server, *others = in_threads(accept_and(listening, greeting()), client, stranger)
    assert (server, others) == (HELLO, [None, None])


def test_a_wrong_secret_at_every_address(in_threads, listening, monkeypatch):
    """When nobody at any address knows the secret, the error says so, and not that a connection failed."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", name) for name in (free, listening.getsockname(), free)]
    monkeypatch.setattr(auth, "resolve", lambda *_, **__: entries)
    _, client = in_threads(accept_and(listening, greeting(b"another")), lambda: dial(1))
    assert type(client) is AuthenticationError
    assert "None is set here" not in client.message
