"""The whole rendezvous, ranks as threads: success, and each way to fail, over TCP and a file."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from ferrodist.deadline import Deadline
from ferrodist.errors import (
    AuthenticationError,
    DistributedError,
    DistributedTimeoutError,
    InvalidRankError,
    InvalidWorldSizeError,
    ProtocolError,
    RendezvousError,
)
from ferrodist.rendezvous import FileStore, MemoryStore, auth, rendezvous, rendezvous_in, roll_call
from ferrodist.rendezvous import shared_store as meeting_module
from ferrodist.rendezvous.membership import JoinRequest
from ferrodist.rendezvous.roll_call import claim_rank, count_departure

LIMIT = 0.6


@pytest.fixture(params=["tcp", "file"])
def method(request, tmp_path, free_port):
    """A place to meet, of each kind."""
    return f"tcp://127.0.0.1:{free_port()}" if request.param == "tcp" else f"file://{tmp_path}/meet"


def join(method, rank, size, *, timeout=20.0, secret="s", **options):
    return lambda: rendezvous(method, rank=rank, world_size=size, timeout=timeout, secret=secret, **options)


def a_request(rank: int, world_size: int, deadline: Deadline) -> JoinRequest:
    return JoinRequest(rank=rank, world_size=world_size, local_rank=None, job="j", secret=b"", deadline=deadline)


def close_all(in_threads, members):
    in_threads(*[member.close for member in members if not isinstance(member, Exception)])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_all_ranks_meet(method, in_threads, tmp_path, size):
    """Each rank becomes a member with one store; closing twice is fine, and a file is removed by the last."""
    members = in_threads(*[join(method, rank, size) for rank in range(size)])
    assert [(member.rank, member.world_size) for member in members] == [(rank, size) for rank in range(size)]
    assert {(m.host, m.job, m.secret, m.local_rank) for m in members} == {("127.0.0.1", "default", b"s", None)}
    assert "b's'" not in repr(members[0])
    members[-1].store.set("k", b"v")
    assert {member.store.get("k") for member in members} == {b"v"}
    started = time.monotonic()
    close_all(in_threads, members)
    close_all(in_threads, members)
    assert time.monotonic() - started < 2
    assert list(tmp_path.iterdir()) == []


def test_an_address_can_be_reused(method, in_threads):
    """After all ranks have closed, the next job can meet at the same address."""
    for _ in range(3):
        members = in_threads(*[join(method, rank, 2) for rank in range(2)])
        assert all(isinstance(member.rank, int) for member in members)
        close_all(in_threads, members)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_leave_for_its_parent(method, in_threads):
    """Closing memberships in a forked child does nothing there and nothing here."""
    members = in_threads(*[join(method, rank, 2) for rank in range(2)])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for member in members:
                member.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    members[0].store.set("k", b"v")
    assert members[1].store.get("k") == b"v"
    close_all(in_threads, members)


def test_missing_ranks_are_named_in_the_same_words(method, in_threads, tmp_path):
    """Ranks that do not come are named by every other rank, in one text, at the deadline; nothing is left."""
    started = time.monotonic()
    errors = in_threads(*[join(method, rank, 5, timeout=LIMIT) for rank in (0, 2, 4)])
    assert time.monotonic() - started < LIMIT + 2
    assert {type(error) for error in errors} == {RendezvousError}
    assert len({error.message for error in errors}) == 1
    assert "ranks 1, 3 of 5 did not come within 0.6 s" in errors[0].message
    assert {error.ranks for error in errors} == {(1, 3)}
    assert list(tmp_path.iterdir()) == []


def test_the_first_deadline_ends_the_rendezvous_for_all(method, in_threads):
    """The first deadline that passes, on any rank, ends the rendezvous for all, with one text."""
    started = time.monotonic()
    errors = in_threads(join(method, 0, 3, timeout=60), join(method, 1, 3, timeout=LIMIT))
    assert time.monotonic() - started < 30
    assert errors[0].message == errors[1].message
    assert errors[0].ranks == (2,)


def test_without_rank_0(method, in_threads):
    """Ranks whose rank 0 never comes say so, and soon after their deadline."""
    started = time.monotonic()
    errors = in_threads(*[join(method, rank, 3, timeout=LIMIT) for rank in (1, 2)])
    assert time.monotonic() - started < LIMIT + 2
    for rank, error in zip((1, 2), errors, strict=True):
        assert type(error) is RendezvousError
        assert f"rank 0 did not answer rank {rank}" in error.message
        assert error.ranks == (0,)


def test_a_rank_number_claimed_twice(method, in_threads, until):
    """The second of two ranks with one number is refused with the first one's process; the job goes on."""
    results = in_threads(*[join(method, rank, 2) for rank in (0, 1)], join(method, 1, 2, timeout=5))
    refused = [result for result in results if isinstance(result, Exception)]
    assert len(refused) == 1
    assert type(refused[0]) is RendezvousError
    assert f"rank 1 is taken by process {os.getpid()} on {socket.gethostname()}" in refused[0].message
    assert "start each rank once" in refused[0].message
    close_all(in_threads, results)


def test_a_duplicate_in_place_of_a_missing_rank_is_reported(method, in_threads):
    """If a rank is missing because its process claimed another one, the failure says both."""
    errors = in_threads(*[join(method, rank, 3, timeout=LIMIT) for rank in (0, 1, 1)])
    assert {type(error) for error in errors} == {RendezvousError}
    failures = {error.message for error in errors if error.ranks == (2,)}
    assert len(failures) == 1
    assert "Turned away: " in failures.copy().pop()
    assert "rank 1 is taken" in failures.pop()


def test_two_ranks_0(method, in_threads):
    """One of two processes with rank 0 is refused at once, with advice."""
    results = in_threads(join(method, 0, 2), join(method, 0, 2), join(method, 1, 2))
    refused = [result for result in results if isinstance(result, Exception)]
    assert len(refused) == 1
    assert refused[0].ranks == (0,)
    assert "start each rank once" in refused[0].message or "be started once" in refused[0].message
    close_all(in_threads, results)


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"secret": "wrong"}, AuthenticationError, "secret"),
        ({"secret": ""}, AuthenticationError, "FERRODIST_SECRET"),
        ({"job": "other"}, RendezvousError, "job 'other'|job 'default'"),
        ({"size": 3}, InvalidWorldSizeError, "world size 3, rank 0 with 2"),
    ],
)
def test_a_rank_that_does_not_belong(method, in_threads, options, kind, reason):
    """It is refused at once with a reason; the others report it as missing, with the reason, at their deadline."""
    options = {"size": 2, **options}
    started = time.monotonic()
    ours, theirs = in_threads(join(method, 0, 2, timeout=LIMIT), join(method, 1, timeout=60, **options))
    assert time.monotonic() - started < 30
    assert type(theirs) is kind
    with pytest.raises(kind, match=reason):
        raise theirs
    assert type(ours) is RendezvousError
    assert "rank 1 of 2 did not come" in ours.message
    assert "Turned away: " in ours.message
    assert "secret" in ours.message


@pytest.mark.parametrize("options", [{"secret": "wrong"}, {"job": "other"}, {"size": 4}])
def test_the_others_are_served_meanwhile(method, in_threads, options):
    """A process that does not belong does not keep the job from meeting."""
    stray = join(method, 1, timeout=5, **{"size": 2, **options})
    results = in_threads(join(method, 0, 2), stray, join(method, 1, 2))
    assert isinstance(results[1], DistributedError)
    assert [results[0].rank, results[2].rank] == [0, 1]
    close_all(in_threads, results)


@pytest.mark.parametrize(
    ("rank", "size", "kind"),
    [(2, 2, InvalidRankError), (-1, 2, InvalidRankError), (0, 0, InvalidWorldSizeError)],
)
def test_a_rank_out_of_range(method, rank, size, kind):
    """The rank is refused before anything is opened."""
    with pytest.raises(kind, match=r"ranks go from 0|at least 1"):
        join(method, rank, size)()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": "0"}, "rank must be an integer, not '0'"),
        ({"rank": True}, "rank must be an integer, not True"),
        ({"rank": 0.0}, "rank must be an integer"),
        ({"world_size": "1"}, "world_size must be an integer, not '1'"),
        ({"init_method": 5}, "init_method must be text .* or None, not int"),
        ({"job": 5}, "job must be text or None, not int"),
        ({"secret": 5}, "secret must be text or bytes"),
    ],
)
def test_an_argument_of_another_type(options, message):
    """A TypeError names the argument and the right type."""
    arguments = {"init_method": "tcp://127.0.0.1:1", "rank": 0, "world_size": 1, "secret": "s", **options}
    with pytest.raises(TypeError, match=message):
        rendezvous(arguments.pop("init_method"), timeout=5, **arguments)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_name_that_is_too_long(method, rank):
    """Every rank is told so at once, in both ways to meet."""
    with pytest.raises(ValueError, match=r"name of the job has 5000 bytes"):
        join(method, rank, 2, job="j" * 5000)()


def test_a_rank_that_dies_between_claiming_and_coming(in_threads):
    """The rank counts as missing: a claim alone does not complete the rendezvous, at no deadline."""
    store = MemoryStore()
    requests = [a_request(rank, 3, Deadline(LIMIT)) for rank in range(3)]
    for request in requests:
        roll_call.claim_rank(store, request, "job 'j'", "")
    calls = [lambda request=request: roll_call.await_all(store, request, "job 'j'") for request in requests[:2]]
    errors = in_threads(*calls)
    assert {type(error) for error in errors} == {RendezvousError}
    assert len({error.message for error in errors}) == 1
    assert "1 of 3 ranks, after claiming a number, did not come" in errors[0].message
    assert "Look at the logs of all ranks for one that ended or hangs." in errors[0].message


def test_a_name_server_that_does_not_answer(silent_name_server):
    """Rank 0 gives up at its deadline."""
    with pytest.raises(RendezvousError, match=r"not be resolved in time"):
        join(f"tcp://{silent_name_server}:29400", 0, 2, timeout=0.1)()


def test_a_host_of_the_others_that_does_not_resolve(silent_name_server):
    """The way to the other ranks' hosts is looked for until the deadline only."""
    store = MemoryStore()
    claim = roll_call.Claim(silent_name_server, "there", 1, "token")
    store.set("ferrodist/attendance/rank/0", meeting_module.msgspec.msgpack.encode(claim))
    with pytest.raises(RendezvousError, match=r"finds no way to host stuck.invalid .*resolved in time"):
        meeting_module._find_interface(store, 1, Deadline(0.1))


def test_another_version(free_port, in_threads):
    """A rank of another release fails at once by version, and rank 0 says that it was turned away."""
    method = f"tcp://127.0.0.1:{(port := free_port())}"

    def old_rank():
        for _ in range(2000):
            try:
                with socket.create_connection(("127.0.0.1", port)) as sock:
                    sock.sendall(auth._INTRO.pack(auth._MAGIC, b"C", 99))
                    return sock.recv(100)
            except ConnectionRefusedError:
                time.sleep(0.005)
        return None

    error, answer = in_threads(join(method, 0, 2, timeout=LIMIT), old_rank)
    assert answer[:9] == auth._MAGIC
    assert "version 99" in error.message


def test_garbage_on_the_port(in_threads):
    """If another program listens there, clients fail at once by ProtocolError and rank 0 by address in use."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        method = f"tcp://127.0.0.1:{other.getsockname()[1]}"

        def talk():
            sock, _ = other.accept()
            with sock:
                sock.sendall(b"220 mail.example.com ESMTP ready\r\n")
                return sock.recv(100)

        _, client, server = in_threads(talk, join(method, 1, 2), join(method, 0, 2))
    assert type(client) is ProtocolError
    assert type(server) is RendezvousError
    assert "in use" in server.message


def test_strangers_do_not_disturb(free_port, in_threads):
    """Garbage sent to rank 0's port while the ranks meet changes nothing."""
    method = f"tcp://127.0.0.1:{(port := free_port())}"

    def stranger():
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"ferrodistC\0\x01" + bytes(64)) * 5:
            try:
                with socket.create_connection(("127.0.0.1", port)) as sock:
                    sock.sendall(data)
            except OSError:
                pass

    members = in_threads(*[join(method, rank, 3) for rank in range(3)], stranger, stranger)[:3]
    assert [member.rank for member in members] == [0, 1, 2]
    close_all(in_threads, members)


def test_a_secret_is_made_for_a_file(tmp_path, in_threads):
    """Without a secret the ranks of a file rendezvous share one that rank 0 made."""
    method = f"file://{tmp_path}/meet"
    members = in_threads(*[join(method, rank, 3, secret=None) for rank in range(3)])
    assert len({member.secret for member in members}) == 1
    assert len(members[0].secret) >= 43
    assert members[0].secret not in repr(members[0]).encode()
    close_all(in_threads, members)


def test_no_secret_on_loopback(free_port, in_threads):
    """Over TCP on loopback no secret is needed."""
    method = f"tcp://127.0.0.1:{free_port()}"
    members = in_threads(*[join(method, rank, 2, secret=None) for rank in range(2)])
    assert [member.secret for member in members] == [b"", b""]
    close_all(in_threads, members)


def test_a_stale_file(tmp_path, in_threads):
    """A file left by a killed run is an error at once, on each rank, with the advice to remove it."""
    method = f"file://{tmp_path}/meet"
    abandoned = in_threads(*[join(method, rank, 2) for rank in range(2)])
    errors = in_threads(*[join(method, rank, 2) for rank in range(2)])
    for error in errors:
        assert type(error) is RendezvousError
        assert f"if {tmp_path}/meet is left over from an earlier run, remove it" in error.message
    close_all(in_threads, abandoned)


def test_a_file_store_that_others_may_write(tmp_path):
    """A file that other users could have written is refused, not joined."""
    (tmp_path / "meet").touch()
    (tmp_path / "meet").chmod(0o666)
    with pytest.raises(RendezvousError, match=r"written by other users"):
        join(f"file://{tmp_path}/meet", 1, 2)()


_RANK_0 = """
import sys
from ferrodist.rendezvous import rendezvous
print("up", flush=True)
rendezvous(sys.argv[1], rank=0, world_size=3, timeout=60, secret="s")
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_0_dies_or_stops(free_port, in_threads, signal_number):
    """Ranks whose rank 0 is killed or stopped while they wait raise an error naming it, by their deadline."""
    method = f"tcp://127.0.0.1:{free_port()}"
    with subprocess.Popen([sys.executable, "-c", _RANK_0, method], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        started = []

        class Waiting(roll_call.PrefixStore):
            def get(self, key, *, timeout=None):
                process.send_signal(signal_number)
                started.append(time.monotonic())
                return super().get(key, timeout=timeout)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(roll_call, "PrefixStore", Waiting)
            error = in_threads(join(method, 1, 3, timeout=5 if signal_number == signal.SIGKILL else 1.5))[0]
        took = time.monotonic() - started[0]
        process.kill()
    assert type(error) is RendezvousError
    assert error.ranks == (0,)
    assert "rank 0" in error.message
    assert took < (2 if signal_number == signal.SIGKILL else 2.5)


def launch(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def from_environment(rank):
    return lambda: rendezvous(None, rank=rank, world_size=None, timeout=20, secret=None)


def test_from_the_environment(monkeypatch, free_port, in_threads):
    """The launcher's variables say everything; the job is named after the run and its restart."""
    launch(monkeypatch, WORLD_SIZE=2, RANK=1, LOCAL_RANK=0, MASTER_ADDR="localhost", MASTER_PORT=free_port())
    launch(monkeypatch, TORCHELASTIC_RUN_ID="run", TORCHELASTIC_RESTART_COUNT=3)
    members = in_threads(from_environment(0), from_environment(None))
    assert [(m.rank, m.world_size, m.job) for m in members] == [(0, 2, "run.3"), (1, 2, "run.3")]
    assert [m.local_rank for m in members] == [None, 0]
    close_all(in_threads, members)
    monkeypatch.setenv("FERRODIST_JOB", "mine")
    members = in_threads(from_environment(0), from_environment(1))
    assert {m.job for m in members} == {"mine"}
    close_all(in_threads, members)


def test_under_torchrun_on_one_host(monkeypatch, tmp_path, in_threads):
    """If torchrun's agent has MASTER_PORT, ranks of one host meet in the attempt's own folder."""
    with socket.create_server(("127.0.0.1", 0)) as agent:
        launch(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=agent.getsockname()[1])
        launch(monkeypatch, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, TORCHELASTIC_USE_AGENT_STORE=True)
        launch(monkeypatch, TORCHELASTIC_ERROR_FILE=tmp_path / "0" / "error.json")
        members = in_threads(from_environment(0), from_environment(1))
        assert [member.rank for member in members] == [0, 1]
        assert members[0].secret
        close_all(in_threads, members)


def test_under_torchrun_on_several_hosts(monkeypatch, free_port, in_threads):
    """There, ranks meet at FERRODIST_PORT; a port that is taken is an error that names the variable."""
    with socket.create_server(("127.0.0.1", 0)) as agent:
        launch(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=agent.getsockname()[1], FERRODIST_SECRET="s")
        launch(monkeypatch, WORLD_SIZE=2, LOCAL_WORLD_SIZE=1, TORCHELASTIC_USE_AGENT_STORE=True)
        launch(monkeypatch, FERRODIST_PORT=free_port())
        members = in_threads(from_environment(0), from_environment(1))
        assert [member.rank for member in members] == [0, 1]
        close_all(in_threads, members)
        launch(monkeypatch, FERRODIST_PORT=agent.getsockname()[1])
        with pytest.raises(RendezvousError, match=r"in use.*set FERRODIST_PORT"):
            from_environment(0)()


def test_missing_variables_are_named(monkeypatch):
    """A missing variable is named, with advice."""
    with pytest.raises(RendezvousError, match=r"RANK and WORLD_SIZE.*torchrun"):
        from_environment(None)()
    launch(monkeypatch, RANK=0, WORLD_SIZE=2)
    with pytest.raises(RendezvousError, match=r"MASTER_ADDR and MASTER_PORT.*torchrun"):
        from_environment(None)()


@pytest.mark.parametrize(
    "method", ["", "tcp://", "tcp://host", "tcp://host:x", "http://a:1", "file://", "tcp://127.0.0.1:0"]
)
def test_invalid_init_methods(method):
    """A wrong init_method is a ValueError."""
    with pytest.raises(ValueError, match=r"init_method|address|port"):
        join(method, 0, 2)()


def test_no_secret_beyond_this_host():
    """Rank 0 does not listen on other interfaces without a secret."""
    with pytest.raises(AuthenticationError, match=r"FERRODIST_SECRET"):
        join("tcp://0.0.0.0:29400", 0, 2, secret=None)()


def test_ranks_of_several_hosts_share_a_file(tmp_path, in_threads, monkeypatch):
    """With claims from another host, a rank's listeners go on the interface towards that host."""
    genuine = roll_call.socket.gethostname()
    store = FileStore(tmp_path / "meet")
    members = in_threads(*[join(f"file://{tmp_path}/meet", rank, 2) for rank in range(2)])
    assert meeting_module._find_interface(store, 2, Deadline(20)) == "127.0.0.1"
    monkeypatch.setattr(meeting_module.socket, "gethostname", lambda: "elsewhere")
    monkeypatch.setattr(meeting_module, "network_id", lambda: "elsewhere")
    monkeypatch.setattr(
        meeting_module.socket,
        "getaddrinfo",
        lambda host, *_, **__: (
            [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.0.2", 9))] if host == genuine else []
        ),
    )
    assert meeting_module._find_interface(store, 2, Deadline(20)).startswith("127.0.0.")
    close_all(in_threads, members)


@pytest.fixture
def hosts(monkeypatch):
    """Return a function that has a call believe that it runs on a host, and the hosts to which there is a way."""
    here = threading.local()
    reachable = {}
    monkeypatch.setattr(socket, "gethostname", lambda: here.name.removesuffix("'s twin"))
    for module in (roll_call, meeting_module):
        monkeypatch.setattr(module, "network_id", lambda: here.name)

    def look_up(host, *_, **__):
        if host not in reachable:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.0.1", 9))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)

    def on_host(name, call):
        def body():
            here.name = name
            return call()

        return body

    return on_host, reachable


def test_ranks_of_several_hosts_all_find_their_interfaces(tmp_path, in_threads, hosts):
    """Ranks that share a file and no host all become members, on the interface towards another host."""
    on_host, reachable = hosts
    reachable.update(a=1, b=1)
    calls = [on_host(name, join(f"file://{tmp_path}/meet", rank, 3)) for rank, name in enumerate("aab")]
    members = in_threads(*calls)
    assert [member.rank for member in members] == [0, 1, 2]
    close_all(lambda *closes: in_threads(*[on_host("a", close) for close in closes]), members)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_without_a_route_fails_all(tmp_path, in_threads, hosts):
    """If one host finds no route to another every rank raises at once; none becomes a member."""
    on_host, reachable = hosts
    reachable.update(a=1)
    started = time.monotonic()
    calls = [on_host(name, join(f"file://{tmp_path}/meet", rank, 3, timeout=60)) for rank, name in enumerate("abb")]
    errors = in_threads(*calls)
    assert time.monotonic() - started < 30
    assert {type(error) for error in errors} == {RendezvousError}
    assert {error.message for error in errors} == {errors[0].message}
    assert "rank 0: this host finds no way to host b" in errors[0].message
    assert {error.ranks for error in errors} == {(0,)}
    assert list(tmp_path.iterdir()) == []


def test_hosts_of_one_name_are_not_one_host(tmp_path, in_threads, hosts):
    """Ranks can't find each other by the shared name, and say so; by the address of rank 0 or of a server they can."""
    on_host, _ = hosts
    calls = [on_host(name, join(f"file://{tmp_path}/meet", rank, 2)) for rank, name in enumerate(["a", "a's twin"])]
    errors = in_threads(*calls)
    assert {type(error) for error in errors} == {RendezvousError}
    assert "another host has this one's name, a, so it can't be found by it; set MASTER_ADDR" in errors[0].message


def test_rank_0_names_its_own_last_round_at_its_deadline(monkeypatch, tmp_path):
    """A file that still has the round that this process has left is no second rank 0."""
    store = FileStore(tmp_path / "meet")
    info = meeting_module._JobInfo(job="j", world_size=2, made_secret=b"", nonce=b"old", proof=b"")
    store.set(meeting_module._JOB_INFO_KEY, msgspec.msgpack.encode(info), timeout=LIMIT)
    monkeypatch.setattr(meeting_module, "left_stores", {b"old"})
    request = a_request(0, 2, Deadline(0.3))
    with pytest.raises(DistributedTimeoutError, match="still that of the last round, which this process has left"):
        meeting_module._create_job(store, request, "here", "", is_private=True)


def test_a_rank_names_the_last_round_at_its_deadline(free_port, in_threads):
    """A rank that meets again while rank 0 has not left is told so, not the name of a key."""
    method = f"tcp://127.0.0.1:{free_port()}"
    members = in_threads(*[join(method, rank, 2) for rank in range(2)])
    members[1].close()
    message = "still that of the last round, which this process has left"
    with contextlib.closing(members[0]), pytest.raises(RendezvousError, match=message):
        join(method, 1, 2, timeout=0.3)()


def test_the_next_round_keeps_the_deadline(free_port, in_threads):
    """A rank that has waited for the end of the last round has only the rest of its time to connect to the next."""
    method = f"tcp://127.0.0.1:{free_port()}"
    members = in_threads(*[join(method, rank, 2) for rank in range(2)])
    members[1].close()
    began = threading.Timer(0.7, members[0].close)
    began.start()
    started = time.monotonic()
    with pytest.raises(RendezvousError, match="could not connect"):
        join(method, 1, 2, timeout=1.0)()
    assert time.monotonic() - started < 1.5
    began.join()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("address", ["127.0.0.1:0", "a..b:29500", f"{'a' * 70}:29500"])
def test_an_address_that_cannot_be_reached_is_refused_at_once(rank, address):
    """Every rank refuses port 0, and names that no name server can know, instead of trying until its deadline."""
    with pytest.raises(ValueError, match=r"port 0 is a different one|no valid host name"):
        join(f"tcp://{address}", rank, 2)()


def test_hosts_of_one_name_find_their_interface_by_a_third(tmp_path, in_threads, hosts):
    """A host of another name shows the interface, whatever the others are called."""
    on_host, reachable = hosts
    reachable.update(a=1, b=1)
    names = ["a", "a's twin", "b"]
    members = in_threads(*[on_host(name, join(f"file://{tmp_path}/meet", rank, 3)) for rank, name in enumerate(names)])
    assert [member.rank for member in members] == [0, 1, 2]
    close_all(lambda *closes: in_threads(*[on_host("a", close) for close in closes]), members)


def test_ranks_of_several_hosts_in_a_store_of_a_server(in_threads, hosts, monkeypatch):
    """Find their interfaces by its address."""
    on_host, _ = hosts
    monkeypatch.setattr(meeting_module, "_route_interface", lambda host, _: {"server": "10.0.0.5"}[host])
    store = MemoryStore()
    options = {"world_size": 2, "timeout": LIMIT, "secret": "s", "job": "j", "server": "server"}
    calls = [
        on_host(name, lambda rank=rank: rendezvous_in(store, "a store", rank=rank, **options))
        for rank, name in enumerate(["a", "a's twin"])
    ]
    assert {member.host for member in in_threads(*calls)} == {"10.0.0.5"}


def test_a_slow_route_lookup_is_a_missing_rank(tmp_path, in_threads, hosts, monkeypatch):
    """Ranks don't wait longer than their deadline for one that still looks for its route."""
    on_host, reachable = hosts
    reachable.update(a=1, b=1)
    release = threading.Event()
    genuine = meeting_module._find_interface

    def slow(*arguments):
        if socket.gethostname() == "b":
            release.wait(20)
        return genuine(*arguments)

    monkeypatch.setattr(meeting_module, "_find_interface", slow)

    def first():
        try:
            return on_host("a", join(f"file://{tmp_path}/meet", 0, 2, timeout=LIMIT))()
        finally:
            release.set()

    errors = in_threads(first, on_host("b", join(f"file://{tmp_path}/meet", 1, 2, timeout=60)))
    assert {type(error) for error in errors} == {RendezvousError}
    assert "1 of 2 ranks, after claiming a number, did not come" in errors[0].message
    assert errors[0].message == errors[1].message


def test_a_rejection_that_utf8_cannot_carry(in_threads):
    """The reason of a rejection is reported also with a file name that is not UTF-8."""
    store = MemoryStore()
    roll_call.note_rejection(store, "job at file:///caf\udce9: no")
    request = a_request(0, 2, Deadline(0.1))
    roll_call.claim_rank(store, request, "job 'j'", "")
    with pytest.raises(RendezvousError, match=r"file:///caf\\udce9: no"):
        roll_call.await_all(store, request, "job 'j'")


def test_ranks_of_several_hosts_that_know_the_address_of_rank_0(tmp_path, in_threads, hosts, monkeypatch):
    """Hosts that don't know each other's names find the way by MASTER_ADDR, unless that is a loopback address."""
    on_host, _ = hosts
    monkeypatch.setattr(
        meeting_module, "_route_interface", lambda host, _: {"leader": "10.0.0.5", "a": "x", "b": "x"}[host]
    )
    monkeypatch.setenv("MASTER_ADDR", "leader")
    calls = [on_host(name, join(f"file://{tmp_path}/meet", rank, 2)) for rank, name in enumerate("ab")]
    members = in_threads(*calls)
    assert {member.host for member in members} == {"10.0.0.5"}
    close_all(lambda *closes: in_threads(*[on_host("a", close) for close in closes]), members)


@pytest.mark.parametrize("step", [0, 1], ids=["same numbers", "other numbers"])
def test_ranks_meet_again_at_one_place_at_any_pace(method, step):
    """A rank that has left finds the store of the last round, and waits for the next one.

    So does rank 0 for a file, and for the port, where another process was rank 0 before. Ranks are processes: what a
    process has left is its own.
    """
    fork = multiprocessing.get_context("fork")
    slow = [0, 1, 2, 0, 2, 1]
    met = fork.Queue()

    def be_rank(rank):
        rounds = 0
        for slowest in slow:
            number = (rank + step * rounds) % 3
            membership = rendezvous(method, rank=number, world_size=3, timeout=20, secret="s")
            if rank == slowest:
                time.sleep(0.05)
            membership.close()
            rounds += 1
        met.put((rank, rounds))

    ranks = [fork.Process(target=be_rank, args=(rank,)) for rank in range(3)]
    for process in ranks:
        process.start()
    try:
        assert sorted(met.get(timeout=60) for _ in ranks) == [(rank, len(slow)) for rank in range(3)]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def test_leaving_a_folder_that_is_gone(tmp_path, in_threads):
    """A rank that leaves after another one has removed the folder of the file has nothing left to remove."""
    (tmp_path / "f").mkdir()
    members = in_threads(*[join(f"file://{tmp_path}/f/meet", rank, 2) for rank in range(2)])
    members[0].close()
    shutil.rmtree(tmp_path / "f")
    members[1].close()


def test_exactly_one_rank_leaves_last():
    """A rank that learns late of the others' leaving is not the last one, which would remove the next store."""
    store = MemoryStore()
    for rank in range(2):
        claim_rank(store, a_request(rank, 2, Deadline(5)), "here", "")
    calls = []

    class Emptied:
        """The last rank removes the store as soon as this one has left."""

        def __getattr__(self, name):
            def call(*args, **options):
                if "add" in calls:
                    raise DistributedTimeoutError("nothing is there")
                calls.append(name)
                return getattr(store, name)(*args, **options)

            return call

    assert not count_departure(Emptied(), 2, timeout=1)
    assert count_departure(store, 2, timeout=1)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("key", ["charter", "attendance/rank/0", "attendance/rank/1", "attendance/verdict"])
def test_what_strangers_write_into_an_open_store(rank, key):
    """Bytes that no rank writes end the start by one of our errors, never by a decoder's own."""
    store = MemoryStore()
    store.set(f"ferrodist/{key}", b"\xff\xfe")
    with pytest.raises(DistributedError):
        rendezvous_in(store, "a store", rank=rank, world_size=2, timeout=0.3, secret="s", job="j")
