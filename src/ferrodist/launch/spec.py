"""What to launch, as a value: the program, how many ranks, and where they meet."""

from __future__ import annotations

import enum
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ferrodist.deadline import TIMEOUT_VARIABLE, check_timeout, default_timeout
from ferrodist.launch.limits import check_rank_count
from ferrodist.rendezvous.secret import SECRET_VARIABLE, resolve_secret
from ferrodist.wording import counted

__all__ = ["DEFAULT_TIMEOUT_BEFORE_KILL", "LaunchSpec", "MpiLauncher", "ProgramKind"]

DEFAULT_TIMEOUT_BEFORE_KILL = 5.0
"""Seconds between asking the ranks to end and SIGKILL."""


class ProgramKind(enum.Enum):
    """How the program of a launch is started."""

    SCRIPT = "script"  # python program args
    MODULE = "module"  # python -m program args
    EXECUTABLE = "executable"  # program args


class MpiLauncher(enum.Enum):
    """Who starts an MPI's ranks."""

    MPIEXEC = "mpiexec"  # the MPI's own, which this process becomes
    PMI = "pmi"  # this process, as MPICH's process manager


def _secret_of_environment() -> str | None:
    resolve_secret(None)  # which the ranks will do: what they refuse is refused here, by its name
    return os.environ.get(SECRET_VARIABLE) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One launch on one host; a job over several hosts is one launch on each.

    Args:
        program: Path of the script, dotted name of the module, or name of the executable.
        arguments: Passed to the program untouched.
        kind: How ``program`` is started.
        nproc_per_node: Ranks on this host. Every host of a job runs the same number.
        nnodes: Hosts in the job.
        node_rank: This host's number, 0-based; must be given when there are several hosts.
        master_addr: Where rank 0 listens. None means this host, and is allowed for one host only.
        master_port: Rank 0's port. None means a free one for every attempt, and is allowed for one host only.
        max_restarts: How often all ranks of this host are started again after a failure.
        timeout: Seconds that ranks wait for each other by default. None leaves it to FERRODIST_TIMEOUT, if that is set.
        timeout_before_kill: Seconds between asking the ranks to end and SIGKILL.
        run_id: Name of the job, the same on all hosts. None makes one up for one host.
        secret: What the ranks prove to each other; taken from ``FERRODIST_SECRET`` by default. None makes
            one, and is allowed for one host only.
        mpi: Who starts the ranks, where they are an MPI's; None where they are not.

    Raises:
        ValueError: For values that cannot be launched; the message says what to give instead.
    """

    program: str
    arguments: tuple[str, ...] = ()
    kind: ProgramKind = ProgramKind.SCRIPT
    nproc_per_node: int = 1
    nnodes: int = 1
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    max_restarts: int = 0
    timeout: float | None = None
    timeout_before_kill: float = DEFAULT_TIMEOUT_BEFORE_KILL
    run_id: str | None = None
    secret: str | None = field(default_factory=_secret_of_environment, repr=False)
    mpi: MpiLauncher | None = None

    def __post_init__(self) -> None:
        if self.nproc_per_node < 1:
            raise ValueError(f"--nproc-per-node must be 1 or more, not {self.nproc_per_node}")
        check_rank_count("--nproc-per-node", self.nproc_per_node)
        if self.nnodes < 1:
            raise ValueError(f"--nnodes must be 1 or more, not {self.nnodes}")
        if self.max_restarts < 0:
            raise ValueError(f"--max-restarts must be 0 or more, not {self.max_restarts}")
        if self.timeout is None:
            default_timeout()  # what the ranks will ask
        elif not self.timeout > 0:
            raise ValueError(f"--timeout must be a number of seconds above 0, not {self.timeout:g}")
        try:
            check_timeout(self.timeout_before_kill)
        except ValueError:
            raise ValueError(
                f"--timeout-before-kill must be 0 or more seconds, not {self.timeout_before_kill:g}"
            ) from None
        resolve_secret(self.secret or "")
        self._check_rendezvous()
        self._check_mpi()
        self._check_program()

    def _check_rendezvous(self) -> None:
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            allowed = f"give 0 to {self.nnodes - 1}" if self.nnodes > 1 else "leave it out, or give 0"
            raise ValueError(
                f"--node-rank {self.node_rank} is not one of the {counted(self.nnodes, 'host')}; {allowed}"
            )
        if self.master_addr is not None and not self.master_addr.strip():
            raise ValueError("--master-addr must name a host, not be empty")
        if self.master_port is not None and not 1 <= self.master_port <= 65535:
            raise ValueError(f"--master-port must be 1 to 65535, not {self.master_port}")
        if self.nnodes == 1:
            return
        needed = {
            "--node-rank": self.node_rank,
            "--master-addr": self.master_addr,
            "--master-port": self.master_port,
        }
        missing = [option for option, value in needed.items() if value is None]
        if missing:
            raise ValueError(
                f"{self.nnodes} hosts need {', '.join(missing)}: give each host its own --node-rank, and all "
                "hosts the same --master-addr and --master-port of host 0"
            )
        if not self.secret:
            raise ValueError(
                f"{self.nnodes} hosts need one secret: set FERRODIST_SECRET to the same value on each "
                "(make one with 'ferrodist secret')"
            )

    def _check_mpi(self) -> None:
        if self.mpi is None:
            return
        if self.nnodes > 1:
            raise ValueError("--mpi starts the ranks of one host: over several, use the MPI's own mpiexec, or srun")
        if self.mpi is MpiLauncher.MPIEXEC and self.max_restarts:
            raise ValueError("--max-restarts goes with --mpi pmi: mpiexec starts its ranks once")

    def _check_program(self) -> None:
        if not self.program:
            raise ValueError("the program to run has an empty name")
        if self.kind is ProgramKind.SCRIPT and not Path(self.program).exists():
            raise ValueError(f"there is no script {self.program!r}; give a path that exists, or -m for a module")
        if self.kind is ProgramKind.EXECUTABLE and shutil.which(self.program) is None:
            raise ValueError(f"there is no executable {self.program!r} on PATH; check its name and permissions")

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        return self.nnodes * self.nproc_per_node

    def global_rank(self, local_rank: int) -> int:
        """The rank, in the whole job, of this host's ``local_rank``."""
        return (self.node_rank or 0) * self.nproc_per_node + local_rank

    def timeout_variable(self) -> dict[str, str]:
        """The variable that gives the ranks their default timeout, where the launch has one."""
        return {} if self.timeout is None else {TIMEOUT_VARIABLE: f"{self.timeout:g}"}

    def command(self) -> tuple[str, ...]:
        """The command line that every rank runs."""
        program = (self.program, *self.arguments)
        if self.kind is ProgramKind.EXECUTABLE:
            return program
        if self.kind is ProgramKind.MODULE:
            return (sys.executable, "-m", *program)
        if self.program.startswith("-"):  # a file with such a name, which Python would take for an option
            return (sys.executable, f"./{self.program}", *self.arguments)
        return (sys.executable, *program)
