"""A checkpoint written anew for another number of ranks, by one process and without the program that saved it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.checkpoint.folder import read_manifest
from ferrodist.checkpoint.reader import CheckpointReader
from ferrodist.checkpoint.rewriting import DEFAULT_MEMORY_BYTES, Contents, RewriteOptions, rewrite
from ferrodist.checkpoint.saving import DEFAULT_FILE_BYTES
from ferrodist.checkpoint.storage import open_storage

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from ferrodist.checkpoint.progress import ProgressCallback
    from ferrodist.checkpoint.rewriting import ChooseDim

__all__ = ["reshard"]


def reshard(
    path: str | os.PathLike[str],
    new_path: str | os.PathLike[str],
    *,
    num_ranks: int,
    dim: int | ChooseDim | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    verify: bool = True,
    max_memory_bytes: int = DEFAULT_MEMORY_BYTES,
    storage_options: Mapping[str, Any] | None = None,
    new_storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> None:
    """Write a checkpoint as another number of ranks would have saved it: the same state, in other files.

    Loading doesn't need this, for any number of ranks loads any checkpoint; it is for ranks that shall each read one
    file, and for other tools: ``num_ranks=1`` makes a folder of whole tensors, as Hugging Face's tools have them.

    `PerRank` values stay those of the ranks that saved them.

    Args:
        path: The checkpoint.
        new_path: Where the new one goes; a checkpoint that is there is replaced when the new one is whole. It may be
            ``path``.
        num_ranks: As by how many ranks.
        dim: Along which dim tensors are divided, as `Shard` divides; those that don't have it stay whole. A function
            says it for each tensor, of its key and shape; None from it leaves the tensor whole. None is the first dim
            that all ranks get the same of, or else the longest.
        max_file_bytes: A rank's part is split into several files if it is larger.
        verify: Compare what is read with its hashes.
        max_memory_bytes: What tensors may take of memory, at least 16 MiB; the manifests come to that.
        storage_options: For fsspec's file system, if ``path`` is a URL.
        new_storage_options: The same for ``new_path``.
        progress: Told how many bytes are written, and of how many.

    Raises:
        DistCheckpointError: There is no checkpoint, it is damaged, or the new one could not be written; what was at
            ``new_path`` is there as it was.
        TypeError, ValueError: An argument is wrong.
    """
    options = RewriteOptions(
        num_ranks=num_ranks,
        dim=dim,
        max_file_bytes=max_file_bytes,
        max_memory_bytes=max_memory_bytes,
        progress=progress,
    )
    storage, new_storage = open_storage(path, storage_options), open_storage(new_path, new_storage_options)
    try:
        manifest = read_manifest(storage)
        contents = Contents(
            tree=manifest.tree,
            tensors={key: (tensor.shape, tensor.dtype) for key, tensor in manifest.tensors.items()},
            source=CheckpointReader(storage, manifest, verify=verify),
            world_size=manifest.world_size,
        )
        rewrite(contents, new_storage, options)
    finally:
        storage.close()
        new_storage.close()
