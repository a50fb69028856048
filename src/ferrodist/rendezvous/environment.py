"""The launcher's environment variables, in torchrun's names; of a task of a Slurm step without them, what they'd be."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.errors import InvalidRankError, InvalidWorldSizeError, RendezvousError
from ferrodist.rendezvous.slurm import SlurmStep

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The launcher's variables; None for unset ones.

    Args:
        rank: RANK.
        world_size: WORLD_SIZE.
        local_rank: LOCAL_RANK, this process's rank on its host.
        local_world_size: LOCAL_WORLD_SIZE, the number of ranks on this host.
        group_rank: GROUP_RANK, the host's rank.
        master_addr: MASTER_ADDR, rank 0's host.
        master_port: MASTER_PORT.
        run_id: TORCHELASTIC_RUN_ID.
        restart_count: TORCHELASTIC_RESTART_COUNT, 0 if it is unset.
        agent_store: TORCHELASTIC_USE_AGENT_STORE: torchrun's agent itself listens on MASTER_PORT.
        attempt_folder: The folder that torchrun made for this attempt on this host (from TORCHELASTIC_ERROR_FILE, which
            is `<folder>/<local rank>/error.json`).
    """

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    group_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    run_id: str | None = None
    restart_count: int = 0
    agent_store: bool = False
    attempt_folder: str | None = None

    @property
    def single_host(self) -> bool:
        """True if, according to the launcher, all ranks run on this host."""
        return self.local_world_size is not None and self.local_world_size == self.world_size


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the launcher's variables, or those of a Slurm step if neither RANK nor WORLD_SIZE is set.

    Args:
        variables: The variables; None is the process's environment.

    Raises:
        RendezvousError: A variable is not the number that it should be.
        InvalidRankError: RANK or LOCAL_RANK does not fit its world size.
        InvalidWorldSizeError: A world size is below 1.
    """
    variables = os.environ if variables is None else variables
    if not (variables.get("RANK") or variables.get("WORLD_SIZE")):
        variables = {**_variables_of_step(variables), **variables}
    error_file = variables.get("TORCHELASTIC_ERROR_FILE")
    environment = Environment(
        rank=_parse_int(variables, "RANK"),
        world_size=_parse_int(variables, "WORLD_SIZE"),
        local_rank=_parse_int(variables, "LOCAL_RANK"),
        local_world_size=_parse_int(variables, "LOCAL_WORLD_SIZE"),
        group_rank=_parse_int(variables, "GROUP_RANK"),
        master_addr=variables.get("MASTER_ADDR") or None,
        master_port=_parse_int(variables, "MASTER_PORT"),
        run_id=variables.get("TORCHELASTIC_RUN_ID") or None,
        restart_count=_parse_int(variables, "TORCHELASTIC_RESTART_COUNT") or 0,
        agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt_folder=str(Path(error_file).parent.parent) if error_file else None,
    )
    _check_rank("RANK", environment.rank, "WORLD_SIZE", environment.world_size)
    _check_rank("LOCAL_RANK", environment.local_rank, "LOCAL_WORLD_SIZE", environment.local_world_size)
    if environment.master_port is not None and not 0 <= environment.master_port <= 65535:
        raise RendezvousError(f"MASTER_PORT={environment.master_port} is not a port; set it to a free one, 1 to 65535")
    return environment


def _variables_of_step(variables: Mapping[str, str]) -> dict[str, str]:
    """The launcher's variables of a task of a Slurm step; {} outside of one."""
    step = SlurmStep.find(variables)
    if step is None:
        return {}
    return {
        "RANK": str(step.task),
        "WORLD_SIZE": str(step.num_tasks),
        "LOCAL_RANK": str(step.local_task),
        "LOCAL_WORLD_SIZE": str(step.num_local_tasks),
        "GROUP_RANK": str(step.host),
        "MASTER_ADDR": "127.0.0.1" if step.num_hosts == 1 else step.first_host,
        "MASTER_PORT": str(step.port),
        "TORCHELASTIC_RUN_ID": step.name,
    }


def _parse_int(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "").strip()
    if not text:
        return None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise RendezvousError(
            f"the environment variable {name}={text[:50]!r} is not a whole number; launchers set it (torchrun, "
            "`python -m ferrodist run`), so unset it or correct it where this process is started"
        )
    return int(text)


def _check_rank(rank_name: str, rank: int | None, size_name: str, size: int | None) -> None:
    if size is not None and size < 1:
        raise InvalidWorldSizeError(f"{size_name}={size} is below 1; set it to the number of processes")
    if rank is not None and (rank < 0 or (size is not None and rank >= size)):
        raise InvalidRankError(
            f"{rank_name}={rank} does not fit {size_name}={size}; ranks go from 0 to {size_name} - 1",
            ranks=(rank,),
        )
