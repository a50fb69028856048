"""Saving a state from all ranks, and the commit by rank 0.

    state --collect--> tree and tensors --report--> rank 0 plans --> each rank writes its files --> rank 0 commits

Until rank 0 commits, nothing that a reader sees has changed; see [Note: commit] in `storage/base.py`.

[Note: five collectives]
1. gather      a rank has opened the storage and collected its state: its report. Rank 0 plans, and begins the save.
2. scatter     the rank's files, or why there is no plan. Each rank reduces its partial sums, and writes.
3. all-gather  the rank has written, or why not.
4. gather      what the rank has written. Rank 0 commits.
5. scatter     done, or why not.

An error of one rank travels with 1, 3 or 4, one of rank 0 with 2 or 5, so all raise the same. If a collective itself
fails, as when a rank is lost, a rank must know whether rank 0 may still commit, which it does once all have sent 4:

- In 1, rank 0 may have begun the save, and nothing is written.
- In 2, while it writes, and in 3, this rank has not sent 4: rank 0 can't commit, and the rank removes its files.
- In 4 and 5, rank 0 may commit as long as it lives. Once it is dead, a disk shows whether it has. In an object store
  a manifest that was sent may still appear, so the files stay for the next save to remove.

Without 3, a rank that waits for the outcome couldn't tell that rank 0 died while it was still writing, which takes most
of a save's time, from its death in the commit. The opening has no collective of its own, since nothing is begun before
rank 0 has all reports; therefore partial sums, whose reduction takes collectives of their meshes, are reported before
they are reduced: a rank that can't collect its state leaves no other rank waiting for it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import uuid
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from ferrodist.arguments import check_int
from ferrodist.checkpoint.consensus import Phase, Rank0Exchange, call_on_all, is_of_group
from ferrodist.checkpoint.format.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    SINGLE_NAME,
    FileEntry,
    Manifest,
    ShardEntry,
    TensorEntry,
    encode_manifest,
    hash_bytes,
)
from ferrodist.checkpoint.format.safetensors import dtype_name
from ferrodist.checkpoint.format.tree import Encoder
from ferrodist.checkpoint.retention import (
    check_owned,
    next_commit_time_ns,
    read_manifest,
    remove_dead_saves,
    stale_files,
)
from ferrodist.checkpoint.save_plan import BoxReport, FilePlan, SavePlan, Span, StateReport, TensorReport, plan_save
from ferrodist.checkpoint.shard_metadata import ShardMetadata
from ferrodist.checkpoint.state import PartialSums, collect_state
from ferrodist.checkpoint.storage.base import MAX_SMALL_FILE_BYTES, Storage
from ferrodist.checkpoint.writer import BLOCK_BYTES, FileReport, bytes_of, hash_blocks, write_file
from ferrodist.errors import DistCheckpointError, DistributedError
from ferrodist.installation import installed_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline

_logger = logging.getLogger(__name__)


def commit(storage: Storage, manifest: Manifest, deadline: Deadline, *, single_name: str | None = None) -> None:
    """Publish a save whose files are all written; see [Note: commit] in `storage/base.py`.

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
            stale = _publish(storage, manifest, names, index)
        except BaseException:
            try:
                _unpublish(storage, manifest.save_id, names)
            except (OSError, DistCheckpointError) as second:
                _logger.warning("the published files of a failed save to %s can't be removed: %s", storage.url, second)
            raise
        if single_name is not None and len(names) == 1:
            try:
                stale, index = _rename_single(storage, manifest, single_name, stale), None
            except OSError as error:  # some file systems have no links
                _logger.warning("%s at %s is not called %s: %s", names[0], storage.url, single_name, error)
        try:
            _clean_up(storage, manifest, stale, index)
        except (OSError, DistCheckpointError) as error:  # a load has all it needs, and the next save cleans up again
            _logger.warning("the checkpoint at %s is saved, but its folder is not tidy: %s", storage.url, error)


def _publish(storage: Storage, manifest: Manifest, names: Sequence[str], index: bytes | None) -> set[str]:
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
    manifest.created_ns = next_commit_time_ns(storage)
    data = encode_manifest(manifest)
    if len(data) > MAX_SMALL_FILE_BYTES:
        raise OSError(
            errno.EFBIG, f"The manifest has {len(data)} bytes, and may have {MAX_SMALL_FILE_BYTES}", storage.url
        )
    storage.put(MANIFEST_NAME, data)
    return stale


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
    """Write the index and remove leftovers; readers of manifests need neither. The first error is raised last."""
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


DEFAULT_FILE_BYTES = 5 * 10**9
"""The file size limit of Hugging Face's tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of a save; see `save_distributed`."""

    max_file_bytes: int
    check_replicas: bool
    shards: ShardMetadata | None


class Save:
    """One save of a group: its ranks agree on a plan in the constructor, `run` writes and commits it.

    ``phase`` is the opening, at the path as the program gave it.
    """

    storage: Storage
    """Opened by the first phase."""

    def __init__(
        self,
        phase: Phase,
        open_checked: Callable[[], Storage],
        state: Any,
        group: Backend,
        *,
        options: SaveOptions,
        deadline: Deadline,
    ) -> None:
        self._group = group
        self._deadline = deadline
        self.save_id = ""
        self._plan: SavePlan | None = None
        """The plan of all ranks; on rank 0 only."""
        self.files: list[FilePlan] = []
        self._tensors: dict[str, TensorReport] = {}
        self._views: dict[Span, torch.Tensor] = {}
        self._partials = PartialSums()

        def report() -> bytes:
            self.storage = open_checked()
            phase.go_on("prepare a checkpoint", self.storage.url)
            collected = collect_state(state, self._partials)
            check_int("max_file_bytes", options.max_file_bytes, min=1)
            encoder = Encoder(group.rank)
            tree = encoder.encode(collected)
            metadata = options.shards or ShardMetadata(num_ranks=group.world_size)
            metadata.check(group.world_size)
            own, self._views = _report(tree, encoder, metadata, self._partials, check_replicas=options.check_replicas)
            self._tensors = own.tensors
            return msgspec.msgpack.encode(own)

        exchange = Rank0Exchange(group, deadline)
        try:
            own_files = exchange.run(
                phase, report, "plan a checkpoint", lambda reports: self._make_plan(reports, options.max_file_bytes)
            )
        except BaseException as error:
            if exchange.may_be_answered:
                self.discard(error)
            raise
        self.save_id, self.files = msgspec.msgpack.decode(own_files, type=tuple[str, list[FilePlan]])

    def _make_plan(self, encoded: Sequence[bytes], max_file_bytes: int) -> list[bytes]:
        """Plan for all ranks, on rank 0; return each rank's encoded files."""
        reports = [msgspec.msgpack.decode(each, type=StateReport) for each in encoded]
        save_id = uuid.uuid4().hex[:12]
        check_owned(self.storage)
        self._plan = plan_save(reports, prefix=f"model-{save_id}", max_file_bytes=max_file_bytes)
        self.save_id = save_id  # from here on there is something to discard
        self.storage.begin(save_id)
        return [msgspec.msgpack.encode((self.save_id, files)) for files in self._plan.files]

    def take_views(self) -> dict[Span, torch.Tensor]:
        """Hand over the state's memory that this rank writes, with partial sums reduced; all ranks call this."""
        self._partials.reduce()
        views, self._views = self._views, {}
        return {span: views[span] for plan in self.files for span in plan.spans}

    def run(
        self,
        get_data: Callable[[Span], torch.Tensor] | None = None,
        group: Backend | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """Write this rank's files and commit with the other ranks; spans come from ``get_data``, or the state."""
        group, deadline = group or self._group, deadline or self._deadline
        exchange = Rank0Exchange(group, deadline)

        def write() -> bytes:
            views = {} if get_data else self.take_views()
            elements = get_data or (lambda span: views[span].cpu())
            files = [write_file(self.storage, self.save_id, plan, self._tensors, elements) for plan in self.files]
            return msgspec.msgpack.encode(files)

        def commit_all(encoded: Sequence[bytes]) -> list[bytes]:
            assert self._plan is not None, "rank 0 has the plan"
            reports = [msgspec.msgpack.decode(each, type=list[FileReport]) for each in encoded]
            manifest = make_manifest(self._plan, reports, save_id=self.save_id, world_size=group.world_size)
            commit(self.storage, manifest, deadline)
            return [b""] * group.world_size

        try:
            # A step of its own; see [Note: five collectives].
            reports = call_on_all(write, "write a checkpoint", self.storage.url, group, deadline)
            phase = Phase("commit a checkpoint", self.storage.url)
            exchange.run(phase, lambda: reports, phase.action, commit_all)
        except BaseException as error:
            # Once rank 0 may have all reports it may commit at any moment, whatever becomes of the group: as long as it
            # lives the files are not for other ranks to remove.
            if self._group.rank == 0 or not exchange.may_be_answered:
                self.discard(error)
            elif isinstance(error, DistributedError) and is_of_group(error):
                self._remove_dead(error)
            raise

    def discard(self, error: BaseException) -> None:
        """Remove the files written so far, because of ``error``."""
        # After a failure of the group every rank does this, since rank 0 may be the one that died.
        if self.save_id and (self._group.rank == 0 or isinstance(error, DistributedError)):
            try:
                if not (self.storage.is_staged or self._group.rank == 0):
                    # They are in the folder already, and rank 0 doesn't know of them.
                    self.storage.remove([plan.name for plan in self.files])
                self.storage.discard(self.save_id)
            except OSError as second:
                _logger.warning("the files of a failed save to %s can't be removed: %s", self.storage.url, second)
        if is_of_group(error) and self._group.rank != 0:
            remove_dead_saves(self.storage, self.save_id)  # rank 0 may have begun it before it died

    def _remove_dead(self, error: DistributedError) -> None:
        """Remove the files that a dead rank 0 can't remove, or raise the error with a note where they are."""
        if remove_dead_saves(self.storage, self.save_id):
            return
        extended = error.fresh()
        extended.message = (
            f"{error.message.rstrip('.')}. What was written of the checkpoint may be left at {self.storage.url}, under"
            f" names with {self.save_id}, if it was not committed; the next save to that path removes it."
        )
        extended.args = (extended.message,)
        raise extended from error.__cause__


def _report(
    tree: Any, encoder: Encoder, shards: ShardMetadata, partials: PartialSums, *, check_replicas: bool
) -> tuple[StateReport, dict[Span, torch.Tensor]]:
    """Return this rank's report, and its memory of each box."""
    tensors: dict[str, TensorReport] = {}
    views: dict[Span, torch.Tensor] = {}
    for key, tensor in encoder.tensors.items():
        part = shards.part(key, tensor, encoder.rank)
        is_compared = check_replicas and part.is_replicated and key not in encoder.own
        boxes = []
        for box, view in [] if key in encoder.unsaved else part.boxes:
            views[Span(key, box.offsets, box.shape)] = view
            digest = hash_bytes("".join(hash_blocks(bytes_of(view.cpu()))).encode()) if is_compared else None
            boxes.append(BoxReport(box.offsets, box.shape, digest, partials.addend(tensor)))
        shape, dtype = tuple(part.shape), dtype_name(part.dtype)
        tensors[key] = TensorReport(shape, dtype, part.placement, boxes, encoder.paths[key])
    return StateReport(tree, tensors), views
