"""Whether the process of a save lives, told by what it has written of itself; see [Note: living saves] in `base`."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["DEAD_SECONDS", "describe_process", "is_process_alive", "system_id"]

DEAD_SECONDS = 86_400
"""How long nothing has changed of a save of which nobody can tell whether it lives, until it counts as dead."""


def system_id() -> bytes:
    """What no other running system has: the boot id, or at least the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return os.uname().nodename.encode()


def describe_process() -> bytes:
    """This process: its system, its namespace of process ids, its id there, and when it was started."""
    return b" ".join((system_id(), _namespace(), str(os.getpid()).encode(), _start_of(os.getpid())))


def is_process_alive(description: bytes) -> bool | None:
    """Whether a process that described itself lives; None if that can't be told here."""
    fields = description.split(b" ")
    if len(fields) != 4 or fields[0] != system_id() or fields[1] != _namespace() or not fields[2].isdigit():
        return None
    return _start_of(int(fields[2])) == fields[3]


def _namespace() -> bytes:
    try:
        return os.fsencode(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return b"?"


def _start_of(pid: int) -> bytes:
    """When a process was started, in the system's ticks; empty if there is none, or it has ended."""
    try:
        state, *facts = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return b""
    return b"" if state in (b"Z", b"X") else facts[18]
