"""A store in a file, for processes that share a file system, on one host or several."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
from typing_extensions import override

from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import DistributedTimeoutError, ProtocolError, RendezvousError
from ferrodist.rendezvous.store import DEFAULT_STORE_TIMEOUT, TransactionalStore, missing_keys_error

if TYPE_CHECKING:
    from collections.abc import Iterator

_FAMILY = b"ferrodist store "
_HEADER = struct.Struct("!18sQ")
_MAGIC = _FAMILY + b"1\n"
_DECODER = msgspec.msgpack.Decoder(dict[str, bytes])
_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.001, 0.05
_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

# fcntl locks belong to the process: they do not exclude its threads, and closing any descriptor of the lock file
# releases the lock. So threads of a process first acquire the mutex of its path. They remove it when they are done, so
# that unused paths take no memory. The pid in the key gives a forked child fresh locks.
_MUTEXES: dict[tuple[int, str], threading.Lock] = {}


class FileStore(TransactionalStore):
    """A `Store` in one file.

    [Note: a kill at any moment] A change is made under a POSIX lock on ``path.lock``, which the kernel releases when
    the process dies: the whole map is written to ``path.tmp``, then renamed over ``path``. So readers, who take no
    lock, see the map before the change or after it, and the next writer replaces a killed writer's ``path.tmp``. Each
    version has a generation number, so that polling reads the header alone. The cost of a change grows with the size of
    the map, which suits a rendezvous but not bulk data. Threads that change the store wait for each other.

    Args:
        path: The file; its folder must exist. Created with mode 0600.
        timeout: The default timeout of a call, in seconds.

    Raises:
        RendezvousError: The folder is missing; or, from any call, the file belongs to another user or is writable by
            others, so that its contents can't be trusted.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = DEFAULT_STORE_TIMEOUT) -> None:
        self._timeout = check_timeout(timeout)
        given = Path(path)
        try:
            self.path = given.parent.resolve(strict=True) / given.name
        except OSError as error:
            raise RendezvousError(f"the folder of the store file {given} cannot be used: {error}") from error
        self._lock_path = self.path.with_name(self.path.name + ".lock")
        self._temporary_path = self.path.with_name(self.path.name + ".tmp")
        self._closed = threading.Event()
        self._cached: tuple[int, dict[str, bytes]] = (0, {})

    @override
    def close(self) -> None:
        self._closed.set()

    def remove(self, *, timeout: float | None = None) -> None:
        """Remove the file and its companions; called by the last user of the store."""
        with self._locked(timeout):
            for path in (self.path, self._temporary_path, self._lock_path):
                path.unlink(missing_ok=True)

    @override
    def _await(self, keys: list[str], timeout: float | None) -> dict[str, bytes]:
        deadline = Deadline(self._timeout if timeout is None else timeout)
        backoff = _MIN_BACKOFF_SECONDS
        while True:
            self._check_open()
            _, values = self._read()
            missing = [key for key in keys if key not in values]
            if not missing:
                return values
            if deadline.expired:
                raise missing_keys_error(f"store file {self.path}", missing, deadline)
            self._closed.wait(min(backoff, deadline.remaining()))
            backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)

    @contextlib.contextmanager
    @override
    def _transaction(self, key: str, timeout: float | None) -> Iterator[dict[str, bytes]]:
        """Lock the store, provide a copy of its map, and write it if it was changed."""
        with self._locked(timeout):
            generation, values = self._read()
            changed = dict(values)
            yield changed
            if changed != values:
                # A file created again after its removal must not repeat a generation that a reader has cached.
                self._write(generation + 1 if generation else secrets.randbits(62) + 1, changed)

    def _read(self) -> tuple[int, dict[str, bytes]]:
        """Return the generation (0: no file) and the map, which the caller must not change."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | _OPEN_FLAGS)
        except FileNotFoundError:
            return 0, {}
        except OSError as error:
            self._fail(error)
        try:
            return self._decode(descriptor)
        except OSError as error:
            if error.errno == errno.ESTALE:  # replaced by another host of a network file system
                return self._read()
            self._fail(error)

    def _decode(self, descriptor: int) -> tuple[int, dict[str, bytes]]:
        """Read an open store file, and close it."""
        try:
            self._check_private(self.path, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        with os.fdopen(descriptor, "rb") as file:
            header = file.read(_HEADER.size)
            if not header:  # an empty file made by the caller, as tempfile does
                return 0, {}
            if len(header) < _HEADER.size or not header.startswith(_MAGIC):
                what = "another version of ferrodist" if header.startswith(_FAMILY) else "something else"
                raise ProtocolError(f"the store file {self.path} was written by {what}; remove it or choose another")
            (_, generation) = _HEADER.unpack(header)
            cached_generation, values = self._cached
            if generation == cached_generation:
                return cached_generation, values
            try:
                values = _DECODER.decode(file.read())
            except ValueError as error:
                raise ProtocolError(f"the store file {self.path} is damaged ({error}); remove it") from error
        self._cached = (generation, values)
        return generation, values

    def _write(self, generation: int, values: dict[str, bytes]) -> None:
        try:
            self._temporary_path.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS
            with os.fdopen(os.open(self._temporary_path, flags, 0o600), "wb") as file:
                file.write(_HEADER.pack(_MAGIC, generation) + msgspec.msgpack.encode(values))
            self._temporary_path.replace(self.path)
        except OSError as error:
            self._fail(error)

    @contextlib.contextmanager
    def _locked(self, timeout: float | None) -> Iterator[None]:
        self._check_open()
        deadline = Deadline(self._timeout if timeout is None else timeout)
        key = (os.getpid(), str(self._lock_path))
        mutex = self._acquire_mutex(key, deadline)
        try:
            descriptor = self._lock(deadline)
            try:
                yield
            finally:
                os.close(descriptor)
        finally:
            del _MUTEXES[key]
            mutex.release()

    def _acquire_mutex(self, key: tuple[int, str], deadline: Deadline) -> threading.Lock:
        """Exclude this process's other threads, until the returned mutex is removed from `_MUTEXES` and released."""
        while True:
            mutex = _MUTEXES.setdefault(key, threading.Lock())
            if mutex.acquire(timeout=min(_MAX_BACKOFF_SECONDS, deadline.remaining())):
                if _MUTEXES.get(key) is mutex:
                    return mutex
                mutex.release()  # removed while this thread waited for it
            elif deadline.expired:
                raise self._lock_timeout_error(deadline)
            self._check_open()

    def _lock(self, deadline: Deadline) -> int:
        """Lock the lock file and return its descriptor; closing it unlocks."""
        backoff = _MIN_BACKOFF_SECONDS
        while True:
            try:
                descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, 0o600)
            except OSError as error:
                self._fail(error)
            if self._try_lock(descriptor):
                return descriptor
            os.close(descriptor)
            if deadline.expired:
                raise self._lock_timeout_error(deadline)
            self._closed.wait(min(backoff, deadline.remaining()))
            self._check_open()
            backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)

    def _try_lock(self, descriptor: int) -> bool:
        try:
            opened = os.fstat(descriptor)
            self._check_private(self._lock_path, opened)
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last user may have removed the file between the opening and the locking: then this lock is
            # on a file that nobody else will ever open.
            current = self._lock_path.stat(follow_symlinks=False)
        except (BlockingIOError, PermissionError, FileNotFoundError):
            return False
        except RendezvousError:
            os.close(descriptor)
            raise
        except OSError as error:
            os.close(descriptor)
            self._fail(error)
        return (opened.st_dev, opened.st_ino) == (current.st_dev, current.st_ino)

    def _check_private(self, path: Path, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise RendezvousError(f"{path} is not a regular file; choose another path for the store")
        if status.st_uid != os.geteuid():
            raise RendezvousError(
                f"{path} belongs to user {status.st_uid}, so it cannot be trusted as a store: choose another path"
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise RendezvousError(
                f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):o}), so it cannot "
                "be trusted as a store: remove it"
            )

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RendezvousError(f"the store at {self.path} was closed")

    def _lock_timeout_error(self, deadline: Deadline) -> DistributedTimeoutError:
        return DistributedTimeoutError(
            f"store file {self.path}: another process held its lock for {deadline.elapsed():.2f} s (limit "
            f"{deadline.timeout:.2f} s). Is one of the job's processes stopped, or the file system stuck?"
        )

    def _fail(self, error: OSError) -> NoReturn:
        raise RendezvousError(f"the store file {self.path} cannot be used: {error}") from error
