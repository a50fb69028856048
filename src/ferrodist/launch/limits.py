"""How many ranks the limits on this process let it start."""

from __future__ import annotations

import math
import os
import resource
from dataclasses import dataclass

from ferrodist.wording import counted

__all__ = ["RankLimit", "check_rank_count", "rank_limit"]

# For each rank the launcher keeps its standard output, its standard error and, on Linux, its pidfd.
_DESCRIPTORS_PER_RANK = 3

# The launcher's own, and those that are open only while a rank is being started.
_DESCRIPTORS_RESERVED = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLimit:
    """The most ranks that can be started.

    Args:
        num_ranks: How many; ``math.inf`` where nothing limits them.
        reason: Which limit that is, and how to see it.
    """

    num_ranks: float
    reason: str


def rank_limit() -> RankLimit:
    """The narrower of the limits on processes and on descriptors, as they stand; what others use is not counted."""
    descriptors = (_soft(resource.RLIMIT_NOFILE) - _DESCRIPTORS_RESERVED) / _DESCRIPTORS_PER_RANK
    # The kernel does not hold root to its number of processes.
    processes = math.inf if os.geteuid() == 0 else _soft(resource.RLIMIT_NPROC)
    if descriptors <= processes:
        fitting = max(1, math.floor(descriptors)) if math.isfinite(descriptors) else math.inf
        return RankLimit(num_ranks=fitting, reason="open files (ulimit -n)")
    return RankLimit(num_ranks=processes, reason="processes (ulimit -u)")


def check_rank_count(option: str, count: int) -> None:
    """Raise ValueError, naming the command line's option, when this host does not allow so many ranks."""
    limit = rank_limit()
    if count > limit.num_ranks:
        raise ValueError(
            f"{option} {count} is more than this host allows: {counted(limit.num_ranks, 'rank')},"
            f" for the limit on {limit.reason}; start fewer, or raise that limit"
        )


def _soft(number: int) -> float:
    soft, _ = resource.getrlimit(number)
    return math.inf if soft == resource.RLIM_INFINITY else soft
