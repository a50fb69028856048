"""The place of this host in a job, as a cluster's software tells it: Slurm's steps, and indexes of Kubernetes' jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.rendezvous.slurm import SlurmStep

if TYPE_CHECKING:
    from collections.abc import Mapping

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""The variable with a pod's number in an indexed job of Kubernetes."""


def find_hosts(environment: Mapping[str, str]) -> SlurmStep | None:
    """The Slurm step on several hosts in which this launcher is one of the tasks; None outside of one.

    Raises:
        ValueError: The step has several tasks on a host, or its variables are not understood.
    """
    num_hosts = environment.get("SLURM_STEP_NUM_NODES", "")
    if not num_hosts.isdecimal() or int(num_hosts) < 2:
        return None
    step = SlurmStep.find(environment)
    if step is None:
        raise ValueError(
            f"this is a Slurm step on {num_hosts} hosts whose variables don't tell this one's place"
            f" (SLURM_STEP_NODELIST={environment.get('SLURM_STEP_NODELIST', '')!r}): give --nnodes, --node-rank,"
            " --master-addr and --master-port, or --nnodes 1"
        )
    if step.num_tasks != step.num_hosts:
        raise ValueError(
            f"srun has started {step.num_tasks} tasks on {step.num_hosts} hosts, and `ferrodist run` starts all ranks"
            " of a host: use srun --ntasks-per-node 1 ferrodist run --nproc-per-node N, or srun the program itself"
        )
    return step


def lone_host_warning(environment: Mapping[str, str]) -> str:
    """A line if this runs on one of the several hosts of a Slurm job, outside of `srun`; else ""."""
    nnodes = environment.get("SLURM_JOB_NUM_NODES", "")
    if not nnodes.isdecimal() or int(nnodes) < 2 or "SLURM_STEP_NUM_NODES" in environment:
        return ""
    return (
        f"ferrodist: this Slurm job has {nnodes} hosts, and the ranks start on this one alone: srun --ntasks-per-node 1"
        " ferrodist run starts them on all\n"
    )
