"""One rank of one peer: ``python -m ferrodist.bench.worker``, or through `foreign` in another interpreter.

It joins its group, reports to the driver, and serves its requests: prepare a case, run batches, release. Between
requests it is blocked in the kernel, inside no call of the library.

In the answer to a batch, ``begin`` and ``end`` are in nanoseconds on the host's monotonic clock, which all processes
share.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import platform
import signal
import time
from multiprocessing.connection import Client
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrodist.bench.adapters.base import Adapter, FileBarrier, MemoryCopyAdapter, RankInfo, UnsupportedError
from ferrodist.bench.cases import GROUP_CREATIONS, OURS, Case, DataType, Operation, Peer
from ferrodist.bench.workload import MatmulLoad, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

_MAX_PRODUCTS = 100_000
_OVERLAP_ALLREDUCES = 2  # alone and together


def main(arguments: Sequence[str] | None = None) -> None:
    """Join the group, and serve the driver until it has no more requests."""
    parser = argparse.ArgumentParser(prog="python -m ferrodist.bench.worker")
    option = parser.add_argument
    option("--socket", required=True, help="where the driver listens")
    option("--folder", type=Path, required=True, help="the peer's own")
    option("--peer", type=Peer, required=True)
    option("--ranks", type=int, required=True)
    option("--rank", type=int, default=0, help="MPI ranks learn theirs from the library")
    option("--address", help="the rendezvous of ranks on several hosts")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles it
    connection = Client(options.socket)
    connection.send({"pid": os.getpid()})
    info = RankInfo(rank=options.rank, num_ranks=options.ranks, folder=options.folder, address=options.address)
    try:
        adapter = open_adapter(options.peer, info)
    except Exception as error:
        connection.send({"failed": f"{type(error).__name__}: {error}"})
        raise
    versions = {"python": platform.python_version(), **adapter.versions}
    connection.send({"rank": adapter.rank, "num_ranks": adapter.num_ranks, "versions": versions})
    barrier = FileBarrier(options.folder / "groups", adapter.rank, adapter.num_ranks)
    with connection, contextlib.suppress(EOFError):  # the driver has ended
        serve(connection, adapter, barrier)
    barrier.close()
    adapter.close()


def open_adapter(peer: Peer, info: RankInfo) -> Adapter:
    """Join the group of a peer; every rank of it calls this."""
    if peer is Peer.LIMIT:
        return MemoryCopyAdapter(info)
    if peer in OURS:
        from ferrodist.bench.adapters.ferrodist import FerrodistAdapter, NcclAdapter  # noqa: PLC0415

        return NcclAdapter(info) if peer is Peer.OVER_NCCL else FerrodistAdapter(peer, info)
    if peer is Peer.GLOO:
        from ferrodist.bench.adapters.gloo import GlooAdapter  # noqa: PLC0415

        return GlooAdapter(info)
    from ferrodist.bench.adapters.mpi import MpiAdapter  # noqa: PLC0415

    return MpiAdapter(peer)


def serve(connection: Connection, adapter: Adapter, barrier: FileBarrier) -> None:
    """Answer every message until the driver sends "end"; ``barrier`` is for the time when the ranks have no group."""
    gc.disable()  # a collection in a timed part would not be the library's; "prepare" makes up for it
    gc.collect()
    gc.freeze()  # the library's own objects stay: later collections look only at newer ones
    timer: CallTimer | GroupTimer | None = None
    while (message := connection.recv())["do"] != "end":
        answer: dict[str, Any] = {}
        try:
            if message["do"] == "batch":
                assert timer is not None, "prepare comes first"
                answer = timer.run(message)
            else:
                timer = None  # "release" does no more
            if message["do"] == "prepare":
                gc.collect()
                timer = open_timer(adapter, message["case"], barrier)
                answer = {"max_calls": timer.max_calls}
        except UnsupportedError as error:
            answer = {"not_offered": str(error)}
        except Exception as error:
            connection.send({"failed": f"{type(error).__name__}: {error}"})
            raise
        connection.send(answer)


def open_timer(adapter: Adapter, case: Case, barrier: FileBarrier) -> CallTimer | GroupTimer:
    """Prepare a case on this rank; UnsupportedError if the library can't."""
    if case.operation in adapter.unsupported:
        raise UnsupportedError(adapter.unsupported[case.operation])
    if case.operation in GROUP_CREATIONS:
        return GroupTimer(adapter, case, barrier)
    kinds = {Operation.SUBMIT: SubmitTimer, Operation.OVERLAP: OverlapTimer}
    return kinds.get(case.operation, CallTimer)(adapter, case)


class CallTimer:
    """Batches of calls that are timed together."""

    def __init__(self, adapter: Adapter, case: Case) -> None:
        self._adapter, self._workload = adapter, Workload(adapter, case)
        self.max_calls = self._workload.max_calls

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run one batch of ``num_calls`` calls, the same on all ranks; ``batch`` is its index."""
        calls = self._workload.begin_batch(message["num_calls"], message["batch"])
        _align(self._adapter)
        begin = time.perf_counter_ns()
        for call in calls:
            call()
        self._adapter.synchronize()
        end = time.perf_counter_ns()
        # This rank may be done while its part in another's call is not: MPI moves data only inside its calls.
        self._adapter.barrier()
        return {"begin": begin, "end": end, "wrong": self._workload.check(len(calls))}


class SubmitTimer(CallTimer):
    """Batches of calls that start an operation: each call is timed alone, and waited for before the next."""

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run one batch; ``end`` is the sum of the calls' times."""
        starts = self._workload.begin_batch(message["num_calls"], message["batch"])
        clock, wait, total = time.perf_counter_ns, self._adapter.wait, 0
        _align(self._adapter)
        for start in starts:
            begin = clock()
            work = start()
            total += clock() - begin
            wait(work)
        self._adapter.barrier()
        return {"begin": 0, "end": total, "wrong": self._workload.check(len(starts))}


class OverlapTimer(CallTimer):
    """Batches of an allreduce alone, ``num_calls`` matrix products alone, and both at once."""

    def __init__(self, adapter: Adapter, case: Case) -> None:
        super().__init__(adapter, case)
        if self.max_calls < _OVERLAP_ALLREDUCES:
            raise UnsupportedError(f"two sums in place of {case.num_ranks} ranks are not exact in {case.dtype.value}")
        self.max_calls = _MAX_PRODUCTS
        self._load = MatmulLoad(adapter.arrays)

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run one batch; the answer has the three times in nanoseconds."""
        num_products, wait, load = message["num_calls"], self._adapter.wait, self._load
        first, second = self._workload.begin_batch(_OVERLAP_ALLREDUCES, message["batch"])
        load.reset()

        def both() -> None:
            work = second()
            load.run(num_products)
            wait(work)

        alone = self._time(lambda: wait(first()))
        computing = self._time(lambda: load.run(num_products))
        together = self._time(both)
        self._adapter.barrier()
        wrong = self._workload.check(_OVERLAP_ALLREDUCES) or load.check()
        return {"alone": alone, "computing": computing, "together": together, "wrong": wrong}

    def _time(self, action: Callable[[], object]) -> int:
        _align(self._adapter)
        begin = time.perf_counter_ns()
        action()
        return time.perf_counter_ns() - begin


class GroupTimer:
    """Batches of one group that is created and used once; ending it is not timed."""

    max_calls = 1

    def __init__(self, adapter: Adapter, case: Case, barrier: FileBarrier) -> None:
        self._adapter, self._barrier, self._is_default = adapter, barrier, case.operation is Operation.INIT
        self._input = adapter.arrays.from_values([adapter.rank + 1.0], DataType.FLOAT32)
        total = adapter.num_ranks * (adapter.num_ranks + 1) / 2
        self._sum = adapter.arrays.from_values([total], DataType.FLOAT32)

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run one batch; for a default group the message has the ``address`` of the rendezvous."""
        adapter, array, group = self._adapter, self._input + 0, None
        if self._is_default:
            adapter.destroy_group()
        self._barrier.wait()
        begin = time.perf_counter_ns()
        if self._is_default:
            adapter.init_group(f"tcp://{message['address']}")
        else:
            group = adapter.new_group()
        adapter.allreduce(array, group)
        adapter.synchronize()
        end = time.perf_counter_ns()
        if group is not None:
            adapter.barrier()
            adapter.destroy_subgroup(group)
        del group
        gc.collect()  # a group may be part of cycles, with its connections
        is_right = adapter.arrays.are_equal(array, self._sum)
        return {"begin": begin, "end": end, "wrong": None if is_right else f"the group adds up to {array}"}


def _align(adapter: Adapter) -> None:
    """Let all ranks start together."""
    adapter.synchronize()  # the inputs are there
    adapter.barrier()
    adapter.barrier()  # ranks leave the first one as they wake up, and this one together


if __name__ == "__main__":
    main()
