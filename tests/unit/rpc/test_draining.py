"""The end of all ranks, step by step: who comes, goes and comes again, and what is under way meanwhile."""

import concurrent.futures
import contextlib
import threading
from types import SimpleNamespace

import pytest

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedTimeoutError, GroupClosedError, PeerLostError, RpcError
from ferrodist.rpc import RpcAgent, SimulatedRpcBackend, current_agent
from ferrodist.rpc.messages import Call
from ferrodist.rpc.shutdown import READY, RELEASE, STATUS, GracefulShutdown
from ferrodist.testing import check_leaks

_PATIENCE = 60.0


class Ranks:
    """A rank's graceful shutdown, and its client and server, whose calls a test decides on.

    Args:
        rank: The rank.
        world_size: The number of ranks.
        answer: Called with a rank and a call that goes there; an exception is the call's error.
        serving: The number of calls that are served, each time it is asked for.
    """

    def __init__(self, rank, world_size, answer=lambda to, call: [0, 0, 0], serving=()):
        self.answer = answer
        self.calls = []
        self.pending = SimpleNamespace(num_made=0, num_ended=0)
        self.serving = list(serving)
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

    def register_internal(self, name, handler):
        """See `RpcServer`."""
        self.handlers[name] = handler

    def respond(self, incoming, value):
        """See `RpcServer`."""

    @property
    def num_serving(self):
        """See `RpcServer`."""
        return self.serving.pop(0) if self.serving else 0

    def serve(self, peer, call):
        """Serve a call of another rank."""
        self.handlers[call.name](SimpleNamespace(peer=SimpleNamespace(rank=peer)), call)

    def come(self, *peers, token=7):
        """Have ranks come to the end."""
        for peer in peers:
            self.serve(peer, Call(READY, (token,), {}))

    def told(self, name):
        """Which ranks such calls went to."""
        return [to for to, called in self.calls if called == name]


def answers(*rounds):
    """Ranks that answer in one round after the other so; the last one is repeated."""
    left = {}

    def answer(to, call):
        if call.name != STATUS:
            return None
        mine = left.setdefault(to, list(rounds))
        found = mine.pop(0) if len(mine) > 1 else mine[0]
        return found.get(to, [0, 0, 0]) if isinstance(found, dict) else found

    return answer


def test_one_round_is_not_enough():
    """A call that was made and has ended between two questions may have made another one, which is under way."""
    hub = Ranks(0, 3, answers({1: [0, 0, 0]}, {1: [1, 1, 0]}, {1: [2, 2, 0]}, {1: [2, 2, 0]}))
    hub.come(1, 2)
    hub.shutdown.drain(Deadline(_PATIENCE))
    assert hub.told(STATUS) == [1, 2] * 4
    assert hub.told(RELEASE) == [1, 2]


def test_two_rounds_that_agree():
    """Are enough, and needed: in the first one nothing is known of what went before."""
    hub = Ranks(0, 2, answers([3, 3, 0]))
    hub.come(1)
    hub.shutdown.drain(Deadline(_PATIENCE))
    assert hub.told(STATUS) == [1, 1]


@pytest.mark.parametrize("busy", [[3, 2, 0], [3, 3, 1]])
def test_what_is_under_way_is_waited_for(busy):
    """Calls without a result, and such as are served, whoever made them."""
    hub = Ranks(0, 2, answers(busy, busy, busy, [3, 3, 0]))
    hub.come(1)
    hub.shutdown.drain(Deadline(_PATIENCE))
    assert hub.told(STATUS) == [1] * 5


@pytest.mark.parametrize(
    ("look", "text", "ranks"),
    [
        ([3, 2, 0], "rank 2 has 1 call without a result", (2,)),
        ([3, 3, 2], "rank 2 serves 2 calls", (2,)),
        (RpcError("too many"), "rank 2 does not say what it is at: too many", (2,)),
        (DistributedTimeoutError("late"), "rank 2 does not say what it is at: late", (2,)),
    ],
)
def test_who_keeps_the_others_waiting(look, text, ranks):
    """Is named: also who does not answer."""

    def answer(to, call):
        if to == 2 and isinstance(look, Exception):
            raise look
        return look if to == 2 else [1, 1, 0]

    hub = Ranks(0, 3, answer)
    hub.come(1, 2)
    with pytest.raises(DistributedTimeoutError, match=rf"calls are under way after 0\.05 s: {text}$") as caught:
        hub.shutdown.drain(Deadline(0.05))
    assert caught.value.ranks == ranks
    assert hub.told(RELEASE) == []


def test_what_is_served_here_is_waited_for():
    """At rank 0, too."""
    hub = Ranks(0, 1, serving=[2, 1])
    hub.shutdown.drain(Deadline(_PATIENCE))
    assert hub.serving == []


def test_a_lost_rank_is_not_waited_for():
    """Neither when it is known to be lost nor when it turns out to be."""

    def answer(to, call):
        if to == 2:
            raise PeerLostError("rank 2 is gone", ranks=(2,))
        return [0, 0, 0]

    hub = Ranks(0, 4, answer)
    hub.come(1, 2)
    hub.shutdown.on_lost(3, None)
    hub.shutdown.drain(Deadline(_PATIENCE))
    assert hub.told(RELEASE) == [1, 2]


def test_a_closed_agent_does_not_come_to_the_end():
    """Its own calls fail, and that is no answer of the others."""

    def answer(to, call):
        raise GroupClosedError("the agent was closed")

    hub = Ranks(0, 2, answer)
    hub.come(1)
    with pytest.raises(GroupClosedError):
        hub.shutdown.drain(Deadline(_PATIENCE))


def test_who_does_not_hear_of_the_end():
    """Is named, for it waits still."""

    def answer(to, call):
        if call.name == RELEASE and to == 2:
            raise DistributedTimeoutError("late")
        return [0, 0, 0]

    hub = Ranks(0, 3, answer)
    hub.come(1, 2)
    with pytest.raises(DistributedTimeoutError, match=r"rank 2 did not say within .* was heard") as caught:
        hub.shutdown.drain(Deadline(_PATIENCE))
    assert caught.value.ranks == (2,)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_who_joins_in_any_round_has_to_come(after):
    """Nobody is told of an end that it has not come to: it is waited for."""
    num_looks = 0

    def answer(to, call):
        nonlocal num_looks
        num_looks += call.name == STATUS and to == 1
        if num_looks == after:
            hub.shutdown.on_joined(2, 0)
        return [0, 0, 0]

    hub = Ranks(0, 3, answer)
    hub.shutdown.on_lost(2, None)
    hub.come(1)
    if not after:
        hub.shutdown.on_joined(2, 0)
    with pytest.raises(DistributedTimeoutError, match=r"rank 2 did not come to the end within 0\.05 s") as caught:
        hub.shutdown.drain(Deadline(0.05))
    assert caught.value.ranks == (2,)
    assert hub.told(RELEASE) == []
    hub.come(2)
    hub.shutdown.drain(Deadline(_PATIENCE))
    assert hub.told(RELEASE) == [1, 2]


def test_who_comes_goes_and_comes_again():
    """Its next process has to come, too, and is told as itself; so is who is lost and does not come again."""
    tokens = []

    def answer(to, call):
        tokens.extend((to, *call.arguments) for _ in [0] if call.name == RELEASE)
        return [0, 0, 0]

    hub = Ranks(0, 3, answer)
    hub.come(1, 2, token=1)
    hub.shutdown.on_lost(1, None)
    hub.shutdown.on_joined(1, 0)
    with pytest.raises(DistributedTimeoutError, match=r"rank 1 did not come to the end"):
        hub.shutdown.drain(Deadline(0.0))
    hub.come(1, token=2)
    hub.shutdown.on_lost(1, None)
    hub.shutdown.on_joined(1, 0)
    hub.come(1, token=3)
    hub.shutdown.drain(Deadline(_PATIENCE))
    assert sorted(tokens) == [(1, 3), (2, 1)]
    with pytest.raises(DistributedTimeoutError, match=r"ranks 1, 2 did not come to the end"):
        hub.shutdown.drain(Deadline(0.0))


@pytest.mark.parametrize(("peer", "change", "ends"), [(0, 0, True), (0, 1, False), (1, 0, False)])
def test_whose_end_it_is(peer, change, ends):
    """What was meant for another process of the rank, or does not come from rank 0, is no end."""

    def answer(to, call):
        assert (to, call.name) == (0, READY)
        rank.serve(peer, Call(RELEASE, (call.arguments[0] + change,), {}))

    rank = Ranks(2, 3, answer)
    expected = contextlib.nullcontext() if ends else pytest.raises(DistributedTimeoutError, match="rank 0 did not say")
    with expected:
        rank.shutdown.drain(Deadline(_PATIENCE if ends else 0.01))


def test_rank_0_is_lost_and_there_again_while_a_rank_waits():
    """That rank is told, though it did not see that in time: the new rank 0 knows nothing of it."""

    def answer(to, call):
        assert (to, call.name) == (0, READY)
        rank.shutdown.on_lost(0, None)
        rank.shutdown.on_joined(0, 0)

    rank = Ranks(1, 2, answer)
    with pytest.raises(PeerLostError, match="rank 0 is gone, which sees to the end") as caught:
        rank.shutdown.drain(Deadline(_PATIENCE))
    assert caught.value.ranks == (0,)
    rank.answer = lambda to, call: rank.serve(0, Call(RELEASE, call.arguments, {}))
    rank.shutdown.drain(Deadline(_PATIENCE))


@pytest.mark.parametrize("name", [READY, RELEASE])
@pytest.mark.parametrize("arguments", [(), ("text",), (1, 2)])
def test_what_no_agent_says(name, arguments):
    """Changes nothing."""
    hub = Ranks(0, 2)
    hub.serve(1, Call(name, arguments, {}))
    with pytest.raises(DistributedTimeoutError, match="rank 1 did not come"):
        hub.shutdown.drain(Deadline(0.0))


@pytest.mark.parametrize("how", ["function", "method", "creation"])
def test_functions_of_a_lost_rank_are_waited_for(how):
    """They may make calls, which others serve before they come to their end."""
    started, release, noted = threading.Event(), threading.Event(), []

    def call_back():
        started.set()
        assert release.wait(_PATIENCE)
        current_agent().rpc_sync(0, "note", 1, timeout=_PATIENCE)

    class Caller:
        """Has a method that makes a call."""

        def call_back(self):
            """Make it."""
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
        assert [agent._shutdown._status().is_quiet for agent in (hub, server)] == [True, False]
        with pytest.raises(DistributedTimeoutError, match=r"rank 1 (serves 1 call|does not say what it is at)"):
            hub.drain(0.2)
        release.set()
        hub.drain(_PATIENCE)
        draining.join(_PATIENCE)
        assert noted == [1]
