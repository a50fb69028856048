"""The names of ranks that join, leave and are started again."""

import contextlib
import threading

import pytest

from ferrodist.deadline import Deadline
from ferrodist.errors import InvalidRankError, PeerLostError
from ferrodist.rendezvous import Membership, MemoryStore
from ferrodist.rpc import RpcAgent, TcpRpcBackend
from ferrodist.rpc.worker_names import WorkerNames
from ferrodist.testing import check_leaks

_PATIENCE = 60.0


def find(names, name):
    """The rank with a name, now."""
    return names.find(name, Deadline(0))


class NoPeers:
    """Peers of rank 0 that are not there, but may come."""

    rank, world_size = 0, 3

    def is_absent_for_good(self, rank):
        """All may come."""
        return False

    def register_internal(self, name, handler, *, is_prefix=False):
        """Receive no names."""


def make_names():
    """Make names, which a test adds."""
    return WorkerNames("", NoPeers(), NoPeers())


def wait_for_end(agent, peer):
    """Return when an agent has lost a rank."""
    patience = Deadline(_PATIENCE)
    while peer in agent._peers._peers:
        assert not patience.expired
        threading.Event().wait(0.001)


def test_a_lost_rank_keeps_its_name_until_another_takes_it():
    """A spare rank may take it; calls by the name of a lost rank don't wait."""
    names = make_names()
    names.on_joined(1, 0)
    names.add(1, "worker")
    names.on_lost(1, None)
    assert find(names, "worker") == 1
    names.on_joined(2, 0)
    names.add(2, "worker")
    assert find(names, "worker") == 2
    names.on_joined(1, 0)
    names.add(1, "worker")
    with pytest.raises(InvalidRankError, match=r"ranks \[1, 2\] are all called 'worker'"):
        find(names, "worker")
    names.on_lost(1, None)
    names.on_lost(2, None)
    assert find(names, "worker") == 2


def test_a_restarted_rank_without_its_name():
    """The old name is unknown, whether the new process has none or another one."""
    names = make_names()
    for lost in (True, False):
        names.on_joined(1, 0)
        names.add(1, "worker")
        if lost:
            names.on_lost(1, None)
        names.on_joined(1, 0)
        with pytest.raises(InvalidRankError, match=r"no rank called 'worker' .*; the names are none"):
            find(names, "worker")
    names.add(1, "other")
    assert find(names, "other") == 1


def test_a_call_waits_for_the_name_of_a_restarted_rank():
    """The name is announced after the rank has joined."""
    names = make_names()
    names.on_joined(1, 0)
    names.add(1, "worker")
    names.on_lost(1, None)
    names.on_joined(1, 0)
    found = []
    thread = threading.Thread(target=lambda: found.append(names.find("worker", Deadline(_PATIENCE))))
    thread.start()
    names.add(1, "worker")
    thread.join(_PATIENCE)
    assert found == [1]


def test_a_spare_takes_over_a_name():
    """The name's rank has left, and was started again without it."""
    store = MemoryStore()

    def agent(rank, name):
        membership = Membership(
            rank=rank,
            world_size=3,
            local_rank=None,
            job="j",
            secret=b"s",
            store=store,
            host="127.0.0.1",
            on_close=lambda: None,
        )
        made = RpcAgent(TcpRpcBackend.from_membership(membership, _PATIENCE), {"who": lambda: [rank, name]}, name=name)
        agents.callback(made.close)
        return made

    with check_leaks(), contextlib.ExitStack() as agents:
        caller, first = agent(0, None), agent(1, "worker")
        assert caller.rpc_sync("worker", "who") == [1, "worker"]
        first.close()
        wait_for_end(caller, 1)
        with pytest.raises(PeerLostError, match="rank 1 has left"):
            caller.rpc_sync("worker", "who")
        with pytest.raises(
            InvalidRankError, match="no rank called 'worker' was there"
        ):  # its next one may have another number
            caller.wait_for_rank("worker", timeout=0.01)
        agent(1, None)
        caller.wait_for_rank(1)
        with pytest.raises(InvalidRankError, match="no rank called 'worker' was there"):
            caller.rpc_sync("worker", "who", timeout=0.01)
        with pytest.raises(InvalidRankError, match="no rank called 'worker' was there"):
            caller.wait_for_rank("worker", timeout=0.01)
        agent(2, "worker")
        caller.wait_for_rank("worker")
        assert caller.rpc_sync("worker", "who") == [2, "worker"]
