"""A checkpoint's state with whole tensors, for writers of other formats, which want all of it at once.

The tensors are files in a folder of their own, mapped to memory: the system keeps of them what memory there is for.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.checkpoint.bands import BAND_BYTES, cut_bands
from ferrodist.checkpoint.dtypes import dtype_from_name
from ferrodist.checkpoint.folder import read_manifest
from ferrodist.checkpoint.matching import Matching
from ferrodist.checkpoint.progress import Progress
from ferrodist.checkpoint.reader import CheckpointReader
from ferrodist.checkpoint.shard_metadata import ShardMetadata
from ferrodist.checkpoint.storage import open_storage
from ferrodist.errors import DistCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ferrodist.checkpoint.progress import ProgressCallback

__all__ = ["open_whole"]


@contextlib.contextmanager
def open_whole(
    path: str | os.PathLike[str],
    beside: Path,
    *,
    storage_options: Mapping[str, Any] | None,
    progress: ProgressCallback | None,
) -> Iterator[Any]:
    """The state of a checkpoint, as long as the block runs.

    NumPy arrays and numbers come as tensors and Python's numbers, and what each rank had its own of as a dict by ranks,
    as text: readers of other formats take no more than these.

    Args:
        path: The checkpoint.
        beside: In this folder the tensors' files are made, and removed at the end; it needs room for all of them.
        storage_options: For fsspec's file system, if the path is a URL.
        progress: Told how many bytes are read, and of how many.

    Raises:
        DistCheckpointError: There is no checkpoint, it is damaged, or the folder can't be written.
    """
    storage = open_storage(path, storage_options)
    try:
        manifest = read_manifest(storage)
        try:
            made = tempfile.TemporaryDirectory(prefix=".ferrodist-", dir=beside)
        except OSError as error:
            raise DistCheckpointError(f"{beside} can't be written: {error}") from error
        with made as folder:
            names = iter(range(len(manifest.tensors)))

            def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
                return _map(Path(folder) / str(next(names)), shape, dtype)

            matching = Matching(manifest, 0, 1, ShardMetadata(num_ranks=1), make=make)
            try:
                build = matching.decode(_plain(manifest.tree))
            except OSError as error:
                raise DistCheckpointError(f"{beside} has no room for the tensors: {error}") from error
            reader = CheckpointReader(storage, manifest, verify=True)
            sizes = {key: dtype_from_name(manifest.tensors[key].dtype).itemsize for key, _, _ in matching.targets}
            meter = Progress(sum(tensor.numel() * sizes[key] for key, tensor, _ in matching.targets), progress)
            for key, tensor, _ in matching.targets:
                for band in cut_bands(tuple(tensor.shape), BAND_BYTES // sizes[key]):
                    reader.read_box(key, band, band.take(tensor))
                    meter.add(band.numel * sizes[key])
            yield build()
    finally:
        storage.close()


def _map(file: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose memory is a new file."""
    if not prod(shape):
        return torch.empty(shape, dtype=dtype, device="cpu")
    with file.open("wb") as opened:
        # On a disk that is full this fails; a mapped file without its room would end the process when it is written.
        os.posix_fallocate(opened.fileno(), 0, prod(shape) * dtype.itemsize)
    return torch.from_file(str(file), shared=True, size=prod(shape), dtype=dtype, device="cpu").view(shape)


def _plain(node: Any) -> Any:
    """A tree without what only we and NumPy have."""
    if isinstance(node, list):
        return [_plain(each) for each in node]
    if not isinstance(node, dict):
        return node
    ((mark, content),) = node.items()
    if mark in ("array", "number"):
        return {"tensor": content} if mark == "array" else content[1]
    if mark in ("dict", "per_rank"):
        return {"dict": {key: _plain(each) for key, each in content.items()}}
    if mark == "pairs":
        content = [[key, _plain(each)] for key, each in content]
    elif mark in ("tuple", "set", "frozenset"):
        content = _plain(content)
    return {mark: content}
