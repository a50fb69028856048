"""The groups of two that `TcpRpcBackend` makes, without agents, and how agents use them."""

import threading

import pytest

from ferrodist.backends.subgroup import SubBackend
from ferrodist.errors import DistributedTimeoutError, GroupClosedError, PeerLostError
from ferrodist.rendezvous import Membership, MemoryStore
from ferrodist.rpc import tcp_transport
from ferrodist.rpc.agent import RpcAgent
from ferrodist.rpc.tcp_transport import TcpRpcBackend
from ferrodist.rpc.transport import GroupRpcBackend
from ferrodist.testing import check_leaks, run_ranks

_PATIENCE = 60.0


class Side:
    """A backend, and what it has told."""

    def __init__(self, store, rank, world_size=3):
        membership = Membership(
            rank=rank,
            world_size=world_size,
            local_rank=None,
            job="j",
            secret=b"s",
            store=store,
            host="127.0.0.1",
            on_close=lambda: None,
        )
        self.backend = TcpRpcBackend.from_membership(membership, _PATIENCE)
        self.told = []
        self._changed = threading.Condition()

    def open(self):
        self.backend.open(self)
        return self

    def joined(self, peer, pair, version):
        with self._changed:
            self.told.append((peer, pair, version))
            self._changed.notify_all()

    def wait(self, count):
        """The newest group, once so many have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.told) >= count, _PATIENCE)
            return self.told[-1][1]

    def close(self):
        self.backend.close()
        for _, pair, _ in self.told:
            pair.close(0)


@pytest.fixture
def sides():
    """Return a function that makes backends of a store, opened unless told otherwise."""
    store, made = MemoryStore(), []
    with check_leaks():

        def make(*ranks, is_open=True):
            new = [Side(store, rank) for rank in ranks]
            made.extend(new)
            return [side.open() if is_open else side for side in new]

        yield make
        for side in made:
            side.close()


def end_of(pair):
    """What a receive in a group ends with."""
    with pytest.raises(PeerLostError) as caught:
        pair.recv(bytearray(1), 1 - pair.rank, timeout=_PATIENCE)
    return caught.value


def test_errors_number_ranks_as_agents_do(sides):
    """Errors name the peer's rank, not its rank in the pair."""
    lower, higher = sides(1, 2)
    pairs = lower.wait(1), higher.wait(1)
    assert [pair.rank for pair in pairs] == [0, 1]
    pairs[1].close()
    error = end_of(pairs[0])
    assert error.ranks == (2,)
    assert error.message == "rank 2 has left: its agent was closed"
    assert "rpc of ranks 1 and 2" in repr(pairs[0])


def test_a_rank_that_left_is_not_reconnected(sides):
    """A lower rank that said goodbye is not connected to until there is a new process."""
    lower, higher = sides(1, 2)
    pair = higher.wait(1)
    lower.wait(1)
    lower.close()
    end_of(pair)
    higher.backend.lost(1, pair)
    assert higher.backend._connector_threads == set()
    assert higher.backend._found == {}
    sides(1)
    higher.wait(2)
    assert [version for _, _, version in higher.told] == [(1, 1), (2, 2)]


def test_a_lost_connection_is_replaced(sides):
    """Unless it is not the current one; earlier failures are forgotten."""
    lower, higher = sides(1, 2)
    first = higher.wait(1)
    higher.backend._failures[1] = OSError("once")
    first.abort("enough")
    higher.backend.lost(1, first)
    second = higher.wait(2)
    higher.backend.lost(1, first)
    assert higher.backend._groups[1][1] is second
    assert higher.backend.absence(1) == ""
    lower.wait(2)
    assert len(higher.told) == 2


def test_a_process_that_is_replaced_while_it_is_connected_to(sides, monkeypatch):
    """The group with it ends as soon as it is there."""
    (lower,) = sides(1)
    (higher,) = sides(2, is_open=False)
    connect = higher.backend._attempt

    def slow(peer, entry):
        found = connect(peer, entry)
        if entry.incarnation == 1:
            newer = higher.backend._found
            sides(1)
            limit = threading.Event()
            while newer[1].incarnation == 1:
                limit.wait(0.002)
        return found

    monkeypatch.setattr(higher.backend, "_attempt", slow)
    higher.open()
    pair = higher.wait(1)
    assert "rank 1 was started again" in end_of(pair).message
    higher.backend.lost(1, pair)
    higher.wait(2)
    assert higher.told[-1][2][0] == 2
    lower.wait(1)


def test_a_new_process_ends_the_pause(sides, monkeypatch):
    """A rank whose last process can't be reached is connected to at once when there is another one."""
    monkeypatch.setattr(tcp_transport, "_MIN_PAUSE_SECONDS", 1000.0)
    (dead,) = sides(1)
    dead.backend._listener.close()
    (higher,) = sides(2)
    waiting = threading.Event()
    while not higher.backend.absence(1):
        waiting.wait(0.002)
    assert "The last attempt to connect:" in higher.backend.absence(1)
    sides(1)
    higher.wait(1)


def test_closing_waits_for_an_attempt_to_connect(sides, monkeypatch):
    """No thread is left, nor a connection that came too late."""
    sides(1)
    (higher,) = sides(2, is_open=False)
    connect, begun, go_on = higher.backend._attempt, threading.Event(), threading.Event()

    def slow(peer, entry):
        begun.set()
        go_on.wait(_PATIENCE)
        return connect(peer, entry)

    monkeypatch.setattr(higher.backend, "_attempt", slow)
    higher.open()
    assert begun.wait(_PATIENCE)
    closing = threading.Thread(target=higher.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    go_on.set()
    closing.join(_PATIENCE)
    assert not closing.is_alive()
    assert [thread.name for thread in threading.enumerate() if "dials" in thread.name] == []
    assert higher.told == []


class Told(GroupRpcBackend):
    """A backend whose groups a test makes."""

    def open(self, peers):
        self.peers = peers

    def tell(self, label, version):
        pair = SubBackend(self._group, (0, 1), label=label, name=label)
        self.peers.joined(1 - self.rank, pair, version)
        return pair


def test_an_agent_uses_the_newest_group():
    """An older one that arrives later is closed."""

    def program(group):
        backend = Told(group)
        agent = RpcAgent(backend)
        agent.register("echo", lambda value: value)
        backend.tell("new", (2, 1))
        old = backend.tell("old", (1, 5))
        with pytest.raises(GroupClosedError):
            old.send(b"x", 1 - old.rank)
        assert agent.rpc_sync(1 - agent.rank, "echo", 1, timeout=_PATIENCE) == 1
        group.barrier()
        agent.close()

    run_ranks(program, 2, backend="simulated")


def test_a_closed_agent_closes_new_groups():
    """A group that arrives too late is closed."""

    def program(group):
        backend = Told(group)
        agent = RpcAgent(backend)
        agent.close()
        with pytest.raises(GroupClosedError):
            backend.tell("late", (1, 1)).send(b"x", 1 - group.rank)

    run_ranks(program, 2, backend="simulated")


def test_unsent_calls_occupy_no_slots():
    """Calls that never went to a rank don't count among those without a result."""
    from_nobody = []

    def program(group):
        agent = RpcAgent(Told(group), most_outstanding=1)
        for _ in range(3):
            with pytest.raises(DistributedTimeoutError, match="was not there within") as caught:
                agent.rpc_sync(1 - agent.rank, "echo", 1, timeout=0.01)
            from_nobody.append(caught.value.ranks)
        agent.close()

    run_ranks(program, 2, backend="simulated")
    assert sorted(from_nobody) == [(0,)] * 3 + [(1,)] * 3


@pytest.mark.parametrize("backend", ["simulated", "tcp-threads"])
def test_a_lost_rank_has_its_number_in_the_group(backend):
    """Not that in the sub-group which agents of a group use."""

    def program(group):
        agent = RpcAgent(group)
        agent.register("wait", lambda: None)
        group.barrier()
        if agent.rank == 2:
            agent.close()
        if agent.rank == 1:
            while (error := agent.rpc_async(2, "wait").exception()) is None:
                pass
            assert isinstance(error, PeerLostError)
            assert error.ranks == (2,)
        group.barrier()
        agent.close()

    run_ranks(program, 3, backend=backend)
