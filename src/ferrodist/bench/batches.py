"""One rank's batches of a case: what is called, from when to when it is timed, and that the result is right.

An answer's ``begin`` and ``end`` are this host's monotonic clock in nanoseconds, which all processes share.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.bench.adapters import NotOfferedError
from ferrodist.bench.cases import DataType, Operation
from ferrodist.bench.product import Product
from ferrodist.bench.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.bench.adapters import Adapter
    from ferrodist.bench.cases import Case
    from ferrodist.bench.meeting import Meeting

_MAX_PRODUCTS = 100_000
_ALLREDUCES = 2  # of an overlap's batch: alone and together


class Batches(Protocol):
    """A case that is prepared."""

    max_calls: int
    """Calls that a batch may have."""

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run one batch of ``num_calls`` calls, the same on all ranks; ``batch`` is its number."""


def open_batches(adapter: Adapter, case: Case, meeting: Meeting) -> Batches:
    """Prepare a case on this rank.

    Raises:
        NotOfferedError: The library can't.
    """
    reason = adapter.not_offered.get(case.operation)
    if reason is not None:
        raise NotOfferedError(reason)
    if case.operation is Operation.SUBMIT:
        return SubmitBatches(adapter, case)
    if case.operation is Operation.OVERLAP:
        return OverlapBatches(adapter, case)
    if case.operation.makes_groups:
        return GroupBatches(adapter, case, meeting)
    return CallBatches(adapter, case)


class CallBatches:
    """Calls that are timed together."""

    def __init__(self, adapter: Adapter, case: Case) -> None:
        self._adapter, self._workload = adapter, Workload(adapter, case)
        self.max_calls = self._workload.max_calls

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """See `Batches.run`."""
        calls = self._workload.begin_batch(message["num_calls"], message["batch"])
        _meet(self._adapter)
        begin = time.perf_counter_ns()
        for call in calls:
            call()
        self._adapter.finish()
        end = time.perf_counter_ns()
        # A rank may be done while its part in another's call is not (an MPI moves data only inside its calls).
        self._adapter.barrier()
        return {"begin": begin, "end": end, "wrong": self._workload.check(len(calls))}


class SubmitBatches:
    """Calls that start something, each timed alone; it has ended before the next one begins."""

    def __init__(self, adapter: Adapter, case: Case) -> None:
        self._adapter, self._workload = adapter, Workload(adapter, case)
        self.max_calls = self._workload.max_calls

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """See `Batches.run`; ``end`` less ``begin`` is what the calls took together."""
        starts = self._workload.begin_batch(message["num_calls"], message["batch"])
        clock, wait, total = time.perf_counter_ns, self._adapter.wait, 0
        _meet(self._adapter)
        for start in starts:
            begin = clock()
            started = start()
            total += clock() - begin
            wait(started)
        self._adapter.barrier()
        return {"begin": 0, "end": total, "wrong": self._workload.check(len(starts))}


class OverlapBatches:
    """An allreduce alone, some products of matrices alone, and both at once; ``num_calls`` is the products' number."""

    max_calls = _MAX_PRODUCTS

    def __init__(self, adapter: Adapter, case: Case) -> None:
        self._adapter, self._workload = adapter, Workload(adapter, case)
        if self._workload.max_calls < _ALLREDUCES:
            raise NotOfferedError(f"two sums in place of {case.num_ranks} ranks are not exact in {case.dtype.value}")
        self._product = Product(adapter.arrays)

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """See `Batches.run`; the answer has the three times in nanoseconds."""
        num_products, wait, product = message["num_calls"], self._adapter.wait, self._product
        first, second = self._workload.begin_batch(_ALLREDUCES, message["batch"])
        product.begin()

        def both() -> None:
            started = second()
            product.run(num_products)
            wait(started)

        answer: dict[str, Any] = {
            "alone": self._time(lambda: wait(first())),
            "computing": self._time(lambda: product.run(num_products)),
            "together": self._time(both),
        }
        self._adapter.barrier()
        return {**answer, "wrong": self._workload.check(_ALLREDUCES) or product.check()}

    def _time(self, action: Callable[[], None]) -> int:
        _meet(self._adapter)
        begin = time.perf_counter_ns()
        action()
        return time.perf_counter_ns() - begin


class GroupBatches:
    """A group is made and used once; what it takes to end one is not timed."""

    max_calls = 1

    def __init__(self, adapter: Adapter, case: Case, meeting: Meeting) -> None:
        self._adapter, self._operation, self._meeting = adapter, case.operation, meeting
        self._own = adapter.arrays.of([adapter.rank + 1.0], DataType.FLOAT32)
        self._sum = adapter.arrays.of([adapter.num_ranks * (adapter.num_ranks + 1) / 2], DataType.FLOAT32)

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """See `Batches.run`; for a default group the message has the ``address`` of the meeting."""
        adapter, array = self._adapter, self._own + 0
        if self._operation is Operation.INIT:
            adapter.leave()
            self._meeting.wait()
            begin = time.perf_counter_ns()
            adapter.join(f"tcp://{message['address']}")
            adapter.add_up(array, None)
            adapter.finish()
            end = time.perf_counter_ns()
        else:
            self._meeting.wait()
            begin = time.perf_counter_ns()
            group = adapter.new_group()
            adapter.add_up(array, group)
            adapter.finish()
            end = time.perf_counter_ns()
            adapter.barrier()
            adapter.end_group(group)
        gc.collect()  # a group may lie in cycles, with its connections
        is_right = adapter.arrays.are_equal(array, self._sum)
        return {"begin": begin, "end": end, "wrong": None if is_right else f"the group adds up to {array}"}


def _meet(adapter: Adapter) -> None:
    adapter.finish()  # the inputs are there
    adapter.barrier()
    adapter.barrier()  # the ranks leave the first one as they wake up, and this one together
