"""Conversion from and to Hugging Face's folders of safetensors files."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ferrodist.arguments import check_type
from ferrodist.checkpoint.convert.external_tensors import ExternalTensor, FileShard, conversion_errors, import_folder
from ferrodist.checkpoint.format.manifest import INDEX_NAME, MANIFEST_NAME, SINGLE_NAME
from ferrodist.checkpoint.format.safetensors import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    HeaderEntry,
    from_safetensors,
    parse_header,
)
from ferrodist.checkpoint.format.tree import map_children, split_node, tensor_key
from ferrodist.checkpoint.reader import CheckpointReader, describe_foreign_format, read_manifest
from ferrodist.checkpoint.storage import Storage, open_storage
from ferrodist.checkpoint.tools.rewrite import BoxSource, RewriteOptions, RewriteSource, rewrite
from ferrodist.errors import DistCheckpointError
from ferrodist.tensor.box import Box
from ferrodist.wording import counted

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def import_hugging_face(
    path: str | os.PathLike[str],
    new_path: str | os.PathLike[str],
    *,
    options: RewriteOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    new_storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Convert a folder with ``model.safetensors``, or with several such files and an index, to a checkpoint.

    Its state is a dict of tensors by name, like a module's state dict.

    Args:
        path: The folder.
        new_path: The new checkpoint.
        options: Options for writing it; None writes full tensors.
        storage_options: Options of fsspec's file system, if ``path`` is a URL.
        new_storage_options: Options of fsspec's file system, if ``new_path`` is a URL.

    Raises:
        DistCheckpointError: The folder is missing or damaged, or the checkpoint can't be written.
    """
    storage, new_storage = open_storage(path, storage_options), open_storage(new_path, new_storage_options)
    import_folder(storage, new_storage, _read_foreign, options)


def _read_foreign(storage: Storage) -> dict[str, ExternalTensor]:
    if MANIFEST_NAME in storage.list_names():
        raise DistCheckpointError(f"{storage.url} is a checkpoint of ferrodist already: reshard makes another of it")
    return find_tensors(storage)


def find_tensors(storage: Storage) -> dict[str, ExternalTensor]:
    """Return the tensors in the safetensors files of a folder by name; DistCheckpointError if it has none."""
    names = set(storage.list_names())
    if SINGLE_NAME in names:
        return _parse_file(storage, SINGLE_NAME)
    if INDEX_NAME not in names:
        what = f"{storage.url} has neither {SINGLE_NAME} nor {INDEX_NAME}"
        raise DistCheckpointError(f"{what}. {other}" if (other := describe_foreign_format(storage)) else what)
    file_of_tensor = msgspec.json.decode(storage.get(INDEX_NAME), type=_Index).weight_map
    if missing := [file for file in file_of_tensor.values() if file not in names]:
        raise DistCheckpointError(f"{storage.url}/{missing[0]} is missing, which {INDEX_NAME} names")
    files = {file: _parse_file(storage, file) for file in dict.fromkeys(file_of_tensor.values())}
    for name, file in file_of_tensor.items():
        if name not in files[file]:
            raise DistCheckpointError(f"{storage.url}/{file} lacks tensor {name!r}, which {INDEX_NAME} says it has")
    return {name: files[file][name] for name, file in file_of_tensor.items()}


def _parse_file(storage: Storage, file: str) -> dict[str, ExternalTensor]:
    """Return the tensors of a file."""
    where, size = f"{storage.url}/{file}", storage.size_bytes(file)
    length_field = bytearray(LENGTH_BYTES)
    if size < LENGTH_BYTES:
        raise DistCheckpointError(f"{where} is no safetensors file: it has {counted(size, 'byte')}")
    storage.read(file, 0, memoryview(length_field))
    begin = LENGTH_BYTES + int.from_bytes(length_field, "little")
    if begin > min(size, LENGTH_BYTES + MAX_HEADER_BYTES):
        raise DistCheckpointError(f"{where} is no safetensors file, or is cut off: its header is longer than it is")
    header = bytearray(begin)
    storage.read(file, 0, memoryview(header))
    found = {}
    with conversion_errors(where):
        entries = parse_header(bytes(header))
        _check_layout(entries, size - begin, where)
        for name, entry in entries.items():
            start, stop = entry.data_offsets
            if not 0 <= start <= stop <= size - begin:
                raise DistCheckpointError(f"{where} is damaged or cut off: tensor {name!r} ends after its end")
            dtype = from_safetensors(entry.dtype)
            box = Box((0,) * len(entry.shape), entry.shape)
            found[name] = ExternalTensor(shape=entry.shape, dtype=dtype, parts=[FileShard(box, file, begin + start)])
            if found[name].size_bytes != stop - start:
                raise DistCheckpointError(
                    f"{where} is damaged: tensor {name!r} of shape {entry.shape} has {counted(stop - start, 'byte')}"
                )
    return found


def _check_layout(entries: Mapping[str, HeaderEntry], size_bytes: int, where: str) -> None:
    """Check that each byte after the header belongs to one tensor, as other readers demand.

    A small file of many tensors in the same bytes would make a huge checkpoint, and bytes of no tensor may hide one
    that occurs twice, of which readers see different ones.
    """
    end, last = 0, ""
    for (start, stop), name in sorted((entry.data_offsets, name) for name, entry in entries.items()):
        if start < min(end, stop):
            raise DistCheckpointError(f"{where} is damaged: tensors {last!r} and {name!r} lie in the same bytes")
        if stop > start > end:
            raise DistCheckpointError(f"{where} is damaged: the bytes before tensor {name!r} belong to no tensor")
        if stop > end:
            end, last = stop, name
    if end < size_bytes:
        raise DistCheckpointError(
            f"{where} is damaged: its last {counted(size_bytes - end, 'byte')} belong to no tensor"
        )


def export_hugging_face(
    path: str | os.PathLike[str],
    new_path: str | os.PathLike[str],
    *,
    part: str | None = None,
    options: RewriteOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    new_storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint's full tensors to a folder, which is also a checkpoint of ferrodist.

    A single file is named ``model.safetensors``, as by Hugging Face's tools; several have an index.

    Args:
        path: The checkpoint.
        new_path: The folder.
        part: The path of the part to export, dict keys joined by dots, which tensor names then don't begin with: with
            ``"model"``, ``model.weight`` is named ``weight``.
        options: Options for writing; tensors stay whole.
        storage_options: Options of fsspec's file system, if ``path`` is a URL.
        new_storage_options: Options of fsspec's file system, if ``new_path`` is a URL.

    Raises:
        DistCheckpointError: The checkpoint or the part is missing or damaged, or the folder can't be written.
        ValueError: ``options`` asks for the files of more than one rank.
    """
    check_type(part, (str, type(None)), "part must be text or None")
    options = options or RewriteOptions()
    check_type(options, RewriteOptions, "options must be RewriteOptions or None")
    if options.num_ranks != 1:
        raise ValueError(f"tensors are exported whole, as one rank's, not as those of {options.num_ranks}")
    with closing(open_storage(path, storage_options)) as storage:
        new_storage = open_storage(new_path, new_storage_options)
        manifest = read_manifest(storage)
        names: dict[str, str] = {}
        tree = _rename(_find_part(manifest.tree, part, storage.url), (), names)
        if not names:
            raise DistCheckpointError(f"{storage.url} has no tensors{'' if part is None else f' in {part!r}'}")
        tensors = {names[key]: (tensor.shape, tensor.dtype) for key, tensor in manifest.tensors.items() if key in names}
        reader = CheckpointReader(storage, manifest, verify=True)
        source = _RenamedSource(reader, {name: key for key, name in names.items()})
        contents = RewriteSource(tree=tree, tensors=tensors, source=source, world_size=manifest.world_size)
        rewrite(contents, new_storage, options, single_name=SINGLE_NAME)


class _RenamedSource(NamedTuple):
    """A `BoxSource` with other keys."""

    source: BoxSource
    keys: Mapping[str, str]

    def read_box(self, key: str, box: Box, target: Any) -> None:
        """Fill a tensor with a box of a tensor."""
        self.source.read_box(self.keys[key], box, target)


def _find_part(node: Any, part: str | None, where: str) -> Any:
    """Return the node at a path; keys may contain dots themselves."""
    if not part:
        return node
    members = (node.get("dict") if isinstance(node, dict) else None) or {}
    if part in members:
        return members[part]
    failure: DistCheckpointError | None = None
    for key, each in members.items():
        if part.startswith(f"{key}."):
            try:
                return _find_part(each, part[len(key) + 1 :], where)
            except DistCheckpointError as error:  # a longer key may have it
                failure = failure or error
    if failure is not None:
        raise failure
    known = ", ".join(list(members)[:5])
    raise DistCheckpointError(f"{where} has no part {part!r}; there is {known or 'no dict with text as keys'}")


def _rename(node: Any, path: tuple[object, ...], names: dict[str, str]) -> Any:
    """Rename a tree's tensors by their new paths; ``names`` collects the new names."""
    mark, content = split_node(node)
    if mark in ("tensor", "array"):
        return {mark: names.setdefault(content, tensor_key(path))}
    prefix = "rank" if mark == "per_rank" else ""
    return map_children(node, lambda key, each: _rename(each, (*path, f"{prefix}{key}"), names))
