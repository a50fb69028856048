"""Forked ranks of a TCP group of which some are killed or stopped, which `run_ranks` would report as a failed run."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_readable
from typing import TYPE_CHECKING, Any

import torch

import ferrodist as fd
from ferrodist.backends.frame_type import FrameType
from ferrodist.backends.process_group import use_group
from ferrodist.backends.tcp import TcpBackend
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ForkedGroup", "Report", "attempt", "open_descriptors", "strike_in_data"]

# Loaded before the ranks are forked: their clocks run while they import.
for _name in fd.__all__:
    getattr(fd, _name)

_fork = multiprocessing.get_context("fork")


@dataclass
class Report:
    """What a rank saw.

    Args:
        rank: The rank.
        error: Class name of the error its calls ended with.
        ranks: The ranks that the error names.
        message: Its text.
        raised_at: When, on the clock of all processes of this host.
        started_at: When the call that raised was made.
        facts: What else the program wants to say.
    """

    rank: int
    error: str = ""
    ranks: tuple[int, ...] = ()
    message: str = ""
    raised_at: float = 0.0
    started_at: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


def attempt(group: TcpBackend, call: Callable[[], object], *, times: int = 1_000_000) -> Report:
    """Repeat ``call()`` until it raises, and tell what."""
    report = Report(group.rank)
    for _ in range(times):
        report.started_at = time.monotonic()
        try:
            call()
        except DistributedError as error:
            report.raised_at = time.monotonic()
            report.error, report.ranks, report.message = type(error).__name__, error.ranks, error.message
            break
    return report


def open_descriptors() -> set[str]:
    """What this process holds open, without the listing itself."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a Path for each would open more descriptors to look at
        with suppress(OSError):  # the listing's own
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")  # noqa: PTH115
    return {entry for entry in found if "/proc/" not in entry}


class ForkedGroup:
    """One forked process a rank.

    Args:
        world_size: Number of ranks.
        program: ``program(group, fork)`` runs on every rank; what it returns comes back by pickle.
        timeout: Of the group.
        kind: Its backend.
    """

    def __init__(
        self,
        world_size: int,
        program: Callable[[TcpBackend, ForkedGroup], Any],
        timeout: float,
        kind: type[TcpBackend] = TcpBackend,
    ) -> None:
        self._kind = kind
        self.struck_at = _fork.RawValue("d", 0.0)
        self._struck = _fork.Event()
        self.descriptors_before: set[str] = set()  # in a rank: those it had before its group
        self.release = _fork.Event()  # set when the ranks' own forked children may end
        self._timeout = timeout
        self._secret = secrets.token_bytes(16)
        listener = socket.create_server(("127.0.0.1", 0))
        pipes = [_fork.Pipe(duplex=False) for _ in range(world_size)]
        self.processes = [
            _fork.Process(target=self._run, args=(rank, world_size, program, listener, pipes), daemon=True)
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()
        listener.close()
        self._results = [reader for reader, _ in pipes]
        for _, writer in pipes:
            writer.close()

    def _run(self, rank: int, world_size: int, program: Any, listener: socket.socket, pipes: list[Any]) -> None:
        torch.set_num_threads(1)  # a pool of threads does not survive a fork
        for other, (reader, writer) in enumerate(pipes):
            reader.close()
            if other != rank:
                writer.close()
        address = "{}:{}".format(*listener.getsockname())
        if rank != 0:
            listener.close()
        self.descriptors_before = open_descriptors()
        try:
            own = {"listener": listener} if rank == 0 else {}
            group = self._kind(rank, world_size, address, secret=self._secret, timeout=self._timeout, **own)
            with use_group(group):
                result = program(group, self)
            group.close(timeout=0.2)  # the end of a process that did not close its group is a death to the others
        except BaseException:
            result = traceback.format_exc()
        pipes[rank][1].send(result)
        pipes[rank][1].close()

    def strike(self, number: int) -> None:
        """Send this process a signal that it can't handle, and leave behind when."""
        self.struck_at.value = time.monotonic()
        self._struck.set()
        os.kill(os.getpid(), number)

    def wait_for_strike(self) -> None:
        """In a rank: wait until another one is about to be struck."""
        assert self._struck.wait(20.0)

    def results(self, ranks: set[int], timeout: float = 30.0) -> dict[int, Any]:
        """What ``ranks`` returned; fails when one does not in time, or when it raised."""
        deadline = Deadline(timeout)
        results: dict[int, Any] = {}
        while ranks - results.keys():
            waiting = {self._results[rank]: rank for rank in ranks - results.keys()}
            ready = wait_readable(list(waiting), deadline.remaining())
            assert ready, f"ranks {sorted(waiting.values())} did not end within {timeout:g} s"
            for reader in ready:
                results[waiting[reader]] = reader.recv()
        for rank, result in results.items():
            assert not isinstance(result, str), f"rank {rank} raised:\n{result}"
        return results

    def exit_code(self, rank: int) -> int | None:
        """Wait for the end of a rank that is known to end; -n when signal n ended it.

        Not by Process.join, which waits for the end of all that have a copy of the rank's descriptors.
        """
        pid = self.processes[rank].pid
        assert pid is not None
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return self.processes[rank].exitcode

    def wait_until_stopped(self, rank: int) -> None:
        """Wait until a signal has stopped a rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self, rank: int) -> None:
        """Let a stopped rank go on."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill what is left."""
        self.release.set()
        for process in self.processes:
            process.kill()
        for process, reader in zip(self.processes, self._results, strict=True):
            process.join()
            process.close()
            reader.close()


def strike_in_data(group: TcpBackend, fork: ForkedGroup, number: int, *, after: int = 3) -> None:
    """Have this process struck by signal ``number`` when ``after`` pieces of large messages have come or gone."""
    lock = threading.Lock()
    seen = 0

    def count(kind: FrameType) -> None:
        nonlocal seen
        if kind is FrameType.DATA:
            with lock:
                seen += 1
                if seen == after:
                    fork.strike(number)

    push, frame_ends = group._push, group.frame_ends

    def counting_push(outgoing: Any, *args: Any) -> None:
        push(outgoing, *args)
        count(outgoing.frame.kind)

    def counting_frame_ends(link: Any, frame: Any, sink: Any) -> None:
        frame_ends(link, frame, sink)
        count(frame.kind)

    group._push = counting_push  # type: ignore[method-assign]
    group.frame_ends = counting_frame_ends  # type: ignore[method-assign]
