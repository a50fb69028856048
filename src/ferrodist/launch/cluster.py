"""The place of this host in a job, as a cluster's software tells it: Slurm's steps, and indexes of Kubernetes' jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000  # below those that systems give to connections
_STEPS_PER_JOB = 31

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""The variable with a pod's number in an indexed job of Kubernetes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """A host's place in a job, and where rank 0 listens."""

    source: str  # what told it
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    run_id: str


def find_place(environment: Mapping[str, str]) -> HostPlace | None:
    """The place of this host in the Slurm step that runs this process on several hosts; None outside of one.

    Raises:
        ValueError: The step has several tasks on a host, or its variables don't tell the place.
    """
    nnodes = environment.get("SLURM_STEP_NUM_NODES", "")
    if not nnodes.isdecimal() or int(nnodes) < 2:
        return None
    names = ("SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS")
    if missing := [name for name in names if not environment.get(name)]:
        raise ValueError(
            f"this is a Slurm step on {nnodes} hosts without {', '.join(missing)}: give --nnodes, --node-rank,"
            " --master-addr and --master-port"
        )
    node_rank, hosts, job, num_tasks = (environment[name] for name in names)
    if num_tasks != nnodes:
        raise ValueError(
            f"srun has started {num_tasks} tasks on {nnodes} hosts, and `ferrodist run` starts all ranks of a host: use"
            " srun --ntasks-per-node 1 ferrodist run --nproc-per-node N, or srun the program itself"
        )
    step = environment.get("SLURM_STEP_ID", "0")
    return HostPlace(
        source="Slurm",
        nnodes=int(nnodes),
        node_rank=int(node_rank),
        master_addr=first_host(hosts),
        master_port=_FIRST_PORT + (_number(job) * _STEPS_PER_JOB + _number(step)) % _NUM_PORTS,
        run_id=f"slurm-{job}-{step}",
    )


def lone_host_warning(environment: Mapping[str, str]) -> str:
    """A line if this runs on one of the several hosts of a Slurm job, outside of `srun`; else ""."""
    nnodes = environment.get("SLURM_JOB_NUM_NODES", "")
    if not nnodes.isdecimal() or int(nnodes) < 2 or "SLURM_STEP_NUM_NODES" in environment:
        return ""
    return (
        f"ferrodist: this Slurm job has {nnodes} hosts, and the ranks start on this one alone: srun --ntasks-per-node 1"
        " ferrodist run starts them on all\n"
    )


def first_host(hosts: str) -> str:
    """The first host of a list as Slurm writes it: "node08" of "node[08-11,20],gpu1"."""
    found = re.match(r"([^\[,]*)(?:\[([0-9]+)[^\]]*\])?([^,]*)", hosts)
    assert found is not None, "each part may be empty"
    name = found[1] + (found[2] or "") + found[3]
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"SLURM_STEP_NODELIST={hosts!r} is no list of hosts: give --master-addr")
    return name


def _number(text: str) -> int:
    """A number of a job or step, whose suffix may be of an array or of a part of a job."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0
