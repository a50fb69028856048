"""The specification of a launch: the program, the number of ranks, their rendezvous, environment and limits.

Variables have torchrun's names, so that programs written for torchrun run unchanged.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import resource
import shutil
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.deadline import TIMEOUT_VARIABLE, check_timeout, default_timeout
from ferrodist.rendezvous.secret import SECRET_VARIABLE, resolve_secret
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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


def usable_cores() -> int:
    """Return the number of cores this process may run on: its affinity mask, or all cores."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
    environment = {**base, "WORLD_SIZE": str(spec.world_size), "PYTHONUNBUFFERED": "1"}
    if spec.timeout is not None:
        environment[TIMEOUT_VARIABLE] = f"{spec.timeout:g}"
    if not environment.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(max(1, cores // spec.nproc_per_node))
    return environment


def rank_environment(
    spec: LaunchSpec, attempt: Attempt, local_rank: int, *, base: Mapping[str, str], cores: int
) -> dict[str, str]:
    """Return ``base`` with a rank's variables."""
    rank = str(spec.global_rank(local_rank))
    return {
        **launch_environment(spec, base, cores),
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(spec.nproc_per_node),
        "GROUP_RANK": str(spec.node_rank or 0),
        "GROUP_WORLD_SIZE": str(spec.nnodes),
        "ROLE_NAME": "default",
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


# Standard output, standard error and, on Linux, a pidfd.
_DESCRIPTORS_PER_RANK = 3

# The launcher's own, and those that are open only while a rank is being started.
_DESCRIPTORS_RESERVED = 32


def rank_limit() -> tuple[float, str]:
    """Return the most ranks that can be started (math.inf without a limit), and that limit with how to see it.

    It is the narrower of the limits on processes and on descriptors; usage by others is not counted.
    """
    descriptors = (_soft_limit(resource.RLIMIT_NOFILE) - _DESCRIPTORS_RESERVED) / _DESCRIPTORS_PER_RANK
    # The kernel does not hold root to its number of processes.
    processes = math.inf if os.geteuid() == 0 else _soft_limit(resource.RLIMIT_NPROC)
    if descriptors <= processes:
        fitting = max(1, math.floor(descriptors)) if math.isfinite(descriptors) else math.inf
        return fitting, "open files (ulimit -n)"
    return processes, "processes (ulimit -u)"


def check_rank_count(option: str, count: int) -> None:
    """Raise ValueError, naming the command-line option, if this host does not allow so many ranks."""
    most, reason = rank_limit()
    if count > most:
        raise ValueError(
            f"{option} {count} is more than this host allows: {counted(most, 'rank')},"
            f" for the limit on {reason}; start fewer, or raise that limit"
        )


def _soft_limit(resource_id: int) -> float:
    soft, _ = resource.getrlimit(resource_id)
    return math.inf if soft == resource.RLIM_INFINITY else soft


DEFAULT_TIMEOUT_BEFORE_KILL = 5.0  # seconds between asking the ranks to end and SIGKILL


class ProgramKind(enum.Enum):
    """The way in which a launch's program is started."""

    SCRIPT = "script"  # python program args
    MODULE = "module"  # python -m program args
    EXECUTABLE = "executable"  # program args


class MpiLauncher(enum.Enum):
    """The process manager of an MPI's ranks."""

    MPIEXEC = "mpiexec"  # the MPI's own, which this process becomes
    PMI = "pmi"  # this process, as MPICH's process manager


def _secret_of_environment() -> str | None:
    resolve_secret(None)  # refuses here what the ranks would refuse
    return os.environ.get(SECRET_VARIABLE) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """A launch on one host; a job over several hosts is one launch on each.

    Args:
        program: The path of the script, dotted name of the module, or name of the executable.
        arguments: The program's arguments, passed unchanged.
        kind: The way ``program`` is started.
        nproc_per_node: The number of ranks on this host; every host of a job has the same number.
        nnodes: The number of hosts in the job.
        node_rank: The rank of this host, 0-based; required with several hosts.
        master_addr: The address at which rank 0 listens. None means this host, and is allowed for one host only.
        master_port: Rank 0's port. None means a free one for every attempt, and is allowed for one host only.
        max_restarts: The number of restarts of all ranks of this host after failures.
        timeout: Seconds that ranks wait for each other by default. None leaves it to FERRODIST_TIMEOUT.
        timeout_before_kill: Seconds between asking the ranks to end and SIGKILL.
        run_id: The name of the job, the same on all hosts. None generates one, for one host only.
        secret: The shared secret of the ranks; ``FERRODIST_SECRET`` by default. None generates one, for one host only.
        mpi: The process manager of an MPI's ranks; None without MPI.

    Raises:
        ValueError: The launch is impossible; the message says what to give instead.
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
            default_timeout()  # raises here what the ranks would raise
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
        options = ("--node-rank", "--master-addr", "--master-port")
        values = (self.node_rank, self.master_addr, self.master_port)
        missing = [option for option, value in zip(options, values, strict=True) if value is None]
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
        """The number of ranks in the job."""
        return self.nnodes * self.nproc_per_node

    def global_rank(self, local_rank: int) -> int:
        """Return the rank in the job of this host's ``local_rank``."""
        return (self.node_rank or 0) * self.nproc_per_node + local_rank

    def command(self) -> tuple[str, ...]:
        """Return the command line of every rank."""
        program = (self.program, *self.arguments)
        if self.kind is ProgramKind.EXECUTABLE:
            return program
        if self.kind is ProgramKind.MODULE:
            return (sys.executable, "-m", *program)
        if self.program.startswith("-"):  # Python would take the file's name for an option
            return (sys.executable, f"./{self.program}", *self.arguments)
        return (sys.executable, *program)
