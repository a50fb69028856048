"""The CPU quota of this process: how many CPUs its control groups let it use at once."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path, PurePosixPath


def cpu_quota(root: Path = Path("/")) -> float:
    """Return the least quota of this process's control groups in CPUs, such as 1.5; math.inf without one.

    All processes of a control group share its quota. Reads both versions of control groups. ``root`` has ``proc`` and
    ``sys``. In a container the path of a control group may be one that only the host has: its own limits are then in
    the highest folder, which is always read.
    """
    groups = root / "sys/fs/cgroup"
    quotas = [math.inf]
    for controllers, path in _memberships(root):
        mount = groups / "cpu" if controllers else groups
        quotas += [_quota_of(mount / str(parent).lstrip("/")) for parent in (path, *path.parents)]
    return min(quotas)


def _memberships(root: Path) -> list[tuple[str, PurePosixPath]]:
    """The control groups that may limit this process: controllers, empty in version 2, and path."""
    found = [("", PurePosixPath("/"))]
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                found.append((controllers, PurePosixPath(path)))
    return found


def _quota_of(group: Path) -> float:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        return math.inf if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        microseconds = int((group / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period_microseconds = int((group / "cpu.cfs_period_us").read_text(encoding="ascii"))
        return math.inf if microseconds <= 0 else microseconds / period_microseconds
    return math.inf
