"""Probes of a machine: the constants of `model`, each from a program that runs no collective.

``python -m ferrodist.bench.probes`` prints those of one host; ``... probes send ADDRESS PORT`` and ``... probes receive
PORT``, on two hosts, those of the network. Each figure is the median of some trials.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import socket
import statistics
import sys
import time
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_TRIALS = 5
_BLOCK_BYTES, _NUM_BLOCKS = 128 * 1024, 32  # of copies and folds: more than a core's own cache holds
_HANDOVERS = 2000  # of a processor, in each direction
_LINE_BYTES, _NUM_LINES = 64, 256
_SMALL_BYTES = 256  # of a message: an arrival
_NUM_CONNECTIONS = 16
_ROUNDS = 50  # of a message over each connection
_STREAM_BYTES = 16 << 20
_TIMEOUT_SECONDS = 20


def probe_host() -> dict[str, float]:
    """The constants of one host, by name, in seconds: `Constants` says what they are."""
    processors = sorted(os.sched_getaffinity(0))
    return {
        "copied_byte": _time_on_all(processors, _copy_blocks) / (_NUM_BLOCKS * _BLOCK_BYTES),
        "folded_byte": _time_on_all(processors, _add_blocks) / (2 * _NUM_BLOCKS * _BLOCK_BYTES),
        "line": _median(lambda: _time_lines(processors)),
        "handover": _median(lambda: _time_handovers(processors[0])),
    }


def send(address: str, port: int) -> dict[str, float]:
    """The constants of the network, from the sender's side; sender and receiver share one processor."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(_connect(address, port)) for _ in range(_NUM_CONNECTIONS)]
        message, block = bytes(_SMALL_BYTES), bytes(1 << 20)

        def send_messages() -> None:
            for _ in range(_ROUNDS):
                for connection in connections:
                    connection.sendall(message)
                connections[0].recv(1, socket.MSG_WAITALL)

        def send_stream() -> None:
            for _ in range(_STREAM_BYTES // len(block)):
                connections[0].sendall(block)
            connections[0].recv(1, socket.MSG_WAITALL)

        def timed(action: Callable[[], None]) -> float:
            begin = time.perf_counter()
            action()
            return time.perf_counter() - begin

        return {
            "message": _median(lambda: timed(send_messages)) / (_ROUNDS * _NUM_CONNECTIONS),
            "sent_byte": _median(lambda: timed(send_stream)) / _STREAM_BYTES,
        }


def receive(port: int) -> None:
    """Receive what `send` sends, and answer; the socket listens once a line has been printed."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("", port)))
        listener.settimeout(_TIMEOUT_SECONDS)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        connections = [stack.enter_context(listener.accept()[0]) for _ in range(_NUM_CONNECTIONS)]
        for connection in connections:
            _prepare(connection)
        buffer = bytearray(_BLOCK_BYTES)
        for _ in range(_TRIALS):
            for _ in range(_ROUNDS):
                for connection in connections:
                    connection.recv(_SMALL_BYTES, socket.MSG_WAITALL)
                connections[0].sendall(b"1")
        for _ in range(_TRIALS):
            missing = _STREAM_BYTES
            while missing:
                missing -= connections[0].recv_into(buffer)
            connections[0].sendall(b"1")


def _connect(address: str, port: int) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=_TIMEOUT_SECONDS)
    _prepare(connection)
    return connection


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)  # with one, each call would poll first
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _median(trial: Callable[[], float]) -> float:
    return statistics.median(trial() for _ in range(_TRIALS))


class _Shared:
    """Memory that a process shares with those that it forks: a line for each of some counters, and a barrier."""

    def __init__(self, num_lines: int) -> None:
        self.memory = mmap.mmap(-1, _LINE_BYTES * num_lines)
        self.words = np.frombuffer(self.memory, np.int64)[:: _LINE_BYTES // 8]

    def wait(self, index: int, value: int) -> None:
        """Wait until a counter has a value."""
        while self.words[index] < value:
            os.sched_yield()


@contextlib.contextmanager
def _forked(actions: Sequence[Callable[[], None]]) -> Iterator[None]:
    """Child processes that run one action each, and end."""
    children = []
    for action in actions:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                action()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    yield
    if any(os.waitpid(child, 0)[1] != 0 for child in children):
        raise RuntimeError("a process of the probes failed")


def _copy_blocks(sources: np.ndarray, targets: np.ndarray) -> Callable[[], None]:
    places = [
        (ctypes.c_void_p(to.ctypes.data), ctypes.c_void_p(of.ctypes.data))
        for of, to in zip(sources, targets, strict=True)
    ]

    def copy() -> None:
        for to, of in places:
            ctypes.memmove(to, of, _BLOCK_BYTES)

    return copy


def _add_blocks(sources: np.ndarray, targets: np.ndarray) -> Callable[[], None]:
    def add() -> None:
        for index in range(_NUM_BLOCKS):
            np.add(sources[index], sources[index - 1], out=targets[index])

    return add


def _time_on_all(processors: Sequence[int], make: Callable[[np.ndarray, np.ndarray], Callable[[], None]]) -> float:
    """The median time of an action on arrays, while a process on each processor repeats it; the slowest one's."""
    shared = _Shared(len(processors) * (_TRIALS + 1))

    def run(index: int) -> None:
        os.sched_setaffinity(0, {processors[index]})
        sources, targets = (np.ones((_NUM_BLOCKS, _BLOCK_BYTES // 4), np.float32) for _ in range(2))
        action = make(sources, targets)
        action()
        first = index * (_TRIALS + 1)
        for trial in range(_TRIALS):
            shared.words[first] = trial + 1
            for other in range(len(processors)):
                shared.wait(other * (_TRIALS + 1), trial + 1)
            begin = time.perf_counter_ns()
            action()
            shared.words[first + 1 + trial] = time.perf_counter_ns() - begin

    with _forked([lambda index=index: run(index) for index in range(len(processors))]):  # type: ignore[misc]
        pass
    times = shared.words.reshape(len(processors), _TRIALS + 1)[:, 1:]
    return float(np.median(times.max(axis=0))) / 1e9


def _time_lines(processors: Sequence[int]) -> float:
    """A cache line that another processor has written, read; of some, read one after the other."""
    shared = _Shared(2 + _NUM_LINES)
    lines = shared.words[2:]
    num_rounds = 50

    def write() -> None:
        os.sched_setaffinity(0, {processors[-1]})
        for turn in range(num_rounds):
            shared.wait(0, turn)
            lines[:] = turn
            shared.words[1] = turn + 1

    seconds = []
    with _forked([write]):
        os.sched_setaffinity(0, {processors[0]})
        for turn in range(num_rounds):
            shared.wait(1, turn + 1)
            begin = time.perf_counter_ns()
            lines.sum()
            seconds.append(time.perf_counter_ns() - begin)
            shared.words[0] = turn + 1
        os.sched_setaffinity(0, processors)
    return statistics.median(seconds) / 1e9 / _NUM_LINES


def _time_handovers(processor: int) -> float:
    """From one process, which wakes another and sleeps, to that one, on one processor: through pipes."""
    there, back = os.pipe(), os.pipe()

    def answer() -> None:
        os.sched_setaffinity(0, {processor})
        for _ in repeat(None, _HANDOVERS):
            os.read(there[0], 1)
            os.write(back[1], b"1")

    usable = os.sched_getaffinity(0)
    with _forked([answer]):
        os.sched_setaffinity(0, {processor})
        begin = time.perf_counter()
        for _ in repeat(None, _HANDOVERS):
            os.write(there[1], b"1")
            os.read(back[0], 1)
        seconds = time.perf_counter() - begin
        os.sched_setaffinity(0, usable)
    for end in (*there, *back):
        os.close(end)
    return seconds / (2 * _HANDOVERS)


def main(arguments: Sequence[str]) -> None:
    """Run the probes that the arguments name, and print their result as JSON."""
    match arguments:
        case ["receive", port]:
            receive(int(port))
        case ["send", address, port]:
            sys.stdout.write(json.dumps(send(address, int(port))))
        case _:
            sys.stdout.write(json.dumps(probe_host()))


if __name__ == "__main__":
    main(sys.argv[1:])
