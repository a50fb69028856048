"""``.metadata`` of torch.distributed.checkpoint: a pickle, of which nothing is taken but what belongs there."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import torch

from ferrodist.checkpoint.conversion.pickles import Global, Items, Made, check_written_out, read_pickle
from ferrodist.checkpoint.folder import DCP_METADATA_NAME as METADATA_NAME
from ferrodist.checkpoint.manifest import MAX_DIMS
from ferrodist.checkpoint.tree import spread
from ferrodist.tensor.regions import Box
from ferrodist.wording import with_article

__all__ = ["DcpItem", "DcpMetadata", "DcpTensor", "decode_metadata"]

_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpTensor:
    """A tensor: its shape, and the chunks that it lies in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Box, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpItem:
    """Where a chunk or a value lies.

    Args:
        name: The name of the tensor or value.
        file: The file's name.
        offset: The item's first byte in the file.
        length: Its size in bytes.
        transforms: How its bytes are transformed, by names.
    """

    name: str
    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class DcpMetadata:
    """What a folder has.

    Args:
        tensors: By name; None for what is a value.
        paths: The keys that lead to each in the state, where they are known.
        items: By name, and for a chunk its offsets.
    """

    tensors: dict[str, DcpTensor | None] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    items: dict[tuple[str, tuple[int, ...] | None], DcpItem] = field(default_factory=dict)


def decode_metadata(data: bytes) -> DcpMetadata:
    """Read the file's bytes. Nothing is called or changed for them, and memory is taken in proportion to them.

    Raises:
        ValueError: They are something else, or name a class that doesn't belong there.
    """
    try:
        value = read_pickle(io.BytesIO(data), len(data), _check_known)
        check_written_out(value, len(data))  # chunks that many tensors share are made for each
        fields = _fields(value, "Metadata")
        found = DcpMetadata()
        for name, node in _by_text(fields.get("state_dict_metadata")).items():
            found.tensors[name] = _tensor(node)
        if isinstance(fields.get("planner_data"), Items):  # otherwise another planner's
            for name, path in _by_text(fields["planner_data"]).items():
                found.paths[name] = _path(path)
        if fields.get("storage_data") is not None:
            pairs = _pairs(fields["storage_data"])
            keys = spread(_index(key) for key, _ in pairs)
            found.items = {key: _item(key[0], node) for key, (_, node) in zip(keys, pairs, strict=True)}
    except ValueError as error:
        raise ValueError(f"{METADATA_NAME} is not what torch.distributed.checkpoint writes: {error}") from error
    return found


def _check_known(found: Global) -> None:
    if found.name in _KNOWN.get(found.module, ()):
        return
    if found.module == "torch" and (found.name == "Size" or isinstance(vars(torch).get(found.name), torch.dtype)):
        return
    raise ValueError(f"it names {found}, which doesn't belong there")


def _tensor(node: Any) -> DcpTensor | None:
    if isinstance(node, Made) and node.function == (_METADATA, "BytesStorageMetadata"):
        return None
    fields = _fields(node, "TensorStorageMetadata")
    properties = fields.get("properties")
    if not isinstance(properties, Made) or properties.function != (_METADATA, "TensorProperties"):
        raise ValueError("it has a tensor without properties")
    state = _of(properties.state, tuple)
    dtype = vars(torch).get(state[0].name) if state and isinstance(state[0], Global) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError("it has a tensor without a dtype")  # noqa: TRY004 - of the file
    layout = state[1] if len(state) > 1 else None
    if not isinstance(layout, Made) or layout.arguments != ("torch.strided",):
        raise ValueError("it has a tensor of another layout than torch.strided")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in _of(fields.get("chunks"), list)]
    boxes = tuple(Box(_sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))) for chunk in chunks)
    return DcpTensor(shape=_sizes(fields.get("size")), dtype=dtype, chunks=boxes)


def _index(node: Any) -> tuple[str, tuple[int, ...] | None]:
    """The name of a tensor or value, and for a chunk its offsets."""
    fields = _fields(node, "MetadataIndex")
    offset = fields.get("offset")
    return _of(fields.get("fqn"), str), None if offset is None else _sizes(offset)


def _item(name: str, node: Any) -> DcpItem:
    fields = _fields(node, "_StorageInfo")
    transforms = fields.get("transform_descriptors")
    return DcpItem(
        name=name,
        file=_of(fields.get("relative_path"), str),
        offset=_of(fields.get("offset"), int),
        length=_of(fields.get("length"), int),
        transforms=() if transforms is None else tuple(_of(each, str) for each in _of(transforms, (list, tuple))),
    )


def _fields(node: Any, name: str) -> dict[str, Any]:
    """The attributes of an object of a class."""
    if not isinstance(node, Made) or node.function.name != name or node.arguments:
        raise ValueError(f"it has something else where {with_article(name)} is expected")
    return {} if node.state is None else _by_text(node.state)


def _pairs(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, Made) and node.function.name == "OrderedDict" and not node.arguments:
        node = node.items
    pairs: list[tuple[Any, Any]] = _of(node, Items).pairs
    return pairs


def _by_text(node: Any) -> dict[str, Any]:
    return {_of(key, str): value for key, value in _pairs(node)}


def _path(node: Any) -> tuple[str | int, ...]:
    if not isinstance(node, tuple) or not node or not all(type(step) in (str, int) for step in node):
        raise ValueError("it has a path that is none")
    return node


def _sizes(node: Any) -> tuple[int, ...]:
    """A torch.Size."""
    if isinstance(node, Made) and node.function == ("torch", "Size") and len(node.arguments) == 1:
        sizes = node.arguments[0]
        if isinstance(sizes, (list, tuple)) and len(sizes) <= MAX_DIMS:
            return tuple(_of(size, int) for size in sizes)
    raise ValueError("it has something else where a torch.Size is expected")


def _of(node: Any, kind: Any) -> Any:
    if not isinstance(node, kind) or isinstance(node, (bool, Global)):
        raise ValueError(f"it has {with_article(type(node).__name__)} in a place of something else")  # noqa: TRY004 - of the file
    return node
