"""Which ranks are there: asking them to answer, and answering.

[Note: life signs]
A rank that is stopped closes nothing, and takes nothing from its connections. When a deadline has passed, the rank
that waited asks those it waited for, and rank 0 if the messages pass through it, to answer (PING). The thread that
moves frames answers (PONG), so a rank that only computes does too. Whatever else comes over a rank's own connection
counts as well: a PONG may wait behind much data.

Rank 0 stops reading from a rank whose messages pile up in front of another one, and would not see its PING. So it
sends a PONG to such ranks from time to time, unasked.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from ferrodist.backends.tcp.connection import QueuedFrame
from ferrodist.backends.tcp.wire import Frame, FrameType

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    from ferrodist.backends.tcp.connection import FramedConnection


class TcpLivenessProbe:
    """What one rank knows of who is there; see [Note: life signs].

    Args:
        rank: This rank.
        links: Its links, by rank.
        push: Sends a frame towards its destination.
        changed: Notified whenever a frame has come.
    """

    def __init__(
        self,
        rank: int,
        links: dict[int, FramedConnection],
        push: Callable[[QueuedFrame], None],
        changed: threading.Condition,
    ) -> None:
        self._rank = rank
        self._links = links
        self._push = push
        self._changed = changed
        self._num_answers: Counter[int] = Counter()  # by rank
        self._unwritten: set[int] = set()  # ranks for which a PONG waits

    def answer(self, rank: int) -> None:
        """Tell a rank that this one is there; once for however many times it asked meanwhile."""
        if rank not in self._unwritten:
            self._unwritten.add(rank)
            frame = Frame(kind=FrameType.PONG, source=self._rank, destination=rank)
            self._push(QueuedFrame(frame, on_written=partial(self._unwritten.discard, rank)))

    def note(self, rank: int) -> None:
        """Take in that a rank has answered."""
        self._num_answers[rank] += 1

    def find_silent(self, ranks: Iterable[int], within: float) -> set[int]:
        """Ask ``ranks`` to answer; returns those from which nothing comes within so many seconds."""
        before = {rank: self._seen_of(rank) for rank in ranks}
        for rank in before:
            self._push(QueuedFrame(Frame(kind=FrameType.PING, source=self._rank, destination=rank)))

        def silent() -> set[int]:
            return {rank for rank, seen in before.items() if self._seen_of(rank) == seen and not self._is_held(rank)}

        with self._changed:
            self._changed.wait_for(lambda: not silent(), within)
        return silent()

    def _seen_of(self, rank: int) -> tuple[int, int]:
        link = self._links.get(rank)
        return self._num_answers[rank], 0 if link is None else link.num_reads

    def _is_held(self, rank: int) -> bool:
        """Whether it is this rank that does not listen."""
        link = self._links.get(rank)
        return link is not None and link.blocked_by is not None
