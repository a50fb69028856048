"""Calls of functions on other ranks."""

import asyncio
import threading
import time

import numpy as np
import pytest
import torch

from ferrodist.errors import DistributedTimeoutError, GroupClosedError, PeerLostError, RpcError
from ferrodist.rpc.agent import RpcAgent
from ferrodist.testing import run_ranks

BACKENDS = ["simulated", "tcp-threads", "native-threads", "native"]


def run_agents(program, world_size, backend="simulated", functions=None, **options):
    """Each rank with an agent that has functions; all stay until all are done."""

    def on_rank(group):
        agent = RpcAgent(group, **options)
        for name, function in {**FUNCTIONS, **(functions or {})}.items():
            agent.register(name, function)
        group.barrier()
        try:
            return program(agent)
        finally:
            group.barrier()
            agent.close()

    return run_ranks(on_rank, world_size, backend=backend)


def add(one, other=1):
    return one + other


def echo(value):
    return value


async def slow_echo(value):
    await asyncio.sleep(0.01)
    return value


def fail(text):
    raise KeyError(text)


FUNCTIONS = {"add": add, "echo": echo, "slow_echo": slow_echo, "fail": fail}


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_rank_calls_any(backend):
    """All ranks call all at once, themselves too."""

    def program(agent):
        futures = [
            agent.rpc_async(to, "add", to, other=agent.rank) for to in range(agent.world_size) for _ in range(20)
        ]
        return [future.result() for future in futures] == [
            to + agent.rank for to in range(agent.world_size) for _ in range(20)
        ]

    assert run_agents(program, 3, backend) == [True] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_values(backend):
    """Values arrive as they were: plain ones, tensors small and large, arrays."""
    large = torch.arange(200_000.0)
    value = {"a": [1, 2.5, "text", b"bytes", None, True], "t": (torch.ones(3), large), 3: np.arange(6).reshape(2, 3)}

    def program(agent):
        found = agent.rpc_sync(1 - agent.rank, "echo", value)
        assert found["a"] == value["a"]
        assert torch.equal(found["t"][0], torch.ones(3))
        assert torch.equal(found["t"][1], large)
        assert isinstance(found[3], np.ndarray)
        assert (found[3] == value[3]).all()

    run_agents(program, 2, backend)


def test_failures():
    """Exceptions with type, text and traceback; unknown names; values that can't be sent; the server lives on."""

    def program(agent):
        to = 1 - agent.rank
        with pytest.raises(RpcError, match=f"'fail' failed on rank {to}: KeyError: 'lost'") as failure:
            agent.rpc_sync(to, "fail", "lost")
        assert failure.value.type_name == "KeyError"
        assert "raise KeyError(text)" in failure.value.remote_traceback
        with pytest.raises(
            RpcError, match="there is no function 'none' here: register it; those registered: add, echo"
        ):
            agent.rpc_sync(to, "none")
        with pytest.raises(RpcError, match=r"TypeError: add.. missing 1 required"):
            agent.rpc_sync(to, "add")
        with pytest.raises(TypeError, match=r"argument \[0\] is of type object"):
            agent.rpc_sync(to, "echo", object())
        with pytest.raises(RpcError, match=r"the result is of type object"):
            agent.rpc_sync(to, "object")
        return agent.rpc_sync(to, "echo", 1)

    assert run_agents(program, 2, functions={"object": object}) == [1, 1]


def test_asynchronous_functions():
    """Many wait at a time, with one worker."""

    def program(agent):
        futures = [agent.rpc_async(1 - agent.rank, "slow_echo", number) for number in range(100)]
        return [future.result() for future in futures] == list(range(100))

    assert run_agents(program, 2, num_workers=1) == [True, True]


def test_futures_are_awaited():
    """In an event loop of the user's."""

    async def both(agent):
        to = 1 - agent.rank
        return await asyncio.gather(agent.rpc_async(to, "echo", 1), agent.rpc_async(to, "slow_echo", 2))

    assert run_agents(lambda agent: asyncio.run(both(agent)), 2) == [[1, 2]] * 2


def test_a_call_that_takes_too_long():
    """The caller raises by itself; a call that has not begun by then is not made."""
    release, started = threading.Event(), threading.Event()
    called = []

    def hold(number):
        called.append(number)
        started.set()
        release.wait(10)

    def program(agent):
        if agent.rank:
            return
        first = agent.rpc_async(1, "hold", 1, timeout=10)
        assert started.wait(10)
        second = agent.rpc_async(1, "hold", 2, timeout=0.1)
        with pytest.raises(DistributedTimeoutError, match=r"rank 1 did not answer the call of 'hold' within 0\.1 s"):
            second.result()
        release.set()
        first.result()
        assert agent.rpc_sync(1, "echo", 3) == 3

    run_agents(program, 2, functions={"hold": hold}, num_workers=1)
    assert called == [1]


def test_statistics():
    """Calls that were answered, given up, late, served and failed."""
    release, started = threading.Event(), threading.Event()

    def program(agent):
        if agent.rank:
            return
        given_up = agent.rpc_async(1, "hold", timeout=1)
        assert started.wait(10)
        with pytest.raises(DistributedTimeoutError):
            given_up.result()
        future = agent.rpc_async(1, "hold", timeout=10)
        assert agent.statistics().in_flight == 1
        release.set()
        future.result()
        with pytest.raises(RpcError):
            agent.rpc_sync(1, "fail", "x")
        found, there = agent.statistics(), agent.rpc_sync(1, "statistics")
        assert (found.in_flight, found.answered, found.timed_out, found.late) == (0, 2, 1, 1)
        assert 0 < found.latency[0] <= found.latency[1] <= found.latency[2]
        assert there == [2, 1]

    agents = []

    def statistics():
        found = next(agent.statistics() for agent in agents if agent.rank == 1)
        return [found.served, found.failed]

    def hold():
        started.set()
        release.wait(10)

    functions = {"hold": hold, "statistics": statistics}

    def body(agent):
        agents.append(agent)
        return program(agent)

    run_agents(body, 2, functions=functions, num_workers=2)


def test_broadcast_call():
    """Results come by rank, failures all together."""

    def program(agent):
        agent.register("rank")(lambda: agent.rank)
        barrier.wait()
        found = agent.broadcast_call("rank")
        with pytest.raises(
            RpcError, match=r"'fail' failed on ranks 0, 1, 2 of 3: .* on rank 2: KeyError: 'x'"
        ) as failure:
            agent.broadcast_call("fail", "x")
        assert failure.value.ranks == (0, 1, 2)
        return found

    barrier = threading.Barrier(3)
    assert run_agents(program, 3) == [[0, 1, 2]] * 3


def test_a_closed_agent():
    """Calls raise, and so do those that wait for it."""

    def program(agent):
        if agent.rank == 0:
            future = agent.rpc_async(1, "leave", timeout=10)
            with pytest.raises(PeerLostError, match="rank 1"):
                future.result()
            stay.set()
            with pytest.raises(PeerLostError, match="rank 1"):
                agent.rpc_sync(1, "echo", 1)
            assert agent.rpc_sync(0, "echo", 2) == 2
        else:
            left.wait(10)
            agent.close()
            with pytest.raises(GroupClosedError, match="closed"):
                agent.rpc_sync(0, "echo", 1)

    left, stay = threading.Event(), threading.Event()
    run_agents(program, 2, functions={"leave": lambda: left.set() or stay.wait(10)})


def test_closing_takes_no_time():
    """Whatever its threads do: a burst of calls has just ended, or the last tick after one."""
    pauses = threading.Event()

    def on_rank(group):
        for number in range(25):
            agent = RpcAgent(group, {"add": add})
            futures = [agent.rpc_async(1 - agent.rank, "add", value) for value in range(20)]
            assert [future.result() for future in futures] == list(range(1, 21))
            pauses.wait(0.001 * (number % 8))
            agent.drain()
            start = time.monotonic()
            agent.close()
            assert time.monotonic() - start < 4

    run_ranks(on_rank, 2, backend="simulated")
