"""The entry points `save_distributed` and `load_distributed`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.arguments import check_int
from ferrodist.backends.process_group import is_initialized, resolve_group
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.checkpoint.consensus import Phase, call_on_all
from ferrodist.checkpoint.load import load
from ferrodist.checkpoint.retention import remove_old
from ferrodist.checkpoint.save import DEFAULT_FILE_BYTES, Save, SaveOptions
from ferrodist.checkpoint.storage import Storage, open_storage, parent_path
from ferrodist.deadline import Deadline, resolve_timeout

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from ferrodist.backends.base import Backend
    from ferrodist.checkpoint.shard_metadata import ShardMetadata


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
    checkpoint that was at ``path`` before is unchanged.

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
    ranks, deadline = resolve_ranks(group), Deadline(resolve_timeout(timeout))

    def open_checked() -> Storage:
        check_keep_last(keep_last)
        storage = open_storage(path, storage_options)
        if keep_last is not None:
            parent_path(storage.url)
        return storage

    options = SaveOptions(max_file_bytes=max_file_bytes, check_replicas=check_replicas, shards=shards)
    save = Save(Phase("open a checkpoint", str(path)), open_checked, state, ranks, options=options, deadline=deadline)
    save.run()
    if keep_last is not None and ranks.rank == 0:
        remove_old(save.storage.url, keep_last, storage_options)


def load_distributed(
    path: str | os.PathLike[str],
    into: Any = None,
    *,
    group: Backend | None = None,
    strict: bool = True,
    verify: bool = True,
    one_reads: bool = False,
    shards: ShardMetadata | None = None,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> Any:
    """Load a checkpoint, or a part of it; every rank of the group calls this.

    Each rank reads only the bytes of its own shards, whatever the number of ranks and the placements were when the
    checkpoint was saved.

    Args:
        path: The checkpoint.
        into: The wanted state, nested as it was saved; parts may be left out. Tensors are filled in place, in their own
            dtypes; modules, `OptimizerState` and objects with ``load_state_dict()`` load their part; a `Placed` becomes
            a `DTensor`; any other value, and an empty dict or list, is replaced by the saved value with full tensors.
            None is the full state.
        group: The ranks that load; as for `save_distributed`.
        strict: Raise for wanted values that were not saved, and for saved tensors that a module or optimizer doesn't
            have.
        one_reads: Have rank 0 read for all ranks, each byte once, and send it on; for storage that is slower than the
            network between ranks.
        shards: The sharding of plain tensors in ``into``.
        verify: Check the hashes of all blocks read: a fifth of the time of a load from memory, little of one from a
            disk.
        storage_options: Options of fsspec's file system, if the path is a URL.
        timeout: Seconds within which all ranks must be done; None takes FERRODIST_TIMEOUT's, or
            `DEFAULT_COLLECTIVE_TIMEOUT`.

    Returns:
        ``into`` with the loaded values; its tensors, modules and objects are the same objects.

    Raises:
        DistCheckpointError: On all ranks: the checkpoint is missing, doesn't fit, or is damaged. Some tensors may
            have been filled already.
        TypeError, ValueError: An argument is wrong.
    """
    ranks, deadline = resolve_ranks(group), Deadline(resolve_timeout(timeout))
    storage = call_on_all(lambda: open_storage(path, storage_options), "open a checkpoint", str(path), ranks, deadline)
    return load(
        storage, into, ranks, strict=strict, verify=verify, one_reads=one_reads, shards=shards, deadline=deadline
    )


def check_keep_last(keep_last: object) -> None:
    """Raise unless ``keep_last`` is a positive number of checkpoints, or None."""
    if keep_last is not None:
        check_int("keep_last", keep_last, min=1)


def resolve_ranks(group: Backend | None) -> Backend:
    """Return the group, the default group, or a new group of this process alone."""
    if group is None and not is_initialized():
        return SimulatedBackend.create_group(1)[0]
    return resolve_group(group)
