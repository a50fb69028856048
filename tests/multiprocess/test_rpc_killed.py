"""Agents in processes of their own, of which some are killed and started again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ferrodist.errors import DistributedError
from ferrodist.rpc.agent import RpcAgent
from ferrodist.rpc.tcp_transport import TcpRpcBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

_PATIENCE = 60.0

_fork = multiprocessing.get_context("fork")


class _Program:
    """What runs in a rank's process: it does what comes through a pipe, and sends back what that gives."""

    def __init__(self, rank: int, world_size: int, address: str, **options: Any) -> None:
        self._backend = TcpRpcBackend(rank, world_size, address, secret="s", timeout=_PATIENCE, **options)
        self._futures: list[Any] = []
        self._held = threading.Event()
        functions = {"add": lambda value: value + rank, "process": os.getpid, "hold": self._hold}
        self._agent = RpcAgent(self._backend, functions)

    def _hold(self) -> None:
        self._held.set()
        threading.Event().wait(_PATIENCE)

    def call(self, to: int, name: str, *arguments: Any) -> Any:
        return self._agent.rpc_sync(to, name, *arguments)

    def start(self, to: int, name: str) -> None:
        self._futures.append(self._agent.rpc_async(to, name))

    def finish(self) -> Any:
        return self._futures.pop(0).result(_PATIENCE)

    def wait_until_held(self) -> bool:
        return self._held.wait(_PATIENCE)

    def wait_for_rank(self, rank: int) -> None:
        self._agent.wait_for_rank(rank)

    def wait_until_alone(self) -> None:
        """Return when this rank has noticed that there is no store any more."""
        self._backend._directory.join(_PATIENCE)

    def close(self) -> list[str]:
        self._agent.close()
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("ferrodist")]

    @classmethod
    def run(cls, rank: int, world_size: int, address: str, pipe: Connection, listener: Any) -> None:
        torch.set_num_threads(1)  # a pool of threads does not survive a fork
        options = {"listener": listener} if rank == 0 else {}
        if rank:
            listener.close()
        program = cls(rank, world_size, address, **options)
        pipe.send(None)
        with suppress(EOFError):
            while True:
                name, arguments = pipe.recv()
                try:
                    pipe.send((True, getattr(program, name)(*arguments)))
                except DistributedError as error:
                    pipe.send((False, error))
        os._exit(0)


class _Job:
    """Ranks in processes of their own, by number."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._processes: dict[int, Any] = {}
        self._pipes: dict[int, Connection] = {}

    def start(self, rank: int) -> None:
        """Start a rank's process, for the first time or again; `await_start` waits for it."""
        self._pipes[rank], theirs = _fork.Pipe()
        address = "{}:{}".format(*self._listener.getsockname())
        arguments = (rank, self.world_size, address, theirs, self._listener)
        self._processes[rank] = _fork.Process(target=_Program.run, args=arguments, daemon=True)
        self._processes[rank].start()
        theirs.close()

    def await_start(self, *ranks: int) -> None:
        for rank in ranks:
            self._answer(rank)

    def kill(self, rank: int) -> None:
        process, pipe = self._processes.pop(rank), self._pipes.pop(rank)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        process.close()
        pipe.close()

    def do(self, rank: int, name: str, *arguments: Any) -> Any:
        """Have a rank do something; returns or raises what that does."""
        self._pipes[rank].send((name, arguments))
        succeeded, value = self._answer(rank)
        if not succeeded:
            raise value
        return value

    def _answer(self, rank: int) -> Any:
        assert self._pipes[rank].poll(2 * _PATIENCE), f"rank {rank} does not answer"
        return self._pipes[rank].recv()

    def process(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert isinstance(pid, int)
        return pid

    def end(self) -> None:
        for rank in list(self._processes):
            self.kill(rank)
        self._listener.close()


@pytest.fixture
def job() -> Iterator[_Job]:
    """A job of three ranks that have all been started."""
    made = _Job(3)
    try:
        for rank in range(3):
            made.start(rank)
        made.await_start(0, 1, 2)
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_rank_is_started_again(job: _Job, victim: int) -> None:
    """Calls that it served fail, other ranks go on; its next processes serve calls again."""
    others = [rank for rank in range(3) if rank != victim]
    for _ in range(2):
        for rank in others:
            job.do(rank, "wait_for_rank", victim)
            job.do(rank, "start", victim, "hold")
        assert job.do(victim, "wait_until_held")
        job.kill(victim)
        for rank in others:
            with pytest.raises(DistributedError, match=f"rank {victim} died: its connection") as caught:
                job.do(rank, "finish")
            assert (type(caught.value).__name__, caught.value.ranks) == ("PeerLostError", (victim,))
            with pytest.raises(DistributedError, match=f"rank {victim} died") as caught:
                job.do(rank, "call", victim, "add", 1)
            assert type(caught.value).__name__ == "PeerLostError"
        first, second = others
        assert job.do(first, "call", second, "add", 1) == 1 + second
        assert job.do(second, "call", first, "add", 1) == 1 + first
        job.start(victim)
        job.await_start(victim)
        for rank in others:
            assert job.do(victim, "call", rank, "add", 1) == 1 + rank
            job.do(rank, "wait_for_rank", victim)
            assert job.do(rank, "call", victim, "process") == job.process(victim)
    for rank in (2, 1, 0):
        assert job.do(rank, "close") == []


def test_started_twice_in_a_row(job: _Job) -> None:
    """A process that is killed before it was called does not hinder the next one."""
    for _ in range(3):
        job.kill(2)
        job.start(2)
    job.await_start(2)
    job.kill(2)
    job.start(2)
    job.await_start(2)
    for rank in (0, 1):
        assert job.do(2, "call", rank, "add", 5) == 5 + rank
        job.do(rank, "wait_for_rank", 2)
        assert job.do(rank, "call", 2, "process") == job.process(2)


def test_rank_0_is_killed(job: _Job) -> None:
    """The store is gone with it: the error says that none can join again. The others go on."""
    for rank in (1, 2):
        job.do(rank, "wait_for_rank", 0)
        job.do(rank, "start", 0, "hold")
    assert job.do(0, "wait_until_held")
    job.kill(0)
    for rank in (1, 2):
        with pytest.raises(DistributedError, match="rank 0 died: its connection"):
            job.do(rank, "finish")
    assert job.do(1, "call", 2, "add", 1) == 3
    assert job.do(2, "call", 1, "add", 1) == 2
    for rank in (1, 2):
        job.do(rank, "wait_until_alone")
        with pytest.raises(DistributedError, match=r"No process can join again, for the store .* is gone"):
            job.do(rank, "call", 0, "add", 1)
