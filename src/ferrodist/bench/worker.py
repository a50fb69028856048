"""One rank of one peer: ``python -m ferrodist.bench.worker``, or through `foreign` in another interpreter.

It joins its group, tells the driver, and does what it is told: prepare a case, run batches, release. Between commands
it is blocked in the kernel, inside no call of the library.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrodist.bench.adapters import NotOfferedError, Place, open_adapter
from ferrodist.bench.cases import Case, Collective, DataType
from ferrodist.bench.channel import Channel, ChannelClosedError
from ferrodist.bench.peers import Peer
from ferrodist.bench.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.bench.adapters import Adapter

__all__ = ["Worker", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Join, and serve the driver until it has no more to ask."""
    parser = argparse.ArgumentParser(prog="python -m ferrodist.bench.worker")
    parser.add_argument("--socket", required=True, help="where the driver listens")
    parser.add_argument("--folder", type=Path, required=True, help="the peer's own")
    parser.add_argument("--peer", type=Peer, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0, help="an MPI tells its ranks itself")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver's to handle
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(options.socket)
    channel = Channel(sock)
    channel.send({"pid": os.getpid()})
    place = Place(rank=options.rank, num_ranks=options.ranks, folder=options.folder)
    try:
        adapter = open_adapter(options.peer, place)
    except Exception as error:
        channel.send({"failed": _words(error)})
        raise
    versions = {"python": platform.python_version(), **adapter.versions}
    channel.send({"rank": adapter.rank, "num_ranks": adapter.num_ranks, "versions": versions})
    try:
        Worker(adapter).serve(channel)
    except ChannelClosedError:
        pass
    finally:
        channel.close()
    adapter.close()


class Worker:
    """Does what the driver asks.

    Args:
        adapter: This rank of the library's group.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._workload: Workload | None = None

    def serve(self, channel: Channel) -> None:
        """Answer every message until the driver says "end" or leaves."""
        gc.disable()  # a collection in a timed part would be no part of the library; `prepare` makes up for it
        while True:
            message = channel.receive()
            if message["do"] == "end":
                return
            try:
                answer = self._do(message)
            except NotOfferedError as error:
                answer = {"not_offered": str(error)}
            except Exception as error:
                channel.send({"failed": _words(error)})
                raise
            channel.send(answer)

    def _do(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["do"] == "prepare":
            return self._prepare(message)
        if message["do"] == "batch":
            return self._run_batch(message["num_calls"], message["batch"])
        assert message["do"] == "release"
        self._workload = None
        return {}

    def _prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        self._workload = None
        gc.collect()
        case = Case(
            collective=Collective(message["collective"]),
            dtype=DataType(message["dtype"]),
            size_bytes=message["size_bytes"],
            num_ranks=self._adapter.num_ranks,
        )
        self._workload = Workload(self._adapter, case)
        return {"max_calls": self._workload.max_calls}

    def _run_batch(self, num_calls: int, batch: int) -> dict[str, Any]:
        assert self._workload is not None, "prepare comes first"
        calls = self._workload.begin_batch(num_calls, batch)
        barrier = self._adapter.barrier
        barrier()
        barrier()  # the ranks leave the first one as they wake up, and this one together
        begin = time.perf_counter_ns()
        for call in calls:
            call()
        end = time.perf_counter_ns()
        # A rank may be done while its part in another's call is not (an MPI moves data only inside its calls).
        barrier()
        return {"begin": begin, "end": end, "wrong": self._workload.check(num_calls)}


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
