"""Folders of checkpoints: which is the newest, and which may go."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ferrodist.checkpoint.folder import read_manifest
from ferrodist.checkpoint.manifest import INDEX_NAME, MANIFEST_NAME
from ferrodist.checkpoint.storage import join_path, open_storage, parent_path
from ferrodist.deadline import Deadline
from ferrodist.errors import DistCheckpointError

if TYPE_CHECKING:
    import os
    import re
    from collections.abc import Mapping

    from ferrodist.checkpoint.manifest import Manifest
    from ferrodist.checkpoint.storage import Storage

__all__ = ["find_latest", "list_checkpoints", "remove_old"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint that can be loaded, as far as its manifest and the sizes of its files tell."""

    path: str
    storage: Storage
    manifest: Manifest


def list_checkpoints(
    dir: str | os.PathLike[str],  # noqa: A002 - as in AsyncCheckpointer
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """The paths of the checkpoints in a folder, the oldest first; those that lack anything are left out.

    Links to folders are left out too: a checkpoint counts once.

    Args:
        dir: The folder, or a URL of fsspec's.
        storage_options: For fsspec's file system, if it is a URL.

    Raises:
        DistCheckpointError: The folder can't be listed.
    """
    storage = open_storage(dir, storage_options)
    try:
        return [found.path for found in _find(storage.url, storage_options)]
    except OSError as error:
        raise DistCheckpointError(f"{storage.url} can't be looked through for checkpoints: {error}") from error


def find_latest(
    dir: str | os.PathLike[str],  # noqa: A002 - as in AsyncCheckpointer
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> str | None:
    """The path of the newest checkpoint in a folder that lacks nothing, or None. See `list_checkpoints`."""
    return next(reversed(list_checkpoints(dir, storage_options=storage_options)), None)


def remove_old(
    saved: str,
    keep_last: int,
    storage_options: Mapping[str, Any] | None,
    names: re.Pattern[str] | None = None,
) -> None:
    """Remove older checkpoints beside one that was just saved; what can't be removed is logged.

    Args:
        saved: It; the newest, whatever clocks say.
        keep_last: How many stay with it, at least 1. Damaged ones don't count and stay.
        storage_options: For fsspec's file system, if it is a URL.
        names: What the folders of those are called that count; None is anything.
    """
    try:
        newest = read_manifest(open_storage(saved, storage_options)).save_id  # by whatever path it was saved
        others = [found for found in _find(parent_path(saved), storage_options) if found.manifest.save_id != newest]
        others = [found for found in others if names is None or names.fullmatch(found.path.rpartition("/")[2])]
    except (OSError, DistCheckpointError) as error:
        _logger.warning("checkpoints older than %s can't be looked for: %s", saved, error)
        return
    for found in others[: max(0, len(others) + 1 - keep_last)]:
        _remove(found)


def _remove(found: _Found) -> None:
    try:
        with found.storage.exclusive(Deadline(0.0)):
            if read_manifest(found.storage).save_id != found.manifest.save_id:
                return  # another job has saved there meanwhile
            # Without its manifest it is no checkpoint any more: never one that lacks files.
            found.storage.remove([INDEX_NAME])  # which no later look could tell from somebody else's
            found.storage.remove([MANIFEST_NAME])
            found.storage.remove([file.name for file in found.manifest.files])
            found.storage.remove_leftovers()
        found.storage.remove_folder()
    except (TimeoutError, FileNotFoundError):
        pass  # another job removes it at the moment, or has, or saves there: then it is no old one any more
    except (OSError, DistCheckpointError) as error:
        if _is_there(found):
            _logger.warning("the old checkpoint %s can't be removed: %s", found.path, error)


def _is_there(found: _Found) -> bool:
    try:
        return MANIFEST_NAME in found.storage.list_names()
    except OSError:
        return True


def _find(dir: str, storage_options: Mapping[str, Any] | None) -> list[_Found]:  # noqa: A002
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
            found.append(_Found(path, storage, manifest))
    return sorted(found, key=lambda each: (each.manifest.created_ns, each.path))
