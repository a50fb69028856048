"""The storage of a checkpoint: the `Storage` interface of a folder on a disk or in an object store.

Which of its methods a save calls when is in [Note: commit] in `checkpoint/commit.py`.

[Note: living saves]
Several jobs may save to one folder at a time. On a disk ``begin`` locks a file in the save's own folder, and holds the
lock during the save: the system drops it when the process ends, however it does. ``remove_leftovers`` removes folders
whose lock it gets. The file's name has the running system's boot id, since some shared file systems have locks for each
host only, and some have none: the folder of another system, or one without a working lock, is left alone until nothing
in it has changed for a day. In an object store ``begin`` puts a small marker object that identifies the process: on the
same host the system is asked whether it is alive (`describe_process`, `is_process_alive`), elsewhere it
counts as alive for a day.

[Note: staged or not]
On a disk a save has a folder of its own until ``publish`` moves its files into place. Object stores can't move: a file
is in place when it is closed. Its name contains the save's id, so that it overwrites nothing and belongs to no
checkpoint until a manifest names it. Once the manifest's ``put`` is sent, it may still appear for a while; so nothing
of that save is removed afterwards, unless the store has refused. Leftovers go with the next save.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from contextlib import AbstractContextManager

    from ferrodist.deadline import Deadline

MAX_SMALL_FILE_BYTES = 1 << 30
"""The limit of `Storage.get`: room for a manifest of some million shards."""

_SAVE_FILE_NAME = re.compile(r"model-([0-9a-f]{12})-\d{5,}-of-\d{5,}\.safetensors")
"""Only saves use such names, so that the leftovers of a killed save are recognized."""


def save_id_of(name: str) -> str | None:
    """Return the save id in a file's name; None without one."""
    found = _SAVE_FILE_NAME.fullmatch(name)
    return found and found[1]


class FileWriter(Protocol):
    """A file that is written sequentially."""

    def write(self, data: memoryview) -> None:
        """Append bytes, which may be reused afterwards."""

    def close(self) -> None:
        """Make the file durable, also after a loss of power."""

    def discard(self) -> None:
        """Remove the file, even if it was closed."""


class Storage(Protocol):
    """A checkpoint's folder. All methods raise OSError if the storage fails."""

    url: str
    """The folder's name, for messages."""

    request_bytes: int
    """The largest useful size of a read."""

    is_staged: bool
    """True if files move into the folder on `publish` only; see [Note: staged or not]."""

    def begin(self, save_id: str) -> None:
        """Create the folder and space for a save; the caller is the one to commit or discard it."""

    def create(self, save_id: str, name: str, size_bytes: int) -> FileWriter:
        """Begin a file of a save, and reserve its space where possible."""

    def exclusive(self, deadline: Deadline) -> AbstractContextManager[None]:
        """Lock out commits of other saves to the folder, where possible; TimeoutError after the deadline."""

    def publish(self, save_id: str, names: Sequence[str]) -> None:
        """Move closed files of a save into the folder."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically and durably."""

    def read_siblings(self, name: str, size_bytes: int) -> list[bytes]:
        """Return the first bytes of the files of one name in this folder and in its sibling folders."""

    def copy(self, name: str, new_name: str) -> None:
        """Give a file a second name, replacing a file of that name; OSError if the storage can't."""

    def discard(self, save_id: str) -> None:
        """Remove the files of a save of all ranks, except published files and a save that may be committed.

        Without staging only the storage that began the save knows whether it may be; others do nothing. The folder is
        removed too if `begin` created it.
        """

    def remove(self, names: Collection[str]) -> None:
        """Remove files; missing ones are ignored."""

    def living_saves(self) -> set[str]:
        """Return the ids of saves that may be alive, among those with files in place."""

    def has_leftovers(self, save_id: str = "") -> bool:
        """Return whether any save, or the given one, was begun here and neither committed nor discarded."""

    def remove_leftovers(self) -> None:
        """Remove the leftovers of dead saves; see [Note: living saves]."""

    def remove_folder(self) -> None:
        """Remove the folder if it is empty."""

    def list_names(self) -> list[str]:
        """List the files in the folder; empty without a folder."""

    def list_folders(self) -> list[str]:
        """List the folders in the folder, without links; empty without a folder."""

    def size_bytes(self, name: str) -> int:
        """Return a file's size; FileNotFoundError if it is missing, OSError if it is not a regular file."""

    def get(self, name: str) -> bytes:
        """Read a small file.

        FileNotFoundError if it is missing, OSError if it is not a regular file or exceeds `MAX_SMALL_FILE_BYTES`.
        """

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill memory with bytes of a file; EOFError if the file is too short."""

    def close(self) -> None:
        """Close the files that reading has opened."""


DEAD_AFTER_SECONDS = 86_400
"""The time without a change after which a save counts as dead if its process can't be checked."""


def system_id() -> bytes:
    """Return an id of the running system: the boot id, or the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return os.uname().nodename.encode()


def describe_process() -> bytes:
    """Describe this process: its system, PID namespace, PID and start time."""
    return b" ".join((system_id(), _pid_namespace(), str(os.getpid()).encode(), _start_time(os.getpid())))


def is_process_alive(description: bytes) -> bool | None:
    """Return whether a described process is alive; None if that can't be checked here."""
    fields = description.split(b" ")
    if len(fields) != 4 or fields[0] != system_id() or fields[1] != _pid_namespace() or not fields[2].isdigit():
        return None
    return _start_time(int(fields[2])) == fields[3]


def _pid_namespace() -> bytes:
    try:
        return os.fsencode(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return b"?"


def _start_time(pid: int) -> bytes:
    """Return a process's start time in ticks; empty if it has ended."""
    try:
        state, *facts = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return b""
    return b"" if state in (b"Z", b"X") else facts[18]
