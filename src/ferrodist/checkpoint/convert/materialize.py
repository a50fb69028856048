"""The full state of a checkpoint, for writers of other formats; its tensors are memory-mapped temporary files."""

from __future__ import annotations

import contextlib
import os
import tempfile
from itertools import count
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.checkpoint.format.safetensors import dtype_from_name
from ferrodist.checkpoint.format.tree import map_children, split_node
from ferrodist.checkpoint.load_plan import LoadPlanner
from ferrodist.checkpoint.reader import CheckpointReader, read_manifest
from ferrodist.checkpoint.storage import open_storage
from ferrodist.checkpoint.tools.rewrite import ROW_BLOCK_BYTES, ProgressCallback, ProgressCounter, row_blocks
from ferrodist.errors import DistCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def materialize(
    path: str | os.PathLike[str],
    scratch_folder: Path,
    *,
    storage_options: Mapping[str, Any] | None,
    progress: ProgressCallback | None,
) -> Iterator[Any]:
    """Provide a checkpoint's full state during the block; its tensors are temporary files in ``scratch_folder``.

    NumPy arrays and numbers become tensors and Python's numbers, and `PerRank` values a dict by rank, since readers of
    other formats support no more. DistCheckpointError: the checkpoint is damaged, or the folder can't be written.
    """
    with contextlib.closing(open_storage(path, storage_options)) as storage:
        manifest = read_manifest(storage)
        try:
            scratch = tempfile.TemporaryDirectory(prefix=".ferrodist-", dir=scratch_folder)
        except OSError as error:
            raise DistCheckpointError(f"{scratch_folder} can't be written: {error}") from error
        with scratch as folder:
            names = count()

            def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
                size = prod(shape)
                if not size:
                    return torch.empty(shape, dtype=dtype, device="cpu")
                file = Path(folder) / str(next(names))
                with file.open("wb") as opened:
                    # Fails on a full disk, where writing to a sparse mapped file would kill the process.
                    os.posix_fallocate(opened.fileno(), 0, size * dtype.itemsize)
                try:
                    return torch.from_file(str(file), shared=True, size=size, dtype=dtype, device="cpu").view(shape)
                except RuntimeError as error:  # too little memory to map it
                    raise OSError(str(error)) from error

            planner = LoadPlanner(manifest, 0, 1, make=make)
            try:
                build = planner.decode(_portable_tree(manifest.tree))
            except OSError as error:
                raise DistCheckpointError(f"{scratch_folder} has no room for the tensors: {error}") from error
            reader = CheckpointReader(storage, manifest, verify=True)
            sizes = {key: dtype_from_name(manifest.tensors[key].dtype).itemsize for key, _, _ in planner.targets}
            total = sum(tensor.numel() * sizes[key] for key, tensor, _ in planner.targets)
            counter = ProgressCounter(total, progress)
            for key, tensor, _ in planner.targets:
                for rows in row_blocks(tuple(tensor.shape), ROW_BLOCK_BYTES // sizes[key]):
                    reader.read_box(key, rows, rows.take(tensor))
                    counter.add(rows.numel * sizes[key])
            yield build()


def _portable_tree(node: Any) -> Any:
    """Replace nodes that other formats don't support."""
    mark, content = split_node(node)
    if mark == "array":
        return {"tensor": content}
    if mark == "leaf" and isinstance(node, dict) and "number" in node:
        return node["number"][1]
    if mark == "per_rank":
        node = {"dict": content}
    return map_children(node, lambda _, each: _portable_tree(each))
