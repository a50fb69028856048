"""The interface of a library to the worker: its arrays, its calls, and the adapter of the limit.

Arrays are one-dimensional; the workload writes and checks them, and slices share their memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ferrodist.bench.cases import GROUP_CREATIONS, Case, DataType, Operation, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

ALIGNMENT_BYTES = 64  # every array begins at a multiple of this, a cache line, in every library
_COUNTER_WORDS = ALIGNMENT_BYTES // 8  # a counter of a barrier has a cache line of its own


class Arrays:
    """The functions on a library's arrays."""

    empty: Callable[[int, DataType], Any]  # an aligned array of so many elements, with arbitrary content
    from_values: Callable[[Sequence[float], DataType], Any]  # an array of values that float32 can hold
    scale: Callable[[Any, float, float, DataType], Any]  # (values + plus) * factor of float32 values, which is exact
    are_equal: Callable[[Any, Any], bool]  # whether two arrays hold the same values
    multiply: Callable[[Any, Any, Any], object]  # writes the product of two matrices into a third


class TorchArrays(Arrays):
    """Torch tensors on a device; torch aligns by itself."""

    def __init__(self, device: str = "cpu") -> None:
        import torch  # noqa: PLC0415

        dtypes = {dtype: getattr(torch, dtype.value) for dtype in DataType}
        self.empty = lambda num_elements, dtype: torch.empty(num_elements, dtype=dtypes[dtype], device=device)
        self.from_values = lambda values, dtype: torch.tensor(values, dtype=dtypes[dtype], device=device)
        self.scale = lambda values, plus, factor, dtype: ((values + plus) * factor).to(dtypes[dtype])
        self.are_equal = torch.equal
        self.multiply = lambda left, right, out: torch.mm(left, right, out=out)


class NumpyArrays(Arrays):
    """NumPy arrays; bfloat16, which NumPy lacks, as its bits."""

    def __init__(self) -> None:
        import numpy as np  # noqa: PLC0415

        def empty(num_elements: int, dtype: DataType) -> Any:
            size_bytes = num_elements * dtype.size_bytes
            raw = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
            begin = -raw.ctypes.data % ALIGNMENT_BYTES
            return raw[begin : begin + size_bytes].view("uint16" if dtype is DataType.BFLOAT16 else dtype.value)

        def narrow(values: Any, dtype: DataType) -> Any:
            if dtype is DataType.BFLOAT16:  # exact ones only
                return (values.view(np.uint32) >> 16).astype(np.uint16)
            return values.astype(dtype.value)

        self.empty, self.are_equal = empty, np.array_equal
        self.from_values = lambda values, dtype: narrow(np.array(values, np.float32), dtype)
        self.scale = lambda values, plus, factor, dtype: narrow((values + np.float32(plus)) * np.float32(factor), dtype)
        self.multiply = lambda left, right, out: np.matmul(left, right, out=out)


class UnsupportedError(Exception):
    """The library does not offer an operation; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """A rank of a peer, and where it meets the others."""

    peer: Peer
    rank: int  # MPI ranks learn theirs from the library instead
    num_ranks: int
    folder: Path  # the peer's own, for the files of the rendezvous
    init_method: str = ""  # the URL of the rendezvous, as torch and ferrodist write it; MPI has its own


class Adapter:
    """One rank of a group of one library, with the library's own calls; those of ``unsupported`` may be absent."""

    rank: int
    num_ranks: int
    arrays: Arrays
    versions: dict[str, str]
    copies: ClassVar[bool] = False  # whether every operation is a copy of the input: true for the limit
    unsupported: ClassVar[Mapping[Operation, str]] = {}  # operations that the library lacks, with the reasons

    barrier: Callable[[], object]  # of all ranks
    init_group: Callable[[str], object]  # creates the default group, at an init method
    destroy_group: Callable[[], object]  # ends the default group
    new_group: Callable[[], Any]  # creates another group of all ranks
    destroy_subgroup: Callable[[Any], object]
    allreduce: Callable[[Any, Any], object]  # in place, over a group that `new_group` has created or the default (None)
    wait: Callable[[Any], object]  # for a work, which the callable of an `ASYNCHRONOUS` operation returns

    def make_call(self, case: Case, source: Any, target: Any) -> Callable[[], Any]:
        """A callable for the operation, in place if ``target`` is ``source``; UnsupportedError if the library can't."""
        raise NotImplementedError

    def make_exchange(
        self, case: Case, send: Callable[..., object], receive: Callable[..., object], source: Any, target: Any
    ) -> Callable[[], object]:
        """A callable for a round trip: the first rank sends and then receives, the last one the reverse."""
        partner = case.partner(self.rank)
        if partner is None:
            return lambda: None
        order = [(send, source), (receive, target)]
        (first, one), (second, other) = order if self.rank == 0 else reversed(order)

        def exchange() -> None:
            first(one, partner)
            second(other, partner)

        return exchange

    def synchronize(self) -> None:
        """Wait for this rank's part of earlier calls, where calls return before: they do on GPUs."""


class FileBarrier:
    """A barrier of counters in a file that all ranks have mapped; the first rank that comes creates the file."""

    def __init__(self, path: Path, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks, self._generation = rank, num_ranks, 0
        size_bytes = ALIGNMENT_BYTES * num_ranks
        with path.open("a+b") as file:
            file.truncate(size_bytes)
            self._memory = mmap.mmap(file.fileno(), size_bytes)
        self._counters = memoryview(self._memory).cast("Q")

    def wait(self) -> None:
        """Wait until all ranks have come."""
        self._generation += 1
        self._counters[self._rank * _COUNTER_WORDS] = self._generation
        for rank in range(self._num_ranks):
            while self._counters[rank * _COUNTER_WORDS] < self._generation:
                os.sched_yield()

    def close(self) -> None:
        """Free the memory."""
        self._counters.release()
        self._memory.close()


class MemoryCopyAdapter(Adapter):
    """The limit: all ranks copy as many bytes as a rank's tensor has, each its own, at the same time."""

    copies = True
    unsupported: ClassVar[Mapping[Operation, str]] = {
        Operation.BARRIER: "a barrier moves no bytes",
        Operation.SUBMIT: "a copy starts at once",
        Operation.OVERLAP: "a copy and a computation of one thread follow each other",
        **dict.fromkeys(GROUP_CREATIONS, "copies need no group"),
    }

    def __init__(self, info: RankInfo) -> None:
        self.arrays: Arrays = NumpyArrays()
        self.rank, self.num_ranks = info.rank, info.num_ranks
        self.versions = {"libc": " ".join(platform.libc_ver())}
        barrier = FileBarrier(info.folder / "counters", info.rank, info.num_ranks)
        self.barrier, self.destroy_group = barrier.wait, barrier.close

    def make_call(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        # For a round trip of messages, too, each rank copies one message.
        memmove, size_bytes = ctypes.memmove, case.num_elements * case.dtype.size_bytes  # libc's, without the GIL
        to, from_ = ctypes.c_void_p(target.ctypes.data), ctypes.c_void_p(source.ctypes.data)
        return lambda: memmove(to, from_, size_bytes)
