"""References to objects on other ranks."""

import concurrent.futures
import copy
import functools
import gc
import pickle
import random
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedTimeoutError, GroupClosedError, PeerLostError, ProtocolError, RpcError
from ferrodist.rpc.agent import RpcAgent
from ferrodist.rpc.messages import ANNOUNCE_NAME, MET, OWN_NAMES, Call
from ferrodist.rpc.refcount_protocol import CONFIRM, LOST, REGISTER, RELEASE, SETTLE, UNREGISTER
from ferrodist.rpc.refcount_tables import ReferenceCounts
from ferrodist.rpc.rref import FETCH, METHOD, RRef
from ferrodist.rpc.rref_manager import CREATE
from ferrodist.testing import run_ranks

NOTHING = ReferenceCounts(for_others=0, for_itself=0, elsewhere=0)


def until(condition):
    """Wait for what comes of itself, when references have gone, but leave the interpreter to what does it."""
    deadline, never = Deadline(60), threading.Event()
    while not condition():
        assert not deadline.expired
        gc.collect()
        never.wait(0.01)
    assert condition()


def run_agents(program, world_size=3, backend="simulated", functions=None, *, check=True, **options):
    """Each rank with an agent; at the end no rank may have any reference left.

    Args:
        functions: Called with the agent, for more functions.
        check: Whether to see to that.
    """

    def on_rank(group):
        agent = RpcAgent(group, **options)
        for name, function in {**FUNCTIONS, **(functions(agent) if functions else {})}.items():
            agent.register(name, function)
        group.barrier()
        try:
            result = program(agent)
            group.barrier()  # or ranks that look for garbage would keep the others from their program
            if check:
                gc.collect()
                until(lambda: agent.num_references() == NOTHING)
            return result
        finally:
            group.barrier()
            agent.close()

    return run_ranks(on_rank, world_size, backend=backend)


def only_on(rank, program):
    """The others serve."""
    return lambda agent: program(agent) if agent.rank == rank else None


class Counter:
    """What is made on other ranks."""

    limit = 100
    Inner = dict

    def __init__(self, start=0):
        self.count = start
        self.hook = len

    def add(self, amount=1, *, to=0):
        self.count += amount + to
        return self.count

    def fail(self):
        raise KeyError("lost")

    def another(self):
        return Counter(self.count)

    async def slow_add(self, amount):
        return self.add(amount)

    def measure(self, much):
        return much.numel()

    @classmethod
    def kind(cls):
        return cls.__name__

    @staticmethod
    def double(number):
        return 2 * number

    @property
    def doubled(self):
        raise AssertionError

    def _secret(self):
        raise AssertionError


class Finer(Counter):
    """Not registered itself."""


class Strange:
    """Not registered at all."""

    def use(self):
        raise AssertionError


class Holder:
    """Holds a reference."""

    def __init__(self, reference):
        self.reference = reference

    def take(self):
        return self.reference

    def use(self, amount):
        return self.reference.rpc_sync().add(amount)

    def give_away(self, much):
        reference, self.reference = self.reference, None
        return reference, much

    def drop(self):
        self.reference = None


def fail(text):
    raise KeyError(text)


def use(reference, amount=1):
    return reference.rpc_sync().add(amount)


FUNCTIONS = {
    "Counter": Counter,
    "Holder": Holder,
    "finer": functools.partial(Finer),
    "strange": functools.partial(Strange),
    "object": object,  # which opens nothing else
    "echo": lambda value: value,
    "fail": fail,
    "use": use,
}


@pytest.mark.parametrize("backend", ["simulated", "tcp-threads", "native-threads", "native"])
def test_any_rank_makes_objects_on_any(backend):
    """All at once, on themselves too; methods are called there in all three ways."""

    def program(agent):
        counters = [agent.remote(to, "Counter", 10 * to) for to in range(agent.world_size)]
        assert [each.owner for each in counters] == [0, 1, 2]
        assert [each.is_owner for each in counters] == [to == agent.rank for to in range(3)]
        for counter in counters:
            start = 10 * counter.owner
            assert counter.rpc_sync().add(2, to=1) == start + 3
            assert counter.rpc_async().slow_add(1).result() == start + 4
            other = counter.remote().another()
            assert other.owner == counter.owner
            assert other.rpc_sync().add() == start + 5
            assert counter.remote().add().to_here() == start + 5
            assert (counter.rpc_sync().kind(), counter.rpc_sync().double(3)) == ("Counter", 6)

    run_agents(program, 3, backend)


def test_creation_is_not_waited_for():
    """Until the object is used, by its creator or a third rank."""
    release = threading.Event()

    def make():
        release.wait(10)
        return Counter(5)

    def program(agent):
        counter = agent.remote(1, "make")
        copied, called = agent.remote(1, "echo", 0), counter.rpc_async().add(1)
        third = agent.rpc_async(2, "use", counter)
        assert copied.to_here() == 0
        assert not called.done()
        assert not third.done()
        release.set()
        assert {called.result(), third.result()} == {6, 7}

    run_agents(only_on(0, program), functions=lambda agent: {"make": make})


def test_an_object_that_is_never_made():
    """Copies, methods and the owner itself raise at their timeouts."""
    release = threading.Event()

    def program(agent):
        slow = agent.remote(1 - agent.rank, "hold")
        with pytest.raises(DistributedTimeoutError, match="rank"):
            slow.to_here(timeout=0.05)
        with pytest.raises(DistributedTimeoutError, match="rank"):
            slow.rpc_sync(timeout=0.05).add()
        own = agent.remote(agent.rank, "hold")
        with pytest.raises(DistributedTimeoutError, match=r"not made yet, after 0\.05 s"):
            own.local_value(timeout=0.05)
        both.wait(10)
        release.set()
        assert slow.to_here() == own.local_value() == 3

    both = threading.Barrier(2)
    run_agents(program, 2, functions=lambda agent: {"hold": lambda: release.wait(10) and 3})


def test_failures_of_creation():
    """Every use of the object raises the error, at the owner and on a third rank, too."""

    def program(agent):
        for to in range(2):
            reference = agent.remote(to, "fail", "lost")
            with pytest.raises(RpcError, match=f"failed on rank {to}: KeyError: 'lost'") as failure:
                reference.to_here()
            assert failure.value.type_name == "KeyError"
            assert "raise KeyError(text)" in failure.value.remote_traceback
            with pytest.raises(RpcError, match="KeyError: 'lost'"):
                reference.rpc_sync().add()
            with pytest.raises(RpcError, match="KeyError: 'lost'"):
                reference.remote().another().to_here()
            with pytest.raises(RpcError, match="KeyError: 'lost'"):
                agent.rpc_sync(2, "use", reference)
            with pytest.raises(RpcError, match="there is no function 'none' here: register it"):
                agent.remote(to, "none").to_here()
        with pytest.raises(RpcError, match="failed on rank 0: KeyError: 'lost'"):
            agent.remote(0, "fail", "lost").local_value()
        with pytest.raises(TypeError, match="is of type object"):
            agent.remote(1, "echo", object())
        with pytest.raises(ValueError, match=r"'ferrodist\..*' can't be called"):
            agent.remote(1, "ferrodist.create")
        with pytest.raises(ValueError, match="no rank 3"):
            agent.remote(3, "echo", 1)

    run_agents(only_on(0, program))


def test_copies():
    """Of plain values, at the owner too: a change of one does not change the other."""

    def program(agent):
        for to in range(2):
            value = agent.remote(to, "echo", {"a": [torch.ones(3), 1]})
            first = value.to_here()
            first["a"][0] += 1
            first["a"].append(2)
            assert torch.equal(value.to_here()["a"][0], torch.ones(3))
            assert len(value.to_here()["a"]) == 2
            with pytest.raises(RpcError, match="is of type Counter"):
                agent.remote(to, "Counter").to_here()

    run_agents(only_on(0, program), 2)


def test_objects_whose_call_is_never_sent():
    """Uses of the reference say why, not that the object was freed; and it is gone when the program drops it."""
    agents = [RpcAgent(group, most_outstanding=1) for group in SimulatedBackend.create_group(2)]
    release = threading.Event()
    agents[1].register("hold", lambda: release.wait(60.0))
    first = agents[0].rpc_async(1, "hold")
    never = agents[0].remote(1, "hold", timeout=0.0)
    release.set()
    assert first.result()
    for use in (never.to_here, never.rpc_sync().wait, functools.partial(agents[0].rpc_sync, 1, "hold", [never])):
        with pytest.raises(DistributedTimeoutError, match="rank 1 has had most_outstanding calls without a result"):
            use()
    del never, use
    for _ in range(1000):
        if not gc.collect() and not agents[0]._rrefs.refcounts.table._used:
            break
        time.sleep(0.01)
    assert not agents[0]._rrefs.refcounts.table._used, "an error holds the reference in its frames"
    for agent in agents:
        agent.close()


def test_own_objects_whose_call_is_never_sent():
    """As those of others."""
    agent = RpcAgent(SimulatedBackend.create_group(1)[0], most_outstanding=1)
    release = threading.Event()
    agent.register("hold", lambda: release.wait(60.0))
    first = agent.rpc_async(0, "hold")
    never = agent.remote(0, "hold", timeout=0.0)
    release.set()
    assert first.result()
    for use in (never.local_value, never.to_here):
        with pytest.raises(DistributedTimeoutError, match="rank 0 has had most_outstanding calls without a result"):
            use(60.0)
    agent.close()


def test_local_values_in_async_functions():
    """One that is made is there at once; only waiting for one is refused."""
    agent = RpcAgent(SimulatedBackend.create_group(1)[0])
    release = threading.Event()

    @agent.register("local")
    async def local(reference):
        return reference.local_value()

    agent.register("hold", lambda: release.wait(60.0))
    assert agent.rpc_sync(0, "local", agent.reference(3), timeout=60.0) == 3
    slow = agent.remote(0, "hold")
    with pytest.raises(RpcError, match="an async function must not wait"):
        agent.rpc_sync(0, "local", slow, timeout=60.0)
    release.set()
    agent.close()


def test_local_values():
    """The owner has the object itself; other ranks get an error with advice."""

    def program(agent):
        value = [agent.rank]
        own = agent.reference(value)
        assert own.local_value() is value
        assert own.to_here() == value
        assert agent.num_references().for_itself == 1
        other = agent.remote(1 - agent.rank, "echo", 1)
        with pytest.raises(ValueError, match=f"on rank {1 - agent.rank}, not here: take to_here.. for a copy, or call"):
            other.local_value()
        assert other.to_here() == 1

    run_agents(program, 2)


@pytest.mark.parametrize("name", ["hook", "doubled", "limit", "Inner", "nothing", "mro"])
def test_attributes_that_are_not_methods(name):
    """Attributes of the object, properties, and attributes of the class or its metaclass can't be called."""

    def program(agent):
        for to in range(2):
            with pytest.raises(RpcError, match=f"Counter has no method {name!r}"):
                getattr(agent.remote(to, "Counter").rpc_sync(), name)()

    run_agents(only_on(0, program), 2)


def test_unregistered_classes():
    """Their methods can't be called; those of subclasses of a registered class can."""

    def program(agent):
        assert agent.remote(1, "finer", 1).rpc_sync().add() == 2
        text = (
            r"methods of Strange can't be called: register its class with its owner's agent, as in agent.register\('S"
        )
        strange = agent.remote(1, "strange")
        with pytest.raises(RpcError, match=text):
            strange.rpc_sync().use()
        with pytest.raises(RpcError, match=text):
            strange.remote().use().to_here()
        for value in ([3], torch.ones(2), 7):
            with pytest.raises(RpcError, match="can't be called: register its class"):
                agent.remote(1, "echo", value).rpc_sync().clear()

    run_agents(only_on(0, program), 2)


def call_inside(agent, name, *arguments):
    """Call one of the agents' own functions of rank 1, as agents do."""
    return agent._client.call(1, Call(name, arguments, {}), agent.timeout)


def test_private_methods():
    """The caller's agent refuses them, and so does the owner's."""

    def program(agent):
        counter = agent.remote(1, "Counter")
        for name in ("_secret", "__len__", "_none"):
            with pytest.raises(AttributeError, match="is no public method"):
                getattr(counter.rpc_sync(), name)
            with pytest.raises(RpcError, match=f"'{name}' is no public method"):
                call_inside(agent, f"{METHOD}{name}", None, counter, (), {})

    run_agents(only_on(0, program), 2)


def test_failures_of_methods():
    """They are those of functions; the object stays."""

    def program(agent):
        counter = agent.remote(1, "Counter")
        with pytest.raises(RpcError, match="fail' failed on rank 1: KeyError: 'lost'") as failure:
            counter.rpc_sync().fail()
        assert 'raise KeyError("lost")' in failure.value.remote_traceback
        with pytest.raises(RpcError, match="TypeError"):
            counter.rpc_sync().add(1, 2, 3)
        with pytest.raises(RpcError, match=r"the result is of type Counter"):
            counter.rpc_sync().another()
        with pytest.raises(TypeError, match="is of type object"):
            counter.rpc_sync().add(object())
        assert counter.rpc_sync().add() == 1

    run_agents(only_on(0, program), 2)


def test_a_reference_is_passed_on():
    """From rank 0 to 2, which uses rank 1's object when 0 has no reference any more, and then drops it."""
    ended = threading.Event()

    def make():
        counter = Counter()
        weakref.finalize(counter, ended.set)
        return counter

    def program(agent):
        counter = agent.remote(1, "make")
        holder = agent.remote(2, "Holder", counter)
        assert holder.rpc_sync().use(2) == 2
        del counter
        until(lambda: agent.rpc_sync(1, "users") == [2])
        assert holder.rpc_sync().use(3) == 5
        assert not ended.is_set()
        holder.rpc_sync().drop()
        assert ended.wait(10)

    def users(agent):
        kept = agent._rrefs.refcounts.table._owned.values()
        return lambda: sorted(user for each in kept for user in each.counts)

    run_agents(only_on(0, program), functions=lambda agent: {"make": make, "users": users(agent)})


def test_references_within_values():
    """In lists, dicts and tuples, twice in one message: a rank has one reference to each object."""

    def program(agent):
        counter, own = agent.remote(1, "Counter"), agent.reference([1])
        value = {"a": [counter, (own, counter)], 3: agent.remote(2, "Counter")}
        for to in range(3):
            found = agent.rpc_sync(to, "echo", value)
            assert found["a"][0] is counter
            assert found["a"][1][0] is own
            assert found["a"][1][1] is counter
            assert found[3] is value[3]
        until(lambda: agent.num_references() == ReferenceCounts(for_others=0, for_itself=1, elsewhere=2))

    run_agents(only_on(0, program))


def test_the_owner_receives_its_own_reference():
    """The owner receives its local reference; references elsewhere keep the object after that is gone."""

    def program(agent):
        value = Counter(7)
        holder = agent.remote(1, "Holder", agent.reference(value))
        assert holder.rpc_sync().use(1) == 8
        assert agent.num_references().for_others == 1
        back = holder.rpc_sync().take()
        assert back.is_owner
        assert back.local_value() is value

    run_agents(only_on(0, program), 2)


def test_results_with_references():
    """To objects of the callee, of the caller, and of third ranks; in copies of objects, too."""

    def program(agent):
        counter = agent.remote(1, "Counter", 5)
        assert agent.rpc_sync(1, "new").rpc_sync().add() == 1
        holder = agent.remote(2, "Holder", counter)
        assert holder.rpc_sync().take() is counter
        del counter
        taken = holder.rpc_sync().take()
        assert (taken.owner, taken.rpc_sync().add()) == (1, 6)
        kept = agent.remote(2, "echo", [taken, agent.reference(3), agent.remote(2, "Counter")])
        del taken
        for found in (kept.to_here(), kept.to_here()):
            assert [each.owner for each in found] == [1, 0, 2]
            assert found[1].local_value() == 3
        assert found[0].rpc_sync().add() == 7
        nested = agent.remote(2, "new")
        assert nested.to_here().rpc_sync().add() == 1

    def functions(agent):
        return {"new": lambda: agent.remote(agent.rank, "Counter")}

    run_agents(only_on(0, program), functions=functions)


@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_user_that_dies(how):
    """Objects that only it had references to are freed, others are not."""
    ended, died = threading.Event(), threading.Event()

    def make():
        counter = Counter()
        weakref.finalize(counter, ended.set)
        return counter

    held = []

    def on_rank(group):
        agent = RpcAgent(group)
        for name, function in {**FUNCTIONS, "make": make, "hold": held.append}.items():
            agent.register(name, function)
        group.barrier()
        if agent.rank == 0:
            mine, its = agent.remote(1, "make"), agent.remote(1, "make")
            for reference in (mine, its):
                agent.rpc_sync(2, "hold", reference)
            del its, reference
            until(lambda: agent.num_references().elsewhere == 1)
            died.set()
            assert ended.wait(10)
            assert mine.rpc_sync().add() == 1
            with pytest.raises(PeerLostError):
                agent.rpc_sync(2, "hold", mine)
            until(lambda: agent.rpc_sync(1, "echo", 1) == 1)
            over.set()
        else:
            assert died.wait(10) if agent.rank == 2 else over.wait(10)
        if agent.rank != 2 or how == "close":
            agent.close()
        else:
            agent._peers._peers[1].group.abort("it dies")
            agent._peers._peers[0].group.abort("it dies")
            over.wait(10)
            agent.close()

    over = threading.Event()
    run_ranks(on_rank, 3, backend="simulated")


def test_an_owner_that_dies():
    """Uses of the object raise, and so does passing it on; dropping the reference blocks nothing."""
    left = threading.Event()

    def program(agent):
        if agent.rank == 1:
            assert left.wait(10)
            agent.close()
        elif agent.rank == 0:
            counter = agent.remote(1, "Counter")
            counter.rpc_sync().add()
            left.set()
            until(lambda: 1 in agent._peers._lost)
            with pytest.raises(PeerLostError, match="rank 1"):
                counter.rpc_sync().add()
            with pytest.raises(PeerLostError, match="rank 1"):
                counter.to_here()
            with pytest.raises(PeerLostError, match="rank 1"):
                agent.rpc_sync(2, "use", counter)
            with pytest.raises(PeerLostError, match="rank 1"):
                agent.remote(1, "Counter").to_here()
            del counter
            gc.collect()
            until(lambda: agent.num_references() == NOTHING)

    run_agents(program, check=False)


def test_unsent_references_are_not_counted():
    """Too large, beside a value that can't be sent, or to a rank that is not there."""

    def program(agent):
        counter, own = agent.remote(1, "Counter"), agent.reference(1)
        counter.rpc_sync().add()
        for references in ([own], [counter], [own, counter]):
            with pytest.raises(ValueError, match="is larger than"):
                agent.rpc_sync(2, "echo", (references, b"x" * 20_000))
            with pytest.raises(TypeError, match="is of type object"):
                agent.rpc_sync(2, "echo", (references, object()))
            with pytest.raises(RpcError, match="is larger than"):
                agent.rpc_sync(2, "large", references)
            with pytest.raises(TypeError, match="is of type object"):
                agent.remote(2, "Holder", (references, object()))
        until(lambda: agent.num_references() == ReferenceCounts(for_others=0, for_itself=1, elsewhere=1))
        until(lambda: agent.rpc_sync(1, "users") == [0])

    def functions(agent):
        def users():
            kept = agent._rrefs.refcounts.table._owned
            return sorted(user for each in kept.values() for user in each.counts)

        return {"users": users, "large": lambda references: (references, b"x" * 20_000)}

    run_agents(only_on(0, program), functions=functions, message_limit=10_000)


def test_workers_that_all_wait():
    """Each rank's only worker passes on, copies and registers objects of the others, while theirs do the same."""
    barrier = threading.Barrier(3)

    def functions(agent):
        def turn(reference):
            barrier.wait(10)
            copied = reference.to_here()
            back = agent.rpc_async((agent.rank + 1) % 3, "echo", reference)  # to a rank whose worker waits
            barrier.wait(10)
            futures.append(back)
            return [reference, copied]

        return {"turn": turn}

    futures = []

    def program(agent):
        right = (agent.rank + 1) % 3
        theirs = agent.remote((agent.rank + 2) % 3, "echo", agent.rank)
        assert theirs.to_here() == agent.rank
        start.wait(10)
        found = agent.rpc_sync(right, "turn", theirs, timeout=10)
        assert found[0] is theirs
        assert found[1] == agent.rank
        start.wait(10)
        if agent.rank == 0:
            concurrent.futures.wait(futures, 10)
            futures.clear()

    start = threading.Barrier(3)
    run_agents(program, functions=functions, num_workers=1)


def test_callbacks_pass_references_on():
    """In the thread that receives the owner's responses, including the one that they wait for."""

    def program(agent):
        passed = concurrent.futures.Future()
        future = agent.rpc_async(1, "new")
        future.add_done_callback(lambda found: passed.set_result(agent.rpc_async(2, "use", found.result(), timeout=10)))
        assert passed.result(10).result() == 1

    def functions(agent):
        return {"new": lambda: hold.wait(10) and agent.reference(Counter())}

    hold = threading.Event()
    hold.set()
    run_agents(only_on(0, program), functions=functions)


def test_objects_made_of_references():
    """Their creation waits for a registration, and their first uses wait for the creation."""

    def program(agent):
        for _ in range(20):
            counter = agent.remote(2, "Counter")
            holder = agent.remote(1, "Holder", counter)
            outer = agent.remote(2, "Holder", holder)
            assert agent.rpc_sync(1, "echo", [holder])[0] is holder
            assert holder.rpc_sync().use(1) == 1
            assert outer.rpc_sync().take() is holder
            agent.remote(1, "Holder", counter)  # nobody waits for that one
            holder.remote().take()

    run_agents(only_on(0, program))


def test_a_reference_that_arrives_while_the_last_one_is_dropped():
    """There is a new reference before the end of the old one was handled, here or elsewhere."""

    def program(agent):
        own, other = agent.reference(Counter()), agent.remote(1, "Counter")
        holder = agent.remote(1, "Holder", [own, other])
        assert holder.rpc_sync().take() == [own, other]
        go = threading.Event()
        agent._rrefs.tasks.submit(functools.partial(go.wait, 10))
        del own, other
        own, other = holder.rpc_sync().take()
        holder.rpc_sync().drop()
        go.set()
        done = threading.Event()
        agent._rrefs.tasks.submit(done.set)
        assert done.wait(10)
        assert (use(own), use(other)) == (1, 1)

    run_agents(only_on(0, program), 2)


_UNCLOSED = """
import threading
import time
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.rpc.agent import RpcAgent

agents = []
def make(group):
    agents.append(RpcAgent(group))
    agents[-1].register("echo", lambda value: value)
threads = [threading.Thread(target=make, args=(group,)) for group in SimulatedBackend.create_group(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
kept = [agents[0].remote(1 - agents[0].rank, "echo", agents[0].reference(number)) for number in range(50)]
for reference in kept[:25]: reference.rpc_async()
kept.append(kept)
"""


def test_agents_that_are_not_closed():
    """The interpreter exits silently, whatever is under way."""
    found = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", _UNCLOSED], capture_output=True, timeout=60, check=False
    )
    assert (found.returncode, found.stderr) == (0, b"")


@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
def test_a_reference_that_returns_with_large_tensors(backend):
    """The object is there, though the sender gives its reference back while the rest of the message is under way."""

    def program(agent):
        for _ in range(20):
            holder = agent.remote(1, "Holder", agent.reference(Counter()))
            home, _ = holder.rpc_sync().give_away(torch.ones(600_000))
            assert use(home) == 1

    run_agents(only_on(0, program), 2, backend)


@pytest.mark.parametrize("backend", ["native-threads", "tcp-threads"])
def test_an_object_made_of_large_tensors(backend):
    """It can be used and passed on at once, while its tensors are still under way."""

    def program(agent):
        for _ in range(15):
            made = agent.remote(1, "echo", torch.ones(600_000))
            assert agent.rpc_async(2, "echo", made).result() is made
            assert made.to_here().shape == (600_000,)
            counter = agent.remote(1, "Counter")
            size = counter.rpc_async().measure(torch.ones(600_000))
            assert counter.rpc_sync().add() == 1
            assert size.result() == 600_000

    run_agents(only_on(0, program), 3, backend)


def test_references_of_other_agents():
    """They are refused, and so is pickling; a copy is the same reference."""

    def program(agent):
        reference = agent.reference(1)
        assert copy.copy(reference) is reference
        assert copy.deepcopy([reference])[0] is reference
        with pytest.raises(TypeError, match="can't be pickled"):
            pickle.dumps(reference)
        other = RpcAgent(SimulatedBackend.create_group(1)[0])
        with pytest.raises(TypeError, match=r"RRef\(owner=0.*of another agent"):
            agent.rpc_sync(1 - agent.rank, "echo", [other.reference(1)])
        other.close()

    run_agents(program, 2)


def test_ids_of_successive_agents():
    """They differ, though ranks and numbers are the same."""

    def on_rank(group):
        found = []
        for _ in range(2):
            agent = RpcAgent(group)
            agent.register("echo", lambda value: value)
            group.barrier()
            found.append(agent.remote(1 - agent.rank, "echo", 1)._record.id)
            group.barrier()
            agent.close()
        return found

    for first, second in run_ranks(on_rank, 2, backend="simulated"):
        assert first[:2] == second[:2]
        assert first.number == second.number
        assert first.agent_token != second.agent_token


class Liar:
    """Travels as a reference, and is none."""

    def __init__(self, *plain):
        self.plain = plain


def let_liars_pass(agent):
    """Have an agent send what no agent would."""
    objects = agent._rrefs
    for peer, (*others, own) in objects.leaf_codecs.items():
        objects.leaf_codecs[peer] = (*others, own.__class__(
            tag=own.tag,
            encode=lambda value, own=own: value.plain if isinstance(value, Liar) else own.encode(value),
            decode=own.decode,
        ))  # fmt: skip


def test_invalid_ids():
    """The call is not served, and the next one is."""

    def program(agent):
        let_liars_pass(agent)
        for plain in ((), (1, 0, 5), (1, 0, 5, "x"), (9, 0, 1, 1), (1, -1, 1, 1), (1, 0, True, 1), (1.0, 0, 1, 1)):
            with pytest.raises(RpcError, match="is not the id of a remote object"):
                agent.rpc_sync(1, "echo", Liar(*plain))
        with pytest.raises(RpcError, match="the object was freed: its owner knows of no reference to it"):
            agent.rpc_sync(1, "use", Liar(1, 0, 1, 1))
        with pytest.raises(RpcError, match=r"failed on rank 1: RpcError: .* on rank 0: the object was freed"):
            agent.rpc_sync(1, "use", Liar(0, 0, 1, 1))
        assert agent.rpc_sync(1, "echo", 1) == 1

    run_agents(only_on(0, program), 2)


def test_many_references_in_one_message():
    """The messages about them are small, whatever the limit of messages."""

    def program(agent):
        counters = [agent.remote(1, "Counter") for _ in range(70)]
        holder = agent.remote(2, "Holder", counters)
        assert holder.rpc_sync().take() == counters
        counters.clear()
        holder.rpc_sync().drop()

    run_agents(only_on(0, program), message_limit=9_000)


def test_registrations_that_are_too_large():
    """They are an error of the call, also if it waits for something else; nothing is counted."""

    def program(agent):
        counters = [agent.remote(1, "Counter") for _ in range(200)]
        assert counters[-1].rpc_sync().add() == 1
        with pytest.raises(ValueError, match="is larger than 8,192"):
            agent.rpc_sync(2, "echo", counters)
        with pytest.raises(ValueError, match="is larger than 8,192"):
            agent.rpc_sync(2, "echo", [agent.remote(2, "Holder", counters[0]), *counters])

    run_agents(only_on(0, program), message_limit=8192)


class Unreadable:
    """Can be pickled, and not be read."""

    def __reduce__(self):
        return fail, ("unreadable",)


def test_references_beside_unreadable_values():
    """They have arrived, and are given back, in calls and results."""

    def program(agent):
        own, theirs, third = agent.reference(1), agent.remote(1, "Counter"), agent.remote(2, "Counter")
        value = [own, Unreadable(), theirs, (third, own), Unreadable()]
        with pytest.raises(RpcError, match="rank 0 sent something that is not a call: 'unreadable'"):
            agent.rpc_sync(1, "echo", value)
        made = agent.remote(1, "beside", [own, theirs, third])
        with pytest.raises(ProtocolError, match="rank 1 sent something that is not a result: 'unreadable'"):
            made.to_here()
        del made
        until(lambda: agent.num_references().for_others == 0)
        assert use(third) == 1

    functions = {"beside": lambda value: [Unreadable(), *value]}
    run_agents(only_on(0, program), functions=lambda agent: functions, allow_pickle=True)


def test_invalid_internal_calls():
    """They are refused or ignored; the object is still there."""

    def program(agent):
        counter = agent.remote(1, "Counter")
        counter.rpc_sync().add()
        id_ = tuple(counter._record.id)
        for name, arguments in (
            (CREATE, (id_, "Counter", (), {})),
            (CREATE, ((0, 0, 1, 1), "Counter", (), {})),
            (CREATE, ((1, 2, 1, 1), "Counter", (), {})),
            (CREATE, ((1, 0, 1), "Counter", (), {})),
            (CREATE, ((1, 0, 1, 1), FETCH, (), {})),
            (CREATE, ()),
            (FETCH, (3,)),
            (FETCH, (agent.remote(2, "Counter"),)),
            (f"{METHOD}add", (id_, counter, (), {})),
            (f"{METHOD}add", (None, 3, (), {})),
            (REGISTER, (1, 2, 0, [(1, 0, 1, 1, 1)])),
            (REGISTER, (1, 1, 0, [(*id_, 1)])),
            (REGISTER, (1, 0, 0, [(*id_, 1)])),
            (REGISTER, (1, 7, 0, [(*id_, 1)])),
            (REGISTER, (1, 2, 0, [(*id_, 0)])),
            (REGISTER, (1, 2, 0, [(*id_, True)])),
            (REGISTER, (1, 2, 0, [3])),
            (REGISTER, (1, 2, 0, [()])),
            (REGISTER, (True, 2, 0, [(*id_, 1)])),
            (REGISTER, (2, [(*id_, 1)])),
            (UNREGISTER, (None,)),
            (UNREGISTER, ()),
            (CONFIRM, ([3], [])),
            (CONFIRM, ([(2, 1)], [])),
            (CONFIRM, ([(2, 1, *id_, 1)], [])),
            (CONFIRM, ([], [3])),
            (CONFIRM, ([], [(2, 1, 1)])),
            (CONFIRM, ([],)),
            (RELEASE, ([(*id_, -5)],)),
            (RELEASE, ([(*id_, 0)],)),
            (RELEASE, ([id_],)),
            (RELEASE, (3,)),
            (RELEASE, ()),
            (SETTLE, (0, [1])),
            (SETTLE, (1, [1])),
            (SETTLE, (7, [1])),
            (SETTLE, (2, ["x"])),
            (SETTLE, (2, 1)),
            (LOST, (0, 1)),
            (LOST, (1, 1)),
            (LOST, (-1, 1)),
            (LOST, (2, None)),
            (MET, (1,)),
            ("ferrodist.nothing", ()),
        ):
            with pytest.raises(RpcError, match=f"the call of '{name.removeprefix(OWN_NAMES)}' on rank 1"):
                call_inside(agent, name, *arguments)
            with pytest.raises(ValueError, match=f"agents' own: '{name}' can't be called"):
                agent.rpc_sync(1, name, *arguments)
        for name, arguments in (
            (RELEASE, ([(1, 0, 1, 1, 5)],)),
            (RELEASE, ([(*id_, 0)],)),
            (RELEASE, (3,)),
            (UNREGISTER, (77,)),
            (CONFIRM, ([(2, 77, 1, 0, 1, 1)], [(2, 77)])),
            (SETTLE, (2, [77])),
            (LOST, (2, 77)),
            (MET, ()),
            (MET, ()),
        ):
            agent._client.notify(1, name, lambda arguments=arguments: arguments)
        for name, arguments in ((RELEASE, ([(1, 0, 1, 1, 5)],)), (UNREGISTER, (77,)), (MET, ()), (ANNOUNCE_NAME, (3,))):
            assert call_inside(agent, name, *arguments) is None
        assert counter.rpc_sync().add() == 2
        agent._client.notify(1, RELEASE, lambda: ([(*id_, 1000)],))
        with pytest.raises(RpcError, match="the object was freed"):
            counter.rpc_sync().add()
        with pytest.raises(RpcError, match="the object was freed"):
            agent.rpc_sync(2, "use", counter)
        with pytest.raises(ValueError, match=r"names that begin with 'ferrodist\.' are the agents' own"):
            agent.register("ferrodist.mine", print)

    run_agents(only_on(0, program))


def test_statistics_do_not_count_registrations():
    """Only users' calls are counted."""

    def program(agent):
        counter = agent.remote(1, "Counter")
        for _ in range(3):
            agent.rpc_sync(2, "echo", counter)
        assert agent.statistics().answered == 4
        del counter

    run_agents(only_on(0, program))


def test_closing_frees_objects():
    """References that end later do no harm."""
    ended = threading.Event()

    def program(agent):
        value = Counter()
        weakref.finalize(value, ended.set)
        kept, other = agent.reference(value), agent.reference(1)
        del value
        agent.close()
        assert ended.is_set()
        with pytest.raises(GroupClosedError, match="the agent was closed"):
            kept.local_value()
        del kept, other

    agent = RpcAgent(SimulatedBackend.create_group(1)[0])
    program(agent)
    assert agent.num_references() == NOTHING


def check_usable(reference):
    """It has not been freed: its owner knows what it is."""
    error = reference.rpc_async().add(1).exception()
    assert error is None or "register its class" in str(error) or "Holder has no method" in str(error)


class Walk:
    """One rank's random steps: it makes, passes, uses, fetches and drops."""

    def __init__(self, agent, seed):
        self.agent = agent
        self.random = random.Random(seed)
        self.references = []
        self.lock = threading.Lock()
        agent.register("take", self.take)
        agent.register("give", self.give)

    def take(self, references, *, keep):
        """What another rank passes."""
        with self.lock:
            self.references += references[:keep]
        return [each for each in references[::-1] if isinstance(each, RRef)]

    def give(self, number):
        """What another rank asks for."""
        with self.lock:
            return {"found": self.references[:number]}

    def some(self):
        """Some of its own."""
        with self.lock:
            return self.random.sample(self.references, min(len(self.references), self.random.randrange(4)))

    def step(self):
        """One step, or more."""
        to = self.random.randrange(self.agent.world_size)
        match self.random.randrange(7):
            case 0:
                made = self.agent.remote(to, "Holder", self.some())
            case 1:
                made = self.agent.remote(to, "Counter", 1)
            case 2:
                self.agent.rpc_sync(to, "take", self.some(), keep=self.random.randrange(3))
                return
            case 3:
                found = self.agent.rpc_sync(to, "give", self.random.randrange(3))["found"]
                made = found[0] if found else None
            case 4:
                made = self.agent.reference([*self.some()])
            case 5:
                made = self.agent.remote(to, "echo", self.some())
                if self.random.random() < 0.5:
                    made.to_here()
            case _:
                with self.lock:
                    self.random.shuffle(self.references)
                    del self.references[self.random.randrange(len(self.references) + 1) :]
                return
        if made is not None and self.random.random() < 0.7:
            with self.lock:
                self.references.append(made)
        elif made is not None:
            made.rpc_async()
        for each in self.some():
            check_usable(each)


@pytest.mark.parametrize(("backend", "seed"), [("simulated", 1), ("native-threads", 2)])
def test_random_steps(backend, seed):
    """After hundreds of steps no object was freed too early, and no rank keeps one."""
    walks = {}

    def functions(agent):
        walks[agent.rank] = Walk(agent, seed * 10 + agent.rank)
        return {}

    def program(agent):
        walk = walks[agent.rank]
        for _ in range(80):
            walk.step()
        with walk.lock:
            for each in walk.references:
                check_usable(each)
        met.wait(60)
        walk.references.clear()

    met = threading.Barrier(4)
    run_agents(program, 4, backend, functions)


def test_many_threads_share_a_reference():
    """They pass it on at the same time, while the receiver drops it again and again."""

    def program(agent):
        counter = agent.remote(1, "Counter")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(agent.rpc_sync, 2, "use", counter) for _ in range(60)]
            assert sorted(future.result() for future in futures) == list(range(1, 61))

    run_agents(only_on(0, program))


def _boom():
    raise ValueError("no")


@pytest.mark.parametrize("use", ["to_here", "method", "method remote", "dropped", "passed on"])
@pytest.mark.parametrize("backend", ["native-threads"])
def test_references_of_failed_creations_are_freed(backend, use):
    """Nor are the callers' frames kept alive, whichever thread receives the failure."""

    class Batch:
        pass

    uses = {
        "to_here": lambda _, reference: reference.to_here(),
        "method": lambda _, reference: reference.rpc_sync().add(1),
        "method remote": lambda _, reference: reference.remote().add(1).to_here(),
        "dropped": lambda agent, _: agent.rpc_sync(1, "boom"),
        "passed on": lambda agent, reference: agent.rpc_sync(2, "use", reference),
    }

    def step(agent):
        batch = Batch()
        with pytest.raises(RpcError):
            uses[use](agent, agent.remote(1, "boom"))
        return weakref.ref(batch)

    def program(agent):
        batches = [step(agent) for _ in range(20)]
        until(lambda: not any(batch() for batch in batches))

    functions = {"boom": _boom, "use": lambda reference: reference.to_here()}
    run_agents(only_on(0, program), backend=backend, functions=lambda _: functions)
