"""Arrays of one library, as the workload writes and checks them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.bench.cases import DataType

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGNMENT_BYTES = 64
"""Every array begins at a multiple of this, in whatever library: a line of the cache."""


class Arrays(Protocol):
    """A library's one-dimensional arrays; slices of them share their memory."""

    def empty(self, num_elements: int, dtype: DataType) -> Any:
        """An array of any content, aligned."""

    def of(self, values: Sequence[float], dtype: DataType) -> Any:
        """An array of these values, which float32 can hold."""

    def scale(self, values: Any, plus: float, factor: float, dtype: DataType) -> Any:
        """A new array of (values + plus) * factor, from float32 values; the results must be exact."""

    def are_equal(self, left: Any, right: Any) -> bool:
        """Whether two arrays hold the same values."""

    def multiply(self, left: Any, right: Any, out: Any) -> None:
        """The product of two matrices into a third."""


class TorchArrays:
    """Torch tensors.

    Args:
        device: Where.
    """

    def __init__(self, device: str = "cpu") -> None:
        import torch  # noqa: PLC0415

        self._torch, self._device = torch, device
        self._dtypes = {dtype: getattr(torch, dtype.value) for dtype in DataType}

    def empty(self, num_elements: int, dtype: DataType) -> Any:
        """See `Arrays.empty`; torch aligns by itself."""
        return self._torch.empty(num_elements, dtype=self._dtypes[dtype], device=self._device)

    def of(self, values: Sequence[float], dtype: DataType) -> Any:
        """See `Arrays.of`."""
        return self._torch.tensor(values, dtype=self._dtypes[dtype], device=self._device)

    def scale(self, values: Any, plus: float, factor: float, dtype: DataType) -> Any:
        """See `Arrays.scale`."""
        return ((values + plus) * factor).to(self._dtypes[dtype])

    def are_equal(self, left: Any, right: Any) -> bool:
        """See `Arrays.are_equal`."""
        return bool(self._torch.equal(left, right))

    def multiply(self, left: Any, right: Any, out: Any) -> None:
        """See `Arrays.multiply`."""
        self._torch.mm(left, right, out=out)


class NumpyArrays:
    """NumPy arrays; bfloat16, which NumPy lacks, as its bits."""

    def __init__(self) -> None:
        import numpy as np  # noqa: PLC0415

        self._np = np
        self._dtypes: dict[DataType, Any] = {
            DataType.FLOAT32: np.dtype("float32"),
            DataType.FLOAT16: np.dtype("float16"),
            DataType.BFLOAT16: np.dtype("uint16"),
        }

    def empty(self, num_elements: int, dtype: DataType) -> Any:
        """See `Arrays.empty`."""
        size_bytes = num_elements * dtype.size_bytes
        raw = self._np.empty(size_bytes + ALIGNMENT_BYTES, self._np.uint8)
        begin = -raw.ctypes.data % ALIGNMENT_BYTES
        return raw[begin : begin + size_bytes].view(self._dtypes[dtype])

    def of(self, values: Sequence[float], dtype: DataType) -> Any:
        """See `Arrays.of`; bfloat16 must be exact."""
        return self._narrow(self._np.array(values, self._np.float32), dtype)

    def scale(self, values: Any, plus: float, factor: float, dtype: DataType) -> Any:
        """See `Arrays.scale`."""
        return self._narrow((values + self._np.float32(plus)) * self._np.float32(factor), dtype)

    def are_equal(self, left: Any, right: Any) -> bool:
        """See `Arrays.are_equal`."""
        return bool(self._np.array_equal(left, right))

    def multiply(self, left: Any, right: Any, out: Any) -> None:
        """See `Arrays.multiply`."""
        self._np.matmul(left, right, out=out)

    def _narrow(self, values: Any, dtype: DataType) -> Any:
        if dtype is DataType.BFLOAT16:
            return (values.view(self._np.uint32) >> 16).astype(self._np.uint16)
        return values.astype(self._dtypes[dtype])
