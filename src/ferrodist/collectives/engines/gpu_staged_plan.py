"""A collective on tensors on a GPU, divided into segments that each are a collective on the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ferrodist.backends.collective_op import CollectiveKind
from ferrodist.collectives.arguments import offsets_of
from ferrodist.collectives.host_staging import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ferrodist.backends.collective_op import CollectiveOp
    from ferrodist.backends.interfaces import HostEngine

_IN_PLACE = {CollectiveKind.ALLREDUCE, CollectiveKind.REDUCE, CollectiveKind.BROADCAST}
"""Collectives whose result replaces their input, element by element."""


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """The range of elements that a segment takes of every part, from ``begin`` to before ``end``."""

    begin: int
    end: int

    def sizes(self, counts: Sequence[int]) -> list[int]:
        """Return how many elements of each part are in the range; ``counts`` are the parts' sizes."""
        return [max(0, min(count, self.end) - self.begin) for count in counts]


@dataclass(frozen=True, slots=True)
class Partition:
    """A tensor that consists of parts of ``counts`` elements; None where nothing is copied."""

    tensor: torch.Tensor | None
    counts: Sequence[int]

    def count_within(self, window: ChunkRange) -> int:
        """The number of elements in a range of every part."""
        return sum(window.sizes(self.counts))

    def within(self, window: ChunkRange) -> list[torch.Tensor]:
        """The elements of each part in a range; some may be empty."""
        if self.tensor is None:
            return []
        sizes = window.sizes(self.counts)
        starts = offsets_of(self.counts)
        return [
            self.tensor[start + window.begin : start + window.begin + size]
            for start, size in zip(starts, sizes, strict=False)
        ]


class StagedOp:
    """A collective on tensors on a GPU."""

    def __init__(self, op: CollectiveOp, rank: int) -> None:
        self.op = op
        self._in_place = op.kind in _IN_PLACE
        is_root = rank == op.root
        if op.kind is CollectiveKind.BROADCAST:
            tensors = (op.out, None) if is_root else (None, op.out)
        else:
            tensors = (op.source, op.out)
        source_counts, out_counts = self._counts()
        self._source, self._out = Partition(tensors[0], source_counts), Partition(tensors[1], out_counts)

    def _counts(self) -> tuple[Sequence[int], Sequence[int]]:
        """The sizes of the parts of ``source``, and of ``out``."""
        op = self.op
        match op.kind:
            case CollectiveKind.ALL_GATHER | CollectiveKind.GATHER:
                return [op.source.numel()], op.counts
            case CollectiveKind.SCATTER | CollectiveKind.REDUCE_SCATTER:
                return op.counts, [op.out.numel()]
            case CollectiveKind.ALL_TO_ALL:
                return op.counts, op.recv_counts
        return [op.tensor.numel()], [op.tensor.numel()]

    @cached_property
    def largest(self) -> int:
        """The number of elements of the largest part; of an all_to_all, as far as this rank knows."""
        return max(*self._source.counts, *self._out.counts)

    def windows(self, largest: int, segment_bytes: int) -> list[ChunkRange]:
        """The segments' ranges, at least one, for parts of at most ``largest`` elements."""
        num_parts = max(len(self._source.counts), len(self._out.counts))
        step = max(1, segment_bytes // self.op.tensor.element_size() // num_parts)
        return [ChunkRange(begin, begin + step) for begin in range(0, max(largest, 1), step)]

    def segment(self, window: ChunkRange, engine: HostEngine, position: Callable[[], tuple[float, int]]) -> Segment:
        """One segment of the collective; ``position()`` gives its timeout and sequence number when it is run."""

        def work(host_in: torch.Tensor, host_out: torch.Tensor) -> None:
            timeout, sequence = position()
            engine.run(self._on_host(window, host_in, host_out, timeout), sequence)

        source, out = self._source, self._out
        return Segment(
            inputs=source.within(window),
            in_count=source.count_within(window) if self._in_place or source.tensor is not None else 0,
            out_count=out.count_within(window) if not self._in_place and out.tensor is not None else 0,
            work=work,
            outputs=out.within(window),
            in_place=self._in_place,
        )

    def _on_host(
        self, window: ChunkRange, host_in: torch.Tensor, host_out: torch.Tensor, timeout: float
    ) -> CollectiveOp:
        op = self.op
        return op.replace(
            source=None if op.source is None else host_in,
            out=None if op.out is None else host_in if self._in_place else host_out,
            counts=window.sizes(op.counts),
            recv_counts=window.sizes(op.recv_counts),
            timeout=timeout,
        )
