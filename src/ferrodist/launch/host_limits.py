"""The limits of this host: its cores, and the ranks that it can start."""

from __future__ import annotations

import math
import os
import resource

from ferrodist.cpu_quota import cpu_quota
from ferrodist.wording import counted

# Standard output, standard error and, on Linux, a pidfd.
_DESCRIPTORS_PER_RANK = 3

# The launcher's own, and those that are open only while a rank is being started.
_DESCRIPTORS_RESERVED = 32


def usable_cores() -> int:
    """Return the number of cores this process may use at once: its affinity mask or all cores, within its quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(cores, cpu_quota())))


def rank_limit(num_files: int = 0) -> tuple[float, str]:
    """Return the most ranks that can be started (math.inf without a limit), and that limit with how to see it.

    It is the narrower of the limits on processes and on descriptors; usage by others is not counted, but for
    ``num_files`` that this process will open.
    """
    descriptors = (_soft_limit(resource.RLIMIT_NOFILE) - _DESCRIPTORS_RESERVED - num_files) / _DESCRIPTORS_PER_RANK
    # The kernel does not hold root to its number of processes.
    processes = math.inf if os.geteuid() == 0 else _soft_limit(resource.RLIMIT_NPROC)
    if descriptors <= processes:
        fitting = max(1, math.floor(descriptors)) if math.isfinite(descriptors) else math.inf
        return fitting, "open files (ulimit -n)"
    return processes, "processes (ulimit -u)"


def check_rank_count(option: str, count: int, num_files: int = 0) -> None:
    """Raise ValueError, naming the command-line option, if this host does not allow so many ranks and open files."""
    most, reason = rank_limit(num_files)
    if count > most:
        raise ValueError(
            f"{option} {count} is more than this host allows: {counted(most, 'rank')},"
            f" for the limit on {reason}; start fewer, or raise that limit"
        )


def _soft_limit(resource_id: int) -> float:
    soft, _ = resource.getrlimit(resource_id)
    return math.inf if soft == resource.RLIM_INFINITY else soft
