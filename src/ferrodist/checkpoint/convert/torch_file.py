"""Conversion from and to files of ``torch.save``."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.checkpoint.convert.external_tensors import conversion_errors, make_rewrite_source
from ferrodist.checkpoint.convert.materialize import materialize
from ferrodist.checkpoint.convert.torch_pickle import check_pickles
from ferrodist.checkpoint.reader import describe_foreign_format
from ferrodist.checkpoint.storage import LocalStorage, open_storage
from ferrodist.checkpoint.storage.local import open_regular
from ferrodist.checkpoint.tools.rewrite import ProgressCallback, RewriteOptions, rewrite
from ferrodist.errors import DistCheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping


def import_torch_file(
    file: str | os.PathLike[str],
    new_path: str | os.PathLike[str],
    *,
    options: RewriteOptions | None = None,
    new_storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Convert a file of ``torch.save`` to a checkpoint. It is read with ``weights_only=True``: none of its code runs.

    Tensors stay in the file, which is memory-mapped, until they are written; except those of the format before torch
    1.6.

    Args:
        file: The file.
        new_path: The new checkpoint.
        options: Options for writing it; None writes full tensors.
        new_storage_options: Options of fsspec's file system, if ``new_path`` is a URL.

    Raises:
        DistCheckpointError: The file is not safe to load or can't be read, or the checkpoint can't be written.
    """
    storage = open_storage(new_path, new_storage_options)
    file_path = Path(file).absolute()
    if file_path.is_dir():
        hint = describe_foreign_format(LocalStorage(file_path))
        raise DistCheckpointError(f"{file_path} is a folder, not a file of torch.save. {hint}".strip())
    with conversion_errors(str(file_path)):
        state = _load(file_path)
        contents = make_rewrite_source(state, LocalStorage(file_path.parent))
    rewrite(contents, storage, options or RewriteOptions())


def _load(file: Path) -> Any:
    try:
        with os.fdopen(open_regular(file), "rb") as opened:
            is_zip = opened.read(2) == b"PK"
            opened.seek(0)
            check_pickles(opened, os.fstat(opened.fileno()).st_size)
        return torch.load(file, map_location="cpu", mmap=is_zip, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # unpickling any bytes may end in any way
        # The sentence in torch's long explanation that names the class.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        named = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
        reason = [*named, *lines, type(error).__name__][0]
        raise DistCheckpointError(
            f"{file} is no file of torch.save, or has more than tensors and plain values, which is not loaded, for it"
            f" could run code: {reason}"
        ) from error


def export_torch_file(
    path: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> None:
    """Write a checkpoint's state to a file with ``torch.save``; ``torch.load`` reads it.

    NumPy arrays and numbers become tensors and Python's numbers, and `PerRank` a dict by rank.

    Args:
        path: The checkpoint.
        file: The file, which appears when it is complete; there must be room beside it for as much again.
        storage_options: Options of fsspec's file system, if the path is a URL.
        progress: Called with the bytes read, and their total.

    Raises:
        DistCheckpointError: The checkpoint is missing or damaged, or the file can't be written.
    """
    file_path = Path(file).absolute()
    with materialize(path, file_path.parent, storage_options=storage_options, progress=progress) as state:
        # A random name: nobody else can have made a link of it before.
        temporary = file_path.with_name(f".{file_path.name}.{secrets.token_hex(8)}")
        try:
            with temporary.open("xb") as opened:
                torch.save(state, opened)
                opened.flush()
                os.fsync(opened.fileno())
            temporary.replace(file_path)
        except (OSError, RuntimeError) as error:
            raise DistCheckpointError(f"could not write {file_path}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
