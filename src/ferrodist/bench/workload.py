"""The inputs of a case, its calls, and what must come out.

[Note: inputs that check exactly] An element is a whole number from 1 to 8 for what is added (to 40 for what is only
moved), a power of two times. Sums of up to 32 ranks are then exact in every type, in whatever order and precision a
library adds, and a result is compared for equality. The numbers repeat with a period that is prime, so that a piece at
a wrong place is seen, and begin elsewhere in each batch, so that what is left from the last one is seen.

An allreduce in place multiplies: after u calls on one array its content is the first sum times ranks**(u - 1). So small
arrays take turns, and a batch ends before a value would lose a bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.bench.arrays import ALIGNMENT_BYTES
from ferrodist.bench.cases import Case, DataType, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.bench.adapters import Adapter

_PERIOD = 16381  # prime
_BASE = tuple((17 * index + index // 11) % 4 for index in range(_PERIOD))
_POOL_BYTES = 256 * 1024
_MAX_BUFFERS = 16


def num_buffers(size_bytes: int) -> int:
    """Arrays that take turns: as many as a core's own cache holds with room to spare."""
    return max(1, min(_MAX_BUFFERS, _POOL_BYTES // max(1, size_bytes)))


def max_calls_in_place(dtype: DataType, num_ranks: int) -> int:
    """Sums in place, one on the other, that stay exact."""
    odd = num_ranks
    while odd % 2 == 0:
        odd //= 2
    calls, largest, growth = 1, 8 * num_ranks, num_ranks
    while growth * num_ranks <= 2**dtype.growth_bits and largest * odd <= 2**dtype.significand_bits:
        calls, largest, growth = calls + 1, largest * odd, growth * num_ranks
    return calls


class Workload:
    """One rank's part of a case.

    Args:
        adapter: The library, and which rank this is.
        case: What to do.

    Raises:
        NotOfferedError: The library has no such operation.
    """

    def __init__(self, adapter: Adapter, case: Case) -> None:
        self._case, self._adapter, self._arrays = case, adapter, adapter.arrays
        self._rank, self._num_ranks = adapter.rank, adapter.num_ranks
        self._copies = adapter.copies  # the limit's: whatever the collective is, the input is copied
        count = num_buffers(case.size_bytes)
        num_inputs = case.num_elements if self._copies else case.input_elements
        num_outputs = case.num_elements if self._copies else case.output_elements
        self._inputs = self._pool(count, num_inputs)
        in_place = case.operation.is_in_place and not self._copies
        self._outputs = self._inputs if in_place else self._pool(count, num_outputs)
        make = adapter.make_start if case.operation.is_asynchronous else adapter.make_call
        self._calls: list[Callable[[], Any]] = [
            make(case, source, target) for source, target in zip(self._inputs, self._outputs, strict=True)
        ]
        self._two_periods = self._arrays.of(_BASE + _BASE, DataType.FLOAT32)
        self._batch = 0

    @property
    def max_calls(self) -> int:
        """Calls that a batch may have."""
        if not self._case.operation.is_allreduce or self._copies:
            return 100_000
        return len(self._calls) * max_calls_in_place(self._case.dtype, self._num_ranks)

    def begin_batch(self, num_calls: int, batch: int) -> Sequence[Callable[[], Any]]:
        """Write new inputs, and give the calls to make; ``batch`` must be the same number on all ranks."""
        self._batch = batch
        own = self._input(self._rank)
        for source, target in zip(self._inputs, self._outputs, strict=True):
            if target is not source:
                target[:] = 0
            if self._case.operation is Operation.BROADCAST and self._rank != 0 and not self._copies:
                source[:] = 0
            else:
                self._write(source, own)
        return [self._calls[index % len(self._calls)] for index in range(num_calls)]

    def check(self, num_calls: int) -> str | None:
        """What is wrong with the results of a batch, if anything."""
        wanted: dict[int, list[tuple[int, int, Any, int]]] = {}
        for number, target in enumerate(self._outputs[:num_calls]):
            uses = len(range(number, num_calls, len(self._outputs)))
            if uses not in wanted:
                wanted[uses] = self._wanted(uses)
            for begin, end, pattern, phase in wanted[uses]:
                problem = self._find_difference(target, begin, end, pattern, phase)
                if problem is not None:
                    return f"{self._case.operation.value}, rank {self._rank}, array {number}: {problem}"
        return None

    def _pool(self, count: int, num_elements: int) -> list[Any]:
        if num_elements == 0:
            return [None]
        line = ALIGNMENT_BYTES // self._case.dtype.size_bytes
        stride = -(-num_elements // line) * line
        memory = self._arrays.empty(count * stride, self._case.dtype)
        return [memory[index * stride : index * stride + num_elements] for index in range(count)]

    def _base(self) -> Any:
        """The period of this batch before a rank is added and it is scaled."""
        turn = 31 * self._batch % _PERIOD
        return self._two_periods[turn : turn + _PERIOD]

    def _input(self, rank: int) -> Any:
        """The period of a rank's input in this batch."""
        own = 1 + self._batch % 2 + (rank % 4 if self._case.operation.reduces else rank)
        return self._pattern(self._base(), own)

    def _write(self, array: Any, pattern: Any) -> None:
        if array is None:
            return
        for begin in range(0, len(array), _PERIOD):
            end = min(begin + _PERIOD, len(array))
            array[begin:end] = pattern[: end - begin]

    def _pattern(self, values: Any, plus: int, factor: int = 1) -> Any:
        dtype = self._case.dtype
        return self._arrays.scale(values, plus, factor * 2.0**dtype.start_exponent, dtype)

    def _wanted(self, uses: int) -> list[tuple[int, int, Any, int]]:
        """The pieces of a result: from where to where, which period, and at which place in it the piece begins."""
        case, num_ranks = self._case, self._num_ranks
        total, part = case.num_elements, case.num_elements // num_ranks
        if total == 0:
            return []
        if self._copies or case.operation is Operation.BROADCAST:
            return [(0, total, self._input(self._rank if self._copies else 0), 0)]
        if case.operation is Operation.SEND_RECV:
            partner = case.partner_of(self._rank)
            return [] if partner is None else [(0, total, self._input(partner), 0)]
        if not case.operation.reduces:
            begin = self._rank * part if case.operation is Operation.ALL_TO_ALL else 0
            return [(r * part, (r + 1) * part, self._input(r), begin) for r in range(num_ranks)]
        others = sum(1 + self._batch % 2 + rank % 4 for rank in range(num_ranks))
        bases = self._base() * num_ranks
        if case.operation is Operation.REDUCE_SCATTER:
            return [(0, part, self._pattern(bases, others), self._rank * part)]
        return [(0, total, self._pattern(bases, others, num_ranks ** (uses - 1)), 0)]

    def _find_difference(self, array: Any, begin: int, end: int, pattern: Any, phase: int) -> str | None:
        place = begin
        while place < end:
            turn = (phase + place - begin) % _PERIOD
            length = min(_PERIOD - turn, end - place)
            if not self._arrays.are_equal(array[place : place + length], pattern[turn : turn + length]):
                return f"wrong between elements {place} and {place + length} of {len(array)}"
            place += length
        return None
