"""What else is in a checkpoint's folder: older saves to it, and files that are none of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.checkpoint.manifest import MANIFEST_NAME, Manifest, decode_manifest
from ferrodist.checkpoint.storage.base import save_of
from ferrodist.errors import DistCheckpointError

if TYPE_CHECKING:
    from ferrodist.checkpoint.storage.base import Storage

__all__ = ["check_is_ours", "find_stale", "read_manifest", "remove_unfinished"]


def read_manifest(storage: Storage) -> Manifest:
    """The manifest of the checkpoint in a folder.

    Raises:
        DistCheckpointError: There is none, or it is damaged.
    """
    where = f"{storage.url}/{MANIFEST_NAME}"
    try:
        data = storage.get(MANIFEST_NAME)
    except FileNotFoundError:
        what = "no checkpoint in it" if storage.list_names() else "nothing in it, or is not there"
        raise DistCheckpointError(f"{storage.url} has {what}: {MANIFEST_NAME} is missing") from None
    except OSError as error:
        raise DistCheckpointError(f"{where} can't be read: {error}") from error
    return decode_manifest(data, where)


def check_is_ours(storage: Storage) -> None:
    """See that a save to the folder takes nothing from others.

    Raises:
        DistCheckpointError: The folder has tensors of something else.
    """
    names = storage.list_names()
    if MANIFEST_NAME in names:
        return
    others = [name for name in names if name.endswith(".safetensors") and save_of(name) is None]
    if others:
        raise DistCheckpointError(
            f"{storage.url} has {others[0]}, which is of no checkpoint of ferrodist: save to a folder of its own"
        )


def find_stale(storage: Storage) -> set[str]:
    """The files of older saves to the folder."""
    names = set(storage.list_names())
    stale = {name for name in names if save_of(name) is not None}
    if MANIFEST_NAME not in names:
        return stale
    try:
        older = read_manifest(storage)
    except DistCheckpointError:
        return stale
    return stale | {file.name for file in older.files if file.name in names}


def remove_unfinished(storage: Storage) -> None:
    """Remove what saves to the folder have left that were never committed, unless a checkpoint is there."""
    if MANIFEST_NAME not in storage.list_names():
        storage.remove(find_stale(storage))
        storage.remove_leftovers()
        storage.remove_folder()
