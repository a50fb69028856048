"""Calls and results that come too late, expire, or are refused: references in them are given back."""

import asyncio
import contextlib
import gc
import threading

import pytest

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedTimeoutError, RpcError
from ferrodist.rpc import RpcAgent, SimulatedRpcBackend
from ferrodist.rpc.messages import Call
from ferrodist.rpc.refcount_tables import ReferenceCounts
from ferrodist.rpc.shutdown import DRAIN_STATUS
from ferrodist.testing import check_leaks

NOTHING = ReferenceCounts(for_others=0, for_itself=0, elsewhere=0)
_PATIENCE = 60.0


def until(condition):
    """Wait until a condition holds."""
    patience = Deadline(_PATIENCE)
    while not condition():
        assert not patience.expired
        gc.collect()
        threading.Event().wait(0.002)


def give_up(agent, future):
    """Make a call exceed its timeout now."""
    calls = agent._client.pending_calls
    for number, waiting in list(calls._calls.items()):
        if waiting.future is future:
            calls._expire(number)
    with pytest.raises(DistributedTimeoutError):
        future.result(_PATIENCE)


class Holder:
    """Functions that wait until a test releases them."""

    def __init__(self):
        self.started, self.release, self.called = threading.Event(), threading.Event(), []

    def hold(self, *values):
        """Wait."""
        self.called.append(values)
        self.started.set()
        self.release.wait(_PATIENCE)

    def give(self):
        """A reference to an object, late."""
        self.hold()
        return [self.agent.reference([1])]

    async def sleep(self, *values):
        """Wait in the event loop, for ever."""
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.called.append(("ended", *values))

    @property
    def functions(self):
        """The functions that others call."""
        return {
            "hold": self.hold,
            "give": self.give,
            "Box": lambda: self,
            "Holder": Holder,
            "echo": lambda value: value,
        }


@pytest.fixture
def make():
    """Return a function that makes agents of two ranks; no reference may be left at the end."""
    holders = []

    def make_agents(**options):
        found = []
        for way, own in zip(SimulatedRpcBackend.create_group(2), ({}, options), strict=True):
            holder = Holder()
            holder.agent = RpcAgent(way, holder.functions, **own)
            holders.append(holder)
            found.append(holder)
        return [*[holder.agent for holder in found], found[1]]

    with check_leaks():
        yield make_agents
        for holder in holders:
            holder.release.set()
            holder.called.clear()
        for holder in holders:
            until(lambda agent=holder.agent: agent.num_references() == NOTHING)
        for holder in holders:
            holder.agent.close()


def test_references_in_late_results(make):
    """Nobody else has the references: they are given back."""
    agent, other, holder = make()
    future = agent.rpc_async(1, "give")
    assert holder.started.wait(_PATIENCE)
    give_up(agent, future)
    holder.release.set()
    until(lambda: agent.statistics().late == 1)
    until(lambda: other.num_references() == NOTHING)


def test_references_in_unexpected_results(make):
    """They are given back, as those in the response to a call that ended with its connection."""
    agent, other, _ = make()
    assert agent.rpc_sync(1, "echo", 1) == 1
    other._server._send_response(other._peers._peers[0], 999, [other.reference([1])])
    assert agent.rpc_sync(1, "echo", 1) == 1
    until(lambda: other.num_references() == NOTHING)
    assert agent.statistics().late == 0


def test_references_in_expired_calls(make):
    """They are given back, though the function is not called."""
    agent, _, holder = make(num_workers=1)
    first = agent.rpc_async(1, "hold")
    assert holder.started.wait(_PATIENCE)
    give_up(agent, agent.rpc_async(1, "hold", [agent.reference([1])]))
    assert agent.num_references().for_others == 1
    holder.release.set()
    first.result()
    until(lambda: agent.num_references() == NOTHING)
    assert holder.called == [()]


def test_references_in_refused_calls(make):
    """Too many calls are made: references in the refused ones are given back."""
    agent, _, holder = make(most_outstanding=1)
    first = [agent.rpc_async(1, "hold") for _ in range(102)]
    refused = agent.rpc_async(1, "hold", [agent.reference([1])])
    with pytest.raises(RpcError, match="as many as may be"):
        refused.result(_PATIENCE)
    del refused
    until(lambda: agent.num_references() == NOTHING)
    holder.release.set()
    for future in first:
        future.result(_PATIENCE)


def test_expired_methods_are_not_called(make):
    """A method that has begun goes on, as a function does."""
    agent, _, holder = make(num_workers=1)
    box = agent.remote(1, "Box")
    first = box.rpc_async().hold("first")
    assert holder.started.wait(_PATIENCE)
    give_up(agent, box.rpc_async().hold("second"))
    with pytest.raises(DistributedTimeoutError):
        box.rpc_sync(0.05).hold("third")
    holder.release.set()
    first.result(_PATIENCE)
    assert agent.rpc_sync(1, "echo", 1) == 1
    assert holder.called == [("first",)]


def test_late_async_methods_are_cancelled(make):
    """As async functions are."""
    agent, _, holder = make()
    box = agent.remote(1, "Box")
    future = box.rpc_async().sleep("it")
    assert holder.started.wait(_PATIENCE)
    give_up(agent, future)
    until(lambda: holder.called == [("ended", "it")])


def test_async_methods_that_are_late_before_they_begin(make, monkeypatch):
    """They are answered, also where Python cancels a task at once that has not begun, as its newer versions do."""
    chain = asyncio.futures._chain_future

    def chain_and_cancel(task, future):
        chain(task, future)
        if future.cancelled():
            task.cancel()

    monkeypatch.setattr(asyncio.futures, "_chain_future", chain_and_cancel)
    agent, other, holder = make()
    box = agent.remote(1, "Box")

    async def block():
        holder.hold()

    other._executor.event_loop.run(block())
    assert holder.started.wait(_PATIENCE)
    future = box.rpc_async().sleep("it")
    until(lambda: any(each._cancel for each in other._server.serving))
    give_up(agent, future)
    until(lambda: any(each.is_cancelled for each in other._server.serving))
    holder.release.set()
    until(lambda: not other._server.serving)
    assert holder.called == [(), ("ended", "it")]


def test_remote_creation_is_not_cancelled(make):
    """The object is made after the timeout, too: its reference may be used later."""
    agent, _, holder = make(num_workers=1)
    box = agent.remote(1, "Box")
    first = box.rpc_async().hold("first")
    assert holder.started.wait(_PATIENCE)
    second, third = box.remote(0.05).hold("second"), agent.remote(1, "hold", "third", timeout=0.05)
    until(lambda: agent.statistics().timed_out == 2)
    holder.release.set()
    first.result(_PATIENCE)
    until(lambda: holder.called == [("first",), ("second",), ("third",)])
    del second, third


def test_internal_calls_are_not_counted(make):
    """Statistics do not count internal calls, whether under way, late or answered."""
    agent, other, _ = make()
    assert agent.rpc_sync(1, "echo", [agent.reference(1)])[0].is_owner
    before = [each.statistics() for each in (agent, other)]
    for _ in range(2):
        threads = [threading.Thread(target=each.drain) for each in (agent, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE)
    assert [each.statistics() for each in (agent, other)] == before
    to_agent = other._peers._peers[0]
    send, held = to_agent.send, []
    to_agent.send = lambda *message: held.append(message)
    future = agent._client.call_internal(1, Call(DRAIN_STATUS, (), {}), 0.1)
    assert agent.statistics() == before[0]
    with pytest.raises(DistributedTimeoutError):
        future.result()
    until(lambda: held)
    to_agent.send = send
    send(*held.pop())
    with contextlib.suppress(RpcError):
        agent.rpc_sync(1, "nothing")  # comes after it
    found = agent.statistics()
    assert (found.answered, found.in_flight) == (before[0].answered + 1, 0)
    assert (found.timed_out, found.late) == (0, 0)


def test_asynchronous_copies(make):
    """`to_here_async` returns futures that can be awaited; they have timeouts."""
    agent, _, holder = make()
    made = agent.remote(1, "echo", [1, 2])
    assert made.to_here_async().result(_PATIENCE) == [1, 2]

    async def several():
        return await asyncio.gather(made.to_here_async(), made.to_here_async(_PATIENCE))

    assert asyncio.run(several()) == [[1, 2]] * 2
    slow = agent.remote(1, "hold")
    late, waits = slow.to_here_async(0.05), slow.to_here_async()
    with pytest.raises(DistributedTimeoutError):
        late.result(_PATIENCE)
    assert not waits.done()
    holder.release.set()
    assert waits.result(_PATIENCE) is None
    assert not hasattr(waits, "sent")
