"""Who answers, and how far they are: each rank says how many of the group's collectives it has entered."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ferrodist.backends.mpi.transport import Frame, FrameType, QueuedFrame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class MpiLivenessProbe:
    """What this rank knows of the others' progress.

    Args:
        push: ``push(rank, outgoing)`` sends a frame.
        num_entered: How many collectives this rank has entered.
        wait: ``wait(done, seconds)`` moves frames until ``done()``, or while the group lives, and for so long at most.
    """

    def __init__(
        self,
        push: Callable[[int, QueuedFrame], None],
        num_entered: Callable[[], int],
        wait: Callable[[Callable[[], bool], float], object],
    ) -> None:
        self._push = push
        self._num_entered = num_entered
        self._wait = wait
        self._answers: Counter[int] = Counter()  # by rank: PONGs
        self._entered: Counter[int] = Counter()  # by rank, as it last said

    def on_ping(self, source: int, _frame: Frame, _payload: memoryview) -> None:
        """A rank asks whether this one is there."""
        self._push(source, QueuedFrame(Frame(FrameType.PONG, self._num_entered())))

    def on_pong(self, source: int, frame: Frame, _payload: memoryview) -> None:
        """A rank is there."""
        self.note(source, frame.message)
        self._answers[source] += 1

    def note(self, rank: int, num_entered: int) -> None:
        """A rank has said how many it has entered. An answer may come behind one that it gave later, or its goodbye."""
        self._entered[rank] = max(self._entered[rank], num_entered)

    def has_entered(self, rank: int, sequence: int) -> bool:
        """Whether a rank has said that it entered the collective at a position."""
        return self._entered[rank] > sequence

    def find_behind(self, ranks: Iterable[int], sequence: int, within: float) -> tuple[int, ...]:
        """Those that have not entered a collective, or don't answer; all when every one has."""
        ranks = tuple(ranks)
        silent = self.find_silent(ranks, within)
        return tuple(rank for rank in ranks if rank in silent or not self.has_entered(rank, sequence)) or ranks

    def find_silent(self, ranks: Iterable[int], within: float) -> tuple[int, ...]:
        """Those that don't answer within so many seconds."""
        before = {rank: self._answers[rank] for rank in ranks}
        for rank in before:
            self._push(rank, QueuedFrame(Frame(FrameType.PING)))

        def silent() -> tuple[int, ...]:
            return tuple(sorted(rank for rank, count in before.items() if self._answers[rank] == count))

        self._wait(lambda: not silent(), within)
        return silent()
