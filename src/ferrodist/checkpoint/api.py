"""`save_distributed` and `load_distributed`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.backends.process_group import is_initialized, resolve_group
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.checkpoint.consensus import call_on_all
from ferrodist.checkpoint.load import load
from ferrodist.checkpoint.retention import remove_old
from ferrodist.checkpoint.save import DEFAULT_FILE_BYTES, Save
from ferrodist.checkpoint.storage import open_storage, parent_path
from ferrodist.deadline import Deadline, resolve_timeout

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from ferrodist.backends.base import Backend
    from ferrodist.checkpoint.shard_metadata import ShardMetadata
    from ferrodist.checkpoint.storage import Storage


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
    """Write a checkpoint; every rank of the group calls this.

    When it returns, the checkpoint is on the disk. When it raises, or the ranks are killed at any moment, the
    checkpoint that was at ``path`` before is as it was.

    Args:
        state: Nested dicts, lists and tuples of tensors (plain, `DTensor`), modules (also in `FSDP` or `DDP`),
            `OptimizerState`, objects with ``state_dict()``, numbers, text and bytes. Dicts may have other keys on other
            ranks; what has the same place must be the same, but for what is in `PerRank`.
        path: A folder that all ranks see, or a URL of fsspec's; it is made.
        group: All ranks that have a part of the state; None is the default group, or this process alone if there is
            none.
        max_file_bytes: A rank writes several files if its part is larger.
        check_replicas: Compare tensors that several ranks have whole. They are hashed for it, at 10 to 20 GB/s.
        shards: How plain tensors are divided that the program has divided itself.
        keep_last: When it is saved, remove older checkpoints beside it, in the same folder of folders, but for the
            newest ones, of which this is one. Damaged ones don't count and are not removed. None removes none.
        storage_options: For fsspec's file system, if the path is a URL.
        timeout: Seconds in which all ranks must be done; None takes FERRODIST_TIMEOUT's, or
            `DEFAULT_COLLECTIVE_TIMEOUT`.

    Raises:
        DistCheckpointError: On all ranks: their states don't fit together, or it could not be written.
        TypeError, ValueError: On the rank whose state or arguments are wrong; DistCheckpointError on the others.
        DistributedError: A rank was lost, or is late. If that was rank 0 at the very end, the checkpoint may be there,
            whole; else what was there before is as it was.
    """
    ranks, deadline = resolve_ranks(group), Deadline(resolve_timeout(timeout))

    def open_checked() -> Storage:
        check_keep_last(keep_last)
        storage = open_storage(path, storage_options)
        if keep_last is not None:
            parent_path(storage.url)
        return storage

    storage = call_on_all(open_checked, "open a checkpoint", str(path), ranks, deadline)
    save = Save(
        state,
        storage,
        ranks,
        max_file_bytes=max_file_bytes,
        check_replicas=check_replicas,
        shards=shards,
        deadline=deadline,
    )
    save.run()
    if keep_last is not None and ranks.rank == 0:
        remove_old(storage.url, keep_last, storage_options)


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

    Each rank reads only the bytes of which it has elements, whatever the number of ranks and the placements were when
    the checkpoint was saved.

    Args:
        path: The checkpoint.
        into: What is wanted, nested as it was saved; parts may be left out. Tensors are filled where they lie, in their
            dtypes; modules, `OptimizerState` and objects with ``load_state_dict()`` take their part; a `Placed` becomes
            a `DTensor`; in the place of any other value, or of an empty dict or list, comes what was saved, with whole
            tensors. None is all of it.
        group: The ranks that load; as for `save_distributed`.
        strict: Raise for what is wanted and not there, and for what a module or optimizer has no place for.
        one_reads: Have rank 0 read for all ranks, each byte once, and send it on; for storage that is slower than what
            connects the ranks.
        shards: How plain tensors in ``into`` are divided that the program divides itself.
        verify: Compare what is read with its hashes: a fifth of the time of a load from memory, little of one from a
            disk.
        storage_options: For fsspec's file system, if the path is a URL.
        timeout: Seconds in which all ranks must be done; None takes FERRODIST_TIMEOUT's, or
            `DEFAULT_COLLECTIVE_TIMEOUT`.

    Returns:
        ``into`` with what was loaded; in it the same tensors, modules and objects.

    Raises:
        DistCheckpointError: On all ranks: there is no checkpoint, it doesn't fit, or it is damaged. Some tensors may
            have been filled by then.
        TypeError, ValueError: An argument is wrong.
    """
    ranks, deadline = resolve_ranks(group), Deadline(resolve_timeout(timeout))
    storage = call_on_all(lambda: open_storage(path, storage_options), "open a checkpoint", str(path), ranks, deadline)
    return load(
        storage,
        into,
        ranks,
        strict=strict,
        verify=verify,
        one_reads=one_reads,
        shards=shards,
        deadline=deadline,
    )


def check_keep_last(keep_last: object) -> None:
    """Raise unless it is a number of checkpoints, or None."""
    if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1):
        raise ValueError(f"keep_last must be a number of checkpoints from 1, or None, not {keep_last!r}")


def resolve_ranks(group: Backend | None) -> Backend:
    """A group, the default group, or a group of this process alone if there is none."""
    if group is None and not is_initialized():
        return SimulatedBackend.create_group(1)[0]
    return resolve_group(group)
