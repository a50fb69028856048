"""The processors that the ranks of a group may use, and whether there are enough.

A rank that has a processor to itself waits by polling; ranks that share one yield to each other.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import os
import secrets
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        quota = _NO_QUOTA
        with contextlib.suppress(OSError, ValueError):
            allowed, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
            quota = min(quota, max(1, int(allowed) // int(period)))
        return cls(machine, usable, quota)


def is_oversubscribed(ranks: Sequence[CpuSet], hosts: Sequence[int]) -> bool:
    """Return whether ranks outnumber the processors of a machine, or the quota of a host's container."""
    usable: dict[bytes, list[int]] = {}
    quotas: dict[int, list[int]] = {}
    for rank, host in zip(ranks, hosts, strict=True):
        usable.setdefault(rank.machine, []).append(rank.usable)
        quotas.setdefault(host, []).append(rank.quota)
    return any(len(masks) > functools.reduce(operator.or_, masks).bit_count() for masks in usable.values()) or any(
        len(allowed) > max(allowed) for allowed in quotas.values()
    )
