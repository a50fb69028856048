"""Ranks killed at random moments: how often the survivors name the right one.

    python tests/stress/kills.py --kills 500 --seed 1

Each kill makes three or four ranks as processes, which call collectives, messages, sub-groups or functions of each
other without a pause, and kills one of them after a random time of some milliseconds. Every survivor then says which
rank its call named, and which the calls name that it makes afterwards, to ranks that live among others.

The backends are those whose ranks are processes: the star over TCP, the engine, gloo, and RPC over each and by itself.
Those of "simulated" are threads; `tests/programs/test_mpi.py` kills one of MPI; and a hybrid group hears of a death
from the group that it is made over.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait as wait_readable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ferrodist as fd
from ferrodist.backends.native import GlooBackend, NativeBackend, is_native_available
from ferrodist.backends.subgroup import SubBackend
from ferrodist.backends.tcp import TcpBackend
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError
from ferrodist.rpc import RpcAgent, TcpRpcBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

__all__ = ["KINDS", "Kill", "run_kill", "run_kills"]

_TIMEOUT = 15.0
_HANG_SECONDS = 25.0
_LONGEST_LIFE_SECONDS = 0.06

for _name in fd.__all__:
    getattr(fd, _name)

_fork = multiprocessing.get_context("fork")

_BACKENDS = {"tcp": TcpBackend, "native": NativeBackend, "gloo": GlooBackend}

Outcome = tuple[str, str, tuple[int, ...], str]
"""Of a call: its name, the class of what it raised, the ranks that this names in the world's numbers, its text."""


class _Rank:
    """One rank of a kill.

    Args:
        kill: What it takes part in.
        rank: Its number.
        group: The world, where there is one.
        agent: The agent, where there is one.
    """

    def __init__(self, kill: Kill, rank: int, group: Backend | None, agent: RpcAgent | None) -> None:
        self.kill = kill
        self.rank = rank
        self.group = group
        self.agent = agent
        self.outcomes: list[Outcome] = []

    def attempt(self, name: str, call: Callable[[], object], numbers: tuple[int, ...] | None = None) -> bool:
        """Make a call; False when it has failed. ``numbers`` are the world's of a sub-group's ranks."""
        try:
            call()
        except DistributedError as error:
            named = error.ranks
            if numbers is not None and "of group 'sub'" in error.message.partition(":")[0]:
                named = tuple(numbers[rank] for rank in error.ranks)
            self.outcomes.append((name, type(error).__name__, named, str(error)))
            return False
        return True


def _collectives(mine: _Rank, draw: random.Random) -> None:
    group = mine.group
    count = draw.choice([1, 1000, 200_000])
    calls: dict[str, Callable[[], object]] = {
        "allreduce": lambda: fd.allreduce(torch.ones(count), group=group),
        "broadcast": lambda: fd.broadcast(torch.ones(count), count % 3, group=group),
        "all_gather_object": lambda: fd.all_gather_object("x" * 10, group=group),
        "barrier": lambda: fd.barrier(group=group),
    }
    while True:
        name = draw.choice(list(calls))
        if not mine.attempt(name, calls[name]):
            break
    mine.attempt("allreduce again", calls["allreduce"])


def _messages(mine: _Rank, draw: random.Random) -> None:
    group, rank, size = mine.group, mine.rank, mine.kill.world_size
    tensor = torch.ones(draw.choice([1, 50_000]))
    after, before = (rank + 1) % size, (rank - 1) % size
    while mine.attempt("ring", lambda: fd.sendrecv(tensor, after, None, before, group=group)):
        pass


def _sub_groups(mine: _Rank, draw: random.Random) -> None:
    """Collectives in groups of some ranks and the victim, in turn."""
    world, victim = mine.group, mine.kill.victim
    assert world is not None
    others = [rank for rank in range(mine.kill.world_size) if rank != victim]
    sets = [tuple(sorted([victim, *draw.sample(others, draw.choice([1, len(others) - 1]))])) for _ in range(3)]
    own = [(ranks, SubBackend(world, ranks, name="sub")) for ranks in sets if mine.rank in ranks]
    while own:
        for ranks, group in own:
            if not mine.attempt(f"allreduce in {ranks}", partial(fd.allreduce, torch.ones(9), group=group), ranks):
                return
    mine.attempt("wait", lambda: world.recv(bytearray(1), victim))


def _calls(mine: _Rank, draw: random.Random) -> None:
    agent, size = mine.agent, mine.kill.world_size
    assert agent is not None
    others = [rank for rank in range(size) if rank != mine.rank]
    data = torch.ones(draw.choice([1, 100_000]))
    while mine.attempt(f"call of {(to := draw.choice(others))}", lambda: agent.rpc_sync(to, "echo", data)):
        pass


_WORK = {"collectives": _collectives, "messages": _messages, "sub-groups": _sub_groups, "rpc": _calls}

KINDS = [
    *((backend, work) for backend in _BACKENDS if backend == "tcp" or is_native_available() for work in _WORK),
    ("tcp-rpc", "rpc"),
]
"""Every backend with every kind of work."""


class Kill:
    """One job, and the rank that is killed in it."""

    def __init__(self, backend: str, work: str, seed: int) -> None:
        draw = random.Random(f"{backend} {work} {seed}")
        self.backend = backend
        self.work = work
        self.seed = seed
        self.world_size = draw.choice([3, 3, 4])
        self.victim = draw.randrange(self.world_size)
        self.seconds = draw.uniform(0.0, _LONGEST_LIFE_SECONDS)

    def __str__(self) -> str:
        return f"{self.backend} {self.work} seed {self.seed}: rank {self.victim} of {self.world_size}"

    def run_rank(self, rank: int, listener: socket.socket, secret: bytes, met: Any) -> list[Outcome]:
        """Be a rank, until it is killed or its calls have failed. All ranks come to the barrier ``met`` first."""
        torch.set_num_threads(1)
        address = "{}:{}".format(*listener.getsockname())
        own = {"listener": listener} if rank == 0 else {}
        if rank:
            listener.close()
        group = agent = None
        if self.backend == "tcp-rpc":
            backend = TcpRpcBackend(rank, self.world_size, address, secret=secret, timeout=_TIMEOUT, **own)
            agent = RpcAgent(backend, {"echo": lambda value: value})
            for other in range(self.world_size):
                if other != rank:
                    agent.wait_for_rank(other)
        else:
            group = _BACKENDS[self.backend](rank, self.world_size, address, secret=secret, timeout=_TIMEOUT, **own)
            if self.work == "rpc":
                agent = RpcAgent(group, {"echo": lambda value: value})
            group.barrier()
        met.wait(_TIMEOUT)
        if rank == self.victim:
            threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        mine = _Rank(self, rank, group, agent)
        seed = f"{self.seed}" if self.work != "rpc" else f"{self.seed} {rank}"
        _WORK[self.work](mine, random.Random(seed))
        if rank == self.victim:
            time.sleep(60)
        self._call_the_living(mine)
        return mine.outcomes

    def _call_the_living(self, mine: _Rank) -> None:
        """After the first failure: what is said of ranks that live. They go on living until all have asked."""
        for other in range(self.world_size):
            if other in (mine.rank, self.victim):
                continue
            if mine.agent is not None:
                mine.attempt(f"late call of {other}", partial(mine.agent.rpc_sync, other, "echo", 1, timeout=3.0))
            elif mine.group is not None:
                mine.attempt(f"late send to {other}", partial(mine.group.send, bytes(1 << 20), other, timeout=3.0))
        if mine.agent is None and mine.group is not None:
            living = tuple(rank for rank in range(self.world_size) if rank != self.victim)
            group = SubBackend(mine.group, living, name="sub")
            mine.attempt(f"late allreduce in {living}", lambda: fd.allreduce(torch.ones(9), group=group), living)


def run_kill(kill: Kill) -> dict[str, Any]:
    """Run it; what came out: "right", or "wrong" or "hang" with what was seen."""
    listener = socket.create_server(("127.0.0.1", 0))
    secret = secrets.token_bytes(16)
    pipes = [_fork.Pipe() for _ in range(kill.world_size)]
    done, met = _fork.Event(), _fork.Barrier(kill.world_size)

    def body(rank: int) -> None:
        with Path(os.devnull).open("w", encoding="utf-8") as nothing:
            os.dup2(nothing.fileno(), 2)
        try:
            result: Any = kill.run_rank(rank, listener, secret, met)
        except BaseException:
            result = traceback.format_exc()
        pipes[rank][1].send(result)
        done.wait(_HANG_SECONDS)  # who goes first is no news for the others
        os._exit(0)

    processes = [_fork.Process(target=body, args=(rank,), daemon=True) for rank in range(kill.world_size)]
    for process in processes:
        process.start()
    listener.close()
    for _, writer in pipes:
        writer.close()
    results: dict[int, Any] = {}
    deadline = Deadline(_HANG_SECONDS)
    waiting = {pipes[rank][0]: rank for rank in range(kill.world_size) if rank != kill.victim}
    while waiting and not deadline.expired:
        for reader in wait_readable(list(waiting), deadline.remaining()):
            rank = waiting.pop(reader)
            with suppress(EOFError):
                results[rank] = reader.recv()
    done.set()
    for process in processes:
        process.kill()
        process.join()
        process.close()
    for reader, _ in pipes:
        reader.close()
    return {"kind": _judge(kill, results), "results": results}


def _judge(kill: Kill, results: dict[int, Any]) -> str:
    if len(results) < kill.world_size - 1:
        return "hang"
    for outcomes in results.values():
        if isinstance(outcomes, str) or not outcomes:  # the text of another error, or nothing was seen
            return "wrong"
        for _, error, ranks, _ in outcomes:
            if error == DistributedTimeoutError.__name__:
                return "hang"
            if ranks != (kill.victim,):
                return "wrong"
    return "right"


def run_kills(number: int, seed: int, kinds: list[tuple[str, str]], *, says: bool = True) -> Counter[str]:
    """Run so many kills, of all kinds in turn; returns how many came out how."""
    counts: Counter[str] = Counter()
    started = time.monotonic()
    for index in range(number):
        backend, work = kinds[index % len(kinds)]
        kill = Kill(backend, work, seed + index)
        outcome = run_kill(kill)
        counts[outcome["kind"]] += 1
        if outcome["kind"] != "right":
            print(f"{outcome['kind'].upper()} {kill}")
            for rank, outcomes in sorted(outcome["results"].items()):
                print(f"  rank {rank}: {outcomes}")
            sys.stdout.flush()
        if says and (index + 1) % 50 == 0:
            print(f"{index + 1} kills, {time.monotonic() - started:.0f} s: {dict(counts)}", flush=True)
    return counts


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a kind's name, as 'tcp rpc'")
    options = parser.parse_args()
    kinds = [kind for kind in KINDS if options.only in " ".join(kind)]
    counts = run_kills(options.kills, options.seed, kinds)
    print(f"{options.kills} kills: {counts['right']} rightly named, {counts['wrong']} wrongly, {counts['hang']} hangs")
    sys.exit(counts["right"] != options.kills)


if __name__ == "__main__":
    _main()
