"""Ranks that run into a limit of their system: all ranks are told soon which one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrodist as fd
from ferrodist.backends.tcp.io_loop import IoLoop
from ferrodist.resource_limits import limit_text
from ferrodist.rpc import RpcContext

if TYPE_CHECKING:
    from collections.abc import Callable

_fork = multiprocessing.get_context("fork")
_TIMEOUT = 40.0
_WORLD_SIZE = 4
_SOON = 15.0


def _join_group(rank: int, port: int) -> object:
    return fd.TcpBackend(rank, _WORLD_SIZE, f"127.0.0.1:{port}", secret="s", timeout=_TIMEOUT)


def _join_job(rank: int, port: int) -> object:
    where = f"tcp://127.0.0.1:{port}"
    return fd.init_process_group(
        "tcp", rank=rank, world_size=_WORLD_SIZE, init_method=where, secret="s", timeout=_TIMEOUT
    )


def _be_rank(rank: int, port: int, join: Callable[[int, int], object], spare: int, told: Any) -> None:
    if rank == 0:
        gc.collect()  # what it closes later would be more to spare
        held = [os.open(os.devnull, os.O_RDONLY) for _ in range(spare)]  # the lowest numbers: what is open has gaps
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, max(held) + 1))
        for each in held:
            os.close(each)
    try:
        join(rank, port)
        told.send("")
    except fd.DistributedError as error:
        told.send(f"{type(error).__name__}: {error}")
    except BaseException as error:
        told.send(f"raw {error!r}")


# With fewer to spare it can't listen, and only it knows; with more the group of 4 has enough.
@pytest.mark.parametrize("spare", [8, 10])
def test_rank_0_of_a_group_out_of_descriptors(spare: int) -> None:
    """It raises an error that names the limit, and so do all others, long before their time is over."""
    _check_that_all_are_told(_join_group, spare)


@pytest.mark.parametrize("spare", [4, 6, 12])
def test_rank_0_of_a_job_out_of_descriptors(spare: int) -> None:
    """So it is for a job's store, and for the group that is made over it."""
    _check_that_all_are_told(_join_job, spare)


def _check_that_all_are_told(join: Callable[[int, int], object], spare: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes = [_fork.Pipe(duplex=False) for _ in range(_WORLD_SIZE)]
    ranks = [
        _fork.Process(target=_be_rank, args=(rank, port, join, spare, pipes[rank][1])) for rank in range(_WORLD_SIZE)
    ]
    started = time.monotonic()
    for rank in ranks:
        rank.start()
    try:
        for reader, _ in pipes:
            assert reader.poll(_SOON)
            text = reader.recv()
            assert text.startswith("RendezvousError: "), text
            assert "as many files open as it may" in text, text
            assert "ulimit -n" in text, text
        assert time.monotonic() - started < _SOON
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
        for ends in pipes:
            for end in ends:
                end.close()


def test_a_rank_that_can_start_no_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises which limit that is, and rank 0, which it has reached, hears of it."""
    start = IoLoop.start

    def start_or_not(loop: IoLoop) -> None:
        if loop._thread.name.endswith("-1"):
            raise RuntimeError("can't start new thread")
        start(loop)

    monkeypatch.setattr(IoLoop, "start", start_or_not)
    listener = socket.create_server(("127.0.0.1", 0))
    address = "{}:{}".format(*listener.getsockname())
    errors: list[BaseException] = []

    def join_as_1() -> None:
        with pytest.raises(fd.RendezvousError, match=r"rank 1 .* can start no more threads: raise the limit") as caught:
            fd.TcpBackend(1, 2, address, secret="s", timeout=_TIMEOUT)
        errors.append(caught.value)

    thread = threading.Thread(target=join_as_1)
    thread.start()
    group = fd.TcpBackend(0, 2, address, secret="s", timeout=_TIMEOUT, listener=listener)
    with pytest.raises(fd.RendezvousError, match=r"rank 1 .* can start no more threads") as caught:
        group.barrier()
    assert caught.value.ranks == (1,)
    thread.join()
    group.close()
    assert errors


@pytest.mark.parametrize(
    ("use", "who"),
    [
        (lambda group: fd.async_allreduce(torch.ones(1), group=group), "the operations of group"),
        (lambda group: RpcContext(group, {}).__enter__(), "the agent of rank 0 can't start"),
    ],
    ids=["started", "rpc"],
)
def test_what_can_start_no_thread_later_says_so(
    use: Callable[[fd.Backend], object], who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first collective that is started, and an agent, name the limit, too; nothing raw is raised."""
    groups = fd.SimulatedBackend.create_group(2)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(fd.DistributedError, match=rf"{who}.*: this process can start no more threads"):
            use(groups[0])
    for group in groups:
        group.close()


def test_other_errors_are_about_no_limit() -> None:
    """Only what a limit has caused is called so."""
    assert limit_text(OSError(13, "no")) is None
    assert limit_text(RuntimeError("no")) is None
    assert "fs.file-max" in str(limit_text(OSError(23, "Too many open files in system")))


@pytest.mark.parametrize("kind", [fd.TcpBackend, fd.NativeBackend, fd.GlooBackend], ids=lambda kind: kind.__name__)
def test_rank_0_that_never_comes_is_named(kind: type[fd.TcpBackend]) -> None:
    """A group that is made without it ends in the error of ranks that did not meet, which names it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(fd.RendezvousError, match="rank 0 of group 'world' did not take rank 1's connection") as caught:
        kind(1, 2, address, secret="s", timeout=0.3)
    assert caught.value.ranks == (0,)
