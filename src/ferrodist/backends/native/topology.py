"""The hosts of a group's ranks, and the processors that ranks may use.

A rank that has a processor to itself waits by polling; ranks that share one yield to each other.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ferrodist.cpu_quota import cpu_quota

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIOCGIFADDR = 0x8915  # of Linux


def host_id() -> bytes:
    """16 bytes that are equal for processes that can meet on a Unix socket and know each other's users.

    Such processes share a boot, a network namespace and a user namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user")]  # noqa: PTH115 - no paths
    except OSError:  # then no other process is known to be on this host
        return secrets.token_bytes(16)
    return hashlib.blake2b(f"{boot}{namespaces}".encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTopology:
    """The hosts of a group's ranks, and what this rank needs to connect to the others."""

    hosts: tuple[bytes, ...]  # by rank: an id that is equal for ranks that can share memory
    address: str  # this rank's, which other hosts can reach, without a port
    secret: bytes = field(repr=False)  # the job's
    job: str

    @property
    def num_hosts(self) -> int:
        """Number of hosts of the group."""
        return len(set(self.hosts))

    def host_leaders(self) -> list[int]:
        """Each rank's host, as the lowest rank of that host."""
        return [self.hosts.index(host) for host in self.hosts]

    def local_ranks(self, rank: int) -> list[int]:
        """The ranks on the host of ``rank``, including it, in order."""
        return [other for other, host in enumerate(self.hosts) if host == self.hosts[rank]]


def address_of_interface(name: str) -> str:
    """An address of a network interface, IPv4 if it has one; ValueError if there is none."""
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
# With the rest of a rank's introduction, as many bytes as travel with a call.
_PACKED = struct.Struct(f"<{_MACHINE_BYTES}s{_MASK_BYTES}sH")
_NO_QUOTA = 0xFFFF


class CpuSet(NamedTuple):
    """The processors of a rank."""

    machine: bytes  # an id that is equal for ranks on one machine, even in different containers
    usable: int  # a bit mask of the processors that it may run on
    quota: int  # the number of processors that its control group may use at once: all ranks of its container together

    @classmethod
    def size(cls) -> int:
        """Size of the result of `pack` in bytes."""
        return _PACKED.size

    def pack(self) -> bytes:
        """Encode the set for other ranks."""
        return _PACKED.pack(self.machine, self.usable.to_bytes(_MASK_BYTES, "little"), self.quota)

    @classmethod
    def unpack(cls, text: bytes) -> CpuSet:
        """Decode the result of `pack`."""
        machine, usable, quota = _PACKED.unpack(text)
        return cls(machine, int.from_bytes(usable, "little"), quota)

    @classmethod
    def of_this_process(cls) -> CpuSet:
        """The processors that the system allows this process."""
        try:
            machine = hashlib.blake2b(
                Path("/proc/sys/kernel/random/boot_id").read_bytes(), digest_size=_MACHINE_BYTES
            ).digest()
        except OSError:  # then no other process is known to be on this machine
            machine = secrets.token_bytes(_MACHINE_BYTES)
        usable = 0
        for processor in os.sched_getaffinity(0):
            usable |= 1 << processor % (8 * _MASK_BYTES)
        return cls(machine, usable, max(1, int(min(_NO_QUOTA, cpu_quota()))))


def is_oversubscribed(ranks: Sequence[CpuSet], hosts: Sequence[int]) -> bool:
    """Return whether some ranks of a machine share a processor, or outnumber the quota of a host's container."""
    usable: dict[bytes, list[int]] = {}
    quotas: dict[int, list[int]] = {}
    for rank, host in zip(ranks, hosts, strict=True):
        usable.setdefault(rank.machine, []).append(rank.usable)
        quotas.setdefault(host, []).append(rank.quota)
    return any(_must_share(masks) for masks in usable.values()) or any(
        len(allowed) > max(allowed) for allowed in quotas.values()
    )


def _must_share(masks: Sequence[int]) -> bool:
    """Return whether not every rank can have a processor of its own, given the bit mask of each rank's processors.

    Ranks that are bound may be crowded on some processors beside idle ones. So it looks for a matching, by augmenting
    paths: a rank without a free processor takes one whose owner finds another.
    """
    owners: dict[int, int] = {}  # a processor's rank, by its bit
    taken = untried = 0

    def place(rank: int) -> bool:
        nonlocal taken, untried
        if free := masks[rank] & ~taken:
            bit = free & -free
            taken |= bit
            owners[bit] = rank
            return True
        while rest := masks[rank] & untried:
            bit = rest & -rest
            untried ^= bit
            if place(owners[bit]):
                owners[bit] = rank
                return True
        return False

    if len(masks) > functools.reduce(operator.or_, masks).bit_count():
        return True
    for rank in range(len(masks)):
        untried = taken
        if not place(rank):
            return True
    return False
