"""Which ranks respond: asking them, and counting their answers.

[Note: liveness]
A rank that is stopped closes nothing, and reads nothing from its connections. When a deadline has passed, the rank that
waited asks those that it waited for to answer (PING). The thread that moves a rank's frames answers (PONG), so a rank
that only computes does too. An answer may be queued behind much data, so that whatever else a transport has read from
a rank's own connection counts as well.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class LivenessProbe:
    """Finds the ranks that don't answer, and those that are behind in the order of collectives.

    See [Note: liveness]. ``ping(rank)`` asks a rank to answer; ``wait(is_done, seconds)`` returns when ``is_done()``,
    or after so many seconds. ``sign_of_life(rank)`` changes with every other message of a rank; ``is_unread(rank)`` is
    whether this rank does not read from that one at the moment.
    """

    def __init__(
        self,
        ping: Callable[[int], None],
        wait: Callable[[Callable[[], bool], float], object],
        sign_of_life: Callable[[int], object] = lambda _: None,
        is_unread: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._ping = ping
        self._wait = wait
        self._sign_of_life = sign_of_life
        self._is_unread = is_unread
        self._num_answers: Counter[int] = Counter()  # by rank
        self._num_entered: Counter[int] = Counter()  # by rank: collectives, as last reported

    def on_answer(self, rank: int) -> None:
        """Count an answer of a rank."""
        self._num_answers[rank] += 1

    def note_progress(self, rank: int, num_entered: int) -> None:
        """Note how many collectives a rank has entered; an older message may come after a newer one."""
        self._num_entered[rank] = max(self._num_entered[rank], num_entered)

    def has_entered(self, rank: int, sequence: int) -> bool:
        """Return whether a rank is known to have entered the collective with this sequence number."""
        return self._num_entered[rank] > sequence

    def find_silent(self, ranks: Iterable[int], within: float) -> tuple[int, ...]:
        """Ask ranks to answer; returns those from which nothing comes within so many seconds, ascending."""
        before = {rank: self._seen(rank) for rank in ranks}
        for rank in before:
            self._ping(rank)

        def silent() -> tuple[int, ...]:
            return tuple(
                sorted(rank for rank in before if self._seen(rank) == before[rank] and not self._is_unread(rank))
            )

        self._wait(lambda: not silent(), within)
        return silent()

    def find_behind(self, ranks: Iterable[int], sequence: int, within: float) -> tuple[int, ...]:
        """Find the ranks that have not entered a collective, or don't answer; all of them if every one has."""
        ranks = tuple(ranks)
        silent = self.find_silent(ranks, within)
        return tuple(rank for rank in ranks if rank in silent or not self.has_entered(rank, sequence)) or ranks

    def _seen(self, rank: int) -> tuple[int, object]:
        return self._num_answers[rank], self._sign_of_life(rank)
