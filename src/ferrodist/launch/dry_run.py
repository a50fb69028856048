"""The plan of a launch, as ``ferrodist run --dry-run`` prints it."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from ferrodist.launch.cpu_binding import BindPolicy, bind_ranks, describe_binding
from ferrodist.launch.host_limits import usable_cores
from ferrodist.launch.mpiexec import find_mpiexec, is_open_mpi, mpiexec_command
from ferrodist.launch.rank_environment import LOOPBACK, Attempt, rank_environment, with_stack_dumps
from ferrodist.launch.rank_logs import ERROR_FILE_VARIABLE
from ferrodist.launch.spec import MpiLauncher
from ferrodist.rendezvous.secret import SECRET_VARIABLE
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ferrodist.launch.spec import LaunchSpec

_OWN_OF_RANKS = ("RANK", "LOCAL_RANK", "ROLE_RANK", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""The variables that may differ between the ranks of a host."""


def describe_launch(spec: LaunchSpec) -> str:
    """Return lines with hosts, ranks, rendezvous, command and variables, without the secret.

    Raises:
        BackendUnavailable: mpiexec is to start the ranks, and is not there.
    """
    first = spec.global_rank(0)
    last = first + spec.nproc_per_node - 1
    where = "one host" if spec.nnodes == 1 else f"{spec.nnodes} hosts, of which this is number {spec.node_rank or 0}"
    told = f", which {spec.place_source} told" if spec.place_source else ""
    lines = [
        f"job: {counted(spec.world_size, 'rank')} on {where}{told}",
        f"ranks here: {first}" + (f" to {last}" if last > first else ""),
    ]
    if spec.mpi is MpiLauncher.MPIEXEC:
        mpiexec = find_mpiexec()
        words = mpiexec_command(mpiexec, spec.nproc_per_node, for_open_mpi=is_open_mpi(mpiexec))
        return "\n".join([*lines, f"command: {shlex.join([*words, *spec.command()])}"]) + "\n"
    address = spec.master_addr or LOOPBACK
    port = str(spec.master_port) if spec.master_port else "a free port"
    secret = f"{SECRET_VARIABLE}'s" if spec.secret else "made anew"
    lines += [
        f"rendezvous: rank 0 listens at {address}, {port}; the secret is {secret}",
        f"restarts: {spec.max_restarts}",
        f"command: {shlex.join(spec.command())}",
    ]
    if spec.mpi is MpiLauncher.PMI:
        lines.append("process manager: this launcher, for MPICH, by PMI_FD, PMI_RANK and PMI_SIZE")
    bound = bind_ranks(spec.bind, spec.nproc_per_node)
    if spec.bind is not BindPolicy.NONE:
        lines.append(f"binding: {describe_binding(bound, first)}")
    if spec.logs.has_folder:
        lines.append(f"log files: in {spec.logs.folder or 'a temporary folder'}; {ERROR_FILE_VARIABLE} is in it, too")
    return "\n".join([*lines, *_variables(spec, bound)]) + "\n"


def _variables(spec: LaunchSpec, bound: Sequence[frozenset[int]]) -> list[str]:
    """Lines with the variables that the launcher sets, whether or not they are already set so."""
    attempt = Attempt(
        master_addr=spec.master_addr or LOOPBACK, master_port=spec.master_port or 0, run_id=spec.run_id or "", secret=""
    )

    def of(local_rank: int, base: Mapping[str, str]) -> dict[str, str]:
        cores, cpus = usable_cores(), bound[local_rank]
        return rank_environment(spec, attempt, local_rank, base=with_stack_dumps(base), cores=cores, cpus=cpus)

    hidden = {SECRET_VARIABLE, *_OWN_OF_RANKS}
    hidden |= set() if spec.master_port else {"MASTER_PORT"}
    hidden |= set() if spec.run_id else {"TORCHELASTIC_RUN_ID"}
    ranks = [of(local_rank, os.environ) for local_rank in range(spec.nproc_per_node)]
    lines = ["variables of all: " + _assignments(ranks[0], [name for name in of(0, {}) if name not in hidden])]
    for local_rank, variables in enumerate(ranks):
        names = [name for name in of(local_rank, {}) if name in _OWN_OF_RANKS]
        lines.append(f"variables of rank {spec.global_rank(local_rank)}: {_assignments(variables, names)}")
    return lines


def _assignments(variables: Mapping[str, str], names: Sequence[str]) -> str:
    return " ".join(f"{name}={shlex.quote(variables[name])}" for name in names)
