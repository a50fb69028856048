"""Storage of checkpoints: local folders and fsspec file systems."""

from ferrodist.checkpoint.storage.base import FileWriter, Storage
from ferrodist.checkpoint.storage.local import LocalStorage
from ferrodist.checkpoint.storage.opening import join_path, open_storage, parent_path
from ferrodist.checkpoint.storage.remote import RemoteStorage

__all__ = ["FileWriter", "LocalStorage", "RemoteStorage", "Storage", "join_path", "open_storage", "parent_path"]


def __dir__() -> list[str]:
    return sorted(__all__)
