"""Storage in a file system of fsspec: an object store or another machine.

Writers send a file part by part. The libraries' various errors become OSError. S3 and similar stores keep the parts of
an unfinished upload until somebody aborts it, invisible in listings but paid for; `remove_leftovers` aborts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import errno
import logging
import re
import time
import weakref
from typing import TYPE_CHECKING, Any

from fsspec.asyn import AsyncFileSystem, sync
from fsspec.spec import AbstractBufferedFile
from typing_extensions import override

from ferrodist.checkpoint.storage.base import (
    DEAD_AFTER_SECONDS,
    MAX_SMALL_FILE_BYTES,
    FileWriter,
    Storage,
    describe_process,
    is_process_alive,
    save_id_of,
)
from ferrodist.errors import describe_error

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from contextlib import AbstractContextManager

    from fsspec import AbstractFileSystem

    from ferrodist.deadline import Deadline

_logger = logging.getLogger(__name__)

_PART_BYTES = 16 << 20
"""The size of a part, kept in memory twice while it is sent; files of more than `_MAX_PARTS` have larger parts."""

_MAX_PARTS = 9_000
"""S3 takes 10,000 parts of a file."""

_RANGE_BYTES = 8 << 20
"""The size of a read request."""

_NUM_RANGES = 8
"""The number of concurrent read requests: S3 delivers 50 to 100 MB/s for each."""

_REMOVAL_BATCH = 16

_MARKER = re.compile(r"\.saving-([0-9a-f]{12})")
"""The name of the object that identifies a save's process; see [Note: living saves] in `base`."""

_MTIME_KEYS = ("LastModified", "last_modified", "mtime", "updated", "created")
"""The names of a file's modification time in various file systems."""

_own_saves: weakref.WeakValueDictionary[str, RemoteStorage] = weakref.WeakValueDictionary()
"""The unfinished saves of this process."""

_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "obs", "tos"})
"""Protocols of buckets: folders are name prefixes, never created or removed, and a put is atomic.

Their ``makedirs`` would create a bucket.
"""

_ERRNOS: dict[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
    TimeoutError: errno.ETIMEDOUT,
}
"""Error numbers of errors raised with a message only."""

_REFUSAL_CLASSES = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)


@contextlib.contextmanager
def as_os_errors(where: str) -> Iterator[None]:
    """Convert all errors of the block to OSError; ``where`` names the file."""
    try:
        yield
    except Exception as error:  # libraries of file systems raise classes that share nothing
        raise to_os_error(error, where) from error


def to_os_error(error: BaseException, where: str) -> OSError:
    """Convert an error to the OSError subclass of its number."""
    if not isinstance(error, OSError):
        return OSError(errno.EIO, describe_error(error), where)
    code = error.errno
    if code is None:
        code = next((code for kind, code in _ERRNOS.items() if isinstance(error, kind)), errno.EIO)
    text = error.strerror or (str(error).strip().partition("\n")[0]) or type(error).__name__
    return OSError(code, text, where)


def is_refusal(error: OSError) -> bool:
    """Return whether the store has refused; without an answer the operation may still take effect."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(getattr(cause, "response", None), dict):  # botocore's: what the server sent
            return True
        cause = cause.__cause__
    return isinstance(error, _REFUSAL_CLASSES)


class RemoteFileWriter(FileWriter):
    """A `FileWriter` that sends a file part by part; in object stores the file appears when it is closed."""

    def __init__(self, fs: Any, path: str, where: str, part_bytes: int) -> None:
        self._fs = fs
        self._path = path
        self._where = where
        self._part_bytes = part_bytes
        with as_os_errors(where):
            self._file: Any = fs.open(path, "wb", block_size=part_bytes)

    @override
    def write(self, data: memoryview) -> None:
        flat = data.cast("B")
        with as_os_errors(self._where):
            for start in range(0, len(flat), self._part_bytes):
                self._file.write(flat[start : start + self._part_bytes])

    @override
    def close(self) -> None:
        with as_os_errors(self._where):
            if self._file.closed:  # fsspec closes what it could not begin to send
                raise OSError(errno.EIO, "It was closed before, or its upload has failed")
            self._file.close()

    @override
    def discard(self) -> None:
        try:
            with as_os_errors(self._where), contextlib.suppress(FileNotFoundError):
                self._abort()
        except OSError as error:
            # Raised, it would hide the error that led here. The next save to the folder removes the file.
            _logger.warning("the unfinished upload of %s can't be removed: %s", self._where, error)

    def _abort(self) -> None:
        try:
            if isinstance(self._file, AbstractBufferedFile):
                self._file.closed = True  # closing it, as its finalizer does, would complete it
                with contextlib.suppress(FileNotFoundError):
                    self._file.discard()
            else:
                self._file.close()
        finally:
            # Stores without uploads have the file already, and the response of a completed upload may be lost.
            self._fs.rm_file(self._path)


class RemoteStorage(Storage):
    """A `Storage` over fsspec; see [Note: staged or not] in `base`. It turns off the listings caches of ``fs``.

    A manifest appears atomically in object stores. Elsewhere it does if the file system's ``mv`` renames, as on SFTP
    and HDFS; one that copies can leave a damaged manifest, which loading detects.
    """

    is_staged = False
    request_bytes = 64 << 20

    def __init__(self, fs: AbstractFileSystem, folder: str, url: str) -> None:
        self.url = url
        self._fs: Any = fs  # fsspec has no types
        self._folder = folder.rstrip("/")
        self._is_new = False
        """True if `begin` created the folder."""
        self._uncommitted: str | None = None
        """The save that was begun here and that no manifest can name yet."""
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self._has_buckets = bool(protocols & _OBJECT_STORES)
        self._has_folders = not self._has_buckets and "memory" not in protocols
        if hasattr(fs, "dircache"):
            fs.dircache.use_listings_cache = False

    @override
    def begin(self, save_id: str) -> None:
        with as_os_errors(self.url):
            if self._has_folders:
                self._fs.invalidate_cache()
                self._is_new = not self._fs.exists(self._folder)
                self._fs.makedirs(self._folder, exist_ok=True)
            if self._has_buckets:  # a missing one is found before anything is sent to it
                bucket = self._folder.partition("/")[0]
                try:
                    self._fs.info(bucket)
                except FileNotFoundError:
                    raise FileNotFoundError(errno.ENOENT, f"There is no bucket {bucket!r}: make it first") from None
                except OSError:
                    pass  # write access to a folder doesn't imply access to its bucket
            self._fs.pipe_file(self._path(f".saving-{save_id}"), describe_process())
        _own_saves[save_id] = self
        self._uncommitted = save_id

    @override
    def create(self, save_id: str, name: str, size_bytes: int) -> RemoteFileWriter:
        assert save_id_of(name) == save_id, "names of files that are not staged have the save's id"
        part_bytes = max(_PART_BYTES, size_bytes // _MAX_PARTS + 1)
        return RemoteFileWriter(self._fs, self._path(name), self._where(name), part_bytes)

    @override
    def exclusive(self, deadline: Deadline) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # stores have no locks: concurrent saves to one folder may conflict

    def publish(self, save_id: str, names: Sequence[str]) -> None:
        """Do nothing: files are in place once they are closed."""

    @override
    def put(self, name: str, data: bytes) -> None:
        uncommitted, self._uncommitted = self._uncommitted, None
        try:
            with as_os_errors(self._where(name)):
                self._put(name, data)
        except OSError as error:
            if is_refusal(error):
                self._uncommitted = uncommitted
                raise
            with contextlib.suppress(OSError):
                if self.get(name) == data:  # only the response was lost
                    return
            text = f"{error.strerror}; whether it was written is not known"
            raise OSError(error.errno, text, error.filename) from error

    @override
    def copy(self, name: str, new_name: str) -> None:
        with as_os_errors(self._where(new_name)):
            self._fs.cp_file(self._path(name), self._path(new_name))

    @override
    def discard(self, save_id: str) -> None:
        if self._uncommitted == save_id:
            self._abort_uploads({save_id})
            self.remove([name for name in self.list_names() if save_id_of(name) == save_id])
        if _own_saves.get(save_id) is self:
            _own_saves.pop(save_id, None)
            self.remove([f".saving-{save_id}"])
        if self._uncommitted == save_id and self._is_new:
            self.remove_folder()

    @override
    def read_siblings(self, name: str, size_bytes: int) -> list[bytes]:
        parent = self._folder.rpartition("/")[0]
        folders = {self._folder}
        with as_os_errors(self.url):
            if parent:
                self._fs.invalidate_cache()
                found = self._fs.ls(parent, detail=True)
                folders |= {entry["name"].rstrip("/") for entry in found if entry["type"] == "directory"}
            paths = [f"{folder}/{name}" for folder in sorted(folders)]
            size = [size_bytes] * len(paths)
            chunks = self._fs.cat_ranges(paths, [0] * len(paths), size, on_error="return") if paths else []
        return [bytes(chunk) for chunk in chunks if not isinstance(chunk, BaseException)]

    @override
    def remove(self, names: Collection[str]) -> None:
        if isinstance(self._fs, AsyncFileSystem):
            remaining = list(names)
            for start in range(0, len(remaining), _REMOVAL_BATCH):
                # Not by threads, which can't be started while the program ends.
                self._remove_batch(remaining[start : start + _REMOVAL_BATCH])
        else:
            for name in names:
                with contextlib.suppress(FileNotFoundError), as_os_errors(self._where(name)):
                    self._fs.rm_file(self._path(name))

    @override
    def has_leftovers(self, save_id: str = "") -> bool:
        saves = self._saves_with_marker() | {str(save_id_of(name)) for name, _ in self._uploads()}
        return save_id in saves if save_id else bool(saves)

    @override
    def remove_leftovers(self) -> None:
        markers = self._saves_with_marker()
        living = {save_id for save_id in markers if self._may_be_alive(save_id)}
        dead = {str(save_id_of(name)) for name, _ in self._uploads()} - living
        if dead:
            self._abort_uploads(dead)
        self.remove([f".saving-{save_id}" for save_id in sorted(markers - living)])

    @override
    def living_saves(self) -> set[str]:
        return {save_id for save_id in self._saves_with_marker() if self._may_be_alive(save_id)}

    def _may_be_alive(self, save_id: str) -> bool:
        """Return whether a save with a marker may be alive."""
        if save_id in _own_saves:
            return True
        name = f".saving-{save_id}"
        try:
            description = self.get(name)
            if (answer := is_process_alive(description)) is not None:
                return answer and description != describe_process()
            with as_os_errors(self._where(name)):
                facts = self._fs.info(self._path(name))
        except FileNotFoundError:
            return False
        changed = next((facts[key] for key in _MTIME_KEYS if facts.get(key) is not None), None)
        if isinstance(changed, dt.datetime):
            changed = changed.timestamp()
        return not isinstance(changed, (int, float)) or time.time() - changed < DEAD_AFTER_SECONDS

    @override
    def remove_folder(self) -> None:
        if self._has_folders:
            with contextlib.suppress(OSError), as_os_errors(self.url):
                self._fs.invalidate_cache()
                if not self._fs.ls(self._folder, detail=False):
                    self._fs.rmdir(self._folder)

    @override
    def list_names(self) -> list[str]:
        return [name for name in self._list("file") if _MARKER.fullmatch(name) is None]

    def _saves_with_marker(self) -> set[str]:
        """The ids of saves with a marker."""
        return {found[1] for name in self._list("file") if (found := _MARKER.fullmatch(name)) is not None}

    @override
    def list_folders(self) -> list[str]:
        return self._list("directory")

    def _list(self, kind: str) -> list[str]:
        start = f"{self._folder.lstrip('/')}/"
        try:
            with as_os_errors(self.url):
                self._fs.invalidate_cache()
                found = self._fs.ls(self._folder, detail=True)
        except FileNotFoundError:
            return []
        paths = [entry["name"].strip("/") for entry in found if entry["type"] == kind]
        # Some stores list the folder itself.
        return sorted(path.removeprefix(start) for path in paths if path.startswith(start))

    @override
    def size_bytes(self, name: str) -> int:
        with as_os_errors(self._where(name)):
            self._fs.invalidate_cache()
            found = self._fs.info(self._path(name))
            if found["type"] != "file":
                raise FileNotFoundError(errno.ENOENT, "It is a folder")
            return int(found["size"])

    @override
    def get(self, name: str) -> bytes:
        size = self.size_bytes(name)
        if size > MAX_SMALL_FILE_BYTES:
            what = f"It has {size} bytes, and may have {MAX_SMALL_FILE_BYTES}"
            raise OSError(errno.EFBIG, what, self._where(name))
        with as_os_errors(self._where(name)):
            return bytes(self._fs.cat_file(self._path(name)))

    @override
    def read(self, name: str, start: int, into: memoryview) -> None:
        remaining = into.cast("B")
        while len(remaining):
            count = self._read_chunk(name, start, remaining)
            start, remaining = start + count, remaining[count:]

    def close(self) -> None:
        """Do nothing: connections belong to the file system."""

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _where(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _put(self, name: str, data: bytes) -> None:
        if not self._has_folders:
            self._fs.pipe_file(self._path(name), data)
            return
        temporary = self._path(f".{name}.new")
        try:
            self._fs.pipe_file(temporary, data)
            self._fs.mv(temporary, self._path(name))
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def _remove_batch(self, names: Sequence[str]) -> None:
        async def remove() -> list[BaseException | None]:
            removals = [self._fs._rm_file(self._path(name)) for name in names]
            outcomes: list[BaseException | None] = await asyncio.gather(*removals, return_exceptions=True)
            return outcomes

        for name, error in zip(names, sync(self._fs.loop, remove), strict=True):
            if error is not None and not isinstance(error, FileNotFoundError):
                raise to_os_error(error, self._where(name)) from error

    def _abort_uploads(self, save_ids: set[str]) -> None:
        """Abort the uploads of saves."""
        for name, upload in self._uploads():
            if save_id_of(name) in save_ids:
                bucket, key, _ = self._fs.split_path(self._path(name))
                with as_os_errors(self._where(name)), contextlib.suppress(FileNotFoundError):  # somebody else did
                    self._fs.abort_mpu(bucket, key, upload)

    def _uploads(self) -> list[tuple[str, str]]:
        """The names and ids of unfinished uploads of all saves; none if the file system can't list them."""
        found: list[tuple[str, str]] = []
        if not hasattr(self._fs, "abort_mpu"):
            return found
        bucket, key, _ = self._fs.split_path(self._folder)
        prefix = f"{key}/" if key else ""
        after: dict[str, str] | None = {}
        try:
            with as_os_errors(self.url):
                while after is not None:
                    page = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **after)
                    for upload in page.get("Uploads", ()):
                        name = upload["Key"].removeprefix(prefix)
                        if upload["Key"].startswith(prefix) and save_id_of(name) is not None:
                            found.append((name, upload["UploadId"]))
                    after = None
                    if page.get("IsTruncated"):
                        after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
        except OSError as error:
            if not is_refusal(error):
                raise
            # Listing uploads needs another permission, and not all stores support it.
            _logger.debug("uploads to %s that were not completed can't be looked for: %s", self.url, error)
            return []
        return found

    def _read_chunk(self, name: str, start: int, into: memoryview) -> int:
        """Fill the beginning of ``into`` with several concurrent requests; return the number of bytes."""
        path, stop = self._path(name), min(start + len(into), start + _NUM_RANGES * _RANGE_BYTES)
        starts = list(range(start, stop, _RANGE_BYTES))
        ends = [min(begin + _RANGE_BYTES, stop) for begin in starts]
        with as_os_errors(self._where(name)):
            chunks = self._fs.cat_ranges([path] * len(starts), starts, ends, on_error="return")
        count = 0
        for begin, end, chunk in zip(starts, ends, chunks, strict=True):
            if isinstance(chunk, BaseException):
                self._check_inside(name, end, chunk)
                raise to_os_error(chunk, self._where(name)) from chunk
            if len(chunk) > end - begin:
                raise OSError(
                    errno.EIO, f"{len(chunk)} bytes came where {end - begin} were asked for", self._where(name)
                )
            into[count : count + len(chunk)] = chunk
            count += len(chunk)
            if len(chunk) < end - begin:
                break  # the rest is asked for again
        if not count:
            self._check_inside(name, start + 1, None)
            raise OSError(errno.EIO, f"No bytes came from {start} on, though it is longer", self._where(name))
        return count

    def _check_inside(self, name: str, end: int, error: BaseException | None) -> None:
        """Raise EOFError if a file ends before ``end``; stores have different errors for that."""
        if isinstance(error, FileNotFoundError):
            return
        try:
            size = self.size_bytes(name)
        except OSError:
            return
        if size < end:
            raise EOFError(f"{self._where(name)} ends {end - size} bytes too early") from error
