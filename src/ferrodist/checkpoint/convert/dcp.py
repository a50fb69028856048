"""Conversion from and to folders of torch.distributed.checkpoint (DCP).

Each item of a DCP file is a ``torch.save`` file in itself: a chunk of a tensor, whose bytes are in it as they are, or a
value. ``.metadata`` is a pickle, of which only known classes are accepted, as inert values.
"""

from __future__ import annotations

import io
import os
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import Buffer, override

from ferrodist.checkpoint.convert.external_tensors import (
    ExternalTensor,
    FileShard,
    LazyShard,
    conversion_errors,
    import_folder,
)
from ferrodist.checkpoint.convert.materialize import materialize
from ferrodist.checkpoint.convert.pickle_reader import Global, PickledCall, PickledDict, check_expansion, read_pickle
from ferrodist.checkpoint.convert.torch_pickle import load_checked
from ferrodist.checkpoint.format.manifest import MAX_DIMS
from ferrodist.checkpoint.format.safetensors import dtype_name
from ferrodist.checkpoint.format.tree import check_collisions
from ferrodist.checkpoint.reader import DCP_METADATA_NAME as METADATA_NAME
from ferrodist.checkpoint.reader import describe_foreign_format
from ferrodist.checkpoint.storage import Storage, open_storage
from ferrodist.errors import DistCheckpointError
from ferrodist.tensor.box import Box
from ferrodist.torch_private.tensors import checkpoint_offset
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ferrodist.checkpoint.tools.rewrite import ProgressCallback, RewriteOptions

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED_GLOBALS = {
    _METADATA: (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "WindowsPath", "PurePosixPath"),
}


class DcpTensor(NamedTuple):
    """A tensor's shape, dtype and chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Box, ...]


class DcpItem(NamedTuple):
    """The position of a chunk or a value."""

    name: str
    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


class DcpMetadata(NamedTuple):
    """The contents of a folder."""

    tensors: dict[str, DcpTensor | None]
    paths: dict[str, tuple[str | int, ...]]
    items: dict[tuple[str, tuple[int, ...] | None], DcpItem]


def decode_metadata(data: bytes) -> DcpMetadata:
    """Decode ``.metadata``. Nothing is called or changed by it, and memory is proportional to its size."""
    try:
        value = read_pickle(io.BytesIO(data), len(data), _check_allowed)
        check_expansion(value, len(data))  # chunks that many tensors share are made for each
        fields = _fields(value, "Metadata")
        tensors = {name: _tensor(node) for name, node in _str_keyed(fields.get("state_dict_metadata")).items()}
        paths = {}
        if isinstance(fields.get("planner_data"), PickledDict):  # otherwise another planner's
            paths = {name: _path(path) for name, path in _str_keyed(fields["planner_data"]).items()}
        pairs = [] if fields.get("storage_data") is None else _pairs(fields["storage_data"])
        keys = check_collisions(_index(key) for key, _ in pairs)
        items = {key: _item(key[0], node) for key, (_, node) in zip(keys, pairs, strict=True)}
    except ValueError as error:
        raise ValueError(f"{METADATA_NAME} is not what torch.distributed.checkpoint writes: {error}") from error
    return DcpMetadata(tensors, paths, items)


def _check_allowed(found: Global) -> None:
    if found.name in _ALLOWED_GLOBALS.get(found.module, ()):
        return
    if found.module == "torch" and (found.name == "Size" or isinstance(vars(torch).get(found.name), torch.dtype)):
        return
    raise ValueError(f"it names {found}, which doesn't belong there")


def _tensor(node: Any) -> DcpTensor | None:
    if isinstance(node, PickledCall) and node.function == (_METADATA, "BytesStorageMetadata"):
        return None
    fields = _fields(node, "TensorStorageMetadata")
    properties = fields.get("properties")
    if not isinstance(properties, PickledCall) or properties.function != (_METADATA, "TensorProperties"):
        raise ValueError("it has a tensor without properties")
    state = _expect(properties.state, tuple)
    dtype = vars(torch).get(state[0].name) if state and isinstance(state[0], Global) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError("it has a tensor without a dtype")  # noqa: TRY004 - of the file
    layout = state[1] if len(state) > 1 else None
    if not isinstance(layout, PickledCall) or layout.arguments != ("torch.strided",):
        raise ValueError("it has a tensor of another layout than torch.strided")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in _expect(fields.get("chunks"), list)]
    boxes = tuple(Box(_sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))) for chunk in chunks)
    return DcpTensor(_sizes(fields.get("size")), dtype, boxes)


def _index(node: Any) -> tuple[str, tuple[int, ...] | None]:
    """Return the name of a tensor or value, and for a chunk its offsets."""
    fields = _fields(node, "MetadataIndex")
    offset = fields.get("offset")
    return _expect(fields.get("fqn"), str), None if offset is None else _sizes(offset)


def _item(name: str, node: Any) -> DcpItem:
    fields = _fields(node, "_StorageInfo")
    transforms = fields.get("transform_descriptors")
    names = () if transforms is None else _expect(transforms, (list, tuple))
    offset, length = (_expect(fields.get(field), int) for field in ("offset", "length"))
    file = _expect(fields.get("relative_path"), str)
    return DcpItem(name, file, offset, length, tuple(_expect(each, str) for each in names))


def _fields(node: Any, name: str) -> dict[str, Any]:
    """Return the attributes of an object of a class."""
    if not isinstance(node, PickledCall) or node.function.name != name or node.arguments:
        raise ValueError(f"it has something else where {with_article(name)} is expected")
    return {} if node.state is None else _str_keyed(node.state)


def _pairs(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, PickledCall) and node.function.name == "OrderedDict" and not node.arguments:
        node = node.items
    pairs: list[tuple[Any, Any]] = _expect(node, PickledDict).pairs
    return pairs


def _str_keyed(node: Any) -> dict[str, Any]:
    return {_expect(key, str): value for key, value in _pairs(node)}


def _path(node: Any) -> tuple[str | int, ...]:
    if not isinstance(node, tuple) or not node or not all(type(step) in (str, int) for step in node):
        raise ValueError("it has an invalid path")
    return node


def _sizes(node: Any) -> tuple[int, ...]:
    """Return the sizes of a torch.Size."""
    if isinstance(node, PickledCall) and node.function == ("torch", "Size") and len(node.arguments) == 1:
        sizes = node.arguments[0]
        if isinstance(sizes, (list, tuple)) and len(sizes) <= MAX_DIMS:
            return tuple(_expect(size, int) for size in sizes)
    raise ValueError("it has something else where a torch.Size is expected")


def _expect(node: Any, kind: Any) -> Any:
    if not isinstance(node, kind) or isinstance(node, (bool, Global)):
        wanted = " or ".join(with_article(each.__name__) for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(f"it has {with_article(type(node).__name__)} where {wanted} is expected")  # noqa: TRY004 - of the file
    return node


class _View(io.RawIOBase):
    """A range of bytes of a file as a seekable Python file."""

    def __init__(self, storage: Storage, name: str, start: int, size_bytes: int) -> None:
        super().__init__()
        self._storage, self._name, self._start, self._size_bytes = storage, name, start, size_bytes
        self._position = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}[whence]
        if base + offset < 0:
            raise OSError("a position before the beginning of a file")
        self._position = base + offset
        return self._position

    @override
    def readinto(self, buffer: Buffer) -> int:
        into = memoryview(buffer).cast("B")
        into = into[: max(0, self._size_bytes - self._position)]
        if len(into):
            self._storage.read(self._name, self._start + self._position, into)
        self._position += len(into)
        return len(into)


def import_dcp(
    path: str | os.PathLike[str],
    new_path: str | os.PathLike[str],
    *,
    options: RewriteOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    new_storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Convert a folder of ``torch.distributed.checkpoint.save`` to a checkpoint.

    None of its code runs: ``.metadata`` is read without any class, values with ``weights_only=True``. Memory is
    proportional to the files. DCP turns all keys of dicts into text.

    Args:
        path: The folder.
        new_path: The new checkpoint.
        options: Options for writing it; None writes full tensors.
        storage_options: Options of fsspec's file system, if ``path`` is a URL.
        new_storage_options: Options of fsspec's file system, if ``new_path`` is a URL.

    Raises:
        DistCheckpointError: The folder is missing, damaged or not safe to load, or the checkpoint can't be
            written.
    """
    storage, new_storage = open_storage(path, storage_options), open_storage(new_path, new_storage_options)
    import_folder(storage, new_storage, _read_state, options)


def _read_state(storage: Storage) -> Any:
    if METADATA_NAME not in storage.list_names():
        what = f"{storage.url} is no folder of torch.distributed.checkpoint: {METADATA_NAME} is missing"
        raise DistCheckpointError(f"{what}. {other}" if (other := describe_foreign_format(storage)) else what)
    return _DcpReader(storage).state()


class _DcpReader:
    """Reads a DCP folder."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._metadata = decode_metadata(storage.get(METADATA_NAME))
        self._sizes: dict[str, int] = {}

    def state(self) -> Any:
        """Return the state that was saved, with `ExternalTensor` leaves."""
        state: dict[Any, Any] = {}
        for name, found in self._metadata.tensors.items():
            with conversion_errors(f"{self._storage.url}: {name!r}"):
                value = self._load(self._item(name, None)) if found is None else self._tensor(name, found)
            _set_at(state, self._metadata.paths.get(name, (name,)), value)
        return _with_lists(state)

    def _tensor(self, name: str, found: DcpTensor) -> ExternalTensor:
        dtype = found.dtype
        parts = [self._chunk_source(name, box, dtype) for box in found.chunks]
        if not all(isinstance(part, FileShard) for part in parts):
            parts = [LazyShard(part.box, partial(self._load, self._item(name, part.box.offsets))) for part in parts]
        return ExternalTensor(shape=found.shape, dtype=dtype_name(dtype), parts=parts)  # type: ignore[arg-type]

    def _chunk_source(self, name: str, box: Box, dtype: torch.dtype) -> FileShard | LazyShard:
        """Return a chunk as a range of a file, if it is row-major there."""
        item = self._item(name, box.offsets)
        tensor = self._load(item, device="meta")
        if not isinstance(tensor, torch.Tensor) or (tuple(tensor.shape), tensor.dtype) != (box.shape, dtype):
            raise ValueError(f"its chunk at {box.offsets} in {item.file} is another tensor")
        start = checkpoint_offset(tensor)
        if start is None or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return LazyShard(box, partial(self._load, item))
        at = item.offset + start + tensor.storage_offset() * dtype.itemsize
        if not item.offset <= at <= at + tensor.nbytes <= item.offset + item.length:
            raise ValueError(f"its chunk at {box.offsets} in {item.file} is longer than its item")
        return FileShard(box, item.file, at)

    def _item(self, key: str, offsets: tuple[int, ...] | None) -> DcpItem:
        """Return the position of a value, or of a chunk of a tensor."""
        found = self._metadata.items.get((key, offsets))
        if found is None:
            raise ValueError("it is in no file")
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
        with io.BufferedReader(_View(self._storage, item.file, item.offset, item.length)) as view:
            return load_checked(view, item.length, map_location=device)


def _set_at(state: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    """Set a value in nested dicts; lists are dicts with int keys for now."""
    for step in path[:-1]:
        state = state.setdefault(step, {})
        if not isinstance(state, dict):
            raise DistCheckpointError(f"{METADATA_NAME} has a value and a dict in one place")
    state[path[-1]] = value


def _with_lists(node: Any) -> Any:
    """Convert dicts with int keys to lists."""
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
    """Write a checkpoint's state with torch.distributed.checkpoint, whose ``load`` reads it on any number of ranks.

    DCP supports dicts of strings and lists: other keys become strings. NumPy arrays and numbers become tensors and
    Python's numbers, and `PerRank` a dict by rank.

    Args:
        path: The checkpoint, of a dict.
        new_path: A local folder that is new or empty, with room beside it for as much again.
        storage_options: Options of fsspec's file system, if ``path`` is a URL.
        progress: Called with the bytes read, and their total.

    Raises:
        DistCheckpointError: The checkpoint is missing, damaged or not a dict, or the folder can't be written.
    """
    folder = Path(new_path).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DistCheckpointError(f"{folder} is there already: name a folder that is not, or is empty")
    with materialize(path, folder.parent, storage_options=storage_options, progress=progress) as state:
        if not isinstance(state, dict):
            raise DistCheckpointError(
                f"{path} has {with_article(type(state).__name__)}, and torch.distributed.checkpoint keeps dicts"
            )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                save(state, checkpoint_id=folder, no_dist=True)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, CheckpointException):  # which is no Exception
                first, _ = next(iter(error.failures.values()))
                raise DistCheckpointError(f"could not write {folder}: {first}") from error
            if isinstance(error, Exception):
                raise DistCheckpointError(f"could not write {folder}: {error}") from error
            raise
