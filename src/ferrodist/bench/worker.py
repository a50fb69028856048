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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrodist.bench.adapters import NotOfferedError, Place, open_adapter
from ferrodist.bench.batches import open_batches
from ferrodist.bench.cases import Case, DataType, Operation
from ferrodist.bench.channel import Channel, ChannelClosedError
from ferrodist.bench.meeting import Meeting
from ferrodist.bench.peers import Peer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.bench.adapters import Adapter
    from ferrodist.bench.batches import Batches


def main(arguments: Sequence[str] | None = None) -> None:
    """Join, and serve the driver until it has no more to ask."""
    parser = argparse.ArgumentParser(prog="python -m ferrodist.bench.worker")
    parser.add_argument("--socket", required=True, help="where the driver listens")
    parser.add_argument("--folder", type=Path, required=True, help="the peer's own")
    parser.add_argument("--peer", type=Peer, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0, help="an MPI tells its ranks itself")
    parser.add_argument("--address", help="where ranks of several hosts meet")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver's to handle
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(options.socket)
    channel = Channel(sock)
    channel.send({"pid": os.getpid()})
    place = Place(rank=options.rank, num_ranks=options.ranks, folder=options.folder, address=options.address)
    try:
        adapter = open_adapter(options.peer, place)
    except Exception as error:
        channel.send({"failed": _words(error)})
        raise
    versions = {"python": platform.python_version(), **adapter.versions}
    channel.send({"rank": adapter.rank, "num_ranks": adapter.num_ranks, "versions": versions})
    meeting = Meeting(options.folder / "groups", adapter.rank, adapter.num_ranks)
    try:
        Worker(adapter, meeting).serve(channel)
    except ChannelClosedError:
        pass
    finally:
        channel.close()
        meeting.close()
    adapter.close()


class Worker:
    """Does what the driver asks.

    Args:
        adapter: This rank of the library's group.
        meeting: Where the ranks meet while they have no group.
    """

    def __init__(self, adapter: Adapter, meeting: Meeting) -> None:
        self._adapter, self._meeting = adapter, meeting
        self._batches: Batches | None = None

    def serve(self, channel: Channel) -> None:
        """Answer every message until the driver says "end" or leaves."""
        gc.disable()  # a collection in a timed part would be no part of the library; `prepare` makes up for it
        gc.collect()
        gc.freeze()  # what the library consists of stays: later collections look at what came since
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
            assert self._batches is not None, "prepare comes first"
            return self._batches.run(message)
        assert message["do"] == "release"
        self._batches = None
        return {}

    def _prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        self._batches = None
        gc.collect()
        case = Case(
            operation=Operation(message["operation"]),
            dtype=DataType(message["dtype"]),
            size_bytes=message["size_bytes"],
            num_ranks=self._adapter.num_ranks,
            num_hosts=message["num_hosts"],
        )
        self._batches = open_batches(self._adapter, case, self._meeting)
        return {"max_calls": self._batches.max_calls}


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
