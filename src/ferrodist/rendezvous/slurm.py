"""The place of a process in a step of Slurm, from the variables that `srun` sets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000  # below those that systems give to connections
_STEPS_PER_JOB = 31

_NAMES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"),
)
"""The variables of a step's tasks. A batch script has the last three, too, and none with STEP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """A step, and this process's place in it.

    Args:
        name: The name of the step, which no other job or step has.
        num_hosts: The number of its hosts.
        num_tasks: The number of its tasks, on all hosts.
        num_local_tasks: The number of those on this host.
        host: This host's number, from 0.
        task: This task's number, from 0.
        local_task: This task's number on this host, from 0.
        first_host: The name of host 0.
        port: A port on it, the same for all tasks, and another one for most other steps.
    """

    name: str
    num_hosts: int
    num_tasks: int
    num_local_tasks: int
    host: int
    task: int
    local_task: int
    first_host: str
    port: int

    @classmethod
    def find(cls, variables: Mapping[str, str]) -> Self | None:
        """The step that runs this process; None outside of one, or if its variables are not `srun`'s."""
        job, step, num_hosts, num_tasks, hosts, per_host, host, task, local_task = (
            variables.get(name, "") for name in _NAMES
        )
        first_host = first_of_hosts(hosts)
        numbers = (job, step, num_hosts, num_tasks, host, task, local_task)
        if first_host is None or not all(each.isascii() and each.isdecimal() for each in numbers):
            return None
        counts = _expand_counts(per_host)
        if int(host) >= len(counts) or sum(counts) != int(num_tasks):
            return None
        return cls(
            name=f"slurm-{job}-{step}",
            num_hosts=int(num_hosts),
            num_tasks=int(num_tasks),
            num_local_tasks=counts[int(host)],
            host=int(host),
            task=int(task),
            local_task=int(local_task),
            first_host=first_host,
            port=_FIRST_PORT + (int(job) * _STEPS_PER_JOB + int(step)) % _NUM_PORTS,
        )


def first_of_hosts(hosts: str) -> str | None:
    """The first host of a list as Slurm writes it: "node08" of "node[08-11,20],gpu1"; None if the list is not so."""
    found = re.match(r"([^\[,]*)(?:\[([0-9]+)[^\]]*\])?([^,]*)", hosts)
    name = "" if found is None else found[1] + (found[2] or "") + found[3]
    return name if re.fullmatch(r"[\w.-]+", name) else None


def _expand_counts(text: str) -> list[int]:
    """The numbers of a list as Slurm writes it: [2, 2, 1] of "2(x2),1"."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part)
        if found is None:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts
