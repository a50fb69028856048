"""Stragglers: ranks for which others have waited long, and warnings about them before the deadline makes it an error.

[Note: long waits]
A rank that waits warns once in each wait, after `ferrodist.deadline.LONG_WAIT_SECONDS`, and names the call and the
ranks that have not made it. Where all ranks see the stragglers, the first one that waits warns for all. In a
verification only rank 0 sees them: the other ranks first ask rank 0, and warn if it does not answer, as it is late
itself. A rank that waits for a message warns by itself. A receive from any rank waits for no particular one, so that it
does not warn; neither does a receive whose message is on its way. A sender does not know whether it is.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrodist.errors import ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.signature import CollectiveSignature
    from ferrodist.deadline import Elapsed

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """The ranks that are responsible for a wait that timed out."""

    ranks: tuple[int, ...]  # in the group that was asked
    detail: str = ""  # a clause for an error's message, with a leading space, or empty
    is_relay: bool = False  # whether it is a rank that does not pass on the messages of others


def is_first_waiting_rank(rank: int, late: Sequence[int]) -> bool:
    """Return whether a rank that waits for the late ranks is the first that does."""
    return all(other in late for other in range(rank))


def warn_about_stragglers(
    call: CollectiveSignature, late: Sequence[int], *, group: str, rank: int, elapsed: Elapsed
) -> None:
    """Warn that a call waits for ranks that have not made it; ``rank`` is the one that waits."""
    have_not = "has not" if len(late) == 1 else "have not"
    _log.warning(
        "%s on group %r, operation %s: %s %s called it yet, and rank %s waits for that, after %s",
        *(call, group, call.sequence, ranks_text(late), have_not, rank, elapsed),
    )


def warn_about_late_peers(
    what: str, late: Sequence[int], *, is_sent: bool, group: str, rank: int, elapsed: Elapsed
) -> None:
    """Warn that messages wait for ranks that have not made the matching calls; does nothing if they are unknown.

    ``what`` is the call in the words of errors; ``is_sent`` says whether messages are sent to them, which may be on
    their way.
    """
    if late:
        have_not = "has not" if len(late) == 1 else "have not"
        or_taken = ", or not taken all that is sent" if is_sent else ""
        _log.warning(
            "%s on group %r: %s %s made the matching call yet%s, and rank %s waits for that, after %s",
            *(what, group, ranks_text(late), have_not, or_taken, rank, elapsed),
        )
