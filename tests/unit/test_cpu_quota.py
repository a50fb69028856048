"""The CPU quota of a process, in emulated control groups."""

from __future__ import annotations

import math

import pytest

from ferrodist.cpu_quota import cpu_quota


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, math.inf),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, math.inf),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "400000 100000"}, 4.0),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "400000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "200000 100000",
                "sys/fs/cgroup/other/cpu.max": "100000 100000",
            },
            2.0,
        ),
        ({"proc/self/cgroup": "0::/only/the/host/has/it\n", "sys/fs/cgroup/cpu.max": "300000 100000"}, 3.0),
        (
            {
                "proc/self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/a\n0::/\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "50000",
                "sys/fs/cgroup/cpu/m/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/m/cpu.cfs_period_us": "50000",
            },
            5.0,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            math.inf,
        ),
        ({"proc/self/cgroup": "nonsense\n", "sys/fs/cgroup/cpu.max": "many"}, math.inf),
    ],
    ids=["none", "v2", "v2 without limit", "parent", "least", "container", "v1", "v1 without limit", "unreadable"],
)
def test_the_least_quota_counts(tmp_path, files, expected):
    """Of the process's group and those above it, in both versions; where nothing can be read there is no quota."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cpu_quota(tmp_path) == expected
