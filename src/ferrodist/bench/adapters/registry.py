"""The adapter of each peer, and the adapter of the limit."""

from __future__ import annotations

import ctypes
import platform
from typing import TYPE_CHECKING, Any, ClassVar

from ferrodist.bench.adapters.arrays import Arrays, NumpyArrays
from ferrodist.bench.adapters.base import Adapter
from ferrodist.bench.cases import OURS, Case, Operation, Peer
from ferrodist.bench.channel import FileBarrier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ferrodist.bench.adapters.base import RankInfo


class MemoryCopyAdapter(Adapter):
    """The limit: all ranks copy as many bytes as a rank's tensor has, each its own, at the same time."""

    copies = True
    unsupported: ClassVar[Mapping[Operation, str]] = {
        Operation.BARRIER: "a barrier moves no bytes",
        Operation.SUBMIT: "a copy starts at once",
        Operation.OVERLAP: "a copy and a computation of one thread follow each other",
        Operation.INIT: "copies need no group",
        Operation.NEW_GROUP: "copies need no group",
    }

    def __init__(self, info: RankInfo) -> None:
        self.arrays: Arrays = NumpyArrays()
        self.rank, self.num_ranks = info.rank, info.num_ranks
        self.versions = {"libc": " ".join(platform.libc_ver())}
        self._barrier = FileBarrier(info.folder / "counters", info.rank, info.num_ranks)

    def make_call(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        # For a round trip of messages, too, each rank copies one message.
        memmove, size_bytes = ctypes.memmove, case.num_elements * case.dtype.size_bytes  # libc's, without the GIL
        to, from_ = ctypes.c_void_p(target.ctypes.data), ctypes.c_void_p(source.ctypes.data)
        return lambda: memmove(to, from_, size_bytes)

    def barrier(self) -> None:
        self._barrier.wait()

    def close(self) -> None:
        self._barrier.close()


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
