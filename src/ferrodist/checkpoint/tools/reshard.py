"""Rewriting a checkpoint for another number of ranks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ferrodist.checkpoint.reader import CheckpointReader, read_manifest
from ferrodist.checkpoint.save_plan import DEFAULT_FILE_BYTES
from ferrodist.checkpoint.storage import open_storage
from ferrodist.checkpoint.tools.rewrite import (
    DEFAULT_MEMORY_BYTES,
    ChooseDim,
    ProgressCallback,
    RewriteOptions,
    RewriteSource,
    rewrite,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping


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
    """Rewrite a checkpoint as another number of ranks would have saved it: the same state in other files.

    Loading doesn't need this, since any number of ranks loads any checkpoint. It is for ranks that shall each read one
    file, and for other tools: ``num_ranks=1`` makes a folder of full tensors, as Hugging Face's tools have them.
    `PerRank` values stay those of the ranks that saved them.

    Args:
        path: The checkpoint.
        new_path: The new checkpoint; an existing one is replaced when the new one is complete. It may be ``path``.
        num_ranks: The number of ranks to write for.
        dim: The dim along which tensors are sharded, as `Shard` does; tensors without it stay whole. A function returns
            it for each tensor's key and shape; None from it leaves the tensor whole. None is the first dim that divides
            evenly over the ranks, or else the longest.
        max_file_bytes: The size from which a rank's data is split into several files.
        verify: Check the hashes of the data read.
        max_memory_bytes: The limit of memory for tensors, at least 16 MiB, without the manifests.
        storage_options: Options of fsspec's file system, if ``path`` is a URL.
        new_storage_options: Options of fsspec's file system, if ``new_path`` is a URL.
        progress: Called with the bytes written, and their total.

    Raises:
        DistCheckpointError: The checkpoint is missing or damaged, or the new one can't be written; ``new_path`` is
            unchanged.
        TypeError, ValueError: An argument is wrong.
    """
    options = RewriteOptions(
        num_ranks=num_ranks,
        dim=dim,
        max_file_bytes=max_file_bytes,
        max_memory_bytes=max_memory_bytes,
        progress=progress,
    )
    with (
        contextlib.closing(open_storage(path, storage_options)) as storage,
        contextlib.closing(open_storage(new_path, new_storage_options)) as new_storage,
    ):
        manifest = read_manifest(storage)
        source_state = RewriteSource(
            tree=manifest.tree,
            tensors={key: (tensor.shape, tensor.dtype) for key, tensor in manifest.tensors.items()},
            source=CheckpointReader(storage, manifest, verify=verify),
            world_size=manifest.world_size,
        )
        rewrite(source_state, new_storage, options)
