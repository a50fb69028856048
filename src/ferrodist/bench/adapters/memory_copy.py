"""The limit: the ranks copy as many bytes as a rank's tensor has, all at once, each its own."""

from __future__ import annotations

import ctypes
import platform
from typing import TYPE_CHECKING, Any, ClassVar

from ferrodist.bench.adapters.base import Adapter
from ferrodist.bench.arrays import NumpyArrays
from ferrodist.bench.cases import Case, Operation
from ferrodist.bench.meeting import Meeting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ferrodist.bench.adapters.base import Place
    from ferrodist.bench.arrays import Arrays


class MemoryCopyAdapter(Adapter):
    """A process that copies; see `Adapter`."""

    copies = True
    not_offered: ClassVar[Mapping[Operation, str]] = {
        Operation.BARRIER: "a barrier moves no bytes",
        Operation.SUBMIT: "a copy starts at once",
        Operation.OVERLAP: "a copy and a computation of one thread follow each other",
        Operation.INIT: "copies need no group",
        Operation.NEW_GROUP: "copies need no group",
    }

    def __init__(self, place: Place) -> None:
        self.arrays: Arrays = NumpyArrays()
        self.rank, self.num_ranks = place.rank, place.num_ranks
        self.versions = {"libc": " ".join(platform.libc_ver())}
        self._meeting = Meeting(place.folder / "counters", place.rank, place.num_ranks)

    def make_call(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        """See `Adapter.make_call`. In the time of a message there and one back, each rank copies one."""
        copy, size_bytes = ctypes.memmove, case.num_elements * case.dtype.size_bytes  # libc's, without the GIL
        to, from_ = ctypes.c_void_p(target.ctypes.data), ctypes.c_void_p(source.ctypes.data)
        return lambda: copy(to, from_, size_bytes)

    def barrier(self) -> None:
        """See `Adapter.barrier`."""
        self._meeting.wait()

    def close(self) -> None:
        """See `Adapter.close`."""
        self._meeting.close()
