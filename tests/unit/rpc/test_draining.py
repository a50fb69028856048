"""Draining, step by step: ranks drain, are lost and join again, and calls are under way."""

import concurrent.futures
import contextlib
import threading
from types import SimpleNamespace

import pytest

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedTimeoutError, GroupClosedError, PeerLostError, RpcError
from ferrodist.rpc import RpcAgent, SimulatedRpcBackend, current_agent
from ferrodist.rpc.messages import Call
from ferrodist.rpc.shutdown import DRAIN_READY, DRAIN_RELEASE, DRAIN_STATUS, GracefulShutdown
from ferrodist.testing import check_leaks

_PATIENCE = 60.0


class Ranks:
    """A rank's graceful shutdown, and its client and server, whose calls a test decides on.

    Args:
        rank: The rank.
        world_size: The number of ranks.
        answer: Called with a rank and a call that goes there; an exception is the call's error.
        num_serving: The number of calls that are served, each time it is asked for.
    """

    def __init__(self, rank, world_size, answer=lambda to, call: [0, 0, 0], num_serving=()):
        self.answer = answer
        self.calls = []
        self.pending_calls = SimpleNamespace(num_made=0, num_ended=0)
        self.num_serving = list(num_serving)
        self.handlers = {}
        self.shutdown = GracefulShutdown(rank, world_size, self, self)

    def call_internal(self, to, call, seconds):
        """See `RpcClient`."""
        assert seconds >= 0
        self.calls.append((to, call.name))
        future = concurrent.futures.Future()
        try:
            future.set_result(self.answer(to, call))
        except Exception as error:
            future.set_exception(error)
        return future

    def register_internal(self, name, handler, *, is_prefix=False):
        """See `RpcServer`."""
        self.handlers[name] = handler

    def respond(self, incoming, value):
        """See `RpcServer`."""

    @property
    def serving(self):
        """See `RpcServer`."""
        return range(self.num_serving.pop(0) if self.num_serving else 0)

    def serve(self, peer, call):
        """Serve a call of another rank."""
        self.handlers[call.name](SimpleNamespace(peer=SimpleNamespace(rank=peer)), call)

    def make_ready(self, *peers, token=7):
        """Have ranks drain."""
        for peer in peers:
            self.serve(peer, Call(DRAIN_READY, (token,), {}))

    def called(self, name):
        """The ranks that received calls of a name."""
        return [to for to, called in self.calls if called == name]


def answers(*rounds):
    """Make answers for one round after the other; the last one is repeated."""
    left = {}

    def answer(to, call):
        if call.name != DRAIN_STATUS:
            return None
        mine = left.setdefault(to, list(rounds))
        found = mine.pop(0) if len(mine) > 1 else mine[0]
        return found.get(to, [0, 0, 0]) if isinstance(found, dict) else found

    return answer


def test_one_round_is_not_enough():
    """A call that has ended between two rounds may have made another one that is under way."""
    hub = Ranks(0, 3, answers({1: [0, 0, 0]}, {1: [1, 1, 0]}, {1: [2, 2, 0]}, {1: [2, 2, 0]}))
    hub.make_ready(1, 2)
    hub.shutdown.drain(Deadline(_PATIENCE))
    assert hub.called(DRAIN_STATUS) == [1, 2] * 4
    assert hub.called(DRAIN_RELEASE) == [1, 2]


def test_two_equal_rounds_are_enough():
    """Two rounds are needed: the first one says nothing about the time before."""
    hub = Ranks(0, 2, answers([3, 3, 0]))
    hub.make_ready(1)
    hub.shutdown.drain(Deadline(_PATIENCE))
    assert hub.called(DRAIN_STATUS) == [1, 1]


@pytest.mark.parametrize("busy", [[3, 2, 0], [3, 3, 1]])
def test_calls_under_way_are_waited_for(busy):
    """Calls without a result, and calls that are served, whoever made them."""
    hub = Ranks(0, 2, answers(busy, busy, busy, [3, 3, 0]))
    hub.make_ready(1)
    hub.shutdown.drain(Deadline(_PATIENCE))
    assert hub.called(DRAIN_STATUS) == [1] * 5


@pytest.mark.parametrize(
    ("look", "text", "ranks"),
    [
        ([3, 2, 0], "rank 2 has 1 call without a result", (2,)),
        ([3, 3, 2], "rank 2 serves 2 calls", (2,)),
        (RpcError("too many"), "rank 2 does not say what it is at: too many", (2,)),
        (DistributedTimeoutError("late"), "rank 2 does not say what it is at: late", (2,)),
    ],
)
def test_the_error_names_busy_ranks(look, text, ranks):
    """The error names ranks with calls under way, and ranks that do not answer."""

    def answer(to, call):
        if to == 2 and isinstance(look, Exception):
            raise look
        return look if to == 2 else [1, 1, 0]

    hub = Ranks(0, 3, answer)
    hub.make_ready(1, 2)
    with pytest.raises(DistributedTimeoutError, match=rf"calls are under way after 0\.05 s: {text}$") as caught:
        hub.shutdown.drain(Deadline(0.05))
    assert caught.value.ranks == ranks
    assert hub.called(DRAIN_RELEASE) == []


def test_the_coordinator_waits_for_its_own_calls():
    """Calls that rank 0 serves count, too."""
    hub = Ranks(0, 1, num_serving=[2, 1])
    hub.shutdown.drain(Deadline(_PATIENCE))
    assert hub.num_serving == []


def test_a_lost_rank_is_not_waited_for():
    """Whether it is known to be lost or turns out to be while it is asked."""

    def answer(to, call):
        if to == 2:
            raise PeerLostError("rank 2 is gone", ranks=(2,))
        return [0, 0, 0]

    hub = Ranks(0, 4, answer)
    hub.make_ready(1, 2)
    hub.shutdown.on_lost(3, None)
    hub.shutdown.drain(Deadline(_PATIENCE))
    assert hub.called(DRAIN_RELEASE) == [1, 2]


def test_draining_a_closed_agent_fails():
    """The agent's own error is raised, and not taken for another rank's."""

    def answer(to, call):
        raise GroupClosedError("the agent was closed")

    hub = Ranks(0, 2, answer)
    hub.make_ready(1)
    with pytest.raises(GroupClosedError):
        hub.shutdown.drain(Deadline(_PATIENCE))


def test_a_rank_that_does_not_confirm_its_release():
    """The error names the rank, which still waits."""

    def answer(to, call):
        if call.name == DRAIN_RELEASE and to == 2:
            raise DistributedTimeoutError("late")
        return [0, 0, 0]

    hub = Ranks(0, 3, answer)
    hub.make_ready(1, 2)
    with pytest.raises(DistributedTimeoutError, match=r"rank 2 did not say within .* was heard") as caught:
        hub.shutdown.drain(Deadline(_PATIENCE))
    assert caught.value.ranks == (2,)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_rank_that_joins_in_any_round_is_waited_for(after):
    """No rank is released before the new one drains."""
    num_looks = 0

    def answer(to, call):
        nonlocal num_looks
        num_looks += call.name == DRAIN_STATUS and to == 1
        if num_looks == after:
            hub.shutdown.on_joined(2, 0)
        return [0, 0, 0]

    hub = Ranks(0, 3, answer)
    hub.shutdown.on_lost(2, None)
    hub.make_ready(1)
    if not after:
        hub.shutdown.on_joined(2, 0)
    with pytest.raises(DistributedTimeoutError, match=r"rank 2 did not come to the end within 0\.05 s") as caught:
        hub.shutdown.drain(Deadline(0.05))
    assert caught.value.ranks == (2,)
    assert hub.called(DRAIN_RELEASE) == []
    hub.make_ready(2)
    hub.shutdown.drain(Deadline(_PATIENCE))
    assert hub.called(DRAIN_RELEASE) == [1, 2]


def test_a_restarted_rank_drains_again():
    """The next process of a rank has to drain, and is released by its own token."""
    tokens = []

    def answer(to, call):
        tokens.extend((to, *call.arguments) for _ in [0] if call.name == DRAIN_RELEASE)
        return [0, 0, 0]

    hub = Ranks(0, 3, answer)
    hub.make_ready(1, 2, token=1)
    hub.shutdown.on_lost(1, None)
    hub.shutdown.on_joined(1, 0)
    with pytest.raises(DistributedTimeoutError, match=r"rank 1 did not come to the end"):
        hub.shutdown.drain(Deadline(0.0))
    hub.make_ready(1, token=2)
    hub.shutdown.on_lost(1, None)
    hub.shutdown.on_joined(1, 0)
    hub.make_ready(1, token=3)
    hub.shutdown.drain(Deadline(_PATIENCE))
    assert sorted(tokens) == [(1, 3), (2, 1)]
    with pytest.raises(DistributedTimeoutError, match=r"ranks 1, 2 did not come to the end"):
        hub.shutdown.drain(Deadline(0.0))


@pytest.mark.parametrize(("peer", "change", "ends"), [(0, 0, True), (0, 1, False), (1, 0, False)])
def test_releases_that_are_ignored(peer, change, ends):
    """A release for another process, or from a rank other than 0, is ignored."""

    def answer(to, call):
        assert (to, call.name) == (0, DRAIN_READY)
        rank.serve(peer, Call(DRAIN_RELEASE, (call.arguments[0] + change,), {}))

    rank = Ranks(2, 3, answer)
    expected = contextlib.nullcontext() if ends else pytest.raises(DistributedTimeoutError, match="rank 0 did not say")
    with expected:
        rank.shutdown.drain(Deadline(_PATIENCE if ends else 0.01))


def test_rank_0_restarts_while_a_rank_drains():
    """The waiting rank raises, even if rank 0 is back before it looks: the new rank 0 knows nothing of it."""

    def answer(to, call):
        assert (to, call.name) == (0, DRAIN_READY)
        rank.shutdown.on_lost(0, None)
        rank.shutdown.on_joined(0, 0)

    rank = Ranks(1, 2, answer)
    with pytest.raises(PeerLostError, match="rank 0, which coordinates draining, is gone") as caught:
        rank.shutdown.drain(Deadline(_PATIENCE))
    assert caught.value.ranks == (0,)
    rank.answer = lambda to, call: rank.serve(0, Call(DRAIN_RELEASE, call.arguments, {}))
    rank.shutdown.drain(Deadline(_PATIENCE))


@pytest.mark.parametrize("name", [DRAIN_READY, DRAIN_RELEASE])
@pytest.mark.parametrize("arguments", [(), ("text",), (1, 2)])
def test_invalid_calls_are_ignored(name, arguments):
    """Calls that no agent makes change nothing."""
    hub = Ranks(0, 2)
    hub.serve(1, Call(name, arguments, {}))
    with pytest.raises(DistributedTimeoutError, match="rank 1 did not come"):
        hub.shutdown.drain(Deadline(0.0))


@pytest.mark.parametrize("how", ["function", "method", "creation"])
def test_functions_of_a_lost_rank_are_waited_for(how):
    """They may make calls, which other ranks serve before they are drained."""
    started, release, noted = threading.Event(), threading.Event(), []

    def call_back():
        started.set()
        assert release.wait(_PATIENCE)
        current_agent().rpc_sync(0, "note", 1, timeout=_PATIENCE)

    class Caller:
        """A class with a method that makes a call."""

        def call_back(self):
            """Make the call."""
            call_back()

    functions = {"call_back": call_back, "Caller": Caller, "note": noted.append}
    with check_leaks(), contextlib.ExitStack() as stack:
        agents = [RpcAgent(way, functions) for way in SimulatedRpcBackend.create_group(3)]
        for agent in agents:
            stack.callback(agent.close)
        hub, server, caller = agents
        made = caller.remote(1, "Caller")
        {
            "function": lambda: caller.rpc_async(1, "call_back"),
            "method": lambda: made.rpc_async().call_back(),
            "creation": lambda: caller.remote(1, "call_back"),
        }[how]()
        assert started.wait(_PATIENCE)
        caller.close()
        for agent in (hub, server):
            patience = Deadline(_PATIENCE)
            while 2 not in agent._shutdown._lost:
                assert not patience.expired
                threading.Event().wait(0.001)
        draining = threading.Thread(target=server.drain, args=(_PATIENCE,))
        draining.start()
        patience = Deadline(_PATIENCE)
        while 1 not in hub._shutdown._ready:
            assert not patience.expired
            threading.Event().wait(0.001)
        statuses = [agent._shutdown._status() for agent in (hub, server)]
        assert [made == ended and not served for made, ended, served in statuses] == [True, False]
        with pytest.raises(DistributedTimeoutError, match=r"rank 1 (serves 1 call|does not say what it is at)"):
            hub.drain(0.2)
        release.set()
        hub.drain(_PATIENCE)
        draining.join(_PATIENCE)
        assert noted == [1]
