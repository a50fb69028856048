"""The workload of a case: its inputs, its calls and the expected results; and a computation to run beside it.

[Note: inputs that check exactly] An element is an integer from 1 to 8 for a sum (to 40 where elements only move), times
a power of two. Sums of up to 32 ranks are then exact in every type, for any order and precision of the additions, and a
result is compared for equality. The integers repeat with a prime period, so that a misplaced chunk shows, and begin
elsewhere in each batch, so that a leftover of the last batch shows.

An allreduce in place multiplies: after u calls on one array it holds the first sum times ranks**(u - 1). So small
arrays take turns, and a batch ends before a value would lose a bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.bench.adapters.base import ALIGNMENT_BYTES
from ferrodist.bench.cases import ALLREDUCES, ASYNCHRONOUS, IN_PLACE, REDUCTIONS, Case, DataType, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.bench.adapters.base import Adapter, Arrays

_PERIOD = 16381  # prime
_BASE = tuple((17 * index + index // 11) % 4 for index in range(_PERIOD))
_POOL_BYTES = 256 * 1024
_MAX_BUFFERS = 16
_MAX_CALLS = 100_000
_MATRIX_ROWS, _MATRIX_COLUMNS = 64, 512


def num_buffers(size_bytes: int) -> int:
    """The number of arrays that take turns: as many as fit a core's own cache easily."""
    return max(1, min(_MAX_BUFFERS, _POOL_BYTES // max(1, size_bytes)))


def max_calls_in_place(dtype: DataType, num_ranks: int) -> int:
    """The number of consecutive in-place sums that stay exact."""
    odd = num_ranks
    while odd % 2 == 0:
        odd //= 2
    calls, largest, growth = 1, 8 * num_ranks, num_ranks
    while growth * num_ranks <= 2**dtype.growth_bits and largest * odd <= 2**dtype.significand_bits:
        calls, largest, growth = calls + 1, largest * odd, growth * num_ranks
    return calls


class Workload:
    """One rank's share of a case; UnsupportedError if the library has no such operation."""

    def __init__(self, adapter: Adapter, case: Case) -> None:
        self._case, self._arrays = case, adapter.arrays
        self._rank, self._num_ranks = adapter.rank, adapter.num_ranks
        self._copies = adapter.copies  # the limit copies the input, whatever the collective is
        count = num_buffers(case.size_bytes)
        num_inputs = case.num_elements if self._copies else case.input_elements
        num_outputs = case.num_elements if self._copies else case.output_elements
        self._inputs = self._allocate(count, num_inputs)
        in_place = case.operation in IN_PLACE and not self._copies
        self._outputs = self._inputs if in_place else self._allocate(count, num_outputs)
        make = adapter.make_start if case.operation in ASYNCHRONOUS else adapter.make_call
        self._calls: list[Callable[[], Any]] = [
            make(case, source, target) for source, target in zip(self._inputs, self._outputs, strict=True)
        ]
        self._two_periods = self._arrays.from_values(_BASE + _BASE, DataType.FLOAT32)
        self._batch = 0
        self.max_calls = _MAX_CALLS  # of a batch
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
                problem = self._find_difference(target, begin, end, pattern, phase)
                if problem is not None:
                    return f"{self._case.operation.value}, rank {self._rank}, array {index}: {problem}"
        return None

    def _allocate(self, count: int, num_elements: int) -> list[Any]:
        if num_elements == 0:
            return [None]
        line = ALIGNMENT_BYTES // self._case.dtype.size_bytes
        stride = -(-num_elements // line) * line
        memory = self._arrays.empty(count * stride, self._case.dtype)
        return [memory[index * stride : index * stride + num_elements] for index in range(count)]

    def _base(self) -> Any:
        """One period of this batch, before the rank is added and it is scaled."""
        start = 31 * self._batch % _PERIOD
        return self._two_periods[start : start + _PERIOD]

    def _input(self, rank: int) -> Any:
        """One period of a rank's input in this batch."""
        return self._pattern(
            self._base(), 1 + self._batch % 2 + (rank % 4 if self._case.operation in REDUCTIONS else rank)
        )

    def _pattern(self, values: Any, plus: int, factor: int = 1) -> Any:
        dtype = self._case.dtype
        return self._arrays.scale(values, plus, factor * 2.0**dtype.start_exponent, dtype)

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
        bases = self._base() * num_ranks
        if case.operation is Operation.REDUCE_SCATTER:
            return [(0, part, self._pattern(bases, offsets), self._rank * part)]
        return [(0, total, self._pattern(bases, offsets, num_ranks ** (uses - 1)), 0)]

    def _find_difference(self, array: Any, begin: int, end: int, pattern: Any, phase: int) -> str | None:
        index = begin
        while index < end:
            start = (phase + index - begin) % _PERIOD
            length = min(_PERIOD - start, end - index)
            if not self._arrays.are_equal(array[index : index + length], pattern[start : start + length]):
                return f"wrong between elements {index} and {index + length} of {len(array)}"
            index += length
        return None


class MatmulLoad:
    """A computation in a core's cache, on one thread: a 64 x 512 matrix times one that rotates its 512 columns."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        rows, columns = range(_MATRIX_ROWS), range(_MATRIX_COLUMNS)
        values = [float((7 * row + column) % 5) for row in rows for column in columns]
        rotated = [values[row * _MATRIX_COLUMNS + (column - 1) % _MATRIX_COLUMNS] for row in rows for column in columns]
        rotation = [float(column == (row + 1) % _MATRIX_COLUMNS) for row in columns for column in columns]
        self._left, self._right, self._expected, self._result = (
            arrays.from_values(flat, DataType.FLOAT32).reshape(-1, _MATRIX_COLUMNS)
            for flat in (values, rotation, rotated, rotated)
        )

    def reset(self) -> None:
        """Clear the last result."""
        self._result[:] = 0

    def run(self, times: int) -> None:
        """Compute the product ``times`` times."""
        multiply = self._arrays.multiply
        for _ in range(times):
            multiply(self._left, self._right, self._result)

    def check(self) -> str | None:
        """A description of a wrong result, or None."""
        return None if self._arrays.are_equal(self._result, self._expected) else "the product of matrices is wrong"
