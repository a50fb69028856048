"""Saving a state from all ranks that have it.

    state --collect--> tree and tensors --report--> rank 0 plans --> each rank writes its files --> rank 0 commits

Until rank 0 commits, nothing that a reader sees has changed; see [Note: commit] in `storage/base.py`.

The end of a save: a manifest of what was planned and written, and its publication. One process does this for all.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import logging
import uuid
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec

from ferrodist.checkpoint.consensus import all_or_none, run_on_rank0
from ferrodist.checkpoint.format.dtypes import dtype_from_name, dtype_name
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
from ferrodist.checkpoint.format.tree import Encoder
from ferrodist.checkpoint.retention import check_owned, next_time_ns, read_manifest, remove_dead, stale_files
from ferrodist.checkpoint.save_plan import BoxReport, FilePlan, SavePlan, Span, StateReport, TensorReport, plan_save
from ferrodist.checkpoint.shard_metadata import ShardMetadata
from ferrodist.checkpoint.state import collect_state, fold_sums
from ferrodist.checkpoint.storage.base import MAX_SMALL_FILE_BYTES
from ferrodist.checkpoint.writer import BLOCK_BYTES, FileReport, bytes_of, hash_blocks, write_file
from ferrodist.collectives.objects import gather_object, scatter_object
from ferrodist.errors import DistCheckpointError, DistributedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ferrodist.backends.base import Backend
    from ferrodist.checkpoint.storage.base import Storage
    from ferrodist.deadline import Deadline

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
    stale = stale_files(storage) - set(names)
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


DEFAULT_FILE_BYTES = 5 * 10**9
"""What Hugging Face's tools take as the limit of a file, too."""


class Save:
    """One act of saving; every rank of the group makes it and calls its methods in this order.

    Args:
        state: What to save.
        storage: Where.
        group: All ranks that have a part of it.
        max_file_bytes: Longer files are split, between tensors.
        check_replicas: Compare what several ranks should have the same.
        shards: How plain tensors are divided.
        deadline: When all must be done.

    Raises:
        DistCheckpointError: On all ranks: what they have doesn't fit together, or the storage refuses.
        TypeError, ValueError: On the rank whose state can't be saved, and `DistCheckpointError` on the others.
    """

    def __init__(
        self,
        state: Any,
        storage: Storage,
        group: Backend,
        *,
        max_file_bytes: int,
        check_replicas: bool,
        shards: ShardMetadata | None,
        deadline: Deadline,
    ) -> None:
        self._storage = storage
        self._group = group
        self._deadline = deadline
        self.save_id = ""
        self._plan: SavePlan | None = None
        """Of all ranks; on rank 0 only."""
        self.files: list[FilePlan] = []
        with all_or_none("prepare a checkpoint", storage.url, group, deadline):
            collected = collect_state(state)
        with all_or_none("prepare a checkpoint", storage.url, group, deadline):
            if isinstance(max_file_bytes, bool) or not isinstance(max_file_bytes, int) or max_file_bytes < 1:
                raise ValueError(f"max_file_bytes is a number of bytes, not {max_file_bytes!r}")
            encoder = Encoder(group.rank)
            tree = encoder.encode(fold_sums(collected))
            shards = shards or ShardMetadata(num_ranks=group.world_size)
            shards.check(group.world_size)
            report, self._views = _report(tree, encoder, shards, check_replicas=check_replicas)
        self._tensors = report.tensors
        self.files = self._share_plan(report, max_file_bytes)

    def _share_plan(self, report: StateReport, max_file_bytes: int) -> list[FilePlan]:
        """The files that this rank writes."""
        group = self._group
        encoded = gather_object(msgspec.msgpack.encode(report), group=group, timeout=self._deadline.remaining())

        def plan() -> list[bytes]:
            assert encoded is not None, "rank 0 has gathered"
            reports = [msgspec.msgpack.decode(each, type=StateReport) for each in encoded]
            save_id = uuid.uuid4().hex[:12]
            check_owned(self._storage)
            self._plan = plan_save(reports, prefix=f"model-{save_id}", max_file_bytes=max_file_bytes)
            self.save_id = save_id  # from here on there is something to discard
            self._storage.begin(save_id)
            return [msgspec.msgpack.encode((self.save_id, files)) for files in self._plan.files]

        try:
            plans = run_on_rank0(plan, "plan a checkpoint", self._storage.url, group, self._deadline)
            own = scatter_object(plans, group=group, timeout=self._deadline.remaining())
        except BaseException as error:
            self.discard(error)
            raise
        self.save_id, files = msgspec.msgpack.decode(own, type=tuple[str, list[FilePlan]])
        return files

    def write(self, find: Callable[[Span], torch.Tensor] | None = None) -> list[FileReport]:
        """Write this rank's files; nothing is sent.

        Args:
            find: The elements of a span; None takes them from the state.

        Raises:
            OSError: What the storage says.
        """
        elements = find or self.elements
        return [write_file(self._storage, self.save_id, plan, self._tensors, elements) for plan in self.files]

    @property
    def url(self) -> str:
        """Where it goes."""
        return self._storage.url

    def own_views(self) -> dict[Span, torch.Tensor]:
        """The state's memory of what this rank writes."""
        return {span: self._views[span] for plan in self.files for span in plan.spans}

    def forget_state(self) -> None:
        """Let go of the state's memory; `write` is given the elements."""
        self._views = {}

    def elements(self, span: Span) -> torch.Tensor:
        """The state's elements of a span, on the CPU."""
        return self._views[span].cpu()

    def run(
        self,
        find: Callable[[Span], torch.Tensor] | None = None,
        group: Backend | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """Write this rank's files and commit with the others.

        Args:
            find: As for `write`.
            group: The same ranks, for those who come from another thread; None is the group of the save.
            deadline: When all must be done; None is that of the save.

        Raises:
            DistCheckpointError: On all ranks: one could not write. Nothing was committed.
            DistributedError: A rank was lost, or is late.
        """
        group = group or self._group
        self._deadline = deadline or self._deadline
        is_handed_over = False
        try:
            reports: list[FileReport] = []
            with all_or_none("write a checkpoint", self._storage.url, group, self._deadline):
                reports = self.write(find)
            is_handed_over = group.rank != 0
            gathered = gather_object(msgspec.msgpack.encode(reports), group=group, timeout=self._deadline.remaining())
            run_on_rank0(
                lambda: self._commit(gathered or []), "commit a checkpoint", self._storage.url, group, self._deadline
            )
        except BaseException as error:
            # From here on rank 0 may commit at any moment, whatever becomes of the group: as long as it lives its files
            # are not for others to remove.
            if not is_handed_over:
                self.discard(error)
            elif isinstance(error, DistributedError) and not isinstance(error, DistCheckpointError):
                self._remove_dead(error)
            raise

    def discard(self, error: BaseException) -> None:
        """Remove what was written; ``error`` is why."""
        # Where the ranks have failed together every one does this, for rank 0 may be the one that died.
        if self.save_id and (self._group.rank == 0 or isinstance(error, DistributedError)):
            try:
                if not (self._storage.is_staged or self._group.rank == 0):
                    # They have their places, and rank 0 doesn't know of them.
                    self._storage.remove([plan.name for plan in self.files])
                self._storage.discard(self.save_id)
            except OSError as second:
                _logger.warning(
                    "what was written of a checkpoint at %s can't be removed: %s", self._storage.url, second
                )
        is_lost = isinstance(error, DistributedError) and not isinstance(error, DistCheckpointError)
        if is_lost and self._group.rank != 0:
            remove_dead(self._storage, self.save_id)  # which it may have begun before the others heard of it

    def _remove_dead(self, error: DistributedError) -> None:
        """Remove what rank 0 can't remove any more, or raise the error with words that say where it lies."""
        if remove_dead(self._storage, self.save_id):
            return
        told = error.fresh()
        told.message = (
            f"{error.message.rstrip('.')}. What was written of the checkpoint may be left at {self._storage.url}, under"
            f" names with {self.save_id}, if it was not committed; the next save to that path removes it."
        )
        told.args = (told.message,)
        raise told from error.__cause__

    def _commit(self, gathered: Sequence[bytes]) -> None:
        """On rank 0, when all files are written."""
        assert self._plan is not None, "rank 0 has the plan"
        reports = [msgspec.msgpack.decode(each, type=list[FileReport]) for each in gathered]
        manifest = make_manifest(self._plan, reports, save_id=self.save_id, world_size=self._group.world_size)
        commit(self._storage, manifest, self._deadline)


def _report(
    tree: Any, encoder: Encoder, shards: ShardMetadata, *, check_replicas: bool
) -> tuple[StateReport, dict[Span, torch.Tensor]]:
    """What this rank has, and its memory of each box."""
    tensors: dict[str, TensorReport] = {}
    views: dict[Span, torch.Tensor] = {}
    for key, tensor in encoder.tensors.items():
        part = shards.part(key, tensor, encoder.rank)
        is_compared = check_replicas and part.is_replicated and key not in encoder.own
        boxes = []
        for box, view in [] if key in encoder.unsaved else part.boxes:
            views[Span(key, box.offsets, box.shape)] = view
            digest = hash_bytes("".join(hash_blocks(bytes_of(view.cpu()))).encode()) if is_compared else None
            boxes.append(BoxReport(box.offsets, box.shape, digest))
        shape, dtype = tuple(part.shape), dtype_name(part.dtype)
        tensors[key] = TensorReport(shape, dtype, part.placement, boxes, encoder.paths[key])
    return StateReport(tree, tensors), views
