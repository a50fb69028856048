"""What users and their functions do that agents must survive, and how they say what was wrong."""

import asyncio
import gc

import pytest

from ferrodist.deadline import Deadline
from ferrodist.errors import PeerLostError, RpcError
from ferrodist.rpc import RpcAgent, SimulatedRpcBackend
from ferrodist.testing import check_leaks

_PATIENCE = 60.0


@pytest.fixture
def make():
    """Return a function that makes agents; nothing of them may be left behind."""
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
def test_functions_that_ask_for_the_end(make, name, to):
    """Their callers are told; the worker, or the loop, goes on."""
    agent, _ = make(FUNCTIONS, num_workers=1)
    for _ in range(3):
        with pytest.raises(RpcError, match=f"{name!r} failed on rank {to}") as caught:
            agent.rpc_sync(to, name, timeout=_PATIENCE)
        assert caught.value.type_name in ("SystemExit", "KeyboardInterrupt")
    assert agent.rpc_sync(to, "echo", 1) == 1
    assert agent.rpc_sync(to, "echo_slowly", 2) == 2


def test_a_reference_that_was_never_made_keeps_nothing(make):
    """What a lost rank should have made is forgotten, and so is what its maker had at hand."""
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
