"""The commit by rank 0, and the removal of the leftovers of dead saves.

[Note: commit]
A checkpoint exists when its manifest does: ``put`` of the manifest commits a save, and it is atomic. Files of tensors
are written before, under names that no committed manifest of the folder mentions. A save has an id:

    rank 0    begin(id)
    all       create(id, name, size).write(...).close()        durable when close returns
    rank 0    with exclusive(deadline): publish(id, names), put(manifest), remove(stale files)

A save that failed, or whose ranks were killed, leaves the folder's manifest unchanged. Who removes what:

    Save.discard              the ranks of a save that fails, before it can be committed: its files
    _unpublish                rank 0, if the commit fails on a disk: files moved into place, unless the manifest is too
    _clean_up                 rank 0 after the commit: files of the earlier checkpoint and of dead saves
    remove_dead_saves         the other ranks, if rank 0 has died: all of the save, unless it was or may be committed
    remove_uncommitted        an AsyncCheckpointer as it opens: leftovers in folders of steps that have no manifest
    remove_old                rank 0 with ``keep_last``: older checkpoints, the manifest before its files

    Storage.discard           a save's unpublished files
    Storage.remove            files of the folder, by name
    Storage.remove_leftovers  what saves of dead processes left unpublished; safe at any time
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from ferrodist.checkpoint.format.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    SINGLE_NAME,
    TIME_WITHIN_BYTES,
    FileEntry,
    Manifest,
    ShardEntry,
    TensorEntry,
    encode_manifest,
    find_commit_time,
    is_time,
)
from ferrodist.checkpoint.reader import read_manifest
from ferrodist.checkpoint.storage.base import MAX_SMALL_FILE_BYTES, Storage, save_id_of
from ferrodist.checkpoint.writer import BLOCK_BYTES, FileReport
from ferrodist.deadline import Deadline
from ferrodist.errors import DistCheckpointError
from ferrodist.installation import installed_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.checkpoint.save_plan import SavePlan

_logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_SECONDS = 2.0
"""The wait for the operating system to clean up after a lost process."""
_POLL_INTERVAL_SECONDS = 0.01


def make_manifest(
    plan: SavePlan, reports: Sequence[Sequence[FileReport]], *, save_id: str, world_size: int
) -> Manifest:
    """Build the manifest of a save, without its commit time, from the plan and each rank's reports of written files."""
    files: list[FileEntry] = []
    shards: dict[str, list[ShardEntry]] = {key: [] for key in plan.tensors}
    for plans, written in zip(plan.files, reports, strict=True):
        for file, report in zip(plans, written, strict=True):
            ranges = pairwise([*report.starts, report.file.size_bytes])
            for span, (start, stop), hashes in zip(file.spans, ranges, report.hashes, strict=True):
                shard = ShardEntry(
                    offsets=span.offsets, shape=span.shape, file=len(files), start=start, stop=stop, hashes=hashes
                )
                shards[span.key].append(shard)
            files.append(report.file)
    tensors = {}
    for key, tensor in plan.tensors.items():
        boxes = sorted(shards[key], key=lambda shard: shard.offsets)
        tensors[key] = TensorEntry(shape=tensor.shape, dtype=tensor.dtype, placement=tensor.placement, shards=boxes)
    version = installed_version()
    return Manifest(
        save_id=save_id,
        created_ns=0,
        producer="ferrodist" if version is None else f"ferrodist {version}",
        world_size=world_size,
        block_bytes=BLOCK_BYTES,
        files=files,
        tensors=tensors,
        tree=plan.tree,
    )


def commit(storage: Storage, manifest: Manifest, deadline: Deadline, *, single_name: str | None = None) -> None:
    """Publish a save whose files are all written; see [Note: commit].

    On an error the published files are removed again, unless the folder's manifest may be this save's. Errors after the
    manifest is in place are only logged. ``single_name`` is the final name of a single file of tensors, if the storage
    can rename it.

    Raises:
        OSError: The storage failed, or a file has another size than was written. Readers see the previous checkpoint,
            except when the disk refused to sync the new manifest: then they see this one, complete.
    """
    with storage.exclusive(deadline):
        names = [file.name for file in manifest.files]
        index = make_index(manifest)
        try:
            stale = _publish_and_put_manifest(storage, manifest, names, index)
        except BaseException:
            try:
                _unpublish(storage, manifest.save_id, names)
            except (OSError, DistCheckpointError) as second:
                _logger.warning("the published files of a failed save to %s can't be removed: %s", storage.url, second)
            raise
        if single_name is not None and len(names) == 1:
            try:
                stale = _rename_single(storage, manifest, single_name, stale)
                index = None  # a single file needs none, and one of an earlier save is removed
            except OSError as error:  # some file systems have no links
                _logger.warning("%s at %s is not called %s: %s", names[0], storage.url, single_name, error)
        try:
            _clean_up(storage, manifest, stale, index)
        except (OSError, DistCheckpointError) as error:  # a load has all it needs, and the next save cleans up again
            _logger.warning("the checkpoint at %s is saved, but its folder is not tidy: %s", storage.url, error)


def _publish_and_put_manifest(
    storage: Storage, manifest: Manifest, names: Sequence[str], index: bytes | None
) -> set[str]:
    """Move everything into place, the manifest last, and return the names of files that were there before."""
    if index is not None and storage.is_staged:  # a full disk shows before the commit
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
    stale = stale_files(storage) - set(names)
    manifest.created_ns = _next_commit_time_ns(storage)
    data = encode_manifest(manifest)
    if len(data) > MAX_SMALL_FILE_BYTES:
        raise OSError(
            errno.EFBIG, f"The manifest has {len(data)} bytes, and may have {MAX_SMALL_FILE_BYTES}", storage.url
        )
    storage.put(MANIFEST_NAME, data)
    return stale


def _next_commit_time_ns(storage: Storage) -> int:
    """Return now, but later than every checkpoint in and beside the folder: clocks differ, and are set back."""
    now = time.time_ns()
    if not is_time(now):  # the clock was never set
        now = 0
    try:
        prefixes = storage.read_siblings(MANIFEST_NAME, TIME_WITHIN_BYTES)
    except OSError as error:
        _logger.warning("checkpoints beside %s can't be listed, and may have a later time: %s", storage.url, error)
        return now
    return max([now, *(time_ns + 1 for head in prefixes if (time_ns := find_commit_time(head)) is not None)])


def _rename_single(storage: Storage, manifest: Manifest, name: str, stale: set[str]) -> set[str]:
    """Rename the only file of a committed save, also over one of the previous save; return the stale names."""
    (file,) = manifest.files
    storage.copy(file.name, name)
    named = msgspec.structs.replace(manifest, files=[msgspec.structs.replace(file, name=name)])
    storage.put(MANIFEST_NAME, encode_manifest(named))
    return {*stale, file.name} - {name}


def _unpublish(storage: Storage, save_id: str, names: Sequence[str]) -> None:
    """Remove the published files of a save, unless it was committed after all, or that can't be known."""
    if not storage.is_staged:
        return  # `discard` does it, and knows whether the manifest may still appear
    if MANIFEST_NAME in storage.list_names() and read_manifest(storage).save_id == save_id:
        return
    storage.remove(names)


def _clean_up(storage: Storage, manifest: Manifest, stale: set[str], index: bytes | None) -> None:
    """Write the index and remove leftovers; readers need neither. All steps run before an error is raised."""
    if not storage.is_staged and read_manifest(storage).save_id != manifest.save_id:
        storage.discard(manifest.save_id)
        return  # without a lock another save was committed meanwhile: files that look stale may be its files
    with contextlib.ExitStack() as steps:  # each step runs even if another fails; in reverse order
        steps.callback(storage.remove_leftovers)
        steps.callback(storage.discard, manifest.save_id)
        steps.callback(storage.remove, stale if index is not None else {*stale, INDEX_NAME})
        if index is not None:
            try:
                if storage.is_staged:
                    storage.publish(manifest.save_id, [INDEX_NAME])
                else:
                    storage.put(INDEX_NAME, index)
            except OSError as error:
                what = f"{INDEX_NAME} is missing, without which Hugging Face's tools find no tensors: {error.strerror}"
                raise OSError(error.errno, what, storage.url) from error


def make_index(manifest: Manifest) -> bytes | None:
    """Build Hugging Face's index of tensors and files; None if a tensor is sharded, or the only file needs no index."""
    if [file.name for file in manifest.files] == [SINGLE_NAME]:
        return None
    if not manifest.tensors or any(len(tensor.shards) != 1 for tensor in manifest.tensors.values()):
        return None
    shards = {key: tensor.shards[0] for key, tensor in manifest.tensors.items()}
    file_of_key = {key: manifest.files[shard.file].name for key, shard in shards.items()}
    total = sum(shard.stop - shard.start for shard in shards.values())
    return msgspec.json.format(msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": file_of_key}))


def stale_files(storage: Storage) -> set[str]:
    """Return the files of earlier saves in the folder."""
    names = set(storage.list_names())
    living = storage.living_saves()
    stale = {name for name in names if (save_id := save_id_of(name)) is not None and save_id not in living}
    if MANIFEST_NAME not in names:
        return stale
    try:
        older = read_manifest(storage)
    except DistCheckpointError:
        return stale
    return stale | {file.name for file in older.files if file.name in names}


def remove_uncommitted(storage: Storage) -> None:
    """Remove the leftovers of saves that were never committed, unless the folder has a checkpoint."""
    with storage.exclusive(Deadline(0.0)):
        if MANIFEST_NAME in storage.list_names():
            return
        storage.remove(stale_files(storage))
        storage.remove_leftovers()
    storage.remove_folder()


def remove_dead_saves(storage: Storage, save_id: str) -> bool:
    """Remove the leftovers of saves whose rank 0 has died; return whether nothing is left of ``save_id``.

    Published files of ``save_id`` are removed too, unless it was committed. It is empty if unknown.
    """
    deadline = Deadline(_EXIT_TIMEOUT_SECONDS)
    try:
        # When a process ends, its connections may be closed before its locks are released.
        while storage.has_leftovers(save_id):
            storage.remove_leftovers()
            if not storage.has_leftovers(save_id):
                break
            if deadline.expired:
                return False
            time.sleep(_POLL_INTERVAL_SECONDS)
        if not storage.is_staged:
            return False  # its manifest may still appear
        with storage.exclusive(deadline):
            names = storage.list_names()
            if MANIFEST_NAME not in names or read_manifest(storage).save_id != save_id:
                storage.remove([name for name in names if save_id and save_id_of(name) == save_id])
            storage.remove_leftovers()
        storage.remove_folder()
    except FileNotFoundError:
        return True
    except (OSError, DistCheckpointError):
        return False
    return True
