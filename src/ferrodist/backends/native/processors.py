"""Which processors the ranks of a group may use, and whether there are enough.

A rank that has a processor to itself waits by looking; ranks that share one give way to each other.
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

__all__ = ["Processors", "is_crowded"]

_MACHINE_BYTES = 6
_MASK_BYTES = 64
# Beside the rest of what a rank says, as many bytes as travel with a call.
_PACKED = struct.Struct(f"<{_MACHINE_BYTES}s{_MASK_BYTES}sH")
_NO_QUOTA = 0xFFFF


class Processors(NamedTuple):
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
    def unpack(cls, text: bytes) -> Processors:
        """What `pack` has made."""
        machine, usable, quota = _PACKED.unpack(text)
        return cls(machine, int.from_bytes(usable, "little"), quota)

    @classmethod
    def of_this_process(cls) -> Processors:
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


def is_crowded(ranks: Sequence[Processors], hosts: Sequence[int]) -> bool:
    """Whether ranks outnumber the processors of a machine, or what the containers of a host may use of them."""
    usable: dict[bytes, list[int]] = {}
    quotas: dict[int, list[int]] = {}
    for rank, host in zip(ranks, hosts, strict=True):
        usable.setdefault(rank.machine, []).append(rank.usable)
        quotas.setdefault(host, []).append(rank.quota)
    return any(len(masks) > functools.reduce(operator.or_, masks).bit_count() for masks in usable.values()) or any(
        len(allowed) > max(allowed) for allowed in quotas.values()
    )
