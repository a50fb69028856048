"""The environment variables of ranks, and the port that they name.

Variables have torchrun's names, so that programs written for torchrun run unchanged.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.deadline import TIMEOUT_VARIABLE
from ferrodist.launch.rank_logs import ERROR_FILE_VARIABLE
from ferrodist.launch.spec import HIP_DEVICES_VARIABLE, VISIBLE_DEVICES_VARIABLE, visible_devices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ferrodist.launch.spec import LaunchSpec

LOOPBACK = "127.0.0.1"

_RANK_SITE = str(Path(__file__).with_name("rank_site"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The settings that all ranks of one start share; a restart has new ones."""

    master_addr: str
    master_port: int
    run_id: str
    secret: str = field(repr=False)
    restart_count: int = 0  # 0 for the first start


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a loopback port for rank 0 within the block.

    The socket stays bound, and never listens. On Linux another socket may then bind the same port by its number if both
    have SO_REUSEADDR, as rank 0's listener has (ferrodist's and torch's), and listen on it; a socket that takes any
    free port, or that connects, gets another one. Elsewhere the socket is closed before the ranks start, so that in
    rare cases another process takes the port first; rank 0 then fails to bind and reports it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        port: int = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port


def with_stack_dumps(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python programs print their stacks on SIGUSR1 and crashes; see `rank_site`."""
    paths = [_RANK_SITE, *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def launch_environment(spec: LaunchSpec, base: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return ``base`` with the variables that mpiexec or the ranks find however they are started.

    OMP_NUM_THREADS shares the cores evenly unless the user has set it.
    """
    # An outer launcher's file of errors is not these ranks'.
    base = {name: value for name, value in base.items() if name != ERROR_FILE_VARIABLE}
    environment = {**base, "WORLD_SIZE": str(spec.world_size), "PYTHONUNBUFFERED": "1"}
    if spec.timeout is not None:
        environment[TIMEOUT_VARIABLE] = f"{spec.timeout:g}"
    if not environment.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(max(1, cores // spec.nproc_per_node))
    return environment


def rank_environment(
    spec: LaunchSpec,
    attempt: Attempt,
    local_rank: int,
    *,
    base: Mapping[str, str],
    cores: int,
    cpus: frozenset[int] = frozenset(),
) -> dict[str, str]:
    """Return ``base`` with a rank's variables. A rank that is bound to ``cpus`` has no more threads than these."""
    rank = str(spec.global_rank(local_rank))
    if cpus:
        cores = min(cores, len(cpus) * spec.nproc_per_node)  # the share of each
    devices = visible_devices(spec.nproc_per_node, base) if spec.virtual_local_rank else []
    return {
        **launch_environment(spec, base, cores),
        **({VISIBLE_DEVICES_VARIABLE: devices[local_rank]} if devices else {}),
        **({HIP_DEVICES_VARIABLE: devices[local_rank]} if devices and base.get(HIP_DEVICES_VARIABLE) else {}),
        "RANK": rank,
        "LOCAL_RANK": "0" if devices else str(local_rank),
        "LOCAL_WORLD_SIZE": str(spec.nproc_per_node),
        "GROUP_RANK": str(spec.node_rank or 0),
        "GROUP_WORLD_SIZE": str(spec.nnodes),
        "ROLE_NAME": spec.role,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "MASTER_ADDR": attempt.master_addr,
        "MASTER_PORT": str(attempt.master_port),
        "TORCHELASTIC_RUN_ID": attempt.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        # "True" would tell torch that the launcher already serves a store on MASTER_PORT; ours does not.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "FERRODIST_SECRET": attempt.secret,
    }
