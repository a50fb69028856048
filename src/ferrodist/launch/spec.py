"""What to launch, as a value: the program, how many ranks, and where they meet.

The environment of one rank, in torchrun's names: programs written for torchrun run unchanged.

How many ranks the limits on this process let it start.
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


# For each rank the launcher keeps its standard output, its standard error and, on Linux, its pidfd.
_DESCRIPTORS_PER_RANK = 3

# The launcher's own, and those that are open only while a rank is being started.
_DESCRIPTORS_RESERVED = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLimit:
    """The most ranks that can be started.

    Args:
        num_ranks: How many; ``math.inf`` where nothing limits them.
        reason: Which limit that is, and how to see it.
    """

    num_ranks: float
    reason: str


def rank_limit() -> RankLimit:
    """The narrower of the limits on processes and on descriptors, as they stand; what others use is not counted."""
    descriptors = (_soft(resource.RLIMIT_NOFILE) - _DESCRIPTORS_RESERVED) / _DESCRIPTORS_PER_RANK
    # The kernel does not hold root to its number of processes.
    processes = math.inf if os.geteuid() == 0 else _soft(resource.RLIMIT_NPROC)
    if descriptors <= processes:
        fitting = max(1, math.floor(descriptors)) if math.isfinite(descriptors) else math.inf
        return RankLimit(num_ranks=fitting, reason="open files (ulimit -n)")
    return RankLimit(num_ranks=processes, reason="processes (ulimit -u)")


def check_rank_count(option: str, count: int) -> None:
    """Raise ValueError, naming the command line's option, when this host does not allow so many ranks."""
    limit = rank_limit()
    if count > limit.num_ranks:
        raise ValueError(
            f"{option} {count} is more than this host allows: {counted(limit.num_ranks, 'rank')},"
            f" for the limit on {limit.reason}; start fewer, or raise that limit"
        )


def _soft(number: int) -> float:
    soft, _ = resource.getrlimit(number)
    return math.inf if soft == resource.RLIM_INFINITY else soft


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
