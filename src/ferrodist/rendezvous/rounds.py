"""Rounds: jobs that meet one after the other at the same address or file.

[Note: rounds]
Ranks that meet and leave may meet again at the same address or file. A rank that has left is often faster than the
others, and finds the store of the previous round at the address, which rank 0 still serves, or the file, which the last
rank to leave will remove. Each store has a random name. A rank that finds the name of a store that it has left waits
for the next one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ferrodist.errors import DistributedTimeoutError

if TYPE_CHECKING:
    from ferrodist.deadline import Deadline

ROUND_NAME_KEY = "ferrodist/round"  # the key of the random name of a store that rank 0 serves
ROUND_OVER_KEY = "ferrodist/round over"  # set when the store is about to close, for ranks that wait for the next round
_ROUND_POLL_SECONDS = 0.02

left_stores: set[bytes] = set()  # the names of the stores that this process met in, and has left; see [Note: rounds]


def wait_for_next_round(what: str, deadline: Deadline) -> None:
    """Wait briefly for the next round; DistributedTimeoutError after the deadline."""
    if deadline.expired:
        raise DistributedTimeoutError(
            f"{what} is still that of the last round, which this process has left, after {deadline.elapsed():.1f} s"
            f" (limit {deadline.timeout:.1f} s): the other ranks must leave, too, before all meet again"
        )
    time.sleep(min(_ROUND_POLL_SECONDS, deadline.remaining()))
