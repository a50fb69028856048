"""The end of a save: a manifest of what was planned and written, and its publication. One process does this for all."""

from __future__ import annotations

import importlib.metadata
import logging
from math import prod
from typing import TYPE_CHECKING

import msgspec

from ferrodist.checkpoint.dtypes import dtype_from_name
from ferrodist.checkpoint.folder import find_stale, read_manifest
from ferrodist.checkpoint.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    ShardEntry,
    TensorEntry,
    encode_manifest,
)
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


def commit(storage: Storage, manifest: Manifest, deadline: Deadline) -> None:
    """Publish a save whose files are all written; see [Note: commit] in `storage/base.py`.

    When it raises, what was published is gone again, unless the folder's manifest may be this save's. What fails after
    the manifest is there is logged.

    Args:
        storage: Where they are.
        manifest: The save's.
        deadline: When other saves to the folder must have been committed.

    Raises:
        OSError: What the storage says, or a file is not what was written. Readers see what was there before, but for
            one case: the manifest was put in its place, and the disk then refused to make that last. It is this save's
            then, whole.
    """
    with storage.exclusive(deadline):
        _commit(storage, manifest)


def _commit(storage: Storage, manifest: Manifest) -> None:
    names = [file.name for file in manifest.files]
    try:
        stale = _publish(storage, manifest, names)
    except BaseException:
        try:
            _withdraw(storage, manifest.save_id, names)
        except (OSError, DistCheckpointError) as second:
            _logger.warning("what was published of a checkpoint at %s can't be removed: %s", storage.url, second)
        raise
    try:
        _tidy(storage, manifest, stale)
    except (OSError, DistCheckpointError) as error:  # all that a load needs is there, and the next save tidies again
        _logger.warning("the checkpoint at %s is saved, but its folder is not tidy: %s", storage.url, error)


def _publish(storage: Storage, manifest: Manifest, names: Sequence[str]) -> set[str]:
    """Put everything in its place, the manifest last, and return which files were there before."""
    storage.publish(manifest.save_id, names)
    for file in manifest.files:
        found = storage.size_bytes(file.name)
        if found != file.size_bytes:
            raise OSError(f"{file.name} has {found} bytes where {file.size_bytes} were written")
    stale = find_stale(storage) - set(names)
    storage.put(MANIFEST_NAME, encode_manifest(manifest))
    return stale


def _withdraw(storage: Storage, save_id: str, names: Sequence[str]) -> None:
    """Remove what was published of a save, unless it was committed after all, or that can't be told."""
    if not storage.is_staged:
        return  # its `discard` does that, and knows whether the manifest may still appear
    if MANIFEST_NAME in storage.list_names() and read_manifest(storage).save_id == save_id:
        return
    storage.remove(names)


def _tidy(storage: Storage, manifest: Manifest, stale: set[str]) -> None:
    """What readers of manifests can do without."""
    if not storage.is_staged and read_manifest(storage).save_id != manifest.save_id:
        return  # without a lock another save was committed meanwhile: what looks stale here may be its files
    index = make_index(manifest)
    if index is not None:
        storage.put(INDEX_NAME, index)
    storage.remove(stale if index is not None else {*stale, INDEX_NAME})
    storage.remove_leftovers()


def make_manifest(
    plan: SavePlan, reports: Sequence[Sequence[FileReport]], *, save_id: str, created_ns: int, world_size: int
) -> Manifest:
    """The manifest of a save.

    Args:
        plan: What was to be written.
        reports: What was written, for each rank.
        save_id: Names the save.
        created_ns: When it was begun, since 1970.
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
        created_ns=created_ns,
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
    """What Hugging Face's tools look for, if each tensor lies whole in one file; else None."""
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
