"""Saving a state from all ranks, and the commit by rank 0.

    state --collect--> tree and tensors --report--> rank 0 plans --> each rank writes its files --> rank 0 commits

Until rank 0 commits, nothing that a reader sees has changed; see [Note: commit] in `commit.py`.

[Note: five collectives]
1. gather      a rank has opened the storage and collected its state: its report. Rank 0 plans, and begins the save.
2. scatter     the rank's files, or the reason for having none. Each rank reduces its partial sums, and writes.
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

import logging
import uuid
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ferrodist.arguments import check_int, check_type
from ferrodist.checkpoint.checkpoint_folder import remove_old
from ferrodist.checkpoint.collective_steps import Phase, Rank0Exchange, call_on_all, is_of_group, resolve_group_or_alone
from ferrodist.checkpoint.commit import commit, make_manifest, remove_dead_saves
from ferrodist.checkpoint.format.manifest import MANIFEST_NAME, hash_bytes
from ferrodist.checkpoint.format.safetensors import dtype_name
from ferrodist.checkpoint.save_plan import (
    DEFAULT_FILE_BYTES,
    BoxReport,
    FilePlan,
    SavePlan,
    Span,
    StateReport,
    TensorReport,
    plan_save,
)
from ferrodist.checkpoint.shard_metadata import ShardMetadata
from ferrodist.checkpoint.state import Encoder, PartialSums, collect_state
from ferrodist.checkpoint.storage import Storage, open_storage, parent_path
from ferrodist.checkpoint.storage.base import save_id_of
from ferrodist.checkpoint.writer import FileReport, hash_blocks, row_major_bytes, write_safetensors
from ferrodist.deadline import Deadline, resolve_timeout
from ferrodist.errors import DistCheckpointError, DistributedError
from ferrodist.tensor.local_shards import local_shard

if TYPE_CHECKING:
    import os
    import re
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from ferrodist.backends.base import Backend

_logger = logging.getLogger(__name__)


def save_distributed(
    state: Any,
    path: str | os.PathLike[str],
    *,
    group: Backend | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    check_replicas: bool = True,
    shards: ShardMetadata | None = None,
    keep_last: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> None:
    """Save a checkpoint; every rank of the group calls this.

    When it returns, the checkpoint is on the disk. When it raises, or the ranks are killed at any moment, the
    checkpoint that was at ``path`` before is unchanged, unless the new manifest was in place: then the new one is
    complete.

    Args:
        state: Nested dicts, lists and tuples of tensors (plain or `DTensor`), modules (also in `FSDP` or `DDP`),
            `OptimizerState`, objects with ``state_dict()``, numbers, strings and bytes. Dicts may have different keys
            on different ranks; a value that several ranks have must be equal on all of them, except within `PerRank`.
        path: A folder that all ranks see, or an fsspec URL; it is created.
        group: All ranks that hold a shard of the state; None is the default group, or this process alone without one.
        max_file_bytes: The size from which a rank's data is split into several files.
        check_replicas: Compare the replicas of a tensor by hash, at 10 to 20 GB/s.
        shards: The sharding of plain tensors that the program has sharded itself.
        keep_last: The number of checkpoints to keep beside this one and including it; older ones in the same parent
            folder are removed after the save. Damaged checkpoints neither count nor are removed. None keeps all.
        storage_options: Options of fsspec's file system, if the path is a URL.
        timeout: Seconds within which all ranks must be done; None takes FERRODIST_TIMEOUT's, or
            `DEFAULT_COLLECTIVE_TIMEOUT`.

    Raises:
        DistCheckpointError: On all ranks: their states don't fit together, or writing failed.
        TypeError, ValueError: On the rank whose state or arguments are wrong; DistCheckpointError on the others.
        DistributedError: A rank was lost or is late. If that was rank 0 at the very end, the checkpoint may be
            complete; otherwise the previous one is unchanged.
    """
    group, deadline = resolve_group_or_alone(group), Deadline(resolve_timeout(timeout))
    options = SaveOptions(max_file_bytes, check_replicas, shards, keep_last, storage_options)
    save = Save(path, group, options)
    save.prepare(state, "open a checkpoint", deadline)
    save.write_and_commit(group, deadline)
    if keep_last is not None:
        save.remove_old_checkpoints(keep_last)


def check_owned(storage: Storage) -> None:
    """Refuse to save into a folder with files of tensors that no save of ferrodist wrote."""
    names = storage.list_names()
    if MANIFEST_NAME in names:
        return
    others = [name for name in names if name.endswith(".safetensors") and save_id_of(name) is None]
    if others:
        raise DistCheckpointError(
            f"{storage.url} has {others[0]}, which no checkpoint of ferrodist wrote: save to a folder of its own"
        )


def _digest(view: torch.Tensor) -> str:
    """The checksum of the checksums of a tensor's blocks."""
    return hash_bytes("".join(hash_blocks(row_major_bytes(view.cpu()))).encode())


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Options of a save; see `save_distributed`."""

    max_file_bytes: int
    check_replicas: bool
    shards: ShardMetadata | None
    keep_last: int | None
    storage_options: Mapping[str, Any] | None


class Save:
    """One save of a group: all ranks call `prepare`, then `write_and_commit`."""

    storage: Storage
    """Opened by `prepare`."""

    def __init__(self, path: str | os.PathLike[str], group: Backend, options: SaveOptions) -> None:
        self._path = path
        self._group = group
        self._options = options
        self._save_id = ""
        self._plan: SavePlan | None = None
        """The plan of all ranks; on rank 0 only."""
        self._files: list[FilePlan] = []
        self._tensors: dict[str, TensorReport] = {}
        self._views: dict[Span, torch.Tensor] = {}
        """This rank's memory of each box of the state."""
        self._partials = PartialSums()

    def prepare(self, state: Any, action: str, deadline: Deadline, *, earlier_error: Exception | None = None) -> None:
        """Open the storage and agree on a plan: collectives 1 and 2 of [Note: five collectives].

        ``action`` names the opening, for messages. ``earlier_error``, if a rank has one, is raised on all.
        """
        phase, exchange = Phase(action, str(self._path)), Rank0Exchange(self._group, deadline)
        open_and_report = partial(self._open_and_report, state, phase, earlier_error)
        try:
            own_files = exchange.run(
                phase, make=open_and_report, answer_action="plan a checkpoint", answer=self._plan_and_begin
            )
        except BaseException as error:
            if exchange.rank0_may_have_acted:
                self.discard(error)
            raise
        self._save_id, self._files = msgspec.msgpack.decode(own_files, type=tuple[str, list[FilePlan]])

    def _open_and_report(self, state: Any, phase: Phase, earlier_error: Exception | None) -> bytes:
        """Open the storage, and return this rank's encoded `StateReport`."""
        if earlier_error is not None:
            raise earlier_error
        options = self._options
        if options.keep_last is not None:
            check_int("keep_last", options.keep_last, min=1)
        self.storage = open_storage(self._path, options.storage_options)
        if options.keep_last is not None:
            parent_path(self.storage.url)  # ValueError without one
        phase.begin_next("prepare a checkpoint", self.storage.url)
        collected = collect_state(state, self._partials)
        check_int("max_file_bytes", options.max_file_bytes, min=1)
        encoder = Encoder(self._group.rank)
        tree = encoder.encode(collected)
        check_type(options.shards, (ShardMetadata, type(None)), "shards must be ShardMetadata or None")
        if options.shards:
            options.shards.check(self._group.world_size)
        self._tensors = {key: self._report_tensor(key, tensor, encoder) for key, tensor in encoder.tensors.items()}
        return msgspec.msgpack.encode(StateReport(tree, self._tensors))

    def _report_tensor(self, key: str, tensor: torch.Tensor, encoder: Encoder) -> TensorReport:
        """Describe this rank's shard of a tensor, and keep views of its boxes."""
        shards = self._options.shards
        shard = shards.part(key, tensor, encoder.rank) if shards else local_shard(tensor)
        is_compared = self._options.check_replicas and shard.is_replicated and key not in encoder.per_rank_keys
        boxes = []
        for box, view in [] if key in encoder.unsaved else shard.boxes:
            self._views[Span(key, box.offsets, box.shape)] = view
            digest = _digest(view) if is_compared else None
            boxes.append(BoxReport(box.offsets, box.shape, digest, self._partials.addend(tensor)))
        return TensorReport(tuple(shard.shape), dtype_name(shard.dtype), shard.placement, boxes, encoder.paths[key])

    def _plan_and_begin(self, encoded: Sequence[bytes]) -> list[bytes]:
        """Plan for all ranks and begin the save in the storage, on rank 0; return each rank's encoded files."""
        reports = [msgspec.msgpack.decode(each, type=StateReport) for each in encoded]
        save_id = uuid.uuid4().hex[:12]
        check_owned(self.storage)
        self._plan = plan_save(reports, prefix=f"model-{save_id}", max_file_bytes=self._options.max_file_bytes)
        self._save_id = save_id  # from here on there is something to discard
        self.storage.begin(save_id)
        return [msgspec.msgpack.encode((save_id, files)) for files in self._plan.files]

    def write_and_commit(
        self, group: Backend, deadline: Deadline, find: Callable[[Span], torch.Tensor] | None = None
    ) -> None:
        """Write this rank's files and commit with the other ranks: collectives 3 to 5, over ``group``.

        ``find`` returns the elements of a span; None takes them from the state.
        """
        url, exchange = self.storage.url, Rank0Exchange(group, deadline)
        try:
            # A step of its own; see [Note: five collectives].
            encoded_reports = call_on_all(partial(self._write, find), "write a checkpoint", url, group, deadline)
            phase = Phase("commit a checkpoint", url)
            exchange.run(
                phase,
                make=lambda: encoded_reports,
                answer_action=phase.action,
                answer=partial(self._commit, deadline),
            )
        except BaseException as error:
            # Once rank 0 may have all reports it may commit at any moment, whatever becomes of the group: as long as it
            # lives the files are not for other ranks to remove.
            if self._group.rank == 0 or not exchange.rank0_may_have_acted:
                self.discard(error)
            elif isinstance(error, DistributedError) and is_of_group(error):
                self._remove_dead(error)
            raise

    def _write(self, find: Callable[[Span], torch.Tensor] | None) -> bytes:
        """Write this rank's files, and return their encoded reports."""
        views = {} if find else self.take_views()
        elements = find or (lambda span: views[span].cpu())
        files = [write_safetensors(self.storage, self._save_id, plan, self._tensors, elements) for plan in self._files]
        return msgspec.msgpack.encode(files)

    def take_views(self) -> dict[Span, torch.Tensor]:
        """Hand over the state's memory that this rank writes, with partial sums reduced; all ranks call this."""
        self._partials.reduce()
        views, self._views = self._views, {}
        return {span: views[span] for plan in self._files for span in plan.spans}

    def _commit(self, deadline: Deadline, encoded: Sequence[bytes]) -> list[bytes]:
        """Commit what all ranks have written, on rank 0."""
        assert self._plan is not None, "rank 0 has the plan"
        reports = [msgspec.msgpack.decode(each, type=list[FileReport]) for each in encoded]
        manifest = make_manifest(self._plan, reports, save_id=self._save_id, world_size=len(reports))
        commit(self.storage, manifest, deadline)
        return [b""] * len(reports)

    def remove_old_checkpoints(self, keep_last: int, name_pattern: re.Pattern[str] | None = None) -> None:
        """Remove checkpoints beyond ``keep_last``, on rank 0; see `remove_old`."""
        if self._group.rank == 0:
            remove_old(self.storage.url, keep_last, self._options.storage_options, name_pattern)

    def discard(self, error: BaseException) -> None:
        """Remove the files written so far, because of ``error``."""
        # After a failure of the group every rank does this, since rank 0 may be the one that died.
        if self._save_id and (self._group.rank == 0 or isinstance(error, DistributedError)):
            try:
                if not (self.storage.is_staged or self._group.rank == 0):
                    # They are in the folder already, and rank 0 doesn't know of them.
                    self.storage.remove([plan.name for plan in self._files])
                self.storage.discard(self._save_id)
            except OSError as second:
                _logger.warning("the files of a failed save to %s can't be removed: %s", self.storage.url, second)
        if is_of_group(error) and self._group.rank != 0:
            remove_dead_saves(self.storage, self._save_id)  # rank 0 may have begun it before it died

    def _remove_dead(self, error: DistributedError) -> None:
        """Remove the files that a dead rank 0 can't remove, or raise the error with a note where they are."""
        if remove_dead_saves(self.storage, self._save_id):
            return
        extended = error.fresh()
        extended.message = (
            f"{error.message.rstrip('.')}. What was written of the checkpoint may be left at {self.storage.url}, under"
            f" names with {self._save_id}, if it was not committed; the next save to that path removes it."
        )
        extended.args = (extended.message,)
        raise extended from error.__cause__
