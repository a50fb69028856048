"""The checkpoints of a folder: which are complete, the newest one, and the removal of old ones."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrodist.checkpoint.format.manifest import INDEX_NAME, MANIFEST_NAME, Manifest
from ferrodist.checkpoint.reader import read_manifest
from ferrodist.checkpoint.storage import Storage, join_path, open_storage, parent_path
from ferrodist.deadline import Deadline
from ferrodist.errors import DistCheckpointError

if TYPE_CHECKING:
    import os
    import re
    from collections.abc import Mapping

_logger = logging.getLogger(__name__)


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
    new_path: str,
    keep_last: int,
    storage_options: Mapping[str, Any] | None,
    name_pattern: re.Pattern[str] | None = None,
) -> None:
    """Remove all but the newest ``keep_last`` checkpoints beside, and including, a new one; failures are logged.

    Damaged ones neither count nor are removed, nor are folders whose names don't match ``name_pattern``.
    """
    try:
        newest = read_manifest(open_storage(new_path, storage_options)).save_id  # by whatever path it was saved
        others = [found for found in _scan(parent_path(new_path), storage_options) if found.manifest.save_id != newest]
        others = [
            found for found in others if name_pattern is None or name_pattern.fullmatch(found.path.rpartition("/")[2])
        ]
    except (OSError, DistCheckpointError) as error:
        _logger.warning("checkpoints older than %s can't be listed: %s", new_path, error)
        return
    for found in others[: max(0, len(others) + 1 - keep_last)]:
        _remove(found)


def _remove(found: _Checkpoint) -> None:
    try:
        with found.storage.exclusive(Deadline(0.0)):
            if read_manifest(found.storage).save_id != found.manifest.save_id:
                return  # another job has new_path there meanwhile
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
