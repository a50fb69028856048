"""Storage in a folder on a disk, or on a file system that hosts share."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import threading
import time
import uuid
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from ferrodist.checkpoint.storage.base import DEAD_AFTER_SECONDS, MAX_SMALL_FILE_BYTES, Storage, system_id
from ferrodist.checkpoint.storage.local_writer import LocalFileWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from ferrodist.deadline import Deadline

_SAVING = ".saving-"
_MAX_OPEN_FILES = 100
"""The most files that reading keeps open; a checkpoint may have more than a process may open."""

_LOCK_POLL_SECONDS = 0.01
_LOCK_PREFIX = "lock-"
"""The prefix of the locked file's name in a save's folder; see [Note: living saves] in `base`."""
_MAX_ATTEMPTS = 100


@dataclass(slots=True)
class _OpenFile:
    """A file that is being read, and the number of its readers."""

    descriptor: int
    num_readers: int = 0


class LocalStorage(Storage):
    """A `Storage` in a local folder: files of a save are in a folder of their own until they are published."""

    is_staged = True
    request_bytes = 4 << 20  # what is hashed next is in the cache

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.url = str(self.path)
        self._is_new = False
        """True if `begin` created the folder."""
        self._is_exclusive = False
        """True while `exclusive` is active."""
        self._release: Callable[[], object] = lambda: None
        """Releases the lock of the save that was begun here."""
        self._open: dict[str, _OpenFile] = {}
        """Open files, least recently used first."""
        self._lock = threading.Lock()

    @override
    def begin(self, save_id: str) -> None:
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self._is_new = bool(missing)
        self._release()
        # This also makes the checkpoint's own folder, and those above it.
        self._release = weakref.finalize(self, _unlock, _make_locked(self._staging_path(save_id)))
        for folder in missing:
            _sync_folder(folder.parent)
        _sync_folder(self.path)

    @override
    def create(self, save_id: str, name: str, size_bytes: int) -> LocalFileWriter:
        staging = self._staging_path(save_id)
        if not staging.is_dir():
            what = "rank 0 has made this folder, and it isn't here: all ranks must see one disk, and save to it in turn"
            raise FileNotFoundError(errno.ENOENT, what, str(staging))
        return LocalFileWriter(staging / name, size_bytes)

    @override
    @contextlib.contextmanager
    def exclusive(self, deadline: Deadline) -> Iterator[None]:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            while not _lock(descriptor):
                if deadline.expired:
                    what = "Another save to this folder is being committed, and has not ended in time"
                    raise TimeoutError(errno.ETIMEDOUT, what, self.url)
                time.sleep(min(_LOCK_POLL_SECONDS, deadline.remaining()))
            self._is_exclusive = True
            yield
        finally:
            self._is_exclusive = False
            _unlock(descriptor)

    @override
    def publish(self, save_id: str, names: Sequence[str]) -> None:
        staging = self._staging_path(save_id)
        _sync_folder(staging)
        for name in names:
            (staging / name).replace(self.path / name)
        _sync_folder(self.path)

    @override
    def put(self, name: str, data: bytes) -> None:
        staging = self._staging_path(f"{name}-{uuid.uuid4().hex}")
        writer = LocalFileWriter(staging, len(data))
        try:
            writer.write(memoryview(data))
            writer.close()
            writer.path.replace(self.path / name)
        except BaseException:
            writer.discard()
            raise
        _sync_folder(self.path)

    @override
    def copy(self, name: str, new_name: str) -> None:
        staging = self._staging_path(f"{new_name}-{uuid.uuid4().hex}")
        os.link(self.path / name, staging)
        staging.replace(self.path / new_name)
        _sync_folder(self.path)

    @override
    def discard(self, save_id: str) -> None:
        if self.path.is_dir():
            _remove_staging(self._staging_path(save_id))
            if self._is_new:
                self.remove_folder()
        self._release()

    @override
    def read_siblings(self, name: str, size_bytes: int) -> list[bytes]:
        beside = LocalStorage(self.path.parent)
        folders = {self.path, *(beside.path / each for each in beside.list_folders())}
        found = []
        for folder in folders:
            with contextlib.suppress(OSError), os.fdopen(open_regular(folder / name), "rb") as file:
                found.append(file.read(size_bytes))
        return found

    @override
    def remove(self, names: Collection[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    @override
    def living_saves(self) -> set[str]:
        return set()  # only the save that commits has files in the folder, and locks it

    @override
    def has_leftovers(self, save_id: str = "") -> bool:
        return any(self.path.glob(f"{_SAVING}{save_id}*"))

    @override
    def remove_leftovers(self) -> None:
        for found in list(self.path.glob(f"{_SAVING}*")):
            with contextlib.suppress(OSError):  # another process removes it, too
                if found.is_dir():
                    self._remove_if_dead(found)
                elif self._is_exclusive:  # an unfinished `put`, of which none is in progress now
                    found.unlink()

    def _remove_if_dead(self, staging: Path) -> None:
        """Remove a save's folder, unless the save may be alive."""
        try:
            descriptor = os.open(_lock_path(staging), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # of another system, or it is just beginning, or was half removed
            if self._is_expired(staging):
                _remove_staging(staging)
            else:
                staging.rmdir()  # unless something is in it
            return
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            except OSError:
                is_dead = self._is_expired(staging)
            else:  # unless it was removed and a save has begun since
                is_dead = _is_same_file(_lock_path(staging), descriptor)
            if is_dead:
                _remove_staging(staging)
        finally:
            os.close(descriptor)

    def _is_expired(self, staging: Path) -> bool:
        """Return whether nothing in a folder has changed for long, by its file system's clock."""
        with os.scandir(staging) as entries:
            last_change = max([staging.stat().st_mtime, *(entry.stat().st_mtime for entry in entries)])
        return self.path.stat().st_mtime - last_change > DEAD_AFTER_SECONDS

    @override
    def remove_folder(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()

    @override
    def list_names(self) -> list[str]:
        names = []
        for entry in self._entries():
            with contextlib.suppress(OSError):  # a link that leads to itself
                if entry.is_file():
                    names.append(entry.name)
        return names

    @override
    def list_folders(self) -> list[str]:
        folders = [entry.name for entry in self._entries() if entry.is_dir(follow_symlinks=False)]
        return [name for name in folders if not name.startswith(_SAVING)]

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.path) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except FileNotFoundError:
            return []

    @override
    def size_bytes(self, name: str) -> int:
        found = (self.path / name).stat()
        _check_regular(self.path / name, found)
        return found.st_size

    @override
    def get(self, name: str) -> bytes:
        with os.fdopen(open_regular(self.path / name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_SMALL_FILE_BYTES:
                what = f"It has {size} bytes, and may have {MAX_SMALL_FILE_BYTES}"
                raise OSError(errno.EFBIG, what, str(self.path / name))
            return file.read(size)

    @override
    def read(self, name: str, start: int, into: memoryview) -> None:
        remaining = into.cast("B")
        with self._file(name) as file:
            while len(remaining):
                count = os.preadv(file, [remaining], start)
                if not count:
                    raise EOFError(f"{self.path / name} ends {len(remaining)} bytes too early")
                start, remaining = start + count, remaining[count:]

    @override
    def close(self) -> None:
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1].descriptor)

    @contextlib.contextmanager
    def _file(self, name: str) -> Iterator[int]:
        with self._lock:
            file = self._open.pop(name, None)
            if file is None:
                idle = [name for name, each in self._open.items() if not each.num_readers]  # least recently used first
                for name_of_idle in idle[: max(0, len(self._open) - _MAX_OPEN_FILES + 1)]:
                    os.close(self._open.pop(name_of_idle).descriptor)
                file = _OpenFile(open_regular(self.path / name))
            self._open[name] = file
            file.num_readers += 1
        try:
            yield file.descriptor
        finally:
            with self._lock:
                file.num_readers -= 1

    def _staging_path(self, save_id: str) -> Path:
        return self.path / f"{_SAVING}{save_id}"


def _make_locked(staging: Path) -> int:
    """Create a save's folder with a locked file, anew if another process removes it; return the file's descriptor."""
    for _ in range(_MAX_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            return _make_locked_once(staging)
    return _make_locked_once(staging)


def _make_locked_once(staging: Path) -> int:
    with contextlib.suppress(FileExistsError):  # exist_ok would look again, when the folder may be gone
        staging.mkdir(parents=True)
    descriptor = os.open(_lock_path(staging), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        is_there = _is_same_file(_lock_path(staging), descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    if not is_there:
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "The folder of a save was removed as it was made", str(staging))
    return descriptor


def _remove_staging(staging: Path) -> None:
    """Remove a save's folder, its lock file last: without it a half removed folder would not be known to be dead."""
    with contextlib.suppress(OSError):  # another process removes it, too
        for entry in staging.iterdir():
            if not entry.name.startswith(_LOCK_PREFIX):
                entry.unlink(missing_ok=True)
    shutil.rmtree(staging, ignore_errors=True)


def _lock_path(staging: Path) -> Path:
    """Return the path of this system's lock file in a save's folder."""
    return staging / f"{_LOCK_PREFIX}{os.fsdecode(system_id())}"


def _is_same_file(path: Path, descriptor: int) -> bool:
    return os.path.samestat(path.stat(), os.fstat(descriptor))


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # closing isn't enough: a forked child may have it open, too
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def open_regular(path: Path) -> int:
    """Open a regular file for reading, and return its descriptor."""
    _check_regular(path, path.stat())  # a device or a FIFO may notice that it is opened
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_regular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: Path, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a folder, where a file is expected", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "Is no regular file, but a FIFO, a socket or a device", str(path))


def _lock(descriptor: int) -> bool:
    """Try to lock an open folder; file systems without locks count as locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _sync_folder(path: Path) -> None:
    """Make a folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
