"""Verification of a checkpoint: every byte is read once, and all problems are reported, not only the first."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ferrodist.checkpoint.commit import make_index
from ferrodist.checkpoint.format.manifest import INDEX_NAME, MANIFEST_NAME, FileEntry, Manifest, ShardEntry, hash_bytes
from ferrodist.checkpoint.format.safetensors import HeaderEntry, parse_header, to_safetensors
from ferrodist.checkpoint.format.tree import referenced_keys
from ferrodist.checkpoint.reader import read_manifest
from ferrodist.checkpoint.storage import Storage, open_storage
from ferrodist.checkpoint.tools.rewrite import ProgressCallback, ProgressCounter
from ferrodist.checkpoint.writer import name_in_file
from ferrodist.errors import DistCheckpointError
from ferrodist.wording import counted

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem of a checkpoint.

    Args:
        file: The file's name.
        tensor: The tensor's key; None if the problem is not about one tensor.
        what: The end of a sentence: "is missing".
    """

    file: str
    tensor: str | None = None
    what: str

    def __str__(self) -> str:
        tensor = "" if self.tensor is None else f", tensor {self.tensor!r}"
        return f"{self.file}{tensor}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationReport:
    """The result of `verify`.

    Args:
        url: The checkpoint.
        num_files: The number of files of tensors.
        num_tensors: The number of tensors.
        size_bytes: The number of bytes read.
        problems: All problems.
        other_files: Other, harmless files in the folder, as a model's ``config.json``.
    """

    url: str
    num_files: int = 0
    num_tensors: int = 0
    size_bytes: int = 0
    problems: tuple[Problem, ...] = ()
    other_files: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """True without problems."""
        return not self.problems


def verify(
    path: str | os.PathLike[str],
    *,
    contents: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> VerificationReport:
    """Read a checkpoint in one process, and check all hashes.

    It needs memory for one block (4 MiB), a header and the manifest.

    Args:
        path: The checkpoint.
        contents: False skips tensors: only files, their sizes and headers are checked, quickly.
        storage_options: Options of fsspec's file system, if the path is a URL.
        progress: Called with the bytes done, and their total.

    Returns:
        All problems; unreadable data is one.

    Raises:
        DistCheckpointError: The checkpoint is missing.
    """
    with closing(open_storage(path, storage_options)) as storage:
        try:
            names = set(storage.list_names())
            try:
                manifest = read_manifest(storage)
            except DistCheckpointError as error:
                if MANIFEST_NAME not in names:
                    raise
                return VerificationReport(url=storage.url, problems=(Problem(file=MANIFEST_NAME, what=error.message),))
            return _Verifier(storage, manifest, names, progress, contents=contents).run()
        except OSError as error:
            raise DistCheckpointError(f"{storage.url} can't be read: {error}") from error


class _Verifier:
    """One pass over a checkpoint."""

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        names: set[str],
        progress: ProgressCallback | None,
        *,
        contents: bool,
    ) -> None:
        self._storage = storage
        self._manifest = manifest
        known = {MANIFEST_NAME, INDEX_NAME, *(file.name for file in manifest.files)}
        self._has_index = INDEX_NAME in names
        self._others = sorted(names - known)
        self._contents = contents
        self._progress = ProgressCounter(sum(map(self._bytes_to_read, manifest.files)), progress)
        self._size_bytes = 0
        self._shards: list[list[tuple[str, ShardEntry]]] = [[] for _ in manifest.files]
        for key, tensor in manifest.tensors.items():
            for shard in tensor.shards:
                self._shards[shard.file].append((key, shard))

    def _bytes_to_read(self, file: FileEntry) -> int:
        return file.size_bytes if self._contents else file.header_bytes

    def run(self) -> VerificationReport:
        """Run all checks."""
        # Decoding the manifest has checked that the tree refers to no other tensors.
        unused = sorted(set(self._manifest.tensors) - set(referenced_keys(self._manifest.tree)))
        what = "is a tensor that the state doesn't refer to"
        problems = [Problem(file=MANIFEST_NAME, tensor=key, what=what) for key in unused]
        for file_index, file in enumerate(self._manifest.files):
            problems += self._check_file(file_index, file)
            self._storage.close()  # there may be more files than can be open together
        problems += self._check_index()
        problems += self._check_others()
        reported = {problem.file for problem in problems}
        return VerificationReport(
            url=self._storage.url,
            num_files=len(self._manifest.files),
            num_tensors=len(self._manifest.tensors),
            size_bytes=self._size_bytes,
            problems=tuple(problems),
            other_files=tuple(name for name in self._others if name not in reported),
        )

    def _check_file(self, file_index: int, file: FileEntry) -> Iterator[Problem]:
        shards = sorted(self._shards[file_index], key=lambda each: (each[1].start, each[1].stop))
        try:
            size = self._storage.size_bytes(file.name)
        except OSError as error:
            self._progress.add(self._bytes_to_read(file))
            what = "is missing" if isinstance(error, FileNotFoundError) else f"can't be read: {error}"
            for each in dict.fromkeys(key for key, _ in shards) or [None]:
                yield Problem(file=file.name, tensor=each, what=what)
            return
        if size != file.size_bytes:
            yield Problem(file=file.name, what=f"has {counted(size, 'byte')} where {file.size_bytes} were written")
        yield from self._check_header(file_index, file)
        yield from self._check_layout(file, shards)
        if self._contents:
            for key, shard in shards:
                yield from self._check_shard(file, key, shard)

    def _check_header(self, file_index: int, file: FileEntry) -> Iterator[Problem]:
        header = bytearray(file.header_bytes)
        if (problem := self._read(file, 0, memoryview(header))) is not None:
            yield Problem(file=file.name, what=f"its header {problem}")
            return
        if hash_bytes(header) != file.header_hash:
            yield Problem(file=file.name, what="its header doesn't have the hash that it was saved with")
        try:
            found = parse_header(bytes(header))
        except ValueError as error:
            yield Problem(file=file.name, what=str(error))
            return
        expected = {}
        for key, shard in self._shards[file_index]:
            tensor = self._manifest.tensors[key]
            dtype, shape = to_safetensors(tensor.dtype, shard.shape)
            entry = HeaderEntry(dtype, shape, (shard.start - file.header_bytes, shard.stop - file.header_bytes))
            expected[name_in_file(key, shard.offsets, shard.shape, tensor.shape)] = key, entry
        for name, (key, entry) in expected.items():
            if found.get(name) != entry:
                what = "lacks it" if name not in found else f"says {found[name]} of it"
                yield Problem(file=file.name, tensor=key, what=f"the header {what}, and the manifest {entry}")
        for name in sorted(set(found) - set(expected)):
            yield Problem(file=file.name, what=f"the header has {name!r}, which the manifest doesn't know")

    def _check_layout(self, file: FileEntry, shards: list[tuple[str, ShardEntry]]) -> Iterator[Problem]:
        """Check that each byte of a file belongs to one tensor, as other readers demand."""
        at = file.header_bytes
        for key, shard in shards:
            if shard.start != at and shard.stop > shard.start:
                what = "of no tensor" if shard.start > at else "of two tensors"
                first, last = sorted((at, shard.start))
                yield Problem(file=file.name, tensor=key, what=f"bytes {first} to {last} before or in it are {what}")
            at = max(at, shard.stop)
        if at != file.size_bytes:
            yield Problem(file=file.name, what=f"bytes {at} to {file.size_bytes} belong to no tensor")

    def _check_shard(self, file: FileEntry, key: str, shard: ShardEntry) -> Iterator[Problem]:
        step = self._manifest.block_bytes
        for index, start in enumerate(range(shard.start, shard.stop, step)):
            block = memoryview(bytearray(min(step, shard.stop - start)))
            stop = start + len(block)
            problem = self._read(file, start, block)
            if problem is None and hash_bytes(block) != shard.hashes[index]:
                problem = "don't have the hash that they were saved with"
            if problem is not None:
                yield Problem(file=file.name, tensor=key, what=f"bytes {start} to {stop} {problem}")

    def _read(self, file: FileEntry, start: int, into: memoryview) -> str | None:
        """Fill memory, or return the problem."""
        self._progress.add(len(into))
        try:
            self._storage.read(file.name, start, into)
        except EOFError:
            return "are missing: the file is too short"
        except OSError as error:
            return f"can't be read: {error}"
        self._size_bytes += len(into)
        return None

    def _check_index(self) -> Iterator[Problem]:
        """Check that Hugging Face's tools find the tensors."""
        expected = make_index(self._manifest)
        if not self._has_index:
            if expected is not None:
                yield Problem(file=INDEX_NAME, what="is missing: Hugging Face's tools won't find the tensors")
            return
        if expected is None:
            yield Problem(file=INDEX_NAME, what="belongs to another checkpoint: this one needs none")
            return
        try:
            is_same = msgspec.json.decode(self._storage.get(INDEX_NAME)) == msgspec.json.decode(expected)
        except (msgspec.MsgspecError, UnicodeDecodeError, OSError, RecursionError, MemoryError) as error:
            yield Problem(file=INDEX_NAME, what=f"can't be read: {error}")
            return
        if not is_same:
            yield Problem(file=INDEX_NAME, what="doesn't agree with the manifest about the files of tensors")

    def _check_others(self) -> Iterator[Problem]:
        """Report leftovers of saves, and files that readers of the folder could take for a part of it."""
        for name in self._others:
            if name.endswith(".safetensors"):
                yield Problem(file=name, what="is not of this checkpoint: remove it, or save again to remove it")
            elif name.startswith((f".{MANIFEST_NAME}.", f".{INDEX_NAME}.")):
                yield Problem(file=name, what="was left by a killed save: remove it")
        if self._storage.has_leftovers():
            yield Problem(
                file=self._storage.url, what="has leftovers of a killed save, or a save is in progress: save again"
            )
