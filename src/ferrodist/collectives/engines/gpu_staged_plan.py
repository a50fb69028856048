"""An operation on tensors on a GPU as a value that can be divided into segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ferrodist.collectives.arguments import offsets_of
from ferrodist.collectives.cuda import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ferrodist.backends.signature import CollectiveSignature
    from ferrodist.collectives.engines.base import HostEngine


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """What a segment takes of every part: the elements from ``begin`` to before ``end``."""

    begin: int
    end: int

    def sizes(self, counts: Sequence[int]) -> list[int]:
        """How many of its elements parts of so many elements have."""
        return [max(0, min(count, self.end) - self.begin) for count in counts]


@dataclass(frozen=True, slots=True)
class Partition:
    """A tensor whose parts, of ``counts`` elements, lie one after the other; or None, of which nothing is copied."""

    tensor: torch.Tensor | None
    counts: Sequence[int]

    def count_within(self, window: ChunkRange) -> int:
        """How many elements a window shows."""
        return sum(window.sizes(self.counts))

    def within(self, window: ChunkRange) -> list[torch.Tensor]:
        """What a window shows of each part, which may be nothing."""
        if self.tensor is None:
            return []
        sizes = window.sizes(self.counts)
        starts = offsets_of(self.counts)
        return [
            self.tensor[start + window.begin : start + window.begin + size]
            for start, size in zip(starts, sizes, strict=False)
        ]


class StagedCall(Protocol):
    """One call of an engine on the host: ``near`` holds what came down, and ``far`` takes what goes up."""

    def __call__(
        self,
        engine: HostEngine,
        near: torch.Tensor,
        far: torch.Tensor,
        window: ChunkRange,
        *,
        timeout: float,
        sequence: int,
    ) -> None:
        """Run the call on one window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedOp:
    """An operation.

    Args:
        call: What ranks compare.
        number: Of the reduction, or -1.
        like: One of its tensors.
        source: What comes down.
        out: What goes up.
        in_place: Whether the result takes the place of the input: then ``far`` is empty, and ``near`` goes up.
        share: How many parts there are for each segment to have some of.
        largest: Elements of the largest part on any rank; of what this rank knows where ranks differ.
        differs: Whether ranks may differ in it.
        work: What is done with each segment.
    """

    call: CollectiveSignature
    number: int
    like: torch.Tensor
    source: Partition
    out: Partition
    in_place: bool
    share: int
    largest: int
    differs: bool = False
    work: StagedCall

    def windows(self, largest: int, segment_bytes: int) -> list[ChunkRange]:
        """The windows that show all of the parts, of at most ``largest`` elements: at least one."""
        step = max(1, segment_bytes // self.like.element_size() // self.share)
        return [ChunkRange(begin, begin + step) for begin in range(0, max(largest, 1), step)]

    def segment(self, window: ChunkRange, engine: HostEngine, place: Callable[[], tuple[float, int]]) -> Segment:
        """What a window shows. ``place()`` says in which time and at which place the engine is called."""

        def work(near: torch.Tensor, far: torch.Tensor) -> None:
            timeout, sequence = place()
            self.work(engine, near, far, window, timeout=timeout, sequence=sequence)

        return Segment(
            down=self.source.within(window),
            near_count=0 if self.source.tensor is None and not self.in_place else self.source.count_within(window),
            far_count=0 if self.out.tensor is None or self.in_place else self.out.count_within(window),
            work=work,
            up=self.out.within(window),
            is_far=not self.in_place,
        )
