"""Functions, results and callbacks that must not end the threads of an agent."""

import asyncio
import contextlib
import logging
import threading
import time

import pytest
import torch

from ferrodist.errors import GroupClosedError, RpcError
from ferrodist.rpc import RpcAgent, RpcContext, SimulatedRpcBackend
from ferrodist.rpc import executor as worker_threads
from ferrodist.rpc.executor import WaitEvents
from ferrodist.rpc.future import Future
from ferrodist.rpc.peer import CallWindow
from ferrodist.rpc.refcount_tables import ReferenceCounts
from ferrodist.testing import check_leaks, run_ranks

PATIENCE = 60.0


class Wrapped(torch.Tensor):
    """A tensor whose attributes raise."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Raises."""
        raise NotImplementedError(f"no {getattr(function, '__name__', function)} here")


class Items(dict):
    """A dict that can't be looked at."""

    def items(self):
        """Raises."""
        raise OSError("no items here")


class Nothing:
    """Says of itself only that it can't."""

    @property
    def __class__(self):
        """Raises."""
        raise LookupError("no class here")


class UnspeakableError(Exception):
    """Its text ends threads."""

    def __str__(self):
        raise SystemExit


def raise_unspeakable():
    """What its name says."""
    raise UnspeakableError


ODD = {
    "wrapped": lambda: torch.ones(3).as_subclass(Wrapped),
    "items": lambda: Items(a=1),
    "nothing": Nothing,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "unspeakable": raise_unspeakable,
}


@pytest.fixture
def make():
    """Return a function that makes two agents; nothing of them may be left behind."""
    made = []

    def make_agents(functions, **options):
        made.extend(RpcAgent(way, functions, **options) for way in SimulatedRpcBackend.create_group(2))
        return made

    with check_leaks():
        yield make_agents
        for agent in made:
            agent.close()


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("name", list(ODD))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_odd_results(make, name, to):
    """They are failures at the caller, and the workers go on."""
    agent, _ = make({**ODD, "one": lambda: 1}, num_workers=2)
    for _ in range(0 if (to, name) == (0, "nested") else 5):  # which needs not travel to this rank
        with pytest.raises(RpcError, match=f"'{name}'"):
            raise agent.rpc_async(to, name).exception(PATIENCE)
    assert agent.rpc_sync(to, "one", timeout=PATIENCE) == 1
    assert agent.statistics().in_flight == 0


def test_a_loop_that_is_stopped(make, caplog):
    """It runs again, and ends with the agent."""

    async def stop():
        asyncio.get_running_loop().stop()
        return "stopped"

    async def go_on():
        await asyncio.sleep(0)
        return "going"

    agent, _ = make({"stop": stop, "go_on": go_on})
    with caplog.at_level(logging.CRITICAL):
        for _ in range(3):
            assert agent.rpc_sync(1, "stop", timeout=PATIENCE) == "stopped"
            assert agent.rpc_sync(1, "go_on", timeout=PATIENCE) == "going"


def test_waiting_in_an_async_function(make):
    """All coroutines would wait with it: the error says what to do."""

    async def wait(how):
        agent = agents[1]
        if how == "sync":
            return agent.rpc_sync(0, "one")
        if how == "result":
            return agent.rpc_async(0, "hold").result()
        return await agent.rpc_async(0, "one")

    release = threading.Event()
    agents = make({"wait": wait, "one": lambda: 1, "hold": lambda: release.wait(PATIENCE)})
    for how in ("sync", "result"):
        with pytest.raises(RpcError, match=r"RuntimeError: an async function must not wait .* await agent\.rpc_async"):
            agents[0].rpc_sync(1, "wait", how, timeout=PATIENCE)
    release.set()
    assert agents[0].rpc_sync(1, "wait", "await", timeout=PATIENCE) == 1


def test_async_functions_without_a_thread(make, monkeypatch):
    """The caller learns which limit it was, and later calls are served."""

    async def one():
        return 1

    agents = make({"one": one, "two": lambda: 2})
    assert agents[0].rpc_sync(1, "two", timeout=PATIENCE) == 2
    start = threading.Thread.start

    def refuse_loops(thread):
        if thread.name.endswith("-async"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse_loops)
        with pytest.raises(RpcError, match="the call of 'one' on rank 1: this process can start no more threads"):
            agents[0].rpc_sync(1, "one", timeout=PATIENCE)
    assert agents[0].rpc_sync(1, "one", timeout=PATIENCE) == 1


def test_calls_without_a_worker_wait_for_one(make, monkeypatch, caplog):
    """The first call is served as soon as a thread can be started, without another call."""
    agents = make({"one": lambda: 1})
    refused = threading.Event()

    def refuse(_thread):
        refused.set()
        raise RuntimeError("can't start new thread")

    with caplog.at_level(logging.CRITICAL), monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        future = agents[0].rpc_async(1, "one", timeout=PATIENCE)
        assert refused.wait(PATIENCE)
    assert future.result() == 1


@pytest.mark.parametrize("to", ["nobody", 1])
@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "wait_for_rank"])
def test_workers_that_wait_for_a_rank_make_room(how, to):
    """The only one waits for a name, or for a rank that has not come, and other calls are served."""

    class Nowhere(SimulatedRpcBackend):
        """Finds no rank."""

        def open(self, peers):
            """Do nothing."""

    begun = threading.Event()

    def wait():
        begun.set()
        with pytest.raises(GroupClosedError):
            getattr(agent, how)(to, *(["one"] if how != "wait_for_rank" else []), timeout=PATIENCE).result()

    agent = RpcAgent(Nowhere.create_group(2)[0], {"wait": wait, "one": lambda: 1}, num_workers=1)
    waits = agent.rpc_async(0, "wait")
    assert begun.wait(PATIENCE)
    assert agent.rpc_sync(0, "one", timeout=PATIENCE / 2) == 1
    agent.close()
    assert isinstance(waits.exception(), GroupClosedError)


def test_callbacks_that_end_threads(caplog):
    """Other callbacks are called, and waiting threads go on; a group of TCP connections stays whole."""

    def end(_):
        raise SystemExit

    def program(group):
        with RpcContext(group, {"one": lambda: 1}) as agent:
            if agent.rank:
                return
            called = []
            for _ in range(20):
                future = agent.rpc_async(1, "one")
                future.add_done_callback(end)
                future.add_done_callback(called.append)
                assert future.result(PATIENCE) == 1
                assert agent.rpc_sync(1, "one", timeout=PATIENCE) == 1
            assert len(called) == 20

    with caplog.at_level(logging.CRITICAL):
        run_ranks(program, 2, backend="tcp")


def test_futures_that_users_settle(make):
    """A result that comes later is ignored."""
    release = threading.Event()
    agent, _ = make({"hold": lambda: release.wait(PATIENCE), "one": lambda: 1})
    futures = [agent.rpc_async(1, "hold") for _ in range(3)]
    futures[0].set_result("mine")
    futures[1].set_exception(KeyError("mine"))
    release.set()
    assert futures[0].result(PATIENCE) == "mine"
    with pytest.raises(KeyError):
        futures[1].result(PATIENCE)
    assert futures[2].result(PATIENCE) is True
    late = agent.rpc_async(1, "hold", timeout=0.001)
    late.set_result("mine")
    assert isinstance(agent.rpc_async(1, "nothing", timeout=PATIENCE).exception(PATIENCE), RpcError)
    assert agent.rpc_sync(1, "one", timeout=PATIENCE) == 1


CALLS_WHILE_CLOSING = {
    "drain": lambda agent: agent.drain(PATIENCE),
    "call": lambda agent: agent.rpc_sync(1, "hold", timeout=PATIENCE),
    "object": lambda agent: agent.remote(0, "hold").local_value(PATIENCE),
    "copy": lambda agent: agent.remote(1, "hold").to_here(PATIENCE),
}


@pytest.mark.parametrize("name", list(CALLS_WHILE_CLOSING))
def test_waiting_threads_when_an_agent_is_closed(make, name):
    """They raise at once, and so do later uses."""
    release = threading.Event()
    agent, _ = make({"hold": lambda: release.wait(PATIENCE), "one": lambda: 1})
    call = CALLS_WHILE_CLOSING[name]

    def close():
        time.sleep(0.05)  # most often it waits by then
        agent.close()

    closing = threading.Thread(target=close)
    closing.start()
    started = time.monotonic()
    with pytest.raises(GroupClosedError):
        call(agent)
    assert time.monotonic() - started < PATIENCE / 2
    release.set()
    closing.join()
    with pytest.raises(GroupClosedError):
        call(agent)


def test_references_of_a_closed_agent(make):
    """None can be made."""
    agent, _ = make({"one": lambda: 1})
    agent.close()
    for call in (lambda: agent.reference(3), lambda: agent.remote(0, "one"), lambda: agent.remote(1, "one")):
        with pytest.raises(GroupClosedError, match="the agent was closed"):
            call()
    assert agent.num_references() == ReferenceCounts(for_others=0, for_itself=0, elsewhere=0)


class NoWorkers:
    """An executor none of whose workers waits."""

    def __init__(self):
        self.wait_events = WaitEvents(SimulatedRpcBackend.create_group(1)[0].make_wait_event)

    def waiting(self):
        """No other thread takes this one's place."""
        return contextlib.nullcontext()


def test_all_callbacks_are_called():
    """Also when a thread that waits for the future leaves in the meantime."""
    future, order, left = Future(NoWorkers()), [], threading.Event()

    def wait():
        assert future.result(0.05) == 3
        left.set()

    waiting = threading.Thread(target=wait)
    future.add_done_callback(lambda _: order.append("one") or left.wait(PATIENCE))
    waiting.start()
    while len(future._done_callbacks) < 2:  # the thread's is there
        time.sleep(0)
    future.add_done_callback(lambda _: order.append("two"))
    with future._condition:
        future._result, future._state = 3, "FINISHED"  # as set_result does, which then calls them
    future._invoke_callbacks()  # which waits for that thread
    waiting.join()
    assert order == ["one", "two"]


@pytest.mark.parametrize("timeout", ["3", True, None, float("nan"), -1])
def test_timeouts_of_futures(timeout):
    """They must be numbers of seconds."""
    future = Future(NoWorkers())
    if timeout is None:
        future.settle(1)
        assert future.result(timeout) == 1
    else:
        with pytest.raises((TypeError, ValueError), match="timeout must be"):
            future.result(timeout)


def test_one_worker_is_one(make):
    """It waits for a slot and for a result, and is counted once: no two functions run at a time."""
    now, most, lock = [0], [0], threading.Lock()

    def busy(to):
        if to is not None:
            agents[1].rpc_sync(to, "one", timeout=PATIENCE)
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.001)
        with lock:
            now[0] -= 1

    agents = make({"busy": busy, "one": lambda: 1}, num_workers=1, most_outstanding=1)
    threads = [
        threading.Thread(target=lambda: [agents[0].rpc_sync(1, "busy", 0, timeout=PATIENCE) for _ in range(20)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for agent in agents:
        workers = agent._executor
        assert workers._num_waiting == 0
        assert 0 <= workers._num_running <= 1
    assert most[0] == 1


class Told:
    """A signal of a test's."""

    def __init__(self):
        self.event = threading.Event()
        self.num_sets = 0

    def set(self):
        """See `Signal`."""
        self.num_sets += 1
        self.event.set()

    def wait(self, seconds):
        """See `Signal`."""
        was_set = self.event.wait(seconds)
        self.event.clear()
        return was_set


def test_the_last_slot():
    """A waiting thread gets it, though no other slot is freed."""
    window = CallWindow(8, WaitEvents(Told))
    assert all(window.acquire(0.0) for _ in range(8))
    assert not window.acquire(0.0)
    timer = threading.Timer(0.01, window.release)
    timer.start()
    assert window.acquire(PATIENCE)
    timer.join()
    assert not window.acquire(0.01)
    assert window._waiting == []


def test_waiting_threads_come_first():
    """They are woken once for a quarter of the slots."""
    signals = []

    def make_signal():
        signals.append(Told())
        return signals[-1]

    window = CallWindow(8, WaitEvents(make_signal))
    assert all(window.acquire(0.0) for _ in range(8))
    window._waiting.append(make_signal())
    window.release()
    assert not window.acquire(0.0)
    assert signals[0].num_sets == 0
    for _ in range(4):
        window.release()
    assert signals[0].num_sets == 1
    assert window.acquire(0.0)
    window.close()
    assert signals[0].num_sets == 2
    assert window.acquire(0.0)


def test_interrupted_while_waiting_for_a_slot():
    """The thread waits no more."""

    class Interrupted(Told):
        def wait(self, seconds):
            raise KeyboardInterrupt

    window = CallWindow(1, WaitEvents(Interrupted))
    assert window.acquire(0.0)
    with pytest.raises(KeyboardInterrupt):
        window.acquire(PATIENCE)
    window.release()
    assert window.acquire(0.0)


def test_a_result_that_arrives_at_its_timeout(make, monkeypatch):
    """The thread that has received it ends the call, which waits for that."""
    agent, _ = make({"one": lambda: 1})
    agent.wait_for_rank(1)
    client = agent._client
    take, come, answers, threads = client.on_response, threading.Event(), [], []

    def keep_result(rank, number, kind, content):
        answers.append((rank, number, kind, content))
        come.set()

    def give_up(_):
        if not threads:
            threads.append(threading.Thread(target=lambda: come.wait(PATIENCE) and take(*answers[0])))
            threads[0].start()

    monkeypatch.setattr(client, "on_response", keep_result)
    monkeypatch.setattr(client.pending_calls, "give_up", give_up)
    assert agent.rpc_sync(1, "one", timeout=0.1) == 1
    threads[0].join()


def test_an_interrupt_while_a_worker_starts(monkeypatch):
    """The thread that runs by then is one of the pool: it ends without an error, and is joined."""
    start = threading.Thread.start

    def start_and_be_interrupted(thread):
        start(thread)
        if thread.name.startswith("pool-0"):
            raise KeyboardInterrupt

    pool = worker_threads.Executor(1, "pool", NoWorkers().wait_events)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_and_be_interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.add_transfers(1)
        started = list(pool._threads)
        assert len(started) == pool._num_running == 1
        pool.add_transfers(-1)
    finally:
        pool.close()
    assert not any(thread.is_alive() for thread in started)
