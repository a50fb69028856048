"""Warnings about ranks that others have waited for for a long time, before a deadline makes an error of it.

[Note: long waits]
A rank that waits says so once in each wait, after `ferrodist.deadline.LONG_WAIT_SECONDS`, naming the call and who has
not made it. Where all ranks see who is late, the first one that waits speaks for them. In an agreement only rank 0 sees
it: the others ask rank 0 first, and speak where it does not answer, being late itself. Of a message its rank alone
knows. Who receives from any rank waits for none, and says nothing; nor does who receives a message that is on its way.
A sender does not know whether it is.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ferrodist.errors import ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.signature import CollectiveSignature
    from ferrodist.deadline import Elapsed

_log = logging.getLogger(__name__)


def is_speaker(rank: int, late: Sequence[int]) -> bool:
    """Whether a rank that waits for the late ones is the first that does."""
    return all(other in late for other in range(rank))


def warn_about_stragglers(
    call: CollectiveSignature, late: Sequence[int], *, group: str, rank: int, elapsed: Elapsed
) -> None:
    """Say that a call waits for ranks that have not made it.

    Args:
        call: The call.
        late: The ranks that have not made it.
        group: The group's name.
        rank: The rank that waits.
        elapsed: How long it has waited.
    """
    have_not = "has not" if len(late) == 1 else "have not"
    _log.warning(
        "%s on group %r, operation %s: %s %s called it yet, and rank %s waits for that, after %s",
        *(call, group, call.sequence, ranks_text(late), have_not, rank, elapsed),
    )


def warn_about_late_peers(
    what: str, late: Sequence[int], *, is_sent: bool, group: str, rank: int, elapsed: Elapsed
) -> None:
    """Say that messages wait for ranks that have not made the matching calls; nothing where these are not known.

    Args:
        what: The call, as errors name it.
        late: The other ranks.
        is_sent: Whether messages are sent to them, of which a large one may be on its way.
        group: The group's name.
        rank: The rank that waits.
        elapsed: How long it has waited.
    """
    if late:
        have_not = "has not" if len(late) == 1 else "have not"
        or_taken = ", or not taken all that is sent" if is_sent else ""
        _log.warning(
            "%s on group %r: %s %s made the matching call yet%s, and rank %s waits for that, after %s",
            *(what, group, ranks_text(late), have_not, or_taken, rank, elapsed),
        )
