"""The computation beside which a collective runs: products of matrices that fit a core's cache, on one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.bench.cases import DataType

if TYPE_CHECKING:
    from ferrodist.bench.arrays import Arrays

_ROWS = 64
_COLUMNS = 512


class Product:
    """A matrix of 64 x 512 times one of 512 x 512, which turns the first one's columns by one place.

    Args:
        arrays: Whose arrays, and whose multiplication.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        values = [float((7 * row + column) % 5) for row in range(_ROWS) for column in range(_COLUMNS)]
        turned = [
            values[row * _COLUMNS + (column - 1) % _COLUMNS] for row in range(_ROWS) for column in range(_COLUMNS)
        ]
        turn = [float(column == (row + 1) % _COLUMNS) for row in range(_COLUMNS) for column in range(_COLUMNS)]
        self._left, self._right, self._wanted, self._result = (
            arrays.of(flat, DataType.FLOAT32).reshape(-1, _COLUMNS) for flat in (values, turn, turned, turned)
        )

    def begin(self) -> None:
        """Forget the last result."""
        self._result[:] = 0

    def run(self, times: int) -> None:
        """Compute it so many times."""
        multiply = self._arrays.multiply
        for _ in range(times):
            multiply(self._left, self._right, self._result)

    def check(self) -> str | None:
        """What is wrong with the result, if anything."""
        return None if self._arrays.are_equal(self._result, self._wanted) else "the product of matrices is wrong"
