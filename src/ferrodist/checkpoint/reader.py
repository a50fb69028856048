"""Reading a checkpoint: its manifest, and boxes of tensors, of which each block's hash is checked.

A hash covers a block of a shard. A range that begins or ends inside a block needs the full block, unless hashes are not
checked: at most two more blocks for each range of bytes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ferrodist.checkpoint.format.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    SINGLE_NAME,
    Manifest,
    ShardEntry,
    decode_manifest,
    hash_bytes,
)
from ferrodist.checkpoint.format.safetensors import dtype_from_name
from ferrodist.collectives.arguments import bytes_of
from ferrodist.errors import DistCheckpointError
from ferrodist.tensor.box import Box
from ferrodist.wording import counted

if TYPE_CHECKING:
    from ferrodist.checkpoint.storage.base import Storage

_READ_BYTES = 32 << 20
"""The size of one read of non-contiguous elements."""

_LONG_ROW_BYTES = 4 << 20
"""Rows longer than this are read in part: a whole tensor may be one row."""

DCP_METADATA_NAME = ".metadata"
"""The manifest's name in torch.distributed.checkpoint."""

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_IMPORTS = {"torch": "import_torch_file", "dcp": "import_dcp", "hf": "import_hugging_face"}


def read_manifest(storage: Storage) -> Manifest:
    """Read the manifest of the checkpoint in a folder."""
    where = f"{storage.url}/{MANIFEST_NAME}"
    try:
        data = storage.get(MANIFEST_NAME)
    except FileNotFoundError:
        raise DistCheckpointError(_explain_missing(storage)) from None
    except NotADirectoryError as error:
        if not Path(storage.url).is_file():  # a file is above it
            raise DistCheckpointError(f"{where} can't be read: {error}") from error
        raise DistCheckpointError(
            f"{storage.url} is a file, and a checkpoint is a folder. {_conversion_hint('torch', storage.url)}"
        ) from None
    except OSError as error:
        raise DistCheckpointError(f"{where} can't be read: {error}") from error
    return decode_manifest(data, where)


def _explain_missing(storage: Storage) -> str:
    """Return the message for a folder without a manifest."""
    try:
        is_empty, other, inner = not storage.list_names(), describe_foreign_format(storage), storage.list_folders()
    except OSError as error:
        return f"{storage.url} can't be read: {error}"
    what = "nothing in it, or is not there" if is_empty and not inner else "no checkpoint in it"
    text = f"{storage.url} has {what}: {MANIFEST_NAME} is missing"
    if other:
        return f"{text}. {other}"
    if inner:
        return f"{text}. There are folders in it, as {inner[-1]}: name one that has a checkpoint, or ask find_latest()"
    return text


def describe_foreign_format(storage: Storage) -> str:
    """Return a sentence on which other format a folder has and how to convert it; empty for unknown formats."""
    names = storage.list_names()
    if DCP_METADATA_NAME in names:
        return f"It is a folder of torch.distributed.checkpoint. {_conversion_hint('dcp', storage.url)}"
    if SINGLE_NAME in names or INDEX_NAME in names:
        return f"It is a folder of Hugging Face's. {_conversion_hint('hf', storage.url)}"
    for name in names:
        if name.endswith(_TORCH_SUFFIXES):
            return f"It has {name}. {_conversion_hint('torch', f'{storage.url}/{name}')}"
    return ""


def _conversion_hint(kind: str, path: str) -> str:
    return (
        f"`ferrodist ckpt convert --from {kind} --to ferrodist {path} NEW` makes a checkpoint of it, in Python"
        f" `ferrodist.checkpoint.convert.{_IMPORTS[kind]}`."
    )


@dataclass(frozen=True, slots=True)
class _RowMajorRange:
    """A row-major box of a shard that begins at one of its bytes."""

    key: str
    shard: ShardEntry
    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]


class CheckpointReader:
    """Reads one checkpoint; safe for several threads."""

    def __init__(self, storage: Storage, manifest: Manifest, *, verify: bool) -> None:
        self._storage = storage
        self.manifest = manifest
        self._verify = verify
        self._checked: set[int] = set()
        self._lock = threading.Lock()

    def read_box(self, key: str, box: Box, target: torch.Tensor) -> None:
        """Fill a tensor with a box of a saved one."""
        tensor = self.manifest.tensors[key]
        dtype, missing = dtype_from_name(tensor.dtype), box.numel
        for shard in tensor.shards:
            saved = Box(shard.offsets, shard.shape)
            common = saved.intersect(box)
            if common is None:
                continue
            missing -= common.numel
            source = _RowMajorRange(key, shard, dtype, 0, tuple(shard.shape))
            self._read_range(source, common.within(saved), common.within(box).take(target))
        if missing:
            raise DistCheckpointError(
                f"{self._storage.url} lacks {counted(missing, 'element')} of tensor {key!r}, though its"
                " manifest says it is whole"
            )

    def _read_range(self, source: _RowMajorRange, box: Box, target: torch.Tensor) -> None:
        """Fill ``target`` with a box of a row-major range."""
        shape, itemsize = source.shape, source.dtype.itemsize
        row_bytes = prod(shape[1:]) * itemsize
        # Consecutive full rows are one range of bytes.
        has_full_rows = all(size == whole for size, whole in zip(box.shape[1:], shape[1:], strict=True))
        first = source.start + box.offsets[0] * row_bytes if box.offsets else source.start
        is_row_major = target.is_contiguous() and not target.is_conj() and not target.is_neg()
        if has_full_rows and is_row_major and target.dtype is source.dtype and target.device.type == "cpu":
            self._read_bytes(source.key, source.shard, first, bytes_of(target))
            return
        num_rows = box.shape[0] if box.shape else 1
        if row_bytes > _LONG_ROW_BYTES:
            inner = Box(box.offsets[1:], box.shape[1:])
            for row in range(num_rows):
                below = _RowMajorRange(source.key, source.shard, source.dtype, first + row * row_bytes, shape[1:])
                self._read_range(below, inner, target[row])
            return
        rows_per_read = max(1, _READ_BYTES // max(1, row_bytes))
        for row in range(0, num_rows, rows_per_read):
            count = min(rows_per_read, num_rows - row)
            rows = torch.empty((count, *shape[1:]) if box.shape else (), dtype=source.dtype, device="cpu")
            self._read_bytes(source.key, source.shard, first + row * row_bytes, bytes_of(rows))
            if box.shape:
                inner = Box((0, *box.offsets[1:]), (count, *box.shape[1:]))
                put_elements(target[row : row + count], inner.take(rows), source.key)
            else:
                put_elements(target, rows, source.key)

    def _read_bytes(self, key: str, shard: ShardEntry, start: int, into: memoryview) -> None:
        """Fill memory with bytes of a shard."""
        name = self.manifest.files[shard.file].name
        try:
            self._check_file(shard.file)
            if self._verify:
                self._read_checked(key, shard, start, into)
            else:
                self._storage.read(name, shard.start + start, into)
        except FileNotFoundError:
            raise self._error(name, key, "is missing") from None
        except EOFError as error:
            raise self._error(name, key, "is too short") from error
        except OSError as error:
            raise self._error(name, key, f"can't be read: {error}") from error

    def _read_checked(self, key: str, shard: ShardEntry, start: int, into: memoryview) -> None:
        block, size, stop = self.manifest.block_bytes, shard.stop - shard.start, start + len(into)
        at = start
        while at < stop:
            begin = at // block * block
            end = min(begin + block, size)
            if begin < start or end > stop:  # a part of a block: its hash needs all of it
                data = memoryview(bytearray(end - begin))
                self._read_blocks(key, shard, begin, data)
                last = min(end, stop)
                into[at - start : last - start] = data[at - begin : last - begin]
            else:
                last = min(begin + max(block, self._storage.request_bytes // block * block), size)
                last = last if last <= stop else stop // block * block
                self._read_blocks(key, shard, begin, into[begin - start : last - start])
            at = last

    def _read_blocks(self, key: str, shard: ShardEntry, begin: int, into: memoryview) -> None:
        """Read full blocks of a shard and check them."""
        name, block = self.manifest.files[shard.file].name, self.manifest.block_bytes
        self._storage.read(name, shard.start + begin, into)
        for at in range(0, len(into), block):
            data = into[at : at + block]
            if hash_bytes(data) != shard.hashes[(begin + at) // block]:
                first = shard.start + begin + at
                raise self._error(
                    name,
                    key,
                    f"is damaged: bytes {first} to {first + len(data)} don't have the hash that they were saved with",
                )

    def _check_file(self, file_index: int) -> None:
        """Check a file's size and the hash of its header, once."""
        with self._lock:
            if file_index in self._checked:
                return
        file = self.manifest.files[file_index]
        found, problem = self._storage.size_bytes(file.name), ""
        if found != file.size_bytes:
            problem = f"has {found} bytes where {file.size_bytes} were written"
        elif self._verify:
            header = bytearray(file.header_bytes)
            self._storage.read(file.name, 0, memoryview(header))
            if hash_bytes(header) != file.header_hash:
                problem = "is damaged: its header doesn't have the hash that it was saved with"
        if problem:
            tensors = self.manifest.tensors.items()
            keys = [key for key, tensor in tensors if any(shard.file == file_index for shard in tensor.shards)]
            names = f"{', '.join(map(repr, keys[:3]))}{' and others' if len(keys) > 3 else ''}"
            raise DistCheckpointError(f"{self._storage.url}/{file.name}, which has tensor {names}, {problem}")
        with self._lock:
            self._checked.add(file_index)

    def _error(self, name: str, key: str, what: str) -> DistCheckpointError:
        return DistCheckpointError(f"{self._storage.url}/{name}, which has a part of tensor {key!r}, {what}")


def put_elements(target: torch.Tensor, elements: torch.Tensor, key: str) -> None:
    """Copy elements of a saved tensor into a tensor, which may be an inference tensor."""
    with torch.inference_mode(target.is_inference()):  # such tensors may not be written outside of it
        target.copy_(elements)
    if _overflows(elements, target.dtype):
        raise DistCheckpointError(f"tensor {key!r} was saved as {elements.dtype}, with numbers beyond {target.dtype}")


def _overflows(elements: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a finite element becomes infinite or is clamped in another floating-point dtype."""
    if elements.dtype is dtype or not dtype.is_floating_point or not elements.is_floating_point():
        return False
    limits = torch.finfo(dtype)
    if limits.max >= torch.finfo(elements.dtype).max:
        return False
    if elements.itemsize == 1:  # of which torch compares nothing
        elements = elements.float()
    back = elements.to(dtype).to(elements.dtype)
    lost = ~back.isfinite() | (elements.abs() > limits.max * (1 + limits.eps))
    return bool((lost & elements.isfinite()).any())
