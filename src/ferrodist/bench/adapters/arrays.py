"""One-dimensional arrays of a library, as the workload writes and checks them; slices share their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.bench.cases import DataType

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGNMENT_BYTES = 64  # every array begins at a multiple of this, a cache line, in every library


class TorchArrays:
    """Torch tensors on a device; torch aligns by itself."""

    def __init__(self, device: str = "cpu") -> None:
        import torch  # noqa: PLC0415

        self._torch, self._device = torch, device
        self._dtypes = {dtype: getattr(torch, dtype.value) for dtype in DataType}

    def empty(self, num_elements: int, dtype: DataType) -> Any:
        """An aligned array with arbitrary content."""
        return self._torch.empty(num_elements, dtype=self._dtypes[dtype], device=self._device)

    def from_values(self, values: Sequence[float], dtype: DataType) -> Any:
        """An array of values, which float32 can hold."""
        return self._torch.tensor(values, dtype=self._dtypes[dtype], device=self._device)

    def scale(self, values: Any, plus: float, factor: float, dtype: DataType) -> Any:
        """A new array of (values + plus) * factor, from float32 values; the results must be exact."""
        return ((values + plus) * factor).to(self._dtypes[dtype])

    def are_equal(self, left: Any, right: Any) -> bool:
        """Return whether two arrays hold the same values."""
        return bool(self._torch.equal(left, right))

    def multiply(self, left: Any, right: Any, out: Any) -> None:
        """Write the product of two matrices into a third."""
        self._torch.mm(left, right, out=out)


class NumpyArrays:
    """NumPy arrays with the methods of `TorchArrays`; bfloat16, which NumPy lacks, as its bits."""

    def __init__(self) -> None:
        import numpy as np  # noqa: PLC0415

        self._np = np
        names = {DataType.FLOAT32: "float32", DataType.FLOAT16: "float16", DataType.BFLOAT16: "uint16"}
        self._dtypes: dict[DataType, Any] = {dtype: np.dtype(name) for dtype, name in names.items()}

    def empty(self, num_elements: int, dtype: DataType) -> Any:
        size_bytes = num_elements * dtype.size_bytes
        raw = self._np.empty(size_bytes + ALIGNMENT_BYTES, self._np.uint8)
        begin = -raw.ctypes.data % ALIGNMENT_BYTES
        return raw[begin : begin + size_bytes].view(self._dtypes[dtype])

    def from_values(self, values: Sequence[float], dtype: DataType) -> Any:
        return self._narrow(self._np.array(values, self._np.float32), dtype)

    def scale(self, values: Any, plus: float, factor: float, dtype: DataType) -> Any:
        return self._narrow((values + self._np.float32(plus)) * self._np.float32(factor), dtype)

    def are_equal(self, left: Any, right: Any) -> bool:
        return bool(self._np.array_equal(left, right))

    def multiply(self, left: Any, right: Any, out: Any) -> None:
        self._np.matmul(left, right, out=out)

    def _narrow(self, values: Any, dtype: DataType) -> Any:
        if dtype is DataType.BFLOAT16:  # exact ones only
            return (values.view(self._np.uint32) >> 16).astype(self._np.uint16)
        return values.astype(self._dtypes[dtype])


Arrays = TorchArrays | NumpyArrays
