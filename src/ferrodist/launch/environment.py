"""The environment of one rank, in torchrun's names: programs written for torchrun run unchanged."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ferrodist.launch.spec import LaunchSpec

__all__ = ["LOOPBACK", "Attempt", "rank_environment", "reserved_port", "usable_cores", "with_stack_dumps"]

LOOPBACK = "127.0.0.1"

_RANK_SITE = str(Path(__file__).with_name("rank_site"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What all ranks of one start share; a restart makes a new one.

    Args:
        master_addr: Where rank 0 listens.
        master_port: Rank 0's port.
        run_id: Name of the job.
        secret: What the ranks prove to each other.
        restart_count: 0 for the first start.
    """

    master_addr: str
    master_port: int
    run_id: str
    secret: str = field(repr=False)
    restart_count: int = 0


def usable_cores() -> int:
    """Cores this process may run on: its affinity mask where the platform has one, else all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A loopback port for rank 0, which nobody else is given inside the block.

    The socket stays bound, and never listens. On Linux another socket may then bind the same port by its number where
    both have SO_REUSEADDR, as rank 0's listener has (ferrodist's and torch's), and listen on it; a socket that takes
    whichever port is free, or that connects, gets another one. Elsewhere the socket is closed before the ranks start,
    so that in rare cases another process takes the port first; rank 0 then fails to bind and says so.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        port: int = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port


def with_stack_dumps(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which Python programs print their stacks at SIGUSR1 and crashes; see `rank_site`."""
    paths = [_RANK_SITE, *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def rank_environment(
    spec: LaunchSpec, attempt: Attempt, local_rank: int, *, base: Mapping[str, str], cores: int
) -> dict[str, str]:
    """Build the whole environment of one rank.

    Args:
        spec: The launch.
        attempt: What all ranks of this start share.
        local_rank: Which rank of this host.
        base: The launcher's own environment; variables that are not the launcher's business pass through.
        cores: Cores this host's ranks share.

    Returns:
        ``base`` with the rank's variables in place. ``OMP_NUM_THREADS`` is left alone where it is set, so a
        user's choice wins over the even share.
    """
    rank = str(spec.global_rank(local_rank))
    world_size = str(spec.world_size)
    environment = {
        **base,
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(spec.nproc_per_node),
        "GROUP_RANK": str(spec.node_rank or 0),
        "GROUP_WORLD_SIZE": str(spec.nnodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": attempt.master_addr,
        "MASTER_PORT": str(attempt.master_port),
        "TORCHELASTIC_RUN_ID": attempt.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        # "True" would tell torch that the launcher already serves a store on MASTER_PORT; ours does not.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "PYTHONUNBUFFERED": "1",
        **spec.timeout_variable(),
        "FERRODIST_SECRET": attempt.secret,
    }
    if not environment.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(max(1, cores // spec.nproc_per_node))
    return environment
