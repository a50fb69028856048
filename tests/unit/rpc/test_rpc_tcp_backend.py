"""Agents over TCP: ranks that join late, leave, and are started again."""

import contextlib
import os
import socket
import threading
import time

import pytest

from ferrodist.deadline import Deadline
from ferrodist.errors import (
    AuthenticationError,
    DistributedError,
    DistributedTimeoutError,
    GroupClosedError,
    InvalidRankError,
    InvalidWorldSizeError,
    NoConnectionError,
    PeerLostError,
    ProtocolError,
    RendezvousError,
)
from ferrodist.rendezvous import Membership, MemoryStore
from ferrodist.rpc.agent import RpcAgent, RpcContext
from ferrodist.rpc.tcp_transport import PairRequest, TcpRpcBackend, _hello
from ferrodist.testing import check_leaks

_PATIENCE = 60.0


class Job:
    """Ranks of this process that share a store, and are closed at the end."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.store = MemoryStore()
        self.agents = []

    def membership(self, rank, *, secret=b"s", world_size=None):
        return Membership(
            rank=rank,
            world_size=world_size or self.world_size,
            local_rank=None,
            job="j",
            secret=secret,
            store=self.store,
            host="127.0.0.1",
            on_close=lambda: None,
        )

    def agent(self, rank, *, secret=b"s", name="rpc", timeout=_PATIENCE, mark=None):
        backend = TcpRpcBackend.from_membership(self.membership(rank, secret=secret), timeout, name=name)
        agent = RpcAgent(backend, {"echo": lambda value: value, "who": lambda: mark})
        self.agents.append(agent)
        return agent

    def close(self):
        for agent in self.agents:
            agent.close()


@pytest.fixture
def job():
    """Return a function that makes a job; nothing of it may be left behind."""
    with check_leaks(), contextlib.ExitStack() as jobs:

        def make(world_size):
            made = Job(world_size)
            jobs.callback(made.close)
            return made

        yield make


def meet(*agents):
    """Wait until all can call all."""
    for agent in agents:
        for other in agents:
            agent.wait_for_rank(other.rank)


def break_connection(agent, peer):
    """End the connection to a peer as a network would; returns when this rank has noticed."""
    remote = agent._peers._peers[peer]
    for link in list(remote.group._links.values()):
        link.sock.shutdown(socket.SHUT_RDWR)
    wait_for_end(agent, remote)


def wait_for_end(agent, remote):
    """Return when an agent has lost a peer."""
    patience = Deadline(_PATIENCE)
    while agent._peers._peers.get(remote.rank) is remote:
        assert not patience.expired
        threading.Event().wait(0.001)


def hold_in(agent):
    """Register a function that waits; gives the events of its start and of its end."""
    started, release = threading.Event(), threading.Event()

    def hold(value):
        started.set()
        release.wait(_PATIENCE)
        return value

    agent.register("hold", hold)
    return started, release


def test_ranks_meet_at_an_address(monkeypatch):
    """Rank 0 serves the store at the address, whichever rank starts first; then all call all."""
    monkeypatch.delenv("FERRODIST_SECRET", raising=False)
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    found = {}

    def start(rank):
        own = {"listener": listener} if rank == 0 else {}
        backend = TcpRpcBackend(rank, 3, address, secret="s", timeout=_PATIENCE, **own)
        found[rank] = RpcAgent(backend, {"echo": lambda value: value})

    with check_leaks():
        threads = [threading.Thread(target=start, args=(rank,)) for rank in (2, 1, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        agents = [found[rank] for rank in range(3)]
        for agent in agents:
            agent.register("add", lambda value, own=agent.rank: value + own)
        meet(*agents)
        calls = [(agent, to) for agent in agents for to in range(3)]
        assert [agent.rpc_sync(to, "add", 10) for agent, to in calls] == [10 + to for _, to in calls]
        with pytest.raises(AuthenticationError, match="the same job secret"):
            TcpRpcBackend(1, 3, address, secret="another", timeout=_PATIENCE)
        with pytest.raises(InvalidWorldSizeError, match="world size 4"):
            TcpRpcBackend(3, 4, address, secret="s", timeout=_PATIENCE)
        for agent in agents:
            agent.close()


def test_the_launchers_variables(monkeypatch):
    """Without arguments everything is taken from the environment."""
    for variable in list(os.environ):
        if variable.startswith(("TORCHELASTIC_", "FERRODIST_", "LOCAL_", "GROUP_")):
            monkeypatch.delenv(variable)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    variables = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "FERRODIST_JOB": "mine"}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    with check_leaks():
        first = RpcAgent(TcpRpcBackend(timeout=_PATIENCE))
        monkeypatch.setenv("RANK", "1")
        second = RpcAgent(TcpRpcBackend(timeout=_PATIENCE))
        first.register("echo", lambda value: value)
        assert (second.rank, second.world_size) == (1, 2)
        assert second.rpc_sync(0, "echo", 1) == 1
        second.close()
        first.close()
    with pytest.raises(RendezvousError, match="rank 0 did not answer rank 1"):
        TcpRpcBackend(connect_timeout=0.05)


def test_wrong_arguments(job):
    """They are named; a backend serves one agent."""
    ranks = job(2)
    with pytest.raises(TypeError, match="name must be"):
        TcpRpcBackend.from_membership(ranks.membership(0), name="")
    with pytest.raises(ValueError, match="choose shorter names"):
        TcpRpcBackend.from_membership(ranks.membership(0), name="x" * 5000)
    with pytest.raises(TypeError, match="address must be 'host:port'"):
        TcpRpcBackend(0, 1, 5)
    with pytest.raises(ValueError, match="timeout"):
        TcpRpcBackend.from_membership(ranks.membership(0), -1)
    backend = TcpRpcBackend.from_membership(ranks.membership(0))
    ranks.agents.append(RpcAgent(backend))
    with pytest.raises(RuntimeError, match="serves one agent"):
        RpcAgent(backend)


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_joins_late(job, late):
    """Calls wait for it, whichever side connects, or until their timeout."""
    ranks = job(3)
    agent = ranks.agent(1)
    with pytest.raises(DistributedTimeoutError, match=rf"rank {late} was not there within 0.05 s. Was it started"):
        agent.rpc_sync(late, "echo", 1, timeout=0.05)
    results = []
    caller = threading.Thread(target=lambda: results.append(agent.rpc_sync(late, "who")))
    caller.start()
    ranks.agent(late, mark="late")
    caller.join(_PATIENCE)
    assert results == ["late"]


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_closed_agent_says_goodbye(job, leaver):
    """Calls fail, waiting ones too; the next agent of that rank is found."""
    ranks = job(2)
    stays, leaves = ranks.agent(1 - leaver), ranks.agent(leaver)
    started, release = hold_in(leaves)
    future = stays.rpc_async(leaver, "hold", 1)
    assert started.wait(_PATIENCE)
    release_soon = threading.Thread(target=lambda: (future.exception(_PATIENCE), release.set()))
    release_soon.start()
    leaves.close()
    release_soon.join()
    for attempt in (future.result, lambda: stays.rpc_sync(leaver, "echo", 1)):
        with pytest.raises(PeerLostError, match=f"^rank {leaver} has left: its agent was closed") as caught:
            attempt()
        assert caught.value.ranks == (leaver,)
    with pytest.raises(GroupClosedError):
        leaves.rpc_sync(1 - leaver, "echo", 1)
    with pytest.raises(GroupClosedError):
        leaves.wait_for_rank(1 - leaver)
    ranks.agent(leaver, mark="second")
    stays.wait_for_rank(leaver)
    assert stays.rpc_sync(leaver, "who") == "second"


@pytest.mark.parametrize("side", [0, 1])
def test_a_broken_connection(job, side):
    """Waiting calls fail; whichever side it broke on, it is soon replaced, again and again."""
    ranks = job(2)
    agents = [ranks.agent(rank) for rank in range(2)]
    started, release = hold_in(agents[1 - side])
    meet(*agents)
    future = agents[side].rpc_async(1 - side, "hold", 1)
    assert started.wait(_PATIENCE)
    for number in range(5):
        remotes = [agent._peers._peers[1 - agent.rank] for agent in agents]
        break_connection(agents[side], 1 - side)
        for agent, remote in zip(agents, remotes, strict=True):
            wait_for_end(agent, remote)
        meet(*agents)
        assert [agent.rpc_sync(1 - agent.rank, "echo", number) for agent in agents] == [number] * 2
    release.set()
    with pytest.raises(PeerLostError, match=f"rank {1 - side} (died: its connection|.* one that broke)"):
        future.result()


def test_an_end_that_one_side_has_not_noticed(job):
    """The higher rank connects anew: the lower one drops the old connection, and uses the new one."""
    ranks = job(2)
    agents = [ranks.agent(rank) for rank in range(2)]
    started, release = hold_in(agents[1])
    meet(*agents)
    future = agents[0].rpc_async(1, "hold", 1)
    assert started.wait(_PATIENCE)
    pair = agents[0]._peers._peers[1].group
    pair.link_ended = lambda link, *_args, **_options: pair._links.pop(link.peer)
    break_connection(agents[1], 0)
    with pytest.raises(PeerLostError, match="made a new connection for one that broke"):
        future.result(_PATIENCE)
    release.set()
    meet(*agents)
    assert [agent.rpc_sync(1 - agent.rank, "echo", 7) for agent in agents] == [7, 7]


@pytest.mark.parametrize("replaced", [0, 1, 2])
def test_a_process_that_is_replaced_while_it_lives(job, replaced):
    """All others switch to the newest process of a rank; the older ones learn that they are replaced."""
    ranks = job(3)
    others = [ranks.agent(rank) for rank in range(3) if rank != replaced]
    before = [ranks.agent(replaced, mark="first")]
    meet(*others, *before)
    for mark in ("second", "third"):
        latest = ranks.agent(replaced, mark=mark)
        for other in others:
            latest.wait_for_rank(other.rank)
            assert latest.rpc_sync(other.rank, "echo", mark) == mark  # so that the other has gone over
            other.wait_for_rank(replaced)
            assert other.rpc_sync(replaced, "who") == mark
        before.append(latest)
    for other in others:
        before[-1].rpc_sync(other.rank, "echo", 1)
    for old in before[:-1]:
        old._peers._backend._directory.join(_PATIENCE)
        for other in others:
            old._peers._changed.acquire()
            lost = old._peers._changed.wait_for(lambda old=old, to=other.rank: to in old._peers._lost, _PATIENCE)
            old._peers._changed.release()
            assert lost
            with pytest.raises(PeerLostError, match=f"Another process was started as rank {replaced}: this one"):
                old.rpc_sync(other.rank, "echo", 1)


def test_an_answer_does_not_go_to_the_next_process(job):
    """The response to a replaced process's call does not reach its successor."""
    ranks = job(2)
    server = ranks.agent(0)
    started, release = hold_in(server)
    first = ranks.agent(1)
    abandoned = first.rpc_async(0, "hold", "of the first")
    assert started.wait(_PATIENCE)
    second = ranks.agent(1)
    second.wait_for_rank(0)
    started.clear()
    asked = second.rpc_async(0, "hold", "of the second")
    assert started.wait(_PATIENCE)
    release.set()
    assert asked.result(_PATIENCE) == "of the second"
    with pytest.raises(PeerLostError):
        abandoned.result(_PATIENCE)
    assert second.statistics().late == 0


def test_the_store_goes_away(job):
    """Ranks go on, with new connections too; but none can join, which the error says."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with check_leaks():
        host = RpcAgent(TcpRpcBackend(0, 4, address, secret="s", timeout=_PATIENCE, listener=listener))
        others = [RpcAgent(TcpRpcBackend(rank, 4, address, secret="s", timeout=_PATIENCE)) for rank in (1, 2)]
        for agent in others:
            agent.register("echo", lambda value: value)
        meet(host, *others)
        host.close()
        for agent in others:
            agent._peers._backend._directory.join(_PATIENCE)
            with pytest.raises(PeerLostError, match=r"has left.*No process can join again, for the store .* is gone"):
                agent.rpc_sync(0, "echo", 1)
        with pytest.raises(DistributedTimeoutError, match=r"rank 3 was not there .* No process can join again"):
            others[0].rpc_sync(3, "echo", 1, timeout=0.01)
        started = time.monotonic()
        for call in (others[0].rpc_sync, others[1].rpc_sync):
            with pytest.raises(
                NoConnectionError, match=r"rank 3 can't come any more: No process can join again"
            ) as caught:
                call(3, "echo", 1)
            assert caught.value.ranks == (3,)
        with pytest.raises(InvalidRankError, match="no rank called 'nobody' is there, and none can come"):
            others[0].rpc_sync("nobody", "echo", 1)
        with pytest.raises(NoConnectionError, match="rank 3 can't come any more"):
            others[1].wait_for_rank(3)
        assert time.monotonic() - started < _PATIENCE / 3
        break_connection(others[0], 2)
        meet(*others)
        assert others[0].rpc_sync(2, "echo", 1) == 1
        for agent in others:
            agent.close()


def test_another_secret_with_the_same_store(job):
    """A rank does not get in; its calls say why."""
    ranks = job(2)
    ranks.agent(0)
    stranger = ranks.agent(1, secret=b"another")
    failures = stranger._peers._backend._failures
    waited = Deadline(_PATIENCE)
    while 0 not in failures and not waited.expired:
        threading.Event().wait(0.002)
    with pytest.raises(DistributedTimeoutError, match="the same job secret"):
        stranger.rpc_sync(0, "echo", 1, timeout=0.01)


def test_agents_of_another_name(job):
    """Two sets of agents in one store don't mix."""
    ranks = job(2)
    agents = {(name, rank): ranks.agent(rank, name=name, mark=name) for name in ("a", "b") for rank in range(2)}
    for (name, rank), agent in agents.items():
        assert agent.rpc_sync(1 - rank, "who") == name


def test_the_store_does_not_fill(job):
    """However often processes are started, a rank has few keys."""
    ranks = job(3)
    stays = ranks.agent(1)
    for _ in range(4):
        for rank in (0, 2):
            agent = ranks.agent(rank)
            agent.wait_for_rank(1)
            assert agent.rpc_sync(1, "echo", 1) == 1
            agent.close()
    stays.close()
    keys = [key.removeprefix("rpc/rpc/") for key in ranks.store._values]
    fixed = [f"{kind}/{rank}" for kind in ("incarnation", "process") for rank in range(3)]
    assert sorted(key for key in keys if not key.startswith("bell/")) == sorted(fixed)
    assert len(keys) - len(fixed) <= 3


def test_refused_connections(job):
    """A connection to the wrong process, of the wrong rank, or an older one is refused."""
    ranks = job(3)
    agents = [ranks.agent(rank) for rank in range(3)]
    meet(*agents)
    middle = agents[1]._peers._backend
    own = middle._own

    def hello(rank=2, **changes):
        values = {
            "name": "rpc",
            "sought_incarnation": own.incarnation,
            "token": own.token,
            "own_incarnation": 1,
            "attempt": 99,
            **changes,
        }
        made = TcpRpcBackend.from_membership(ranks.membership(rank))
        return _hello(made._membership, PairRequest(**values))

    for wrong in ({"sought_incarnation": own.incarnation + 1}, {"token": "other"}, {"name": "other"}):
        with pytest.raises(RendezvousError, match="another process"):
            middle._admit(hello(**wrong))
    with pytest.raises(RendezvousError, match="newer process"):
        middle._admit(hello(attempt=1))
    with pytest.raises(RendezvousError, match="newer process"):
        middle._admit(hello(own_incarnation=0))
    with pytest.raises(ValueError, match="does not connect to rank 1"):
        middle._admit(hello(rank=0))
    with pytest.raises(ProtocolError, match="names no two agents"):
        PairRequest.from_text("{}")
    middle._admit(hello())


def test_an_attempt_to_connect_that_fails_unexpectedly(job, caplog):
    """The next reading of the directory starts another one; until then its error is reported."""
    ranks = job(2)
    stays = ranks.agent(1)
    backend = stays._peers._backend
    connect, has_failed = backend._attempt, threading.Event()

    def fail(peer, entry):
        backend._attempt = connect
        raise ValueError("no such address")

    backend._attempt = fail

    class Dialers(set):
        """Says when a thread has ended."""

        def discard(self, thread):
            super().discard(thread)
            has_failed.set()

    backend._connector_threads = Dialers()
    ranks.agent(0)
    assert has_failed.wait(_PATIENCE)
    assert backend._connecting == {}
    with pytest.raises(DistributedTimeoutError, match="The last attempt to connect: no such address"):
        stays.rpc_sync(0, "echo", 1, timeout=0.0)
    assert "rank 1 can't connect to rank 0" in caplog.text
    backend._directory._read(backend._find)
    stays.wait_for_rank(0)
    assert stays.rpc_sync(0, "echo", 1) == 1


WRONG = [
    {"num_workers": 0},
    {"num_workers": "8"},
    {"most_outstanding": 0},
    {"message_limit": 10},
    {"name": 5},
    {"name": ""},
    {"name": "x" * 256},
    {"allow_pickle": "no"},
    {"functions": ["echo"]},
    {"functions": {"": print}},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_a_failed_agent_closes_its_backend(job, options):
    """But not that of another agent."""
    ranks = job(1)
    backend = TcpRpcBackend.from_membership(ranks.membership(0))
    with pytest.raises((TypeError, ValueError)):
        RpcAgent(backend, **options)
    assert backend._closed
    agent = ranks.agent(0)
    with pytest.raises((TypeError, ValueError)):
        RpcAgent(agent._peers._backend, **options)
    assert not agent._peers._backend._closed


def test_a_failed_context_closes_its_backend(job):
    """When it is made with an unknown option."""
    ranks = job(1)
    for options in ({"workers": 3}, {"drain_timeout": -1}):
        backend = TcpRpcBackend.from_membership(ranks.membership(0))
        with pytest.raises((TypeError, ValueError)):
            RpcContext(backend, **options)
        assert backend._closed


def refuse_threads_after(number, monkeypatch):
    """Have the system refuse to start more threads than so many."""
    start, started = threading.Thread.start, []

    def start_or_refuse(thread):
        if len(started) == number:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)


@pytest.mark.parametrize("num_threads", range(6))
def test_an_agent_without_threads_leaves_nothing(num_threads, job, monkeypatch):
    """The limit is named, whichever thread can't be started; backend and threads are closed."""
    ranks = job(2)
    backend = TcpRpcBackend.from_membership(ranks.membership(1))
    with check_leaks(), monkeypatch.context() as patched:
        refuse_threads_after(num_threads, patched)
        with pytest.raises(DistributedError, match="rank 1 can't start: this process can start no more threads"):
            RpcAgent(backend)
        assert backend._closed


def test_a_backend_that_can_not_listen_is_closed(job, monkeypatch):
    """With the reason as the error."""
    backend = TcpRpcBackend.from_membership(job(1).membership(0))

    def refuse(*_args, **_options):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("ferrodist.rpc.tcp_transport.Listener", refuse)
    with pytest.raises(DistributedError, match="rank 0 can't start: this process has as many files open as it may"):
        RpcAgent(backend)
    assert backend._closed


@pytest.mark.parametrize("wrong", [{"name": ""}, {"name": "x" * 5000}, {"rank": 7}, {"timeout": -1}], ids=str)
def test_a_backend_of_wrong_arguments_leaves_nothing(wrong):
    """Neither the store that it serves nor the socket that it was given."""
    with check_leaks():
        listener = socket.create_server(("127.0.0.1", 0))
        with pytest.raises((TypeError, ValueError)):
            TcpRpcBackend(**{"rank": 0, "world_size": 1, "address": "127.0.0.1:1", "listener": listener, **wrong})
        assert listener.fileno() == -1
    with pytest.raises(TypeError, match="membership must be a Membership"):
        TcpRpcBackend.from_membership(3)
