"""The manifest of a checkpoint: the schema of ``metadata.json``, which docs/formats.md describes for other readers.
Also the checksum of all bytes (`hash_bytes`), and whether boxes cover a tensor once.

The file is one line with a single valid spelling, so that every byte of it is checked::

    {"format":"ferrodist-checkpoint","version":1,"hash":"<xxh3-128 of what follows>","checkpoint":{...}}
"""

from __future__ import annotations

import re
import secrets
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from ferrodist.checkpoint.format.safetensors import LENGTH_BYTES, MAX_HEADER_BYTES, dtype_from_name
from ferrodist.checkpoint.format.tree import check_tree
from ferrodist.errors import DistCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MANIFEST_NAME = "metadata.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
"""Hugging Face's name of a folder's only file of tensors, which has no index."""
HASH_BYTES = 16
_VERSION = 1
_PREFIX = b'{"format":"ferrodist-checkpoint","version":'
_HASH = b',"hash":"'
_CONTENT_KEY = b'","checkpoint":'
_SUFFIX = b"}\n"
MAX_DIMS = 64
"""torch's limit of dims."""
_MAX_BLOCK_BYTES = 1 << 30
"""A reader holds a full block in memory."""
_MAX_TIME_NS = 1 << 63
"""A time in the year 2262."""
_RESERVED_TIMES = 1 << 32
"""The last valid times are left for checkpoints that must be later than another one."""
TIME_WITHIN_BYTES = 256
"""The length of the prefix of a manifest that contains its `created_ns`."""
_TIME_PATTERN = re.compile(re.escape(_PREFIX) + rb'[^{]*"checkpoint":\{"save_id":"[^"]*","created_ns":(\d{1,20}),')


class FileEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A safetensors file in the checkpoint's folder."""

    name: str
    size_bytes: int
    header_bytes: int  # with the 8-byte length; tensors begin there
    header_hash: str


class ShardEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A box of a tensor, row-major in one file."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: int  # index in the manifest's files
    start: int  # first byte in the file
    stop: int  # byte after the last one
    hashes: list[str]  # of each block of `Manifest.block_bytes`; the last may be shorter, an empty box has none


class TensorEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tensor."""

    shape: tuple[int, ...]
    dtype: str
    placement: str  # on the ranks that saved it, in words
    shards: list[ShardEntry]  # boxes that cover the tensor, each element once

    @property
    def size_bytes(self) -> int:
        """The size of the elements."""
        return prod(self.shape) * dtype_from_name(self.dtype).itemsize


class Manifest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A checkpoint without the elements of its tensors."""

    save_id: str
    created_ns: int  # the commit, since 1970; later than that of each checkpoint that was beside it then
    producer: str
    world_size: int
    block_bytes: int  # size of a hashed block
    files: list[FileEntry]
    tensors: dict[str, TensorEntry]
    tree: Any  # the state, which refers to tensors by key

    def position(self, key: str) -> tuple[int, int]:
        """Return a tensor's first file and byte, for reading in the order in which disks read ahead."""
        return min(((shard.file, shard.start) for shard in self.tensors[key].shards), default=(0, 0))


class _FormatHeader(msgspec.Struct, kw_only=True):
    format: str
    version: int


def hash_bytes(data: Any) -> str:
    """Return the checksum of bytes as text: 128-bit xxh3."""
    return xxhash.xxh3_128_hexdigest(data)


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest as the bytes of its file."""
    content = msgspec.json.encode(manifest)
    return _PREFIX + str(_VERSION).encode() + _HASH + hash_bytes(content).encode() + _CONTENT_KEY + content + _SUFFIX


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Decode an untrusted manifest; DistCheckpointError, naming ``where``, unless `encode_manifest` writes such."""
    start = _PREFIX + str(_VERSION).encode() + _HASH
    content_start = len(start) + 2 * HASH_BYTES + len(_CONTENT_KEY)
    if not data.startswith(start):
        raise DistCheckpointError(_describe_mismatch(data, where))
    content = data[content_start : -len(_SUFFIX)]
    expected_hash = data[len(start) : len(start) + 2 * HASH_BYTES]
    rest = data[len(start) + 2 * HASH_BYTES : content_start], data[content_start + len(content) :]
    if rest != (_CONTENT_KEY, _SUFFIX) or hash_bytes(content).encode() != expected_hash:
        raise DistCheckpointError(
            f"{where} is damaged: its bytes don't have the hash in it. Nothing of this checkpoint can be"
            " trusted; take another one, or a copy"
        )
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
        _check(manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise DistCheckpointError(f"{where} is no manifest of a checkpoint: {error}") from error
    return manifest


def find_commit_time(prefix: bytes) -> int | None:
    """Return the `created_ns` in the first bytes of a manifest; None without a valid one."""
    found = _TIME_PATTERN.match(prefix)
    return int(found[1]) if found and is_time(int(found[1])) else None


def is_time(time_ns: int) -> bool:
    """Return whether a checkpoint can have this commit time, and others a later one."""
    return 0 <= time_ns < _MAX_TIME_NS - _RESERVED_TIMES


def _describe_mismatch(data: bytes, where: str) -> str:
    try:
        prefix = msgspec.json.decode(data, type=_FormatHeader)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError):
        return f"{where} is damaged, or is no manifest of a checkpoint"
    if prefix.format != "ferrodist-checkpoint":
        return f"{where} is of format {prefix.format!r}, not 'ferrodist-checkpoint'"
    if prefix.version != _VERSION:
        return f"{where} has version {prefix.version}, and this ferrodist reads version {_VERSION}: use a newer one"
    return f"{where} is damaged, or was changed by hand"


def _check(manifest: Manifest) -> None:
    """Raise ValueError unless the manifest is consistent."""
    if manifest.world_size < 1 or manifest.block_bytes < 1:
        raise ValueError("a world size or block size below 1")
    if manifest.block_bytes > _MAX_BLOCK_BYTES:
        raise ValueError(f"blocks of {manifest.block_bytes} bytes, where {_MAX_BLOCK_BYTES} is the most")
    if not 0 <= manifest.created_ns < _MAX_TIME_NS:
        raise ValueError(f"a time of {manifest.created_ns} ns since 1970")
    names = [file.name for file in manifest.files]
    if len(set(names)) < len(names):
        raise ValueError("a file comes twice")
    for file in manifest.files:
        if not file.name or set(file.name) & set("/\\\0") or file.name in (".", "..", MANIFEST_NAME, INDEX_NAME):
            raise ValueError(f"a file named {file.name!r}")
        most = min(file.size_bytes, LENGTH_BYTES + MAX_HEADER_BYTES)
        if not LENGTH_BYTES <= file.header_bytes <= most:
            raise ValueError(f"file {file.name!r} of {file.size_bytes} bytes has a header of {file.header_bytes}")
    for key, tensor in manifest.tensors.items():
        for problem in _find_problems(manifest, tensor):
            raise ValueError(f"tensor {key!r}: {problem}")
    check_tree(manifest.tree, manifest.tensors)


def _find_problems(manifest: Manifest, tensor: TensorEntry) -> Iterator[str]:
    itemsize = dtype_from_name(tensor.dtype).itemsize
    if len(tensor.shape) > MAX_DIMS or any(size < 0 for size in tensor.shape):
        yield f"shape {tensor.shape[: MAX_DIMS + 1]}"
    if prod(size for size in tensor.shape if size) * itemsize >= 1 << 63:
        yield f"shape {tensor.shape} is more than any memory"
    for shard in tensor.shards:
        yield from _shard_problems(manifest, tensor, shard, itemsize)
    if not covers_once(((shard.offsets, shard.shape) for shard in tensor.shards), tensor.shape):
        yield "its shards overlap, or are not all of it"


def _shard_problems(manifest: Manifest, tensor: TensorEntry, shard: ShardEntry, itemsize: int) -> Iterator[str]:
    if not len(shard.offsets) == len(shard.shape) == len(tensor.shape):
        yield "a shard has another number of dims"
    sides = zip(shard.offsets, shard.shape, tensor.shape, strict=True)
    if any(offset < 0 or size < 0 or offset + size > whole for offset, size, whole in sides):
        yield f"a shard of {shard.shape} at {shard.offsets} is outside of {tensor.shape}"
    if not 0 <= shard.file < len(manifest.files):
        yield f"a shard in file number {shard.file}"
    file = manifest.files[shard.file]
    length = shard.stop - shard.start
    if not file.header_bytes <= shard.start <= shard.stop <= file.size_bytes:
        yield f"a shard at bytes {shard.start} to {shard.stop} of file {file.name!r}"
    if length != prod(shard.shape) * itemsize:
        yield f"a shard of {shard.shape} in {length} bytes"
    if len(shard.hashes) != -(-length // manifest.block_bytes):
        yield f"{len(shard.hashes)} hashes for {length} bytes"


_PRIME = (1 << 127) - 1


def covers_once(boxes: Iterable[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> bool:
    """Return whether each element of a tensor is in exactly one box.

    Boxes are weighed: along each dim an interval weighs the difference of two secret random numbers, one for each end,
    and a box weighs the product of its intervals, modulo a prime. Boxes that cover the tensor once weigh as much as it
    does. Other boxes do so with a probability of at most the number of dims in 2**127, by the Schwartz-Zippel lemma,
    since the difference is a non-zero polynomial in the random numbers. The cost is one step per dim and box.
    """
    weights_of_ends: list[dict[int, int]] = [{} for _ in shape]

    def weight(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        weighed = 1
        for weights, begin, size in zip(weights_of_ends, offsets, sizes, strict=True):
            for end in (begin, begin + size):
                if end not in weights:
                    weights[end] = secrets.randbelow(_PRIME)
            weighed = weighed * (weights[begin + size] - weights[begin]) % _PRIME
        return weighed

    found = sum(weight(offsets, sizes) for offsets, sizes in boxes if prod(sizes))
    return (found - weight([0] * len(shape), shape)) % _PRIME == 0
