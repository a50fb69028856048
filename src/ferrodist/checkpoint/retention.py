"""The contents of checkpoint folders: manifests, stale files, the newest checkpoint, and the removal of old ones."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrodist.checkpoint.format.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    SINGLE_NAME,
    TIME_WITHIN_BYTES,
    Manifest,
    decode_manifest,
    find_commit_time,
    is_time,
)
from ferrodist.checkpoint.storage import join_path, open_storage, parent_path
from ferrodist.checkpoint.storage.base import Storage, save_id_of
from ferrodist.deadline import Deadline
from ferrodist.errors import DistCheckpointError

if TYPE_CHECKING:
    import os
    import re
    from collections.abc import Mapping


DCP_METADATA_NAME = ".metadata"
"""The manifest's name in torch.distributed.checkpoint."""

_logger = logging.getLogger(__name__)


def read_manifest(storage: Storage) -> Manifest:
    """Read the manifest of the checkpoint in a folder."""
    where = f"{storage.url}/{MANIFEST_NAME}"
    try:
        data = storage.get(MANIFEST_NAME)
    except FileNotFoundError:
        raise DistCheckpointError(_explain_missing(storage)) from None
    except NotADirectoryError as error:
        if not Path(storage.url).is_file():  # a file is above it
            raise DistCheckpointError(f"{where} can't be read: {error}") from error
        raise DistCheckpointError(
            f"{storage.url} is a file, and a checkpoint is a folder. {_conversion_hint('torch', storage.url)}"
        ) from None
    except OSError as error:
        raise DistCheckpointError(f"{where} can't be read: {error}") from error
    return decode_manifest(data, where)


def describe_foreign_format(storage: Storage) -> str:
    """Return a sentence on which other format a folder has and how to convert it; empty for unknown formats."""
    names = storage.list_names()
    if DCP_METADATA_NAME in names:
        return f"It is a folder of torch.distributed.checkpoint. {_conversion_hint('dcp', storage.url)}"
    if SINGLE_NAME in names or INDEX_NAME in names:
        return f"It is a folder of Hugging Face's. {_conversion_hint('hf', storage.url)}"
    for name in names:
        if name.endswith(_TORCH_SUFFIXES):
            return f"It has {name}. {_conversion_hint('torch', f'{storage.url}/{name}')}"
    return ""


_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_IMPORTS = {"torch": "import_torch_file", "dcp": "import_dcp", "hf": "import_hugging_face"}


def _conversion_hint(kind: str, path: str) -> str:
    return (
        f"`ferrodist ckpt convert --from {kind} --to ferrodist {path} NEW` makes a checkpoint of it, in Python"
        f" `ferrodist.checkpoint.convert.{_IMPORTS[kind]}`."
    )


def _explain_missing(storage: Storage) -> str:
    """Return the message for a folder without a manifest."""
    try:
        is_empty, other, inner = not storage.list_names(), describe_foreign_format(storage), storage.list_folders()
    except OSError as error:
        return f"{storage.url} can't be read: {error}"
    what = "nothing in it, or is not there" if is_empty and not inner else "no checkpoint in it"
    text = f"{storage.url} has {what}: {MANIFEST_NAME} is missing"
    if other:
        return f"{text}. {other}"
    if inner:
        return f"{text}. There are folders in it, as {inner[-1]}: name one that has a checkpoint, or ask find_latest()"
    return text


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


def stale_files(storage: Storage) -> set[str]:
    """Return the files of earlier saves in the folder."""
    names = set(storage.list_names())
    living = {None} | storage.living_saves()
    stale = {name for name in names if save_id_of(name) not in living}
    if MANIFEST_NAME not in names:
        return stale
    try:
        older = read_manifest(storage)
    except DistCheckpointError:
        return stale
    return stale | {file.name for file in older.files if file.name in names}


def next_commit_time_ns(storage: Storage) -> int:
    """Return now, but later than every checkpoint in and beside the folder: clocks differ, and are set back."""
    now = time.time_ns()
    if not is_time(now):  # the clock was never set
        now = 0
    try:
        prefixes = storage.read_siblings(MANIFEST_NAME, TIME_WITHIN_BYTES)
    except OSError as error:
        _logger.warning("checkpoints beside %s can't be listed, and may have a later time: %s", storage.url, error)
        return now
    return max(now, *(time_ns + 1 for head in prefixes if (time_ns := find_commit_time(head)) is not None), 0)


def remove_uncommitted(storage: Storage) -> None:
    """Remove the leftovers of saves that were never committed, unless the folder has a checkpoint."""
    with storage.exclusive(Deadline(0.0)):
        if MANIFEST_NAME in storage.list_names():
            return
        storage.remove(stale_files(storage))
        storage.remove_leftovers()
    storage.remove_folder()


_EXIT_TIMEOUT_SECONDS = 2.0
"""The wait for the operating system to clean up after a lost process."""
_POLL_INTERVAL_SECONDS = 0.01


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


class _Checkpoint(NamedTuple):
    """A checkpoint whose manifest and file sizes are right."""

    path: str
    storage: Storage
    manifest: Manifest


def list_checkpoints(
    dir: str | os.PathLike[str],  # noqa: A002 - as in AsyncCheckpointer
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the paths of the complete checkpoints in a folder, oldest first.

    Links to folders are skipped: a checkpoint counts once.

    Args:
        dir: The folder, or an fsspec URL.
        storage_options: Options of fsspec's file system, if ``dir`` is a URL.

    Raises:
        DistCheckpointError: The folder can't be listed.
    """
    storage = open_storage(dir, storage_options)
    try:
        return [found.path for found in _scan(storage.url, storage_options)]
    except OSError as error:
        raise DistCheckpointError(f"{storage.url} can't be searched for checkpoints: {error}") from error


def find_latest(
    dir: str | os.PathLike[str],  # noqa: A002 - as in AsyncCheckpointer
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> str | None:
    """Return the path of the newest complete checkpoint in a folder, or None. See `list_checkpoints`."""
    return next(reversed(list_checkpoints(dir, storage_options=storage_options)), None)


def remove_old(
    saved: str, keep_last: int, storage_options: Mapping[str, Any] | None, names: re.Pattern[str] | None = None
) -> None:
    """Remove all but the newest ``keep_last`` checkpoints beside, and including, a new one; failures are logged.

    Damaged ones neither count nor are removed, nor are folders whose names don't match ``names``.
    """
    try:
        newest = read_manifest(open_storage(saved, storage_options)).save_id  # by whatever path it was saved
        others = [found for found in _scan(parent_path(saved), storage_options) if found.manifest.save_id != newest]
        others = [found for found in others if names is None or names.fullmatch(found.path.rpartition("/")[2])]
    except (OSError, DistCheckpointError) as error:
        _logger.warning("checkpoints older than %s can't be listed: %s", saved, error)
        return
    for found in others[: max(0, len(others) + 1 - keep_last)]:
        _remove(found)


def _remove(found: _Checkpoint) -> None:
    try:
        with found.storage.exclusive(Deadline(0.0)):
            if read_manifest(found.storage).save_id != found.manifest.save_id:
                return  # another job has saved there meanwhile
            found.storage.remove([INDEX_NAME])  # first, since its name doesn't say whose it is
            found.storage.remove([MANIFEST_NAME])  # before the files, so that no checkpoint ever lacks some
            found.storage.remove([file.name for file in found.manifest.files])
            found.storage.remove_leftovers()
        found.storage.remove_folder()
    except (TimeoutError, FileNotFoundError):
        pass  # another job removes it or saves there
    except (OSError, DistCheckpointError) as error:
        with contextlib.suppress(OSError):
            if MANIFEST_NAME not in found.storage.list_names():
                return
        _logger.warning("the old checkpoint %s can't be removed: %s", found.path, error)


def _scan(dir: str, storage_options: Mapping[str, Any] | None) -> list[_Checkpoint]:  # noqa: A002
    found = []
    for name in open_storage(dir, storage_options).list_folders():
        path = join_path(dir, name)
        storage = open_storage(path, storage_options)
        try:
            manifest = read_manifest(storage)
            sizes = [storage.size_bytes(file.name) for file in manifest.files]
        except (DistCheckpointError, OSError):
            continue
        if sizes == [file.size_bytes for file in manifest.files]:
            found.append(_Checkpoint(path, storage, manifest))
    return sorted(found, key=lambda each: (each.manifest.created_ns, each.path))
