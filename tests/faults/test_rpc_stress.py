"""Agents in processes call each other at random, while ranks are killed at any instant and started again.

``FERRODIST_RPC_STRESS=600`` goes on for that many seconds; ``FERRODIST_RPC_SEED`` is another course of events.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedTimeoutError, GroupClosedError, PeerLostError, RpcError
from ferrodist.rendezvous import Membership, TcpStore, TcpStoreServer
from ferrodist.rpc import RpcAgent, TcpRpcBackend
from ferrodist.testing import check_leaks, run_ranks

SECONDS = float(os.environ.get("FERRODIST_RPC_STRESS", "8"))
SEED = int(os.environ.get("FERRODIST_RPC_SEED", "0"))
NUM_RANKS = 4
NUM_CALLERS = 2  # threads of each rank that make calls
PATIENCE = 60.0
SECRET, NAME = b"s", "stress"
MOST_ABSENT_SECONDS = 1.0
MOST_MEMORY_GROWTH = 768 << 20  # of which much is memory that agents keep for tensors to come

_fork = multiprocessing.get_context("fork")


def serve_store(pipe):
    """What the store's process does; ranks come and go, it stays."""
    server = TcpStoreServer("127.0.0.1", 0, secret=SECRET, job=NAME, world_size=NUM_RANKS)
    pipe.send(server.address)
    with contextlib.suppress(EOFError):
        pipe.recv()
    os._exit(0)


def pattern(seed, size):
    """A tensor that is a function of its seed."""
    return torch.arange(size, dtype=torch.int32) * 7 + seed


class Box:
    """An object that others have references of."""

    def __init__(self, value):
        self._value = value

    def plus(self, number):
        """Its value and a number."""
        return self._value + number


class Excused(Exception):
    """A call that came to nothing because of somebody who was killed."""


class Rank:
    """One process's part.

    Args:
        rank: It.
        address: Of the store.
        kills: How often each rank has been killed; shared by all processes.
        progress: How many calls of each rank have succeeded; shared too.
        passes_on: Whether it does little but to pass on references to objects of rank 0, which is not killed.
    """

    def __init__(self, rank, address, kills, progress, passes_on):
        self.rank = rank
        self.passes_on = passes_on
        self.kills = kills
        self.progress = progress
        self.life = kills[rank]
        self.met = {}  # by rank: the life in which it was last talked to
        self.tally = Counter()
        self.problems = []
        self.is_over = threading.Event()
        store = TcpStore(address, secret=SECRET, job=NAME, rank=rank, world_size=NUM_RANKS, timeout=PATIENCE)
        membership = Membership(
            rank=rank,
            world_size=NUM_RANKS,
            local_rank=None,
            job=NAME,
            secret=SECRET,
            store=store,
            host="127.0.0.1",
            on_close=store.close,
        )
        functions = {
            "plain": self.plain,
            "tensor": self.tensor,
            "nested": self.nested,
            "slowly": self.slowly,
            "dawdle": self.dawdle,
            "fail": self.fail,
            "make": lambda value: value,
            "box": Box,
            "read": self.read,
            "give": self.give,
            "relay": self.relay,
        }
        self.agent = RpcAgent(TcpRpcBackend.from_membership(membership, PATIENCE), functions, num_workers=4)
        self.membership = membership
        self.callers = [
            threading.Thread(target=self.run_caller, args=(random.Random(f"{SEED} {rank} {self.life} {number}"),))
            for number in range(NUM_CALLERS)
        ]
        for caller in self.callers:
            caller.start()

    # What others call.

    def plain(self, token, text):
        return [self.rank, self.life, token, text[::-1]]

    def tensor(self, seed, given, size):
        assert torch.equal(given, pattern(seed, len(given))), "arguments arrived changed"
        return pattern(seed + self.rank, size)

    def nested(self, token, path):
        if not path:
            return [(self.rank, token)]
        with contextlib.suppress(Excused):
            found = self.call(path[0], "nested", token + 1, path[1:])
            return found if found == "excused" else [(self.rank, token), *found]
        return "excused"

    async def slowly(self, token):
        await asyncio.sleep(0.001)
        return [self.rank, token]

    async def dawdle(self):
        await asyncio.sleep(10 * PATIENCE)

    def fail(self, token):
        raise KeyError(f"token {token}")

    def read(self, reference, number):
        with contextlib.suppress(Excused):
            return self.attempt([reference.owner], lambda: reference.rpc_sync(PATIENCE).plus(number))
        return "excused"

    def give(self, reference):
        return {"back": [reference]}

    def relay(self, reference, path):
        if not path:
            return self.read(reference, 0)
        with contextlib.suppress(Excused):
            ranks = [path[0], reference.owner]
            return self.attempt(ranks, lambda: self.agent.rpc_sync(path[0], "relay", reference, path[1:]))
        return "excused"

    # What this rank calls.

    def attempt(self, ranks, action):
        """Do something that must succeed where those ranks live, have been talked to and go on living."""
        before = [self.kills[rank] for rank in ranks]
        was_sure = all(self.met.get(rank) == life for rank, life in zip(ranks, before, strict=True))
        try:
            return action()
        except PeerLostError as error:
            if was_sure and before == [self.kills[rank] for rank in ranks]:
                raise AssertionError(f"ranks {ranks} lived all the time, but: {error}") from error
            raise Excused from error
        except RpcError as error:
            # Of those ranks one may not have noticed yet that another one of them has been started again.
            if len(ranks) > 1 and error.type_name == "PeerLostError":
                raise Excused from error
            if "was freed" in str(error) and not (was_sure and before == [self.kills[rank] for rank in ranks]):
                raise Excused from error
            raise

    def call(self, to, name, *arguments):
        return self.attempt([to], lambda: self.agent.rpc_sync(to, name, *arguments, timeout=PATIENCE))

    def try_plain(self, draw, to):
        token, text = draw.getrandbits(60), "é" * draw.choice([0, 5, 5, 400])
        own, life, found, back = self.call(to, "plain", token, text + "a")
        assert (own, found, back) == (to, token, "a" + text)
        self.met[to] = life

    def try_many(self, draw, to):
        tokens = [draw.getrandbits(60) for _ in range(draw.randrange(2, 50))]

        def ask():
            futures = [self.agent.rpc_async(to, "plain", token, "x", timeout=PATIENCE) for token in tokens]
            errors = [future.exception(PATIENCE) for future in futures]
            for error in errors:
                if error is not None:
                    raise error
            return [future.result() for future in futures]

        assert [(own, token) for own, _, token, _ in self.attempt([to], ask)] == [(to, token) for token in tokens]

    def try_tensor(self, draw, to):
        sizes = [draw.choice([0, 1, 100, 5000, 40_000, draw.randrange(1_200_000)]) for _ in range(2)]
        seed = draw.randrange(1 << 20)
        found = self.call(to, "tensor", seed, pattern(seed, sizes[0]), sizes[1])
        other = self.call(to, "tensor", seed + 1, pattern(seed + 1, 10), sizes[1])  # is the first one still itself?
        assert torch.equal(found, pattern(seed + to, sizes[1]))
        assert torch.equal(other, pattern(seed + 1 + to, sizes[1]))

    def try_nested(self, draw, to):
        token, path = draw.getrandbits(40), [draw.randrange(NUM_RANKS) for _ in range(draw.randrange(4))]
        found = self.call(to, "nested", token, path)
        assert found in ("excused", [(rank, token + step) for step, rank in enumerate([to, *path])])

    def try_slowly(self, draw, to):
        token = draw.getrandbits(40)
        assert self.call(to, "slowly", token) == [to, token]

    def try_failing(self, draw, to):
        token = draw.getrandbits(40)
        with pytest.raises(RpcError, match=f"token {token}") as caught:
            self.call(to, "fail", token)
        assert (caught.value.type_name, caught.value.ranks) == ("KeyError", (to,))

    def try_late(self, draw, to):
        with pytest.raises(DistributedTimeoutError, match=r"within 0\.0") as caught:
            self.attempt([to], lambda: self.agent.rpc_async(to, "dawdle", timeout=0.01).result(PATIENCE))
        assert caught.value.ranks == (to,)

    def try_reference(self, draw, to):
        value, reader = draw.getrandbits(40), draw.randrange(NUM_RANKS)
        reference = self.agent.remote(to, "box", value, timeout=PATIENCE)
        found = self.attempt([to, reader], lambda: self.agent.rpc_sync(reader, "read", reference, 5, timeout=PATIENCE))
        assert found in ("excused", value + 5)
        back = self.attempt([to, reader], lambda: self.agent.rpc_sync(reader, "give", reference, timeout=PATIENCE))
        assert back["back"][0] is reference
        assert self.attempt([to], lambda: reference.rpc_sync(PATIENCE).plus(1)) == value + 1

    def try_relay(self, draw, to):
        value, path = draw.getrandbits(40), [draw.randrange(NUM_RANKS) for _ in range(draw.randrange(4))]
        reference = self.agent.remote(0, "box", value, timeout=PATIENCE)
        found = self.attempt([0, to], lambda: self.agent.rpc_sync(to, "relay", reference, path, timeout=PATIENCE))
        assert found in ("excused", value)

    def try_copy(self, draw, to):
        seed = draw.randrange(1 << 20)
        reference = self.agent.remote(to, "make", pattern(seed, 1000), timeout=PATIENCE)
        assert torch.equal(self.attempt([to], lambda: reference.to_here(PATIENCE)), pattern(seed, 1000))

    def run_caller(self, draw):
        """Make calls until it is over."""
        tries = [self.try_plain] * 3 + [self.try_reference] * 2
        tries += [self.try_many, self.try_tensor, self.try_nested, self.try_slowly]
        tries += [self.try_failing, self.try_late, self.try_copy, self.try_relay]
        if self.passes_on:
            tries = [self.try_plain, *[self.try_relay] * 5]
        while not self.is_over.is_set() and not self.problems:
            each, to = draw.choice(tries), draw.randrange(NUM_RANKS)
            started = time.monotonic()
            try:
                each(draw, to)
            except Excused:
                self.tally["excused"] += 1
                self.is_over.wait(0.005)  # who is gone is gone for a while
            except BaseException:
                self.problems.append(f"rank {self.rank}, {each.__name__} of {to}: {traceback.format_exc()}")
                print(self.problems[-1], file=sys.stderr, flush=True)  # the supervisor may be stuck without this caller
            else:
                self.tally[each.__name__] += 1
                self.progress[self.rank] += 1
            if time.monotonic() - started > 5 * PATIENCE:
                self.problems.append(f"rank {self.rank}: {each.__name__} of {to} took too long")

    # What the supervisor has it do.

    def stop(self):
        """End the calls of this rank; gives what went wrong, and what was done."""
        self.is_over.set()
        for caller in self.callers:
            caller.join(5 * PATIENCE)
            if caller.is_alive():
                self.problems.append(f"rank {self.rank}: a call does not end")
        return self.problems, dict(self.tally)

    def drain(self):
        """Come to the end with the others; gives what is left of what there was."""
        for rank in range(NUM_RANKS):
            self.agent.wait_for_rank(rank, PATIENCE)
        self.agent.drain(PATIENCE)
        patience = Deadline(PATIENCE)
        while (left := self.left()) and not patience.expired:
            gc.collect()
            threading.Event().wait(0.01)
        return left

    def left(self):
        """What calls and references have left behind, in words."""
        agent = self.agent
        table = agent._rrefs.refcounts.table
        kept = list(table._owned.values())
        found = {f"keeps {each.id}": each.handle() or each.counts or "what was registered" for each in kept}
        found["registered"] = [vars(each) for each in table._transfers.by_key.values()]
        found |= {f"has {id_}": held.handle() or held.count for id_, held in list(table._used.items())}
        found["calls"] = agent.statistics().in_flight + len(agent._client.pending_calls._calls)
        peers = list(agent._peers._peers.values())
        found["served"] = sum(len(peer.incoming) for peer in peers) + len(agent._server.serving)
        found["slots"] = sum(1024 - peer.window._num_free for peer in peers)
        found["transfers"] = sum(len(peer._transfers) for peer in peers if peer.rank != self.rank)
        found["moving"] = agent._executor._num_transfers
        found["running"] = agent._executor._num_waiting
        return {f"rank {self.rank} after {self.kills[:]}: {what}": str(each) for what, each in found.items() if each}

    def close(self):
        """End the agent; gives threads that are left."""
        self.agent.close()
        self.membership.close()
        return [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]

    @classmethod
    def run(cls, rank, address, kills, progress, passes_on, pipe):
        """What a rank's process does."""
        faulthandler.enable()
        torch.set_num_threads(1)
        try:
            made = cls(rank, address, kills, progress, passes_on)
            pipe.send(None)
            while (name := pipe.recv()) is not None:
                pipe.send(getattr(made, name)())
        except EOFError:
            pass
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)


class Supervisor:
    """Starts ranks, kills them and starts them again.

    Args:
        pass_on: See `Rank`.
    """

    def __init__(self, pass_on):
        self.pass_on = pass_on
        self.kills = _fork.RawArray("Q", NUM_RANKS)
        self.progress = _fork.RawArray("Q", NUM_RANKS)
        self.store_pipe, theirs = _fork.Pipe()
        self.store = _fork.Process(target=serve_store, args=(theirs,), daemon=True)
        self.store.start()
        theirs.close()
        assert self.store_pipe.poll(PATIENCE)
        self.address = self.store_pipe.recv()
        self.ranks: dict[int, tuple[Any, Any]] = {}  # processes and their pipes

    def start(self, rank):
        """Start a rank's process, for the first time or again."""
        pipe, theirs = _fork.Pipe()
        arguments = (rank, self.address, self.kills, self.progress, self.pass_on, theirs)
        process = _fork.Process(target=Rank.run, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self.ranks[rank] = process, pipe

    def kill(self, rank):
        """Kill a rank's process, which all know beforehand."""
        process, pipe = self.ranks.pop(rank)
        self.kills[rank] += 1
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        process.close()
        pipe.close()

    def answers(self, *names):
        """Have all ranks do something at once; gives what each says, by rank."""
        for name in names:
            for _, pipe in self.ranks.values():
                pipe.send(name)
        found = {}
        for rank, (_, pipe) in self.ranks.items():
            assert pipe.poll(6 * PATIENCE), f"rank {rank} does not answer to {names}: {self.dump(rank)}"
            found[rank] = pipe.recv()
        return found

    def dump(self, rank):
        """Have a rank's process say where it is, and die."""
        os.kill(self.ranks[rank][0].pid, signal.SIGABRT)
        return "see its stacks"

    def await_progress(self, number, end):
        """Return when so many calls have been made from now on, or at the end."""
        goal = sum(self.progress) + number
        patience = Deadline(2 * PATIENCE)
        while sum(self.progress) < goal and time.monotonic() < end:
            ended = multiprocessing.connection.wait([each.sentinel for each, _ in self.ranks.values()], 0.002)
            assert not ended, "a rank has ended that was not killed"
            if patience.expired:
                raise AssertionError(f"no calls succeed any more: {[self.dump(rank) for rank in self.ranks]}")

    def end(self):
        """Kill everything."""
        for rank in list(self.ranks):
            self.kill(rank)
        self.store.kill()
        self.store.join()
        self.store_pipe.close()


@pytest.fixture
def supervisor(pass_on):
    """A supervisor whose processes are gone at the end."""
    made = Supervisor(pass_on)
    try:
        yield made
    finally:
        made.end()


def rss_bytes(pid):
    """Memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("pass_on", [False, True])
@pytest.mark.timeout(SECONDS + 10 * PATIENCE)
def test_calls_while_ranks_are_killed(supervisor, pass_on):
    """Each call has its right result, or an error that a death explains; in the end nothing is left."""
    draw = random.Random(SEED)
    for rank in range(NUM_RANKS):
        supervisor.start(rank)
    end = time.monotonic() + SECONDS
    sizes = {}
    while time.monotonic() < end:
        supervisor.await_progress(draw.randrange(1, 400), end)
        victims = draw.sample(range(pass_on, NUM_RANKS), draw.choice([1, 1, 1, 2]))
        for victim in victims:
            supervisor.kill(victim)
        if draw.random() < 0.7:  # but ranks that have not met them yet may all wait for them
            supervisor.await_progress(draw.randrange(1, 50), min(end, time.monotonic() + MOST_ABSENT_SECONDS))
        for victim in victims:
            supervisor.start(victim)
        sizes = {rank: sizes.get(rank) or rss_bytes(process.pid) for rank, (process, _) in supervisor.ranks.items()}
    supervisor.answers()  # of their starts
    grown = {rank: rss_bytes(process.pid) for rank, (process, _) in supervisor.ranks.items()}
    stopped = supervisor.answers("stop")
    assert not [problem for problems, _ in stopped.values() for problem in problems]
    assert sum(supervisor.kills) > 0
    left = supervisor.answers("drain")
    assert left == {rank: {} for rank in range(NUM_RANKS)}
    assert supervisor.answers("close") == {rank: [] for rank in range(NUM_RANKS)}
    assert max(grown.values()) - min(sizes.values()) < MOST_MEMORY_GROWTH
    print(
        f"{sum(supervisor.kills)} kills, {sum(supervisor.progress)} calls, {[tally for _, tally in stopped.values()]}"
    )


BACKENDS = ["simulated", "native-threads"]


def run_agents(program, world_size, backend, functions, **options):
    """Each rank with an agent that has functions, each of which is given the agent first; nothing may be left."""

    def on_rank(group):
        agent = RpcAgent(group, **options)
        for name, function in functions.items():
            agent.register(name, functools.partial(function, agent))
        group.barrier()
        try:
            return program(agent)
        finally:
            group.barrier()
            agent.close()

    with check_leaks():
        run_ranks(on_rank, world_size, backend=backend, timeout=PATIENCE)
        gc.collect()  # first the references in what was raised, whose agents go with the rest


def in_threads(number, program):
    """Run a program in threads at once, each of which has a number; raises what one of them has raised."""
    with concurrent.futures.ThreadPoolExecutor(number) as threads:
        for future in [threads.submit(program, each) for each in range(number)]:
            future.result(PATIENCE)


def plus(agent, one, other):
    """A sum, so that each answer tells its call."""
    return one + other + agent.rank


async def plus_later(agent, one, other):
    """The same, of a coroutine."""
    await asyncio.sleep(0)
    return one + other + agent.rank


def bounce(agent, hops, token):
    """Call from rank to rank, back and forth; gives the ranks."""
    if not hops:
        return [agent.rank + token]
    to = (agent.rank + hops % 2 + 1) % agent.world_size
    call = agent.rpc_sync if hops % 3 else lambda *call: agent.rpc_async(*call).result(PATIENCE)
    return [agent.rank + token, *call(to, "bounce", hops - 1, token)]


def bounced(rank, world_size, hops, token):
    """What `bounce` gives."""
    found = [rank + token]
    for left in range(hops, 0, -1):
        rank = (rank + left % 2 + 1) % world_size
        found.append(rank + token)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thousand_calls_at_once(backend):
    """Eight threads of each rank have them outstanding at the same time; each result goes to its call."""

    def program(agent):
        def ask(thread):
            for turn in range(2):
                calls = [(number % 2, 1000 * thread + number, turn) for number in range(125)]
                futures = [
                    agent.rpc_async(to, "plus_later" if number % 5 else "plus", number, turn)
                    for to, number, turn in calls
                ]
                assert [future.result(PATIENCE) for future in futures] == [to + one + turn for to, one, turn in calls]

        in_threads(8, ask)
        assert agent.statistics().in_flight == 0

    run_agents(program, 2, backend, {"plus": plus, "plus_later": plus_later})


@pytest.mark.parametrize("most_outstanding", [1, 2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_few_calls_at_once(backend, most_outstanding):
    """More threads than calls may be outstanding: each gets its turn."""

    def program(agent):
        def ask(thread):
            draw = random.Random(f"{SEED} {agent.rank} {thread}")
            for number in range(60):
                to = draw.randrange(agent.world_size)
                if draw.random() < 0.5:
                    assert agent.rpc_sync(to, "plus", number, thread) == number + thread + to
                else:
                    futures = [agent.rpc_async(to, "plus", number, each) for each in range(5)]
                    assert [future.result(PATIENCE) for future in futures] == [number + each + to for each in range(5)]

        in_threads(4, ask)
        assert agent.statistics().in_flight == 0

    run_agents(program, 3, backend, {"plus": plus}, most_outstanding=most_outstanding, num_workers=1)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_back_and_forth(backend, num_workers):
    """Many more ranks than cores, whose functions call each other, don't deadlock."""

    def program(agent):
        def ask(thread):
            for turn in range(6):
                hops, token = 1 + (thread + turn) % 7, 1000 * thread + turn
                to = (agent.rank + turn) % agent.world_size
                assert agent.rpc_sync(to, "bounce", hops, token) == bounced(to, agent.world_size, hops, token)

        in_threads(3, ask)
        agent.drain(PATIENCE)
        assert agent.statistics().in_flight == 0

    run_agents(program, 6, backend, {"bounce": bounce}, num_workers=num_workers)


async def sleep(agent):
    """Be at it until the caller is gone."""
    del agent
    await asyncio.sleep(10 * PATIENCE)


def plus_of_tensor(agent, tensor):
    """Of a tensor, which may be large."""
    return tensor + agent.rank


@pytest.mark.parametrize("backend", BACKENDS)
def test_agents_are_closed_at_any_moment(backend):
    """Calls under way, here or there, end with an error that says so; closing takes no time."""

    def program(agent, seed):
        draw = random.Random(f"{SEED} {seed} {agent.rank}")
        enough, num_calls = threading.Event(), [0]
        moment, found = draw.randrange(1, 120), []

        def ask(thread):
            calls = random.Random(f"{SEED} {seed} {agent.rank} {thread}")
            while True:
                to, number = calls.randrange(agent.world_size), calls.randrange(1000)
                try:
                    num_calls[0] += 1
                    if num_calls[0] >= moment:
                        enough.set()
                    match calls.randrange(5):
                        case 0:
                            assert agent.rpc_sync(to, "plus", number, 1) == number + 1 + to
                        case 1:
                            futures = [agent.rpc_async(to, "plus_later", number, each) for each in range(4)]
                            assert [each.result(PATIENCE) for each in futures] == [number + i + to for i in range(4)]
                        case 2:
                            agent.rpc_sync(to, "bounce", 3, number)
                        case 3:
                            size = calls.choice([10, 50_000, 400_000])
                            tensor = agent.rpc_sync(to, "plus_of_tensor", torch.full((size,), float(number)))
                            assert torch.equal(tensor, torch.full((size,), float(number + to)))
                        case 4:
                            agent.rpc_async(to, "sleep")
                            assert agent.remote(to, "plus", number, 1).to_here() == number + 1 + to
                except GroupClosedError:
                    return
                except PeerLostError as error:
                    if error.ranks != (to,):
                        found.append(f"to rank {to}: {error}, of ranks {error.ranks}")
                except RpcError as error:
                    if "PeerLostError" not in str(error) and "GroupClosedError" not in str(error):
                        found.append(f"to rank {to}: {error}")

        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            asking = [threads.submit(ask, thread) for thread in range(2)]
            assert enough.wait(PATIENCE)
            started = time.monotonic()
            agent.close()
            took = time.monotonic() - started
            for future in asking:
                future.result(PATIENCE)
        assert took < PATIENCE / 2
        assert not found
        assert agent.statistics().in_flight == 0
        assert not agent._client.pending_calls._calls

    functions = {"plus": plus, "plus_later": plus_later, "bounce": bounce, "sleep": sleep}
    functions["plus_of_tensor"] = plus_of_tensor
    for seed in range(6):
        run_agents(lambda agent, seed=seed: program(agent, seed), 3, backend, functions, num_workers=2)
