"""Misuse that agents must survive, and the errors that it raises."""

import asyncio
import contextlib
import functools
import gc
import re
import signal
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedTimeoutError, GroupClosedError, PeerLostError, RpcError
from ferrodist.rpc import RpcAgent, RpcContext, SimulatedRpcBackend
from ferrodist.rpc import executor as worker_threads
from ferrodist.rpc.messages import Call, MessageKind, pack_call
from ferrodist.rpc.rref_manager import CREATE
from ferrodist.testing import check_leaks

_PATIENCE = 60.0


@pytest.fixture
def make():
    """Return a function that makes agents; no leak may be left."""
    made = []

    def make_agents(functions=None, num_ranks=2, **options):
        agents = [RpcAgent(way, functions, **options) for way in SimulatedRpcBackend.create_group(num_ranks)]
        made.extend(agents)
        return agents

    with check_leaks():
        yield make_agents
        for agent in made:
            agent.close()


def echo(value=None):
    """What it is given."""
    return value


async def echo_slowly(value):
    """The same, later."""
    await asyncio.sleep(0)
    return value


class Giver:
    """Its method gives its keywords."""

    def give(self, /, **keywords):
        """Them."""
        return keywords


def exit_process():
    """Ask for the end of the process."""
    raise SystemExit(3)


def interrupt():
    """Be interrupted."""
    raise KeyboardInterrupt


async def exit_slowly():
    """Ask for it in the event loop."""
    raise SystemExit(3)


async def exit_in_a_task():
    """Ask for it in a task of its own."""
    await asyncio.create_task(exit_slowly())


FUNCTIONS = {
    "echo": echo,
    "echo_slowly": echo_slowly,
    "exit_process": exit_process,
    "interrupt": interrupt,
    "exit_slowly": exit_slowly,
    "exit_in_a_task": exit_in_a_task,
}


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("name", ["exit_process", "interrupt", "exit_slowly", "exit_in_a_task"])
def test_functions_that_exit(make, name, to):
    """Their callers get an error; the worker, or the loop, goes on."""
    agent, _ = make(FUNCTIONS, num_workers=1)
    for _ in range(3):
        with pytest.raises(RpcError, match=f"{name!r} failed on rank {to}") as caught:
            agent.rpc_sync(to, name, timeout=_PATIENCE)
        assert caught.value.type_name in ("SystemExit", "KeyboardInterrupt")
    assert agent.rpc_sync(to, "echo", 1) == 1
    assert agent.rpc_sync(to, "echo_slowly", 2) == 2


def test_a_failed_creation_keeps_nothing(make):
    """An object that a lost rank should have made is forgotten, with everything its creator had."""
    agent, other = make(FUNCTIONS)
    other.close()

    def create():
        reference = agent.remote(1, "echo", 1)
        with pytest.raises(PeerLostError):
            reference.to_here()

    with pytest.raises(PeerLostError):
        agent.rpc_sync(1, "echo")
    create()
    patience = Deadline(_PATIENCE)
    while agent.num_references().elsewhere:
        assert not patience.expired, "the reference is kept"
        gc.collect()


@pytest.fixture
def hold():
    """Return a function that waits until the end of the test; and an event that ends it before, one of its start."""
    started, release = threading.Event(), threading.Event()

    def wait():
        started.set()
        release.wait(_PATIENCE)

    wait.started, wait.release = started, release
    yield wait
    release.set()


@pytest.mark.parametrize("timeout", [float("inf"), 1e299, 1e15])
def test_endless_timeouts(make, hold, timeout):
    """Futures with an endless timeout don't disturb the timeouts of others."""
    agent, _ = make({"hold": hold})
    endless = agent.rpc_async(1, "hold", timeout=timeout)
    for _ in range(3):
        with pytest.raises(DistributedTimeoutError, match=r"within 0\.01 s"):
            agent.rpc_async(1, "hold", timeout=0.01).result(_PATIENCE)
    hold.release.set()
    assert endless.result(_PATIENCE) is None


def test_names_that_are_no_text(make):
    """They are refused, and occupy no slot."""
    agent, _ = make(FUNCTIONS, most_outstanding=1)
    for name in (5, None, ["echo"], b"echo"):
        for call in (agent.rpc_sync, agent.rpc_async):
            with pytest.raises(TypeError, match="the name of a function is a text, not"):
                call(1, name)
    assert agent.rpc_sync(1, "echo", 1, timeout=_PATIENCE) == 1


@pytest.mark.parametrize(
    ("given", "position"),
    [
        (("a file called \udc80",), "argument [0] is"),
        ((1, {"name": "\ud800"}), "argument [1]['name'] is"),
        (({"\ud800": 1},), "argument [0] is"),
    ],
)
def test_half_a_surrogate_pair(make, given, position):
    """Python's texts may have one, which can't be encoded: the argument is named."""
    agent, _ = make(FUNCTIONS)
    where = re.escape(f"the call of 'echo': {position}")
    with pytest.raises(TypeError, match=f"{where}.*half of a surrogate pair"):
        agent.rpc_sync(1, "echo", *given)
    with pytest.raises(TypeError, match=r"keyword \['value'\] is .*half of a surrogate pair"):
        agent.rpc_sync(1, "echo", value="\ud800")
    with pytest.raises(ValueError, match="half of a surrogate pair: take another one"):
        make(num_ranks=1, name="\ud800")


def test_keywords_of_any_name(make):
    """The names of a call's own parameters can be the function's, too."""

    def give(**keywords):
        return keywords

    agent, _ = make({"give": give, "Giver": Giver})
    given = {"self": 1, "to": 2, "name": 3, "arguments": 4, "keywords": 5, "method": 6}
    assert agent.rpc_sync(1, "give", **given) == given
    assert agent.rpc_async(1, "give", **given).result(_PATIENCE) == given
    assert agent.remote(1, "give", **given).to_here(_PATIENCE) == given
    assert agent.broadcast_call("give", **given) == [given, given]
    giver = agent.remote(1, "Giver")
    assert giver.rpc_sync().give(**given) == given


def test_more_calls_than_another_rank_takes(hold):
    """Agents with different limits: calls beyond the limit are refused, the others are served."""
    few, many = SimulatedRpcBackend.create_group(2)
    with check_leaks(), contextlib.ExitStack() as agents:
        agents.callback(RpcAgent(few, {"hold": hold}, most_outstanding=1).close)
        agent = RpcAgent(many)
        agents.callback(agent.close)
        futures = [agent.rpc_async(0, "hold") for _ in range(110)]
        refused = [future for future in futures[102:] if "as many as may be" in str(future.exception(_PATIENCE))]
        assert len(refused) == 8
        assert all(isinstance(future.exception(), RpcError) for future in refused)
        hold.release.set()
        assert [future.result(_PATIENCE) for future in futures[:102]] == [None] * 102
        assert agent.rpc_async(0, "hold").result(_PATIENCE) is None


@pytest.mark.parametrize("value", [torch.eye(2).to_sparse(), torch.ones(2, device="meta"), np.arange(3).astype(">i4")])
def test_values_that_cant_travel(make, value):
    """They are an error of the arguments, not the end of a rank, or an error of the function's result."""
    agent, _ = make({**FUNCTIONS, "give": lambda: value})
    for call in (agent.rpc_sync, lambda *given: agent.rpc_async(*given).result(_PATIENCE)):
        with pytest.raises(TypeError):
            call(1, "echo", value)
    with pytest.raises(RpcError, match="the call of 'give' on rank 1"):
        agent.rpc_sync(1, "give", timeout=_PATIENCE)
    assert agent.rpc_sync(1, "echo", 1) == 1
    assert agent.statistics().in_flight == 0


@pytest.mark.parametrize("text", ["the end of it " + "x" * 20_000, "a file called \udc80"])
def test_failures_that_are_too_large_or_no_text(make, text):
    """They are sent shortened, whatever the limit of messages."""

    def fail():
        raise ValueError(text)

    agent, _ = make({**FUNCTIONS, "fail": fail}, message_limit=8192, num_workers=1)
    for _ in range(2):
        with pytest.raises(RpcError, match=r"ValueError: (the end of it xxx|a file called .udc80)") as caught:
            agent.rpc_sync(1, "fail", timeout=_PATIENCE)
        assert caught.value.type_name == "ValueError"
    assert agent.rpc_sync(1, "echo", 1, timeout=_PATIENCE) == 1


def test_draining_twice(make):
    """A second drain waits for all ranks once more."""
    agents = make(FUNCTIONS, num_ranks=3)
    arrived = []
    threads = []
    for _ in range(3):
        for agent in agents[:2]:
            with pytest.raises(DistributedTimeoutError):  # the others have not come
                agent.drain(0.05)
        threads = [
            threading.Thread(target=lambda agent=agent: (agent.drain(_PATIENCE), arrived.append(agent.rank)))
            for agent in agents
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(arrived) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_waiting_functions_make_room(make):
    """However they wait for calls of their own, one worker is enough."""
    agents = make(FUNCTIONS, num_workers=1)

    def bounce(agent, number):
        other = 1 - agent.rank
        return number if not number else agent.rpc_async(other, "bounce", number - 1).result(_PATIENCE)

    def ask(agent, number):
        call = agent.remote(1 - agent.rank, "bounce", number)
        return [agent.broadcast_call("echo", number), agent.remote(agent.rank, "echo", 1).local_value(), call.to_here()]

    for agent in agents:
        agent.register("bounce", functools.partial(bounce, agent))
        agent.register("ask", functools.partial(ask, agent))
    assert agents[0].rpc_sync(0, "bounce", 3, timeout=_PATIENCE) == 0
    assert agents[0].rpc_sync(1, "ask", 0, timeout=_PATIENCE) == [[0, 0], 1, 0]


def test_closed_in_a_coroutine(make):
    """A function closes its own agent: it ends, and so do coroutines that are under way."""
    agent, other = make(FUNCTIONS)
    closed, begun = threading.Event(), threading.Event()

    async def close():
        other.close()
        closed.set()

    async def sleep():
        begun.set()
        await asyncio.sleep(10 * _PATIENCE)

    other.register("close", close)
    other.register("sleep", sleep)
    sleeping = agent.rpc_async(1, "sleep")
    assert begun.wait(_PATIENCE)
    with pytest.raises(PeerLostError):
        agent.rpc_sync(1, "close", timeout=_PATIENCE)
    assert closed.wait(_PATIENCE)
    with pytest.raises(PeerLostError):
        sleeping.result(_PATIENCE)


def test_closed_in_the_overseers_last_tick(make):
    """The overseer ends, though it does not look at the queue again."""
    agent, _ = make(FUNCTIONS)
    workers = agent._executor
    wakes, num_ticks = threading.Semaphore(0), 0

    class Ticks:
        """Closes the workers when the overseer is about to sleep."""

        def acquire(self, timeout=None):
            nonlocal num_ticks
            num_ticks += timeout is not None
            if timeout is not None and num_ticks == worker_threads._MAX_IDLE_TICKS:
                workers.close()
            return wakes.acquire(timeout=timeout)

        def release(self):
            wakes.release()

    before, workers._oversee_now = workers._oversee_now, Ticks()
    before.release()  # the overseer waits for this one still
    workers._overseer.join(_PATIENCE)
    assert not workers._overseer.is_alive()


def test_closed_while_functions_hang(make, hold, monkeypatch):
    """Closing waits for all of them together as long as for one."""
    monkeypatch.setattr(worker_threads, "_JOIN_SECONDS", 1.5)
    agent, other = make({"hold": hold}, num_workers=8)
    futures = [agent.rpc_async(1, "hold") for _ in range(8)]
    patience = Deadline(_PATIENCE)
    while len(other._executor._threads) < 8 and not patience.expired:
        threading.Event().wait(0.005)
    started = time.monotonic()
    other.close()
    assert time.monotonic() - started < 8 * 1.5 - 2
    for future in futures:
        with pytest.raises(PeerLostError):
            future.result(_PATIENCE)
    agent.close()
    with pytest.raises(GroupClosedError):
        agent.rpc_sync(0, "hold")


def interrupt_when(condition):
    """Have a thread interrupt this one when something is so; gives the thread."""

    def run():
        patience = Deadline(_PATIENCE)
        while not condition() and not patience.expired:
            threading.Event().wait(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.fixture
def _interruptible():
    """Has the system's signal raise, which programs in the background may be started to ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_interrupted_while_a_call_is_under_way(make, hold):
    """The call is given up; the thread's next calls have their own results."""
    agent, _ = make({**FUNCTIONS, "hold": hold})
    for number in range(5):
        thread = interrupt_when(hold.started.is_set)
        with pytest.raises(KeyboardInterrupt):
            agent.rpc_sync(1, "hold", timeout=_PATIENCE)
        thread.join()
        hold.started.clear()
        assert agent.rpc_sync(1, "echo", number) == number
    hold.release.set()
    for number in range(100):
        assert agent.rpc_sync(1, "echo", number) == number


@pytest.mark.usefixtures("_interruptible")
def test_interrupted_while_waiting_for_the_window(make, hold):
    """The thread waits no more, and is not taken for one whose result has come."""
    agent, _ = make({**FUNCTIONS, "hold": hold}, most_outstanding=1)
    holding = agent.rpc_async(1, "hold", timeout=_PATIENCE)
    window = agent._peers._peers[1].window
    thread = interrupt_when(lambda: window._waiting)
    with pytest.raises(KeyboardInterrupt):
        agent.rpc_sync(1, "echo", 0, timeout=_PATIENCE)
    thread.join()
    hold.release.set()
    assert holding.result(_PATIENCE) is None
    for number in range(100):
        assert agent.rpc_sync(1, "echo", number, timeout=_PATIENCE) == number


def test_messages_received_after_a_rank_was_lost(make):
    """A large message may be received late: it makes no object, which would never be freed."""
    agent, other = make(FUNCTIONS)
    before = agent._peers._peers[1]
    identity = (0, 1, other._rrefs._agent_token, 99)
    content, _ = other._rrefs.pack(0, pack_call, Call(CREATE, (identity, "echo", (1,), {}), {}))
    agent._dispatcher.on_message(before, MessageKind.INTERNAL_CALL, 99, content)
    assert agent.num_references().for_others == 1
    other.close()
    with pytest.raises(PeerLostError):
        agent.rpc_sync(1, "echo")
    patience = Deadline(_PATIENCE)
    while agent.num_references().for_others and not patience.expired:
        threading.Event().wait(0.005)
    agent._dispatcher.on_message(before, MessageKind.INTERNAL_CALL, 99, content)
    assert agent.num_references().for_others == 0


def test_errors_keep_nothing(make):
    """Objects of the caller are freed as soon as its error is, without garbage collection."""
    agent, other = make(FUNCTIONS)
    other.register("hold", other.close)

    class Large:
        """What a caller has."""

    def call():
        large = Large()
        with contextlib.suppress(PeerLostError):
            agent.rpc_sync(1, "hold")
        return weakref.ref(large)

    gc.disable()
    try:
        for _ in range(3):
            assert call()() is None
    finally:
        gc.enable()


def test_wrong_registrations(make):
    """Errors say how to register: with brackets, with a name, as a dict."""
    agent, _ = make(FUNCTIONS)
    with pytest.raises(TypeError, match=r"@agent.register takes a name: @agent.register\('name'\), before <function"):

        @agent.register
        def add(one, other):
            return one + other

    for register in (lambda: agent.register("", echo), lambda: agent.register("")(echo)):
        with pytest.raises(ValueError, match="the name of a function is empty"):
            register()
    with pytest.raises(TypeError, match=r"functions are given by their names, as in \{'add': add\}, not as a list"):
        make([echo])
    with pytest.raises(TypeError, match="takes a text and a function, not 'a' and 3"):
        make({"a": 3})


@pytest.mark.parametrize("value", ["no", 1, None])
def test_pickles_are_allowed_by_a_bool(make, value):
    """Other true values do not open every rank to every other one."""
    with pytest.raises(TypeError, match=f"allow_pickle must be True or False, not {type(value).__name__}"):
        make(allow_pickle=value)


def test_unknown_options_of_a_context():
    """They raise when the context is made, and so do invalid ones."""
    backend, _ = SimulatedRpcBackend.create_group(2)
    with pytest.raises(TypeError, match="RpcContext has no option 'workers'; there are drain_timeout, name, num_"):
        RpcContext(backend, FUNCTIONS, workers=3)


def test_the_minimum_message_limit(make):
    """Internal calls fit into it, with the longest name; a smaller one is refused."""
    with pytest.raises(ValueError, match="message_limit must be at least 8192, not 8191"):
        make(FUNCTIONS, message_limit=8191)
    with pytest.raises(ValueError, match="the name of a rank has 1 to 255 bytes, not 256"):
        make(FUNCTIONS, name="x" * 256)
    agents = make(FUNCTIONS, message_limit=8192, name="x" * 255)
    with pytest.raises(ValueError, match="is larger than 8,192"):
        agents[0].rpc_sync(1, "echo", "x" * 8192)
    references = [agents[0].remote(1, "echo", number) for number in range(100)]
    assert [each.to_here(_PATIENCE) for each in references] == list(range(100))
    threads = [threading.Thread(target=agent.drain) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
    del references
    patience = Deadline(_PATIENCE)
    while agents[1].num_references().for_others:
        assert not patience.expired
        gc.collect()
