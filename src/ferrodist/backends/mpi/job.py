"""Whether MPI's ranks are those that a launcher has started, or each is alone with an MPI that knows of no others."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ferrodist.backends.mpi.library import library_version
from ferrodist.errors import InvalidRankError, InvalidWorldSizeError
from ferrodist.rendezvous.environment import read_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_job"]

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables in which launchers say how many ranks they have started: mpiexec of Open MPI, of MPICH and of what descends
from it, and srun."""


def check_job(
    communicator: Any, rank: int | None = None, world_size: int | None = None, variables: Mapping[str, str] = os.environ
) -> None:
    """Raise where MPI's world is not what the user, or else the launcher, says.

    Args:
        communicator: MPI's world.
        rank: What the user says this rank is, or None.
        world_size: What the user says the number of ranks is, or None.
        variables: The environment.

    Raises:
        InvalidWorldSizeError, InvalidRankError: MPI says otherwise.
    """
    size, own = communicator.Get_size(), communicator.Get_rank()
    source = ""
    if world_size is None and size == 1:  # alone, or started by what is not this MPI's launcher
        world_size, source = _launched(variables)
    if world_size not in (None, size):
        hint = ": it was not started by an MPI's mpiexec, or by another MPI's" if size == 1 else ""
        raise InvalidWorldSizeError(
            f"the world size is to be {world_size}{source}, but {library_version()} says that this process is one of"
            f" {size}{hint}. Start the program with this MPI's mpiexec -n {world_size}, with srun --mpi=... as it"
            f" needs it, or with ferrodist run --mpi{source and '; or pass world_size=1, if it is to be alone'}"
        )
    if rank not in (None, own):
        raise InvalidRankError(f"the rank is to be {rank}, but {library_version()} says that this is rank {own}")


def _launched(variables: Mapping[str, str]) -> tuple[int | None, str]:
    """How many ranks a launcher has started, and how it is known; None where none has said so."""
    size = read_environment(variables).world_size
    if size is not None:
        return size, " (WORLD_SIZE)"
    for name in _SIZES:
        text = variables.get(name, "")
        if text.isdecimal() and int(text) > 1:
            return int(text), f" ({name})"
    return None, ""
