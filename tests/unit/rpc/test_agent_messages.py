"""How agents handle odd messages: cancelled calls, undecodable results, forged responses, large objects."""

import threading

import pytest
import torch

from ferrodist.errors import DistributedError, RpcError
from ferrodist.rpc import RpcAgent, SimulatedRpcBackend
from ferrodist.rpc.messages import Call, MessageKind, pack_call
from ferrodist.rpc.rref_manager import CREATE
from ferrodist.testing import check_leaks, run_ranks

PATIENCE = 60.0


@pytest.fixture
def make():
    """Return a function that makes agents, each with its options; no leak may be left."""
    made = []

    def make_agents(functions, *options):
        for way, given in zip(SimulatedRpcBackend.create_group(len(options)), options, strict=True):
            made.append(RpcAgent(way, functions, **given))
        return made

    with check_leaks():
        yield make_agents
        for agent in made:
            agent.close()


def peer_of(agent, rank):
    """An agent's peer."""
    return agent._peers._peers[rank]


def test_forged_responses(make):
    """A rank that guesses the number of a call to another rank can't answer it."""
    hold = threading.Event()
    agents = make({"hold": lambda: hold.wait(PATIENCE), "echo": lambda: 1}, {}, {}, {})
    for rank in (1, 2):
        assert agents[0].rpc_sync(rank, "echo") == 1
    future = agents[0].rpc_async(1, "hold")
    (number,) = agents[0]._client.pending_calls._calls
    peer_of(agents[2], 0).send(MessageKind.RESULT, number, b"\xa6forged")
    peer_of(agents[2], 0).send(MessageKind.FAILURE, number, b"\xa6forged")
    assert agents[2].rpc_sync(0, "echo") == 1
    assert not future.done()
    hold.set()
    assert future.result(PATIENCE) is True


def test_undecodable_results(make):
    """An agent without pickles raises at its own caller; the next call succeeds."""
    large = torch.zeros(100_000)
    functions = {"give": lambda: [large, {1, 2}], "echo": lambda: 1}
    agent, other = make(functions, {}, {"allow_pickle": True})
    for _ in range(2):
        with pytest.raises(RpcError, match=r"rank 1 sent something that is not a value.*'pickle'"):
            agent.rpc_sync(1, "give", timeout=PATIENCE)
    assert agent.rpc_sync(1, "echo") == 1
    for each in (agent, other):
        assert each._executor._num_transfers == 0
        assert not each._peers._peers[1 - each.rank]._transfers


def test_different_message_limits(make):
    """Both agents raise an error that names the limit."""
    agent, _ = make({"echo": len}, {}, {"message_limit": 1 << 20})
    with pytest.raises(DistributedError, match="message_limit is 1,048,576: make all agents with the same"):
        agent.rpc_sync(1, "echo", torch.zeros(1 << 20), timeout=PATIENCE)


def test_responses_are_sent_without_the_lock(make):
    """Sending may receive messages, also from other ranks."""
    agent, other = make({"echo": lambda: 1}, {}, {})
    assert agent.rpc_sync(1, "echo") == 1
    peer = peer_of(other, 0)
    send, could_take = peer.send, []

    def look():
        could_take.append(peer.internal_lock.acquire(blocking=False))
        if could_take[-1]:
            peer.internal_lock.release()

    def look_and_send(*message):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        send(*message)

    peer.send = look_and_send
    future = agent._client.call_internal(1, Call("ferrodist.nothing", (), {}), PATIENCE)  # is refused at once
    assert future.exception(PATIENCE) is not None
    assert could_take == [True]


@pytest.mark.parametrize("kind", [MessageKind.CALL, MessageKind.INTERNAL_CALL])
def test_cancelled_before_its_tensors_arrived(make, kind):
    """The call is refused, and its function is not called: the tensors may be torn."""
    called = []
    agent, other = make({"take": called.append}, {}, {})
    agent.rpc_sync(1, "take", 0)
    answers = []
    peer = peer_of(other, 0)
    peer.send = lambda *message: answers.append(message)
    call = Call("take", (1,), {})
    if kind is MessageKind.INTERNAL_CALL:
        call = Call(CREATE, ((1, 0, agent._rrefs._agent_token, 99), "take", (1,), {}), {})
    content, _ = agent._rrefs.pack(1, pack_call, call)
    other._dispatcher.on_cancelled_message(peer, 99, content)
    ((answer, number, text),) = answers
    del peer.send
    assert (answer, number) == (MessageKind.FAILURE, 99)
    assert b"its caller had given up" in text
    assert called == [0]
    assert other.num_references().for_others == 0


@pytest.mark.parametrize("backend", ["simulated", "tcp", "native"])
def test_objects_made_of_large_tensors_are_used_at_once(backend):
    """By functions that are called with the reference, or that return one."""

    def make_here(number):
        agent = fd_agents[1 - number]
        return agent.remote(number, "Box", torch.ones(1 << 20))

    fd_agents = {}

    def program(group):
        agent = fd_agents[group.rank] = RpcAgent(group, {"Box": torch.sum, "use": use, "make_here": make_here})
        group.barrier()
        try:
            if group.rank == 0:
                for _ in range(10):
                    reference = agent.remote(1, "Box", torch.ones(1 << 20))
                    assert agent.rpc_sync(1, "use", reference, timeout=PATIENCE) == 1 << 20
                    returned = agent.rpc_sync(1, "make_here", 0, timeout=PATIENCE)
                    assert returned.local_value(PATIENCE) == 1 << 20
        finally:
            group.barrier()
            agent.close()

    def use(reference):
        return reference.local_value(PATIENCE).item()

    run_ranks(program, 2, backend=backend)
