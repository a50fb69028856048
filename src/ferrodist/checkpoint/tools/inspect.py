"""A description of a checkpoint without its tensors' elements, for people and, as JSON, for programs."""

from __future__ import annotations

import datetime as dt
from contextlib import closing
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ferrodist.checkpoint.format.tree import child_nodes, leaf_text, split_node
from ferrodist.checkpoint.reader import read_manifest
from ferrodist.checkpoint.storage import open_storage
from ferrodist.checkpoint.tools.verify import verify

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from ferrodist.checkpoint.format.manifest import Manifest

_MAX_VALUE_LENGTH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """A tensor.

    Args:
        key: The name in files.
        shape: The full tensor's shape.
        dtype: torch's name of its dtype.
        size_bytes: The size of its elements.
        placement: The placement on the ranks that saved it, in words.
        num_shards: The number of its shards.
        files: The files of its shards.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    placement: str
    num_shards: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """A value in a state.

    Args:
        place: The keys of its path, as text.
        kind: ``tensor``, ``array``, ``value``, or the container's: ``dict``, ``list``, ``tuple``, ``per_rank``...
        value: A value's repr, cut off if it is long; the number of members of a container.
        tensor: The tensor, for tensors and arrays.
    """

    place: tuple[str, ...]
    kind: str
    value: str | None = None
    tensor: TensorFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A checkpoint.

    Args:
        url: The checkpoint's URL.
        producer: The program that wrote it.
        created: The time of the commit, in UTC and ISO 8601.
        world_size: The number of ranks that saved it.
        files: File names and sizes in bytes.
        size_bytes: The size of all files of tensors.
        num_tensors: The number of tensors.
        num_elements: The number of their elements.
        state: The values in the state; a container comes before its members.
        problems: The problems found without reading tensors.
    """

    url: str
    producer: str
    created: str
    world_size: int
    files: dict[str, int]
    size_bytes: int
    num_tensors: int
    num_elements: int
    state: tuple[StateEntry, ...]
    problems: tuple[str, ...]


def inspect_checkpoint(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Inspection:
    """Read a checkpoint's manifest and check that its files exist; tensors are not read.

    Args:
        path: The checkpoint.
        storage_options: Options of fsspec's file system, if the path is a URL.

    Raises:
        DistCheckpointError: The checkpoint is missing, or its manifest is damaged.
    """
    with closing(open_storage(path, storage_options)) as storage:
        manifest = read_manifest(storage)
    report = verify(path, contents=False, storage_options=storage_options)
    created = dt.datetime.fromtimestamp(manifest.created_ns // 10**9, tz=dt.timezone.utc)
    return Inspection(
        url=storage.url,
        producer=manifest.producer,
        created=created.isoformat(),
        world_size=manifest.world_size,
        files={file.name: file.size_bytes for file in manifest.files},
        size_bytes=sum(file.size_bytes for file in manifest.files),
        num_tensors=len(manifest.tensors),
        num_elements=sum(prod(tensor.shape) for tensor in manifest.tensors.values()),
        state=tuple(_entries(manifest, manifest.tree, ())),
        problems=tuple(map(str, report.problems)),
    )


def _entries(manifest: Manifest, node: Any, place: tuple[str, ...]) -> Iterator[StateEntry]:
    mark, content = split_node(node)
    if mark == "leaf":
        yield StateEntry(place=place, kind="value", value=leaf_text(node)[:_MAX_VALUE_LENGTH])
        return
    if mark in ("tensor", "array"):
        tensor = manifest.tensors[content]
        facts = TensorFacts(
            key=content,
            shape=tensor.shape,
            dtype=tensor.dtype,
            size_bytes=tensor.size_bytes,
            placement=tensor.placement,
            num_shards=len(tensor.shards),
            files=tuple(dict.fromkeys(manifest.files[shard.file].name for shard in tensor.shards)),
        )
        yield StateEntry(place=place, kind=mark, tensor=facts)
        return
    yield StateEntry(place=place, kind="dict" if mark == "pairs" else mark, value=str(len(content)))
    for key, each in child_nodes(node):
        name = leaf_text(key) if mark == "pairs" else f"rank {key}" if mark == "per_rank" else str(key)
        yield from _entries(manifest, each, (*place, name))
