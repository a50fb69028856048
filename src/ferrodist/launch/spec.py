"""The specification of a launch: the program, the number of ranks, and their rendezvous."""

from __future__ import annotations

import enum
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.arguments import check_int, check_type
from ferrodist.deadline import check_timeout, default_timeout
from ferrodist.launch.cpu_binding import BindPolicy, bind_ranks
from ferrodist.launch.host_limits import check_rank_count
from ferrodist.launch.rank_logs import LogOptions
from ferrodist.launch.signals import STOP_SIGNALS
from ferrodist.rendezvous.secret import SECRET_VARIABLE, resolve_secret
from ferrodist.wording import counted

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping

DEFAULT_ROLE = "default"
VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
HIP_DEVICES_VARIABLE = "HIP_VISIBLE_DEVICES"
"""AMD's variable, which comes before the other one, as in torchrun."""

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


def visible_devices(num_ranks: int, environment: Mapping[str, str]) -> list[str]:
    """The value of CUDA_VISIBLE_DEVICES with the GPU of each rank of this host; ValueError: there are too few."""
    variable = HIP_DEVICES_VARIABLE if environment.get(HIP_DEVICES_VARIABLE) else VISIBLE_DEVICES_VARIABLE
    named = environment.get(variable)
    if named is None:
        return [str(local_rank) for local_rank in range(num_ranks)]
    devices = [device for each in named.split(",") if (device := each.strip())]
    if len(devices) < num_ranks:
        raise ValueError(
            f"--virtual-local-rank gives each of the {counted(num_ranks, 'rank')} a GPU of its own, and"
            f" {variable}={named!r} names {len(devices)}"
        )
    return devices[:num_ranks]


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
        bind: The CPUs that each rank of this host is bound to.
        logs: The files and streams to which the ranks' output goes.
        role: The value of ROLE_NAME.
        virtual_local_rank: Whether each rank has LOCAL_RANK 0, and sees one GPU in CUDA_VISIBLE_DEVICES: its own.
        stop_signals: Signals to the launcher that end the ranks.
        place_source: The software that told this host's place, such as "Slurm", for people; "" if the user did.

    Raises:
        TypeError, ValueError: The launch is impossible; the message says what to give instead.
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
    bind: BindPolicy = BindPolicy.NONE
    logs: LogOptions = field(default_factory=LogOptions)
    role: str = DEFAULT_ROLE
    virtual_local_rank: bool = False
    stop_signals: frozenset[signal.Signals] = STOP_SIGNALS
    place_source: str = ""

    def __post_init__(self) -> None:
        check_type(self.kind, ProgramKind, "kind must be a ProgramKind")
        check_type(self.arguments, (tuple, list), "arguments must be a tuple of texts")
        for each in self.arguments:
            check_type(each, str, "arguments must be texts")
        for name in ("nproc_per_node", "nnodes", "max_restarts"):
            check_int(name, getattr(self, name))
        if self.nproc_per_node < 1:
            raise ValueError(f"--nproc-per-node must be 1 or more, not {self.nproc_per_node}")
        check_type(self.logs, LogOptions, "logs must be a LogOptions")
        check_rank_count("--nproc-per-node", self.nproc_per_node, self.logs.num_files(self.nproc_per_node))
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
        check_type(self.bind, BindPolicy, "bind must be a BindPolicy")
        bind_ranks(self.bind, self.nproc_per_node)
        self.logs.check_local_ranks(self.nproc_per_node)
        if self.virtual_local_rank:
            visible_devices(self.nproc_per_node, os.environ)  # raises if there are too few
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
        if self.mpi is MpiLauncher.MPIEXEC and self.bind is not BindPolicy.NONE:
            raise ValueError("--bind goes with --mpi pmi: mpiexec binds the ranks that it starts; see its --bind-to")
        if self.mpi is MpiLauncher.MPIEXEC and (self.logs.has_folder or self.logs.needs_pipes):
            raise ValueError(
                "--log-dir, --redirects, --tee, filters and prefixes go with --mpi pmi: mpiexec carries its ranks'"
                " output"
            )
        if self.mpi is MpiLauncher.MPIEXEC and self.virtual_local_rank:
            raise ValueError("--virtual-local-rank goes with --mpi pmi: mpiexec numbers the ranks that it starts")
        if self.mpi is MpiLauncher.MPIEXEC and (self.role != DEFAULT_ROLE or self.stop_signals != STOP_SIGNALS):
            raise ValueError(
                "--role and --signals-to-handle go with --mpi pmi: mpiexec starts its ranks, and handles signals"
            )

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
