"""What a checkpoint has, and where: the schema of ``metadata.json``, which docs/formats.md describes for other readers.

The file is one line, in one spelling only, so that every byte of it counts::

    {"format":"ferrodist-checkpoint","version":1,"hash":"<xxh3-128 of what follows>","checkpoint":{...}}
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from ferrodist.checkpoint.format.coverage import covers_once
from ferrodist.checkpoint.format.dtypes import dtype_from_name
from ferrodist.checkpoint.format.tree import check_tree
from ferrodist.errors import DistCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

MANIFEST_NAME = "metadata.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
"""What Hugging Face's tools call a folder's only file of tensors, which then has no index."""
HASH_BYTES = 16
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file, without its length; readers of these files accept no longer one."""
_VERSION = 1
_START = b'{"format":"ferrodist-checkpoint","version":'
_HASH = b',"hash":"'
_BODY = b'","checkpoint":'
_END = b"}\n"
MAX_DIMS = 64
"""Of torch's tensors."""
_MAX_BLOCK_BYTES = 1 << 30
"""A reader holds a whole block."""
_MAX_TIME_NS = 1 << 63
"""In the year 2262."""
_NUM_TIMES_BELOW = 1 << 32
"""Later times are not counted on from: these are left for checkpoints that must be later than another one."""
TIME_WITHIN_BYTES = 256
"""A manifest has its `created_ns` in its first bytes."""
_TIME = re.compile(re.escape(_START) + rb'[^{]*"checkpoint":\{"save_id":"[^"]*","created_ns":(\d{1,20}),')


class FileEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One safetensors file.

    Args:
        name: Within the checkpoint's folder.
        size_bytes: All of it.
        header_bytes: Its header, with the 8 bytes that say how long it is; tensors begin here.
        header_hash: Of these.
    """

    name: str
    size_bytes: int
    header_bytes: int
    header_hash: str


class ShardEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A box of a tensor, row-major in one file.

    Args:
        offsets: Where the box begins in the tensor.
        shape: Its sizes.
        file: Its file's place among the manifest's files.
        start: Its first byte in the file.
        stop: The byte after its last.
        hashes: One for each `Manifest.block_bytes` of it, the last of which may be shorter; an empty box has none.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: int
    start: int
    stop: int
    hashes: list[str]


class TensorEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One tensor.

    Args:
        shape: Of the whole tensor.
        dtype: Its name in torch.
        placement: In words, how it lay over the ranks that saved it.
        shards: Boxes that are the tensor together, each element once.
    """

    shape: tuple[int, ...]
    dtype: str
    placement: str
    shards: list[ShardEntry]


class Manifest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """All of a checkpoint but the elements of its tensors.

    Args:
        save_id: Names the act of saving.
        created_ns: When it was committed, since 1970; later than that of each checkpoint that was beside it then.
        producer: Who wrote it.
        world_size: By how many ranks it was saved.
        block_bytes: How much of a shard each hash is of.
        files: All files with tensors.
        tensors: By key.
        tree: What was saved, with `tree`'s marks in the places of tensors.
    """

    save_id: str
    created_ns: int
    producer: str
    world_size: int
    block_bytes: int
    files: list[FileEntry]
    tensors: dict[str, TensorEntry]
    tree: Any

    def place(self, key: str) -> tuple[int, int]:
        """Where a tensor begins: the number of its first file, and the byte there. Disks read ahead."""
        return min(((shard.file, shard.start) for shard in self.tensors[key].shards), default=(0, 0))


class _HeadOfFile(msgspec.Struct, kw_only=True):
    format: str
    version: int


def hash_bytes(data: Any) -> str:
    """The checksum of some bytes as text: xxh3 with 128 bits."""
    return xxhash.xxh3_128_hexdigest(data)


def encode_manifest(manifest: Manifest) -> bytes:
    """The file's bytes."""
    body = msgspec.json.encode(manifest)
    return _START + str(_VERSION).encode() + _HASH + hash_bytes(body).encode() + _BODY + body + _END


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Read the file's bytes; nothing in them is believed unseen.

    Args:
        data: The bytes.
        where: The file, for messages.

    Raises:
        DistCheckpointError: They are not what `encode_manifest` makes.
    """
    start = _START + str(_VERSION).encode() + _HASH
    body_at = len(start) + 2 * HASH_BYTES + len(_BODY)
    if not data.startswith(start):
        raise DistCheckpointError(_why_other(data, where))
    body = data[body_at : -len(_END)]
    told = data[len(start) : len(start) + 2 * HASH_BYTES]
    rest = data[len(start) + 2 * HASH_BYTES : body_at], data[body_at + len(body) :]
    if rest != (_BODY, _END) or hash_bytes(body).encode() != told:
        raise DistCheckpointError(
            f"{where} is damaged: its bytes don't have the hash that it says. Nothing of this checkpoint can be"
            " trusted; take another one, or a copy"
        )
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
        _check(manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise DistCheckpointError(f"{where} is no manifest of a checkpoint: {error}") from error
    return manifest


def find_time(head: bytes) -> int | None:
    """The `created_ns` that the beginning of a manifest has; None if it has none that can be."""
    found = _TIME.match(head)
    return int(found[1]) if found and is_time(int(found[1])) else None


def is_time(time_ns: int) -> bool:
    """Whether it is a time since 1970 that a checkpoint can have, and others after it."""
    return 0 <= time_ns < _MAX_TIME_NS - _NUM_TIMES_BELOW


def _why_other(data: bytes, where: str) -> str:
    try:
        head = msgspec.json.decode(data, type=_HeadOfFile)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError):
        return f"{where} is damaged, or is no manifest of a checkpoint"
    if head.format != "ferrodist-checkpoint":
        return f"{where} is of format {head.format!r}, not 'ferrodist-checkpoint'"
    if head.version != _VERSION:
        return f"{where} has version {head.version}, and this ferrodist reads version {_VERSION}: use a newer one"
    return f"{where} is damaged, or was changed by hand"


def _check(manifest: Manifest) -> None:
    """Raise ValueError unless each shard can lie where it is said to."""
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
        for problem in _problems(manifest, tensor):
            raise ValueError(f"tensor {key!r}: {problem}")
    check_tree(manifest.tree, manifest.tensors)


def _problems(manifest: Manifest, tensor: TensorEntry) -> Iterator[str]:
    itemsize = dtype_from_name(tensor.dtype).itemsize
    if len(tensor.shape) > MAX_DIMS or any(size < 0 for size in tensor.shape):
        yield f"shape {tensor.shape[: MAX_DIMS + 1]}"
    if prod(size for size in tensor.shape if size) * itemsize >= 1 << 63:
        yield f"shape {tensor.shape} is more than any memory"
    for shard in tensor.shards:
        yield from _problems_of_shard(manifest, tensor, shard, itemsize)
    if not covers_once(((shard.offsets, shard.shape) for shard in tensor.shards), tensor.shape):
        yield "its shards overlap, or are not all of it"


def _problems_of_shard(manifest: Manifest, tensor: TensorEntry, shard: ShardEntry, itemsize: int) -> Iterator[str]:
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
