"""One rank of one competing library: ``python -m ferrodist.bench.worker``, or by `foreign` in another interpreter.

It joins its group, reports to the driver, and serves its requests: prepare a case, run batches, release. In the answer
to a batch, ``begin`` and ``end`` are in nanoseconds on the host's monotonic clock, which all processes share; ``used``
is the processor time between them.

[Note: inputs that check exactly] An element is an integer from 1 to 8 for a sum (to 40 where elements only move), times
a power of two. Sums of up to 32 ranks are then exact in every type, for any order and precision of the additions, and a
result is compared for equality. The integers repeat with a prime period, so that a misplaced chunk shows, and begin
elsewhere in each batch, so that a leftover of the last batch shows.

An allreduce in place multiplies: after u calls on one array it holds the first sum times ranks**(u - 1). So small
arrays take turns, and a batch ends before a value would lose a bit.
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

from ferrodist.bench.adapters.base import ALIGNMENT_BYTES, FileBarrier, MemoryCopyAdapter, RankInfo, UnsupportedError
from ferrodist.bench.cases import ALLREDUCES, GROUP_CREATIONS, IN_PLACE, OURS, REDUCTIONS, DataType, Operation, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from ferrodist.bench.adapters.base import Adapter
    from ferrodist.bench.cases import Case

_PERIOD = 16381  # prime
_BASE = tuple((17 * index + index // 11) % 4 for index in range(_PERIOD))
_POOL_BYTES, _MAX_BUFFERS = 256 * 1024, 16  # of the arrays that take turns: they fit a core's own cache easily
_MAX_CALLS = 100_000  # of a batch, and products of matrices
_MATRIX_ROWS, _MATRIX_COLUMNS = 64, 512
_OVERLAP_ALLREDUCES = 2  # alone and together


def main(arguments: Sequence[str] | None = None) -> None:
    """Join the group, and serve the driver until it has no more requests."""
    parser = argparse.ArgumentParser(prog="python -m ferrodist.bench.worker")
    option = parser.add_argument
    option("--folder", type=Path, required=True, help="the peer's own, with the driver's socket")
    option("--peer", type=Peer, required=True)
    option("--num-ranks", type=int, required=True)
    option("--rank", type=int, default=0, help="MPI ranks learn theirs from the library")
    option("--init-method", default="", help="the rendezvous; MPI ranks have their own")
    info = RankInfo(**vars(parser.parse_args(arguments)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles it
    connection = Client(str(info.folder / "socket"))
    connection.send({"pid": os.getpid()})
    try:
        adapter = open_adapter(info)
    except Exception as error:
        connection.send({"failed": f"{type(error).__name__}: {error}"})
        raise
    versions = {"python": platform.python_version(), **adapter.versions}
    connection.send({"rank": adapter.rank, "num_ranks": adapter.num_ranks, "versions": versions})
    barrier = FileBarrier(info.folder / "groups", adapter.rank, adapter.num_ranks)
    with connection, contextlib.suppress(EOFError):  # the driver has ended
        serve(connection, adapter, barrier)
    barrier.close()
    adapter.destroy_group()


def open_adapter(info: RankInfo) -> Adapter:
    """Join the group of a peer; every rank of it calls this."""
    if info.peer is Peer.LIMIT:
        return MemoryCopyAdapter(info)
    if info.peer in OURS:
        from ferrodist.bench.adapters.ferrodist import FerrodistAdapter, NcclAdapter  # noqa: PLC0415

        return (NcclAdapter if info.peer is Peer.OVER_NCCL else FerrodistAdapter)(info)
    if info.peer is Peer.GLOO:
        from ferrodist.bench.adapters.gloo import GlooAdapter  # noqa: PLC0415

        return GlooAdapter(info)
    from ferrodist.bench.adapters.mpi import MpiAdapter  # noqa: PLC0415

    return MpiAdapter(info)


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


def max_calls_in_place(dtype: DataType, num_ranks: int) -> int:
    """The number of consecutive in-place sums that stay exact."""
    odd = num_ranks // (num_ranks & -num_ranks)  # without its factors of 2, which need no bits of the significand
    calls, largest, growth = 1, 8 * num_ranks, num_ranks
    while growth * num_ranks <= 2**dtype.growth_bits and largest * odd <= 2**dtype.significand_bits:
        calls, largest, growth = calls + 1, largest * odd, growth * num_ranks
    return calls


class Workload:
    """One rank's share of a case; UnsupportedError if the library has no such operation."""

    def __init__(self, adapter: Adapter, case: Case) -> None:
        self.adapter, self._case, self._arrays = adapter, case, adapter.arrays
        self._rank, self._num_ranks = adapter.rank, adapter.num_ranks
        self._copies = adapter.copies  # the limit copies the input, whatever the collective is
        count = max(1, min(_MAX_BUFFERS, _POOL_BYTES // max(1, case.size_bytes)))
        num_inputs = case.num_elements if self._copies else case.input_elements
        num_outputs = case.num_elements if self._copies else case.output_elements
        self._inputs = self._allocate(count, num_inputs)
        in_place = case.operation in IN_PLACE and not self._copies
        self._outputs = self._inputs if in_place else self._allocate(count, num_outputs)
        self._calls: list[Callable[[], Any]] = [
            adapter.make_call(case, source, target) for source, target in zip(self._inputs, self._outputs, strict=True)
        ]
        self._two_periods = self._arrays.from_values(_BASE + _BASE, DataType.FLOAT32)
        self._batch = 0
        self.max_calls = _MAX_CALLS
        if case.operation in ALLREDUCES and not self._copies:
            self.max_calls = len(self._calls) * max_calls_in_place(case.dtype, self._num_ranks)

    def begin_batch(self, num_calls: int, batch: int) -> Sequence[Callable[[], Any]]:
        """Write new inputs, and return the calls to make; ``batch`` is the same on all ranks."""
        self._batch = batch
        own = self._input(self._rank)
        for source, target in zip(self._inputs, self._outputs, strict=True):
            if target is not source:
                target[:] = 0
            if self._case.operation is Operation.BROADCAST and self._rank != 0 and not self._copies:
                source[:] = 0
            elif source is not None:
                for begin in range(0, len(source), _PERIOD):
                    end = min(begin + _PERIOD, len(source))
                    source[begin:end] = own[: end - begin]
        return [self._calls[index % len(self._calls)] for index in range(num_calls)]

    def check(self, num_calls: int) -> str | None:
        """A description of a wrong result in the batch, or None."""
        expected: dict[int, list[tuple[int, int, Any, int]]] = {}
        for index, target in enumerate(self._outputs[:num_calls]):
            uses = len(range(index, num_calls, len(self._outputs)))
            if uses not in expected:
                expected[uses] = self._expected(uses)
            for begin, end, pattern, phase in expected[uses]:
                if problem := self._find_difference(target, begin, end, pattern, phase):
                    return f"{self._case.operation.value}, rank {self._rank}, array {index}: {problem}"
        return None

    def _allocate(self, count: int, num_elements: int) -> list[Any]:
        if num_elements == 0:
            return [None]
        line = ALIGNMENT_BYTES // self._case.dtype.size_bytes
        stride = -(-num_elements // line) * line
        memory = self._arrays.empty(count * stride, self._case.dtype)
        return [memory[index * stride : index * stride + num_elements] for index in range(count)]

    def _input(self, rank: int) -> Any:
        """One period of a rank's input in this batch."""
        return self._pattern(1 + self._batch % 2 + (rank % 4 if self._case.operation in REDUCTIONS else rank))

    def _pattern(self, plus: int, factor: int = 1, num_ranks: int = 1) -> Any:
        """One period of this batch, a multiple of which is added up, moved and scaled."""
        start, dtype = 31 * self._batch % _PERIOD, self._case.dtype
        base = self._two_periods[start : start + _PERIOD] * num_ranks
        return self._arrays.scale(base, plus, factor * 2.0**dtype.start_exponent, dtype)

    def _expected(self, uses: int) -> list[tuple[int, int, Any, int]]:
        """The chunks of a result: begin, end, the period, and the index in the period at which the chunk begins."""
        case, num_ranks = self._case, self._num_ranks
        total, part = case.num_elements, case.num_elements // num_ranks
        if total == 0:
            return []
        if self._copies or case.operation is Operation.BROADCAST:
            return [(0, total, self._input(self._rank if self._copies else 0), 0)]
        if case.operation is Operation.SEND_RECV:
            partner = case.partner(self._rank)
            return [] if partner is None else [(0, total, self._input(partner), 0)]
        if case.operation not in REDUCTIONS:
            begin = self._rank * part if case.operation is Operation.ALL_TO_ALL else 0
            return [(r * part, (r + 1) * part, self._input(r), begin) for r in range(num_ranks)]
        offsets = sum(1 + self._batch % 2 + rank % 4 for rank in range(num_ranks))
        if case.operation is Operation.REDUCE_SCATTER:
            return [(0, part, self._pattern(offsets, 1, num_ranks), self._rank * part)]
        return [(0, total, self._pattern(offsets, num_ranks ** (uses - 1), num_ranks), 0)]

    def _find_difference(self, array: Any, begin: int, end: int, pattern: Any, phase: int) -> str | None:
        index = begin
        while index < end:
            start = (phase + index - begin) % _PERIOD
            length = min(_PERIOD - start, end - index)
            if not self._arrays.are_equal(array[index : index + length], pattern[start : start + length]):
                return f"wrong between elements {index} and {index + length} of {len(array)}"
            index += length
        return None


class CallTimer(Workload):
    """Batches of calls that are timed together."""

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run one batch of ``num_calls`` calls, the same on all ranks; ``batch`` is its index."""
        calls = self.begin_batch(message["num_calls"], message["batch"])
        _align(self.adapter)
        used = time.process_time_ns()
        begin, end = self.time_calls(calls)
        used = time.process_time_ns() - used
        # This rank may be done while its part in another's call is not: MPI moves data only inside its calls.
        self.adapter.barrier()
        return {"begin": begin, "end": end, "used": used, "wrong": self.check(len(calls))}

    def time_calls(self, calls: Sequence[Callable[[], Any]]) -> tuple[int, int]:
        """Make the calls; returns the begin and the end."""
        begin = time.perf_counter_ns()
        for call in calls:
            call()
        self.adapter.synchronize()
        return begin, time.perf_counter_ns()


class SubmitTimer(CallTimer):
    """Batches of calls that start an operation: each call is timed alone, and waited for before the next."""

    def time_calls(self, calls: Sequence[Callable[[], Any]]) -> tuple[int, int]:
        """Make the calls; returns 0 and the sum of their times."""
        clock, wait, total = time.perf_counter_ns, self.adapter.wait, 0
        for start in calls:
            begin = clock()
            work = start()
            total += clock() - begin
            wait(work)
        return 0, total


class OverlapTimer(CallTimer):
    """Batches of an allreduce alone, ``num_calls`` matrix products alone, and both at once.

    A product computes in a core's cache, on one thread: a 64 x 512 matrix times the unit matrix.
    """

    def __init__(self, adapter: Adapter, case: Case) -> None:
        super().__init__(adapter, case)
        if self.max_calls < _OVERLAP_ALLREDUCES:
            raise UnsupportedError(f"two sums in place of {case.num_ranks} ranks are not exact in {case.dtype.value}")
        self.max_calls = _MAX_CALLS
        columns = range(_MATRIX_COLUMNS)
        values = [float((7 * row + column) % 5) for row in range(_MATRIX_ROWS) for column in columns]
        unit = [float(row == column) for row in columns for column in columns]
        self._left, self._right, self._product = (
            self._arrays.from_values(flat, DataType.FLOAT32).reshape(-1, len(columns))
            for flat in (values, unit, values)
        )

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run one batch; the answer has the three times in nanoseconds."""
        wait, multiply = self.adapter.wait, self._arrays.multiply
        first, second = self.begin_batch(_OVERLAP_ALLREDUCES, message["batch"])
        self._product[:] = 0

        def compute() -> None:
            for _ in range(message["num_calls"]):
                multiply(self._left, self._right, self._product)

        def both() -> None:
            work = second()
            compute()
            wait(work)

        alone, computing, together = self._time(lambda: wait(first())), self._time(compute), self._time(both)
        self.adapter.barrier()
        wrong = self.check(_OVERLAP_ALLREDUCES)
        if not self._arrays.are_equal(self._product, self._left):
            wrong = "the product of matrices is wrong"
        return {"alone": alone, "computing": computing, "together": together, "wrong": wrong}

    def _time(self, action: Callable[[], object]) -> int:
        _align(self.adapter)
        begin = time.perf_counter_ns()
        action()
        return time.perf_counter_ns() - begin


class GroupTimer:
    """Batches of one group that is created and used once; ending it is not timed."""

    max_calls = 1

    def __init__(self, adapter: Adapter, case: Case, barrier: FileBarrier) -> None:
        self._adapter, self._barrier, self._is_default = adapter, barrier, case.operation is Operation.INIT
        self._input = adapter.arrays.from_values([adapter.rank + 1.0], DataType.FLOAT32)
        self._sum = adapter.arrays.from_values([adapter.num_ranks * (adapter.num_ranks + 1) / 2], DataType.FLOAT32)

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run one batch; for a default group the message has the ``init_method``."""
        adapter, array, group = self._adapter, self._input + 0, None
        if self._is_default:
            adapter.destroy_group()
        self._barrier.wait()
        begin = time.perf_counter_ns()
        if self._is_default:
            adapter.init_group(message["init_method"])
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
