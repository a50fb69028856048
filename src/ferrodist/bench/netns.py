"""Two emulated hosts: network namespaces on one machine, with a virtual cable between them.

Processes of one reach those of the other over TCP alone: each has its own abstract Unix sockets, loopback and
addresses. They share files, and Unix sockets with a path, so that the driver talks to the ranks of both as usual.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from typing import TYPE_CHECKING

from ferrodist.bench.cases import Peer
from ferrodist.bench.environments import run_command
from ferrodist.rendezvous.secret import make_secret

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typing_extensions import Self

NUM_HOSTS = 2
_DEVICE = "cable"
_FIRST_PORT = 29_500  # free: the networks are our own
_COMMAND_TIMEOUT_SECONDS = 20


class HostsUnavailableError(Exception):
    """Network namespaces can't be created on this machine; the message says why."""


def host_index(rank: int, num_ranks: int) -> int:
    """The host of a rank: the first ranks are on the first host."""
    return rank * NUM_HOSTS // num_ranks


class EmulatedHosts:
    """Two hosts and the cable between them; a context; HostsUnavailableError if they can't be created."""

    device = _DEVICE  # the network device of either host

    def __init__(self) -> None:
        if os.geteuid() != 0:
            raise HostsUnavailableError("two hosts on one machine are network namespaces, which need root")
        if shutil.which("ip") is None:
            raise HostsUnavailableError("two hosts on one machine need the program ip (apt-get install iproute2)")
        self._names = [f"ferrodist-{os.getpid()}-{side}" for side in "ab"]
        self.secret = make_secret()
        self.addresses = [f"10.77.0.{host + 1}" for host in range(NUM_HOSTS)]

    def __enter__(self) -> Self:
        first, second = self._names
        try:
            for name in self._names:
                _run(["ip", "netns", "add", name])
            _run(["ip", "link", "add", _DEVICE, "netns", first, "type", "veth", "peer", _DEVICE, "netns", second])
            for name, address in zip(self._names, self.addresses, strict=True):
                _run(["ip", "-n", name, "address", "add", f"{address}/24", "dev", _DEVICE])
                for device in ("lo", _DEVICE):
                    _run(["ip", "-n", name, "link", "set", device, "up"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            with contextlib.suppress(HostsUnavailableError):  # it does not exist
                _run(["ip", "netns", "delete", name])

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


def _run(command: Sequence[str]) -> None:
    title = " ".join(command[:3])
    done = run_command(command, title=title, timeout=_COMMAND_TIMEOUT_SECONDS, failure=HostsUnavailableError)
    if done.returncode != 0:
        raise HostsUnavailableError(f"{title}: {done.stderr.strip()}")
