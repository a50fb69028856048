"""Where checkpoints lie: what saving and loading need of a folder, on a disk or in an object store.

[Note: commit]
A checkpoint is there when its manifest is: ``put`` of the manifest is the last thing of a save, and it is atomic. Files
with tensors are written before, under names that no committed manifest of the folder mentions. A save has an id:

    rank 0    begin(id)
    all       create(id, name, size).write(...).close()        durable when close returns
    rank 0    with exclusive(deadline): publish(id, names), put(manifest), remove(what no manifest mentions any more)

A save that failed, or whose ranks were killed, leaves the folder's manifest as it was. ``discard`` removes what it
wrote; where rank 0 was killed the other ranks do, and where nobody was left to call that, the next save to the folder.

[Note: living saves]
Several jobs may save to one folder at a time. On a disk ``begin`` locks a file in the save's own folder, and holds the
lock as long as the save lives: the system drops it when the process ends, however it does. ``remove_leftovers`` removes
folders whose lock it gets. The file's name has the running system's boot id, for some file systems that hosts share
have locks for each host alone, and some none: the folder of another system, or one without a lock that works, is left
there until nothing in it was changed for a day. In an object store ``begin`` puts a small object that says of which
process the save is: on that host the system is asked whether it lives, elsewhere it counts as living for a day.

[Note: staged or not]
On a disk a save has a folder of its own until ``publish`` moves its files to their places. Object stores can't move:
a file has its place when it is closed. There its name has the save's id in it, so that it overwrites nothing and
belongs to no checkpoint until a manifest names it. From the moment at which the manifest's ``put`` is sent, nobody can
be sure for a while that it won't appear; so nothing of that save is removed after that, unless the store has refused.
What then belongs to no checkpoint goes with the next save.

Whether the process of a save lives, told by what it has written of itself; see [Note: living saves] in `base`.
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
"""The most that `Storage.get` reads: room for a manifest of some million shards."""

_SAVE_FILE_NAME = re.compile(r"model-([0-9a-f]{12})-\d{5,}-of-\d{5,}\.safetensors")
"""Names that only saves give: what a save was killed before it could remove is known by them for what it is."""


def save_id_of(name: str) -> str | None:
    """The id of the save that a file's name has in it; None if it has none."""
    found = _SAVE_FILE_NAME.fullmatch(name)
    return found and found[1]


class FileWriter(Protocol):
    """A file that is being written from its beginning to its end."""

    def write(self, data: memoryview) -> None:
        """Add bytes; they may be changed when it has returned."""

    def close(self) -> None:
        """Make it last: what was written is there after a loss of power."""

    def discard(self) -> None:
        """Give up; nothing of it stays, even if it was closed."""


class Storage(Protocol):
    """A folder. All methods raise OSError for what the storage can't do."""

    url: str
    """Its name, for messages."""

    request_bytes: int
    """How many bytes it is worth to ask for at once, at most."""

    is_staged: bool
    """Whether files have their places in the folder when they are published, not before; see [Note: staged or not]."""

    def begin(self, save_id: str) -> None:
        """Make the folder, and room for the files of a save; who calls this is the one that commits or discards it."""

    def create(self, save_id: str, name: str, size_bytes: int) -> FileWriter:
        """Begin a file of a save, and find room for it where that can be asked for."""

    def exclusive(self, deadline: Deadline) -> AbstractContextManager[None]:
        """Keep other saves to the folder from being committed meanwhile, where that can be done.

        TimeoutError if one is, and goes on until the deadline.
        """

    def publish(self, save_id: str, names: Sequence[str]) -> None:
        """Give closed files of a save their places in the folder."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small file whole, at once and for good: readers see what was there before, or this."""

    def read_beside(self, name: str, size_bytes: int) -> list[bytes]:
        """The beginnings of the files of one name in this folder, and in the folders that lie where this one lies."""

    def copy(self, name: str, new_name: str) -> None:
        """Give a file of the folder a second name, whatever had that before; OSError where that can't be done."""

    def discard(self, save_id: str) -> None:
        """Remove what all ranks have made for a save, but for what `publish` has moved, and what may be committed.

        Where files are not staged only the storage that began the save can tell what may be: others do nothing.
        The folder goes too if `begin` has made it.
        """

    def remove(self, names: Collection[str]) -> None:
        """Remove files; those that are not there count as removed."""

    def living_saves(self) -> set[str]:
        """The ids of saves that may live, among those whose files have their places already."""

    def has_leftovers(self, save_id: str = "") -> bool:
        """Whether a save was begun here that was neither committed nor discarded; any save, or one."""

    def remove_leftovers(self) -> None:
        """Remove what saves left that nobody could discard; see [Note: living saves]."""

    def remove_folder(self) -> None:
        """Remove the folder if nothing is in it."""

    def list_names(self) -> list[str]:
        """The names of files in the folder; none if there is no folder."""

    def list_folders(self) -> list[str]:
        """The names of folders in the folder, without links to others; none if there is no folder."""

    def size_bytes(self, name: str) -> int:
        """The size of a file; FileNotFoundError if it is not there, OSError if it is no regular file."""

    def get(self, name: str) -> bytes:
        """A small file whole; FileNotFoundError if it is not there.

        OSError if it is no regular file, or has more than `MAX_SMALL_FILE_BYTES`.
        """

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill memory from a place of a file on; EOFError if the file ends before."""

    def close(self) -> None:
        """Give back what reading keeps open."""


DEAD_AFTER_SECONDS = 86_400
"""How long nothing has changed of a save of which nobody can tell whether it lives, until it counts as dead."""


def system_id() -> bytes:
    """What no other running system has: the boot id, or at least the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return os.uname().nodename.encode()


def describe_process() -> bytes:
    """This process: its system, its namespace of process ids, its id there, and when it was started."""
    return b" ".join((system_id(), _pid_namespace(), str(os.getpid()).encode(), _start_time(os.getpid())))


def is_process_alive(description: bytes) -> bool | None:
    """Whether a process that described itself lives; None if that can't be told here."""
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
    """When a process was started, in the system's ticks; empty if there is none, or it has ended."""
    try:
        state, *facts = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return b""
    return b"" if state in (b"Z", b"X") else facts[18]
