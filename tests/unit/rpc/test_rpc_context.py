"""`RpcContext`, draining at its end, and the names of ranks."""

import re
import threading
import time

import pytest

from ferrodist import rpc
from ferrodist.errors import DistributedTimeoutError, GroupClosedError, InvalidRankError, PeerLostError, RpcError
from ferrodist.testing import run_ranks

BACKENDS = ["simulated", "native-threads"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_draining_waits_for_chains_of_calls(backend):
    """A call that goes from rank to rank long after its maker drains is served everywhere."""
    ends = []

    def pass_on(left):
        agent = rpc.current_agent()
        if left:
            agent.rpc_async((agent.rank + 1) % agent.world_size, "pass_on", left - 1)
        else:
            ends.append(agent.rank)

    def on_rank(group):
        with rpc.RpcContext(group, {"pass_on": pass_on}) as agent:
            if agent.rank == 1:
                for _ in range(5):
                    agent.rpc_async(2, "pass_on", 40)
        assert agent.statistics().in_flight == 0

    run_ranks(on_rank, 3, backend=backend)
    assert ends == [0] * 5


def test_ranks_that_only_serve():
    """An empty block serves until the others are done."""

    def on_rank(group):
        with rpc.RpcContext(group, {"double": lambda value: 2 * value}) as agent:
            if agent.rank == 0:
                return [agent.rpc_sync(to, "double", to) for to in range(agent.world_size)]
        return None

    assert run_ranks(on_rank, 3, backend="simulated") == [[0, 2, 4], None, None]


def test_drain_timeouts():
    """The error names the ranks that do not drain, or have calls without a result."""
    release, gone = threading.Event(), threading.Event()

    def error_of_draining_together(agent):
        for _ in range(100):  # rank 1 comes to its end, and answers, when its processor lets it
            with pytest.raises(DistributedTimeoutError) as caught:
                agent.drain(0.2)
            if not re.search("rank 1 did not (come|answer)", str(caught.value)):
                break
        return caught.value

    def on_rank(group):
        with rpc.RpcContext(group, {"hold": lambda: release.wait(30), "go": gone.set}) as agent:
            if agent.rank == 0:
                with pytest.raises(DistributedTimeoutError, match=r"rank 1 did not come to the end within 0\.05 s"):
                    agent.drain(0.05)
                agent.rpc_sync(1, "go")
            else:
                assert gone.wait(30)
                agent.rpc_async(0, "hold")
            if agent.rank == 0:
                try:
                    error = error_of_draining_together(agent)
                finally:
                    release.set()
                assert "calls are under way after 0.2 s: rank 1 has 1 call" in str(error)

    run_ranks(on_rank, 2, backend="simulated")


def test_a_block_that_raises():
    """It ends at once; the others drain without its rank."""

    def on_rank(group):
        started = threading.Event()

        def hold():
            started.set()
            forever.wait(30)

        with rpc.RpcContext(group, {"hold": hold}) as agent:
            if agent.rank == 2:
                assert started.wait(30)
                raise KeyError("its own error")
            if agent.rank == 0:
                with pytest.raises(PeerLostError, match="rank 2"):
                    agent.rpc_sync(2, "hold")
                forever.set()

    forever = threading.Event()
    with pytest.raises(Exception, match="its own error"):
        run_ranks(on_rank, 3, backend="simulated")
    assert forever.is_set()


def test_draining_without_rank_0():
    """Ranks that wait for it raise."""
    is_gone = threading.Event()

    def on_rank(group):
        context = rpc.RpcContext(group)
        agent = context.__enter__()
        if agent.rank == 0:
            agent.close()
            is_gone.set()
            return
        with pytest.raises(PeerLostError, match="rank 0"):
            context.__exit__(None, None, None)
        with pytest.raises(GroupClosedError):
            agent.rpc_sync(1, "anything")
        with pytest.raises(RuntimeError, match="has been entered already"):
            context.__enter__()

    run_ranks(on_rank, 2, backend="simulated")
    assert is_gone.is_set()


@pytest.mark.parametrize("backend", BACKENDS)
def test_names(backend):
    """A rank can be called by its name as soon as it is there; equal names are an error."""
    names = ["server", "one", "one"]

    def on_rank(group):
        with rpc.RpcContext(group, {"who": lambda: rpc.current_agent().rank}, name=names[group.rank]) as agent:
            assert agent.rpc_sync("server", "who") == 0
            assert agent.rpc_async("server", "who").result() == 0
            if agent.rank == 0:
                with pytest.raises(
                    InvalidRankError,
                    match=r"no rank called 'none' (was there within 0\.01 s|is there, and none can come); the names",
                ):
                    agent.rpc_sync("none", "who", timeout=0.01)
                agent.rpc_sync(1, "who"), agent.rpc_sync(2, "who")
                with pytest.raises(InvalidRankError, match=r"ranks \[1, 2\] are all called 'one'"):
                    agent.rpc_sync("one", "who")

    run_ranks(on_rank, 3, backend=backend)
    with pytest.raises(Exception, match="the name of a rank is a text, not 3"):
        run_ranks(lambda group: rpc.RpcAgent(group, name=3), 1, backend="simulated")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_name_that_no_rank_has(backend):
    """Once all ranks are there calls don't wait for it, whether or not the others have names."""

    def on_rank(group):
        with rpc.RpcContext(
            group, {"who": lambda: rpc.current_agent().rank}, name=[None, "one", None][group.rank]
        ) as agent:
            started = time.monotonic()
            if agent.rank == 0:
                for call in (agent.rpc_sync, agent.remote, agent.rpc_async):
                    with pytest.raises(InvalidRankError, match="no rank called 'nobody' is there, and none can come"):
                        call("nobody", "who", timeout=50)
                with pytest.raises(InvalidRankError, match="no rank called 'nobody' is there, and none can come"):
                    agent.wait_for_rank("nobody", timeout=50)
            assert time.monotonic() - started < 10

    run_ranks(on_rank, 3, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_current_agent(backend):
    """Functions get it, async ones too; elsewhere it raises."""

    async def who():
        return rpc.current_agent().rank

    def on_rank(group):
        with rpc.RpcContext(group, {"who": who}) as agent:
            assert [agent.rpc_sync(to, "who") for to in range(2)] == [0, 1]
            with pytest.raises(RuntimeError, match="is for functions that an agent serves"):
                rpc.current_agent()

    run_ranks(on_rank, 2, backend=backend)


class Thing:
    """What only a pickle carries."""

    def __init__(self, value):
        self.value = value


def test_pickles_where_they_are_allowed():
    """Any value travels between agents that allow it; an agent that does not refuses it, and goes on."""

    def on_rank(group):
        echo = {"echo": lambda value: value}
        with rpc.RpcContext(group, echo, allow_pickle=True) as agent:
            to = 1 - agent.rank
            assert agent.rpc_sync(to, "echo", Thing(3)).value == 3
            found = agent.rpc_sync(to, "echo", [1, {"set": {4, 5}, "text": "plain"}, (2.5, None)])
            assert found == [1, {"set": {4, 5}, "text": "plain"}, (2.5, None)]
            with pytest.raises(TypeError, match="can't be pickled"):
                agent.rpc_sync(to, "echo", lambda: 3)
        strict = rpc.RpcAgent(group, echo, allow_pickle=group.rank == 0)
        if group.rank == 0:
            with pytest.raises(RpcError, match="sent something that is not a value: a tree spec has the tag 'pickle'"):
                strict.rpc_sync(1, "echo", Thing(3))
            assert strict.rpc_sync(1, "echo", 3) == 3
        else:
            with pytest.raises(TypeError, match="is of type Thing"):
                strict.rpc_sync(0, "echo", Thing(3))
        strict.drain()
        strict.close()

    run_ranks(on_rank, 2, backend="simulated")
