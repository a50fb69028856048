"""How ranks of different hosts connect, each to each."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.backends.call import Call
from ferrodist.backends.tcp.tuning import tune
from ferrodist.errors import BackendUnavailable, DistributedError, RendezvousError
from ferrodist.rendezvous.handshake import Hello, connect
from ferrodist.rendezvous.listener import Listener, parse_address

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline

__all__ = ["Place", "address_of_interface", "agree_on", "connect_hosts", "host_id"]

_MAX_TEXT = 100  # bytes of an error, or of an address, that travel with an agreement
_SIOCGIFADDR = 0x8915


def host_id() -> bytes:
    """16 bytes that are equal for processes that can meet on a Unix socket: this boot and this network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        network = os.readlink("/proc/self/ns/net")  # noqa: PTH115 - a name, not a path
    except OSError:  # nobody can be known to be on this host
        return secrets.token_bytes(16)
    return hashlib.blake2b(f"{boot}{network}".encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank of a group is, and what it needs to meet the others.

    Args:
        hosts: Of each rank of the group, something that is equal for those that can share memory.
        address: This rank's address that other hosts can reach, without a port.
        secret: The job secret.
        job: Name of the job.
    """

    hosts: tuple[bytes, ...]
    address: str
    secret: bytes
    job: str

    @property
    def num_hosts(self) -> int:
        """Number of hosts of the group."""
        return len(set(self.hosts))

    def host_numbers(self) -> list[int]:
        """Each rank's host, as the lowest rank of that host."""
        return [self.hosts.index(host) for host in self.hosts]

    def neighbours(self, rank: int) -> list[int]:
        """The ranks of the host of ``rank``, itself among them, in order."""
        return [other for other, host in enumerate(self.hosts) if host == self.hosts[rank]]


def agree_on(group: Backend, problem: str, what: str, deadline: Deadline) -> None:
    """Raise BackendUnavailable on all ranks when any has a problem; called on all."""
    said = group.agreement.reach(Call(operation=what, payload=problem.encode()[:_MAX_TEXT]), deadline.remaining())
    problems = [text.decode(errors="replace") for text in said if text]
    if problems:
        raise BackendUnavailable(
            f"the ranks of group {group.name!r} can't {what}: {'; '.join(problems)}. Use the tcp backend, or mend"
            " what the system says."
        )


def connect_hosts(group: Backend, place: Place, purpose: str, deadline: Deadline) -> list[int]:
    """Connect to every rank of other hosts; called on all ranks.

    Args:
        group: The group.
        place: Where its ranks are.
        purpose: What the connections are for: they meet only those of the same.
        deadline: For all of it.

    Returns:
        A descriptor for each rank, which is the caller's; -1 for ranks of this host.

    Raises:
        BackendUnavailable: On all ranks, when two of them can't connect.
    """
    if place.num_hosts == 1:
        return [-1] * group.world_size
    meeting = _Meeting(group, place, purpose)
    server = Listener(place.address, 0, secret=place.secret, deadline=deadline)
    try:
        server.serve(meeting.admit, meeting.take)
        call = Call(operation="connect hosts", payload=server.address.encode()[:_MAX_TEXT])
        addresses = [address.decode() for address in group.agreement.reach(call, deadline.remaining())]
        try:
            meeting.dial(addresses, deadline)
            problem = meeting.await_others(deadline)
        except (DistributedError, OSError) as error:
            problem = f"rank {group.rank}: {error}"
        server.close()
        agree_on(group, problem, "connect hosts", deadline)
        return meeting.hand_over()
    finally:
        server.close()
        meeting.close()


class _Meeting:
    """The connections of one rank as they come about: it dials lower ranks, and higher ones dial it."""

    def __init__(self, group: Backend, place: Place, purpose: str) -> None:
        self._group = group
        self._place = place
        self._purpose = purpose
        self._name = f"{group.name[:100]}:{group.group_id:x}"
        self._remote = sorted(set(range(group.world_size)) - set(place.neighbours(group.rank)))
        self._sockets: dict[int, socket.socket] = {}
        self._changed = threading.Condition()

    def admit(self, hello: Hello) -> None:
        """Raise unless ``hello`` is a rank's that this one waits for."""
        expected = (self._purpose, self._place.job, self._name)
        if (hello.purpose, hello.job, hello.group) != expected or hello.rank not in self._remote:
            raise RendezvousError(
                f"rank {hello.rank} came for {hello.purpose} {hello.group!r} of job {hello.job!r}, but this is rank"
                f" {self._group.rank} of group {self._name!r} of job {self._place.job!r}"
            )

    def take(self, sock: socket.socket, hello: Hello) -> None:
        """Keep a connection."""
        with self._changed:
            if hello.rank in self._sockets:
                sock.close()
                return
            self._sockets[hello.rank] = sock
            self._changed.notify()

    def dial(self, addresses: list[str], deadline: Deadline) -> None:
        """Connect to the ranks before this one."""
        group, place = self._group, self._place
        hello = Hello(
            purpose=self._purpose, job=place.job, rank=group.rank, world_size=group.world_size, group=self._name
        )
        for rank in self._remote:
            if rank < group.rank:
                host, port = parse_address(addresses[rank])
                sock = connect(host, port, secret=place.secret, hello=hello, deadline=deadline)
                with self._changed:
                    self._sockets[rank] = sock

    def await_others(self, deadline: Deadline) -> str:
        """Wait for the ranks after this one; returns what is wrong, or nothing."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._sockets) == len(self._remote), deadline.remaining())
            missing = [str(rank) for rank in self._remote if rank not in self._sockets]
        return f"rank {self._group.rank}: no connection from rank {', '.join(missing)}" if missing else ""

    def hand_over(self) -> list[int]:
        """The descriptors, which are the caller's from now on."""
        links = [-1] * self._group.world_size
        for rank, sock in self._sockets.items():
            tune(sock, self._group.timeout, None)
            links[rank] = sock.detach()
        return links

    def close(self) -> None:
        """Close what was not handed over."""
        for sock in self._sockets.values():
            sock.close()


def address_of_interface(name: str) -> str:
    """An address of a network interface, IPv4 if it has one.

    Raises:
        ValueError: There is no such interface, or it has no address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        found = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntop(socket.AF_INET, found[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, interface = line.split()
            if interface == name and not digits.startswith("fe80"):
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    names = ", ".join(interface for _, interface in socket.if_nameindex())
    raise ValueError(f"FERRODIST_SOCKET_IFNAME={name!r} is no interface with an address; there is {names}")
