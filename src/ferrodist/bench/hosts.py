"""Two hosts on one machine: network namespaces with a virtual cable between them.

Processes of one reach those of the other over TCP alone: abstract Unix sockets, loopback and addresses are each one's
own. Files are shared, and Unix sockets that have a path, so the driver talks to the ranks of both as ever.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING

from ferrodist.bench.peers import Peer
from ferrodist.rendezvous.secret import make_secret

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typing_extensions import Self

NUM_HOSTS = 2
_DEVICE = "cable"
_FIRST_PORT = 29_500  # in networks of our own
_LIMIT = 20  # seconds, for a command of ip
_AGENT_MODE = 0o700


class HostsUnavailableError(Exception):
    """This machine makes no network namespaces; the message says why."""


def host_of(rank: int, num_ranks: int) -> int:
    """Where a rank is: the first ranks are on the first host."""
    return rank * NUM_HOSTS // num_ranks


class EmulatedHosts:
    """Two hosts and the cable between them; a context that removes them.

    Raises:
        HostsUnavailableError: They can't be made.
    """

    device = _DEVICE
    """The network device of either host."""

    def __init__(self) -> None:
        if os.geteuid() != 0:
            raise HostsUnavailableError("two hosts on one machine are network namespaces, which need root")
        if shutil.which("ip") is None:
            raise HostsUnavailableError("two hosts on one machine need the program ip (apt-get install iproute2)")
        self._names = [f"ferrodist-{os.getpid()}-{side}" for side in "ab"]
        self.secret = make_secret()
        self.addresses = [f"10.77.0.{number}" for number in range(1, NUM_HOSTS + 1)]

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def meeting_of(self, peer: Peer) -> str:
        """Where a peer's rank 0 can serve its others, while those of all peers are there."""
        return f"{self.addresses[0]}:{_FIRST_PORT + list(Peer).index(peer)}"

    def prefix(self, host: int) -> list[str]:
        """What makes a command run on a host."""
        return ["ip", "netns", "exec", self._names[host]]

    def write_agent(self, path: Path) -> None:
        """Write a program that is to these hosts what ssh is to others: ``agent [option ...] address command ...``.

        The command sees a host name of its own: an MPI takes hosts of one name for one.
        """
        cases = "\n".join(
            f"    {address}) exec {shlex.join(self.prefix(host))} unshare --uts sh -c"
            f' "hostname host-{host}; exec \\"\\$@\\"" sh sh -c "$*" ;;'
            for host, address in enumerate(self.addresses)
        )
        path.write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1\nshift\n'
            f'case "$host" in\n{cases}\n    *) echo "there is no host $host" >&2; exit 1 ;;\nesac\n',
            encoding="utf-8",
        )
        path.chmod(_AGENT_MODE)

    def _make(self) -> None:
        first, second = self._names
        for name in self._names:
            _run(["ip", "netns", "add", name])
        _run(["ip", "link", "add", _DEVICE, "netns", first, "type", "veth", "peer", _DEVICE, "netns", second])
        for name, address in zip(self._names, self.addresses, strict=True):
            _run(["ip", "-n", name, "address", "add", f"{address}/24", "dev", _DEVICE])
            for device in ("lo", _DEVICE):
                _run(["ip", "-n", name, "link", "set", device, "up"])

    def _remove(self) -> None:
        for name in self._names:
            with contextlib.suppress(HostsUnavailableError):  # it was not made
                _run(["ip", "netns", "delete", name])


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        raise HostsUnavailableError(f"{' '.join(command[:3])} took more than {_LIMIT} s") from None
    if done.returncode != 0:
        raise HostsUnavailableError(f"{' '.join(command[:3])}: {done.stderr.strip()}")
