"""The end of a save: a manifest of what was planned and written, and its publication. One process does this for all."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import logging
from math import prod
from typing import TYPE_CHECKING

import msgspec

from ferrodist.checkpoint.dtypes import dtype_from_name
from ferrodist.checkpoint.folder import find_stale, next_time_ns, read_manifest
from ferrodist.checkpoint.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    SINGLE_NAME,
    FileEntry,
    Manifest,
    ShardEntry,
    TensorEntry,
    encode_manifest,
)
from ferrodist.checkpoint.storage.base import MAX_SMALL_FILE_BYTES
from ferrodist.checkpoint.writer import BLOCK_BYTES
from ferrodist.errors import DistCheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.checkpoint.planner import SavePlan, Span
    from ferrodist.checkpoint.storage.base import Storage
    from ferrodist.checkpoint.writer import FileReport
    from ferrodist.deadline import Deadline

__all__ = ["commit", "make_index", "make_manifest"]

_logger = logging.getLogger(__name__)


def commit(storage: Storage, manifest: Manifest, deadline: Deadline, *, single_name: str | None = None) -> None:
    """Publish a save whose files are all written; see [Note: commit] in `storage/base.py`.

    When it raises, what was published is gone again, unless the folder's manifest may be this save's. What fails after
    the manifest is there is logged.

    Args:
        storage: Where they are.
        manifest: The save's.
        deadline: When other saves to the folder must have been committed.
        single_name: What the file is called in the end if it is the only one, where the storage can do that.

    Raises:
        OSError: What the storage says, or a file is not what was written. Readers see what was there before, but for
            one case: the manifest was put in its place, and the disk then refused to make that last. It is this save's
            then, whole.
    """
    with storage.exclusive(deadline):
        _commit(storage, manifest, single_name)


def _commit(storage: Storage, manifest: Manifest, single_name: str | None) -> None:
    names = [file.name for file in manifest.files]
    index = make_index(manifest)
    try:
        stale = _publish(storage, manifest, names, index)
    except BaseException:
        try:
            _withdraw(storage, manifest.save_id, names)
        except (OSError, DistCheckpointError) as second:
            _logger.warning("what was published of a checkpoint at %s can't be removed: %s", storage.url, second)
        raise
    if single_name is not None and len(names) == 1:
        try:
            stale = _rename_single(storage, manifest, single_name, stale)
            index = None
        except OSError as error:  # some file systems have no links
            _logger.warning("%s at %s is not called %s: %s", names[0], storage.url, single_name, error)
    try:
        _tidy(storage, manifest, stale, index)
    except (OSError, DistCheckpointError) as error:  # all that a load needs is there, and the next save tidies again
        _logger.warning("the checkpoint at %s is saved, but its folder is not tidy: %s", storage.url, error)


def _publish(storage: Storage, manifest: Manifest, names: Sequence[str], index: bytes | None) -> set[str]:
    """Put everything in its place, the manifest last, and return which files were there before."""
    if index is not None and storage.is_staged:  # what the disk has no room for is known before the commit
        writer = storage.create(manifest.save_id, INDEX_NAME, len(index))
        try:
            writer.write(memoryview(index))
            writer.close()
        except BaseException:
            writer.discard()
            raise
    storage.publish(manifest.save_id, names)
    for file in manifest.files:
        found = storage.size_bytes(file.name)
        if found != file.size_bytes:
            raise OSError(f"{file.name} has {found} bytes where {file.size_bytes} were written")
    stale = find_stale(storage) - set(names)
    manifest.created_ns = next_time_ns(storage)
    data = encode_manifest(manifest)
    if len(data) > MAX_SMALL_FILE_BYTES:
        raise OSError(
            errno.EFBIG, f"The manifest has {len(data)} bytes, and may have {MAX_SMALL_FILE_BYTES}", storage.url
        )
    storage.put(MANIFEST_NAME, data)
    return stale


def _rename_single(storage: Storage, manifest: Manifest, name: str, stale: set[str]) -> set[str]:
    """Give the only file of a committed save its name, which a file of the save before may have; returns what is stale.

    At each moment the manifest names a file that is there, whole.
    """
    (file,) = manifest.files
    storage.copy(file.name, name)
    named = msgspec.structs.replace(manifest, files=[msgspec.structs.replace(file, name=name)])
    storage.put(MANIFEST_NAME, encode_manifest(named))
    return {*stale, file.name} - {name}


def _withdraw(storage: Storage, save_id: str, names: Sequence[str]) -> None:
    """Remove what was published of a save, unless it was committed after all, or that can't be told."""
    if not storage.is_staged:
        return  # its `discard` does that, and knows whether the manifest may still appear
    if MANIFEST_NAME in storage.list_names() and read_manifest(storage).save_id == save_id:
        return
    storage.remove(names)


def _tidy(storage: Storage, manifest: Manifest, stale: set[str], index: bytes | None) -> None:
    """What readers of manifests can do without; the first error is raised at the end."""
    if not storage.is_staged and read_manifest(storage).save_id != manifest.save_id:
        storage.discard(manifest.save_id)
        return  # without a lock another save was committed meanwhile: what looks stale here may be its files
    with contextlib.ExitStack() as steps:  # each is done, whatever becomes of the others; the last one first
        steps.callback(storage.remove_leftovers)
        steps.callback(storage.discard, manifest.save_id)
        steps.callback(storage.remove, stale if index is not None else {*stale, INDEX_NAME})
        if index is not None:
            _put_index(storage, manifest.save_id, index)


def _put_index(storage: Storage, save_id: str, index: bytes) -> None:
    try:
        if storage.is_staged:
            storage.publish(save_id, [INDEX_NAME])
        else:
            storage.put(INDEX_NAME, index)
    except OSError as error:
        what = f"{INDEX_NAME} is missing, without which Hugging Face's tools find no tensors: {error.strerror}"
        raise OSError(error.errno, what, storage.url) from error


def make_manifest(
    plan: SavePlan, reports: Sequence[Sequence[FileReport]], *, save_id: str, world_size: int
) -> Manifest:
    """The manifest of a save, which has no time as yet.

    Args:
        plan: What was to be written.
        reports: What was written, for each rank.
        save_id: Names the save.
        world_size: Of the ranks whose state it is.
    """
    files: list[FileEntry] = []
    shards: dict[str, list[ShardEntry]] = {key: [] for key in plan.tensors}
    for plans, written in zip(plan.files, reports, strict=True):
        for file, report in zip(plans, written, strict=True):
            for span, start, hashes in zip(file.spans, report.starts, report.hashes, strict=True):
                entry = ShardEntry(
                    offsets=span.offsets,
                    shape=span.shape,
                    file=len(files),
                    start=start,
                    stop=start + _size_bytes(plan, span),
                    hashes=hashes,
                )
                shards[span.key].append(entry)
            files.append(
                FileEntry(
                    name=report.name,
                    size_bytes=report.size_bytes,
                    header_bytes=report.header_bytes,
                    header_hash=report.header_hash,
                )
            )
    tensors = {
        key: TensorEntry(
            shape=tensor.shape,
            dtype=tensor.dtype,
            placement=tensor.placement,
            shards=sorted(shards[key], key=lambda shard: shard.offsets),
        )
        for key, tensor in plan.tensors.items()
    }
    return Manifest(
        save_id=save_id,
        created_ns=0,
        producer=_producer(),
        world_size=world_size,
        block_bytes=BLOCK_BYTES,
        files=files,
        tensors=tensors,
        tree=plan.tree,
    )


def _size_bytes(plan: SavePlan, span: Span) -> int:
    return prod(span.shape) * dtype_from_name(plan.tensors[span.key].dtype).itemsize


def make_index(manifest: Manifest) -> bytes | None:
    """What Hugging Face's tools look for, if each tensor lies whole in one file; else None, or if they need none."""
    if [file.name for file in manifest.files] == [SINGLE_NAME]:
        return None
    places = {}
    for key, tensor in manifest.tensors.items():
        if len(tensor.shards) != 1:
            return None
        places[key] = manifest.files[tensor.shards[0].file].name
    if not places:
        return None
    total = sum(shard.stop - shard.start for tensor in manifest.tensors.values() for shard in tensor.shards)
    return msgspec.json.format(msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": places}))


def _producer() -> str:
    try:
        return f"ferrodist {importlib.metadata.version('ferrodist')}"
    except importlib.metadata.PackageNotFoundError:  # from its source tree
        return "ferrodist"
