"""Folders of torch.distributed.checkpoint (DCP).

Each item of a DCP file is a file of ``torch.save`` in itself: of a chunk of a tensor, whose bytes lie in it as they
are, or of a value.
"""

from __future__ import annotations

import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from ferrodist.checkpoint.conversion.dcp_metadata import DcpItem, DcpTensor, decode_metadata
from ferrodist.checkpoint.conversion.file_view import open_view
from ferrodist.checkpoint.conversion.foreign import ForeignTensor, LoadedPart, RawPart, explain_foreign, make_contents
from ferrodist.checkpoint.conversion.torch_pickles import load_checked
from ferrodist.checkpoint.conversion.whole import open_whole
from ferrodist.checkpoint.dtypes import dtype_name
from ferrodist.checkpoint.folder import DCP_METADATA_NAME as METADATA_NAME
from ferrodist.checkpoint.folder import describe_other
from ferrodist.checkpoint.rewriting import RewriteOptions, rewrite
from ferrodist.checkpoint.storage import open_storage
from ferrodist.errors import DistCheckpointError
from ferrodist.torch_private.tensors import checkpoint_offset
from ferrodist.wording import with_article

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from ferrodist.checkpoint.progress import ProgressCallback
    from ferrodist.checkpoint.storage.base import Storage
    from ferrodist.tensor.regions import Box

__all__ = ["export_dcp", "import_dcp"]


def import_dcp(
    path: str | os.PathLike[str],
    new_path: str | os.PathLike[str],
    *,
    options: RewriteOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    new_storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Make a checkpoint of a folder that ``torch.distributed.checkpoint.save`` has written.

    None of its code runs: ``.metadata`` is read without any class, values with ``weights_only=True``. Memory is taken
    in proportion to the files. Keys of dicts are text there, whatever they were.

    Args:
        path: The folder.
        new_path: Where the checkpoint goes.
        options: How it is written; None is whole tensors.
        storage_options: For fsspec's file system, if ``path`` is a URL.
        new_storage_options: The same for ``new_path``.

    Raises:
        DistCheckpointError: There is no such folder, it is damaged or has what is not to be loaded, or the checkpoint
            can't be written.
    """
    storage, new_storage = open_storage(path, storage_options), open_storage(new_path, new_storage_options)
    try:
        with explain_foreign(storage.url):
            if METADATA_NAME not in storage.list_names():
                what = f"{storage.url} is no folder of torch.distributed.checkpoint: {METADATA_NAME} is missing"
                raise DistCheckpointError(f"{what}. {other}" if (other := describe_other(storage)) else what)
            contents = make_contents(_Folder(storage).state(), storage)
        rewrite(contents, new_storage, options or RewriteOptions())
    finally:
        storage.close()


class _Folder:
    """A DCP folder."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._metadata = decode_metadata(storage.get(METADATA_NAME))
        self._sizes: dict[str, int] = {}

    def state(self) -> Any:
        """The state that was saved, with `ForeignTensor`s."""
        state: dict[Any, Any] = {}
        for name, found in self._metadata.tensors.items():
            with explain_foreign(f"{self._storage.url}: {name!r}"):
                value = self._load(self._item(name, None)) if found is None else self._tensor(name, found)
            _put(state, self._metadata.paths.get(name, (name,)), value)
        return _with_lists(state)

    def _tensor(self, name: str, found: DcpTensor) -> ForeignTensor:
        dtype = found.dtype
        parts = [self._part(name, box, dtype) for box in found.chunks]
        if not all(isinstance(part, RawPart) for part in parts):
            parts = [
                LoadedPart(box=part.box, load=partial(self._load, self._item(name, part.box.offsets))) for part in parts
            ]
        return ForeignTensor(shape=found.shape, dtype=dtype_name(dtype), parts=parts)  # type: ignore[arg-type]

    def _part(self, name: str, box: Box, dtype: torch.dtype) -> RawPart | LoadedPart:
        """A chunk: where its bytes are, if they lie row-major."""
        item = self._item(name, box.offsets)
        tensor = self._load(item, device="meta")
        if not isinstance(tensor, torch.Tensor) or (tuple(tensor.shape), tensor.dtype) != (box.shape, dtype):
            raise ValueError(f"its chunk at {box.offsets} in {item.file} is another tensor")
        start = checkpoint_offset(tensor)
        if start is None or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return LoadedPart(box=box, load=partial(self._load, item))
        at = item.offset + start + tensor.storage_offset() * dtype.itemsize
        if not item.offset <= at <= at + tensor.nbytes <= item.offset + item.length:
            raise ValueError(f"its chunk at {box.offsets} in {item.file} is longer than its item")
        return RawPart(box=box, file=item.file, start=at)

    def _item(self, key: str, offsets: tuple[int, ...] | None) -> DcpItem:
        """Where a value lies, or a chunk of a tensor."""
        found = self._metadata.items.get((key, offsets))
        if found is None:
            raise ValueError("it has no place in a file")
        name = found.file
        if "/" in name or "\\" in name or name in ("", ".", ".."):
            raise ValueError(f"it is in a file named {name!r}")
        if found.transforms:
            raise ValueError(f"it is written with {list(found.transforms)}, which is not known here")
        if name not in self._sizes:
            try:
                self._sizes[name] = self._storage.size_bytes(name)
            except FileNotFoundError:
                raise DistCheckpointError(f"{self._storage.url}/{name} is missing, which has {key!r}") from None
        if not 0 <= found.offset <= found.offset + found.length <= self._sizes[name]:
            raise DistCheckpointError(f"{self._storage.url}/{name} is cut off: it ends before {key!r}")
        return found

    def _load(self, item: DcpItem, device: str = "cpu") -> Any:
        with open_view(self._storage, item.file, item.offset, item.length) as view:
            return load_checked(view, item.length, map_location=device)


def _put(state: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    """Put a value to its place in nested dicts; a list is a dict by numbers as yet."""
    for step in path[:-1]:
        state = state.setdefault(step, {})
        if not isinstance(state, dict):
            raise DistCheckpointError(f"{METADATA_NAME} has a value and a dict in one place")
    state[path[-1]] = value


def _with_lists(node: Any) -> Any:
    """What has the keys 0, 1, ... as numbers was a list."""
    if not isinstance(node, dict):
        return node
    members = {key: _with_lists(each) for key, each in node.items()}
    if members and all(type(key) is int for key in members):
        return [members[key] for key in sorted(members)]
    return members


def export_dcp(
    path: str | os.PathLike[str],
    new_path: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> None:
    """Write a checkpoint's state with torch.distributed.checkpoint; its ``load`` reads it, on any number of ranks.

    DCP has dicts of text and lists: other keys become text. NumPy arrays and numbers become tensors and Python's
    numbers, and `PerRank` a dict by ranks.

    Args:
        path: The checkpoint, of a dict.
        new_path: A local folder that is not there yet, or is empty; beside it there must be room for as much again.
        storage_options: For fsspec's file system, if ``path`` is a URL.
        progress: Told how many bytes are read, and of how many.

    Raises:
        DistCheckpointError: There is no checkpoint, it is damaged or has no dict, or the folder can't be written.
    """
    place = Path(new_path).absolute()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise DistCheckpointError(f"{place} is there already: name a folder that is not, or is empty")
    with open_whole(path, place.parent, storage_options=storage_options, progress=progress) as state:
        if not isinstance(state, dict):
            raise DistCheckpointError(
                f"{path} has {with_article(type(state).__name__)}, and torch.distributed.checkpoint keeps dicts"
            )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                save(state, checkpoint_id=place, no_dist=True)
        except BaseException as error:
            shutil.rmtree(place, ignore_errors=True)
            if isinstance(error, CheckpointException):  # which is no Exception
                first, _ = next(iter(error.failures.values()))
                raise DistCheckpointError(f"could not write {place}: {first}") from error
            if isinstance(error, Exception):
                raise DistCheckpointError(f"could not write {place}: {error}") from error
            raise
