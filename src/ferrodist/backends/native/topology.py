"""How ranks of different hosts connect, each to each.

Which processors the ranks of a group may use, and whether there are enough.

A rank that has a processor to itself waits by looking; ranks that share one give way to each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import operator
import os
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ferrodist.backends.signature import CollectiveSignature
from ferrodist.backends.tcp.connection import tune
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable, DistributedError, DistributedTimeoutError, RendezvousError, ranks_text
from ferrodist.rendezvous.auth import Hello, connect
from ferrodist.rendezvous.listener import Listener, parse_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ferrodist.backends.base import Backend

_MAX_TEXT = 100  # bytes of an error, or of an address, that travel with an agreement
_PROBLEM = "!"  # in the place of an address
_POLL_SECONDS = 0.05
_NEWS_SECONDS = 1.0
"""How long the news of a rank's end may take to come after its connections have ended."""

_SIOCGIFADDR = 0x8915


def host_id() -> bytes:
    """16 bytes that are equal for processes that can meet on a Unix socket and know each other's users.

    They have this boot, this network namespace and this user namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user")]  # noqa: PTH115 - no paths
    except OSError:  # nobody can be known to be on this host
        return secrets.token_bytes(16)
    return hashlib.blake2b(f"{boot}{namespaces}".encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTopology:
    """Where a rank of a group is, and what it needs to meet the others.

    Args:
        hosts: Of each rank of the group, something that is equal for those that can share memory.
        address: This rank's address that other hosts can reach, without a port.
        secret: The job secret.
        job: Name of the job.
    """

    hosts: tuple[bytes, ...]
    address: str
    secret: bytes = field(repr=False)
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


def agree_on_topology(group: Backend, problem: str, what: str, deadline: Deadline) -> None:
    """Raise BackendUnavailable on all ranks when any has a problem; called on all."""
    said = group.verifier.verify(
        CollectiveSignature(operation=what, payload=problem.encode()[:_MAX_TEXT]), deadline.remaining()
    )
    check_problems(group, said, what)


def check_problems(group: Backend, said: Iterable[bytes], what: str) -> None:
    """Raise BackendUnavailable when ``said`` has any text: what ranks have said to all, or what this one found."""
    problems = dict.fromkeys(text.decode(errors="replace") for text in said if text)
    if problems:
        raise BackendUnavailable(
            f"the ranks of group {group.name!r} can't {what}: {'; '.join(problems)}. Use the tcp backend, or mend"
            " what the system says."
        )


def connect_hosts(group: Backend, place: HostTopology, purpose: str, deadline: Deadline) -> list[int]:
    """Connect to every rank of other hosts; called on all ranks, which agree afterwards on whether all could.

    Args:
        group: The group.
        place: Where its ranks are.
        purpose: What the connections are for: they meet only those of the same.
        deadline: For all of it.

    Returns:
        A descriptor for each rank, which is the caller's; -1 for ranks of this host.

    Raises:
        BackendUnavailable: On all ranks, when one can't listen; on this rank, when it can't connect or be connected to.
        DistributedTimeoutError: On this rank, when another one did not connect to it in time.
        DistributedError: What the group has ended with. Who gets an error that is its own ends the group.
    """
    if place.num_hosts == 1:
        return [-1] * group.world_size
    meeting = _Meeting(group, place, purpose)
    server: Listener | None = None
    try:
        try:
            server = Listener(place.address, 0, secret=place.secret, deadline=deadline)
            server.serve(meeting.admit, meeting.take)
            said = server.address
        except (DistributedError, OSError, RuntimeError) as error:  # the last of a thread that can't be started
            said = f"{_PROBLEM}rank {group.rank}: {error}"
        call = CollectiveSignature(operation="connect hosts", payload=said.encode()[:_MAX_TEXT])
        addresses = [address.decode(errors="replace") for address in group.verifier.verify(call, deadline.remaining())]
        problems = [address[1:].encode() for address in addresses if address.startswith(_PROBLEM)]
        check_problems(group, problems, "connect hosts")
        assert server is not None
        meeting.dial(addresses, deadline)
        meeting.await_others(server, deadline)
        return meeting.hand_over()
    finally:
        if server is not None:
            server.close()
        meeting.close()


class _Meeting:
    """The connections of one rank as they come about: it dials lower ranks, and higher ones dial it."""

    def __init__(self, group: Backend, place: HostTopology, purpose: str) -> None:
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
        for rank in self._remote:
            if rank < group.rank:
                host, port = parse_address(addresses[rank])
                hello = Hello(
                    purpose=self._purpose,
                    job=place.job,
                    rank=group.rank,
                    world_size=group.world_size,
                    group=self._name,
                    address=addresses[rank],
                )
                try:
                    # It has listened since before it told its address: refused, it is gone.
                    sock = connect(host, port, secret=place.secret, hello=hello, deadline=deadline, retry_refused=False)
                except (DistributedError, OSError) as error:
                    self._raise_failure(_NEWS_SECONDS if isinstance(error.__cause__, ConnectionError) else 0.0)
                    check_problems(
                        group, [f"rank {group.rank}: connecting to rank {rank}: {error}".encode()], "connect hosts"
                    )
                with self._changed:
                    self._sockets[rank] = sock

    def await_others(self, server: Listener, deadline: Deadline) -> None:
        """Wait for the ranks after this one to connect to ``server``."""
        while True:
            with self._changed:
                self._changed.wait_for(self._is_complete, min(_POLL_SECONDS, deadline.remaining()))
                missing = tuple(rank for rank in self._remote if rank not in self._sockets)
            if not missing:
                return
            self._raise_failure(0.0)
            if server.exhaustion is not None:
                check_problems(self._group, [f"rank {self._group.rank}: {server.exhaustion}".encode()], "connect hosts")
            if deadline.expired:
                raise DistributedTimeoutError(
                    f"connecting hosts in group {self._group.name!r}: {ranks_text(missing)} did not connect to rank"
                    f" {self._group.rank} within {deadline.timeout:g} s. Look at what is going on there, or pass a"
                    f" larger timeout. Reported by rank {self._group.rank}.",
                    ranks=missing,
                )

    def _is_complete(self) -> bool:
        return len(self._sockets) == len(self._remote)

    def _raise_failure(self, patience: float) -> None:
        """Raise what the group has ended with, if it has, or does within so many seconds."""
        news = Deadline(patience)
        while self._group.failure is None and not news.expired:
            time.sleep(_NEWS_SECONDS / 100)
        if self._group.failure is not None:
            raise self._group.failure.fresh()

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


_MACHINE_BYTES = 6
_MASK_BYTES = 64
# Beside the rest of what a rank says, as many bytes as travel with a call.
_PACKED = struct.Struct(f"<{_MACHINE_BYTES}s{_MASK_BYTES}sH")
_NO_QUOTA = 0xFFFF


class CpuSet(NamedTuple):
    """The processors of a rank."""

    machine: bytes
    """Bytes that are equal for ranks on one machine, be it in different containers."""
    usable: int
    """Those that it may run on, as a mask."""
    quota: int
    """As how many its control group may use at once: all ranks of its container together."""

    @classmethod
    def size(cls) -> int:
        """Bytes that `pack` makes."""
        return _PACKED.size

    def pack(self) -> bytes:
        """In bytes, for other ranks."""
        return _PACKED.pack(self.machine, self.usable.to_bytes(_MASK_BYTES, "little"), self.quota)

    @classmethod
    def unpack(cls, text: bytes) -> CpuSet:
        """What `pack` has made."""
        machine, usable, quota = _PACKED.unpack(text)
        return cls(machine, int.from_bytes(usable, "little"), quota)

    @classmethod
    def of_this_process(cls) -> CpuSet:
        """What the system says."""
        try:
            machine = hashlib.blake2b(
                Path("/proc/sys/kernel/random/boot_id").read_bytes(), digest_size=_MACHINE_BYTES
            ).digest()
        except OSError:  # nobody can be known to be on this machine
            machine = secrets.token_bytes(_MACHINE_BYTES)
        usable = 0
        for processor in os.sched_getaffinity(0):
            usable |= 1 << processor % (8 * _MASK_BYTES)
        quota = _NO_QUOTA
        with contextlib.suppress(OSError, ValueError):
            allowed, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
            quota = min(quota, max(1, int(allowed) // int(period)))
        return cls(machine, usable, quota)


def is_oversubscribed(ranks: Sequence[CpuSet], hosts: Sequence[int]) -> bool:
    """Whether ranks outnumber the processors of a machine, or what the containers of a host may use of them."""
    usable: dict[bytes, list[int]] = {}
    quotas: dict[int, list[int]] = {}
    for rank, host in zip(ranks, hosts, strict=True):
        usable.setdefault(rank.machine, []).append(rank.usable)
        quotas.setdefault(host, []).append(rank.quota)
    return any(len(masks) > functools.reduce(operator.or_, masks).bit_count() for masks in usable.values()) or any(
        len(allowed) > max(allowed) for allowed in quotas.values()
    )
