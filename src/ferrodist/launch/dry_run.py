"""The plan of a launch, as ``ferrodist run --dry-run`` prints it."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from ferrodist.launch.cpu_binding import BindPolicy, bind_ranks, describe_binding
from ferrodist.launch.host_limits import usable_cores
from ferrodist.launch.rank_environment import LOOPBACK, Attempt, rank_environment
from ferrodist.launch.spec import MpiLauncher
from ferrodist.rendezvous.secret import SECRET_VARIABLE
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ferrodist.launch.spec import LaunchSpec

_ALIKE = ("RANK", "LOCAL_RANK", "ROLE_RANK", "CUDA_VISIBLE_DEVICES")
"""The variables that may differ between the ranks of a host."""


def describe_launch(spec: LaunchSpec) -> str:
    """Return lines with hosts, ranks, rendezvous, command and variables, without the secret."""
    first = spec.global_rank(0)
    last = first + spec.nproc_per_node - 1
    address = spec.master_addr or LOOPBACK
    port = str(spec.master_port) if spec.master_port else "a free port"
    where = "one host" if spec.nnodes == 1 else f"{spec.nnodes} hosts, of which this is number {spec.node_rank or 0}"
    lines = [
        f"job: {counted(spec.world_size, 'rank')} on {where}"
        + (f", which {spec.place_source} told" if spec.place_source else ""),
        f"ranks here: {first}" + (f" to {last}" if last > first else ""),
        f"rendezvous: rank 0 listens at {address}, {port}; the secret is "
        + (f"{SECRET_VARIABLE}'s" if spec.secret else "made anew"),
        f"restarts: {spec.max_restarts}",
        f"command: {shlex.join(spec.command())}",
    ]
    if spec.mpi is not None:
        by = "the MPI's own mpiexec" if spec.mpi is MpiLauncher.MPIEXEC else "this launcher, for MPICH"
        lines.append(f"process manager: {by}")
    bound = bind_ranks(spec.bind, spec.nproc_per_node)
    if spec.bind is not BindPolicy.NONE:
        lines.append(f"binding: {describe_binding(bound, first)}")
    if spec.logs.has_files:
        lines.append(f"log files: in {spec.logs.folder or 'a temporary folder'}")
    attempt = Attempt(
        master_addr=address,
        master_port=spec.master_port or 0,
        run_id=spec.run_id or "",
        secret="",
    )
    ranks = [
        rank_environment(spec, attempt, local_rank, base=os.environ, cores=usable_cores(), cpus=bound[local_rank])
        for local_rank in range(spec.nproc_per_node)
    ]
    hidden = {SECRET_VARIABLE, *(() if spec.master_port else ("MASTER_PORT",))}
    hidden |= set() if spec.run_id else {"TORCHELASTIC_RUN_ID"}
    common = {name: value for name, value in ranks[0].items() if os.environ.get(name) != value}
    lines.append("variables of all: " + _assignments(common, hidden | set(_ALIKE)))
    lines += [
        f"variables of rank {first + local_rank}: "
        + _assignments({name: variables[name] for name in _ALIKE if name in variables}, set())
        for local_rank, variables in enumerate(ranks)
    ]
    return "\n".join(lines) + "\n"


def _assignments(variables: Mapping[str, str], hidden: set[str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items() if name not in hidden)
