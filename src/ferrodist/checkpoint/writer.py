"""A rank's safetensors files as hashed blocks, which a `FileWriter` of the storage writes."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import msgspec
import torch
import xxhash

from ferrodist.checkpoint.format.manifest import FileEntry, hash_bytes
from ferrodist.checkpoint.format.safetensors import LENGTH_BYTES, dtype_from_name, to_safetensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.checkpoint.save_plan import FilePlan, Span, TensorDescription
    from ferrodist.checkpoint.storage.base import FileWriter, Storage

BLOCK_BYTES = 4 << 20
"""The size of a hashed block: a reader of a part of a shard reads whole blocks."""

_WRITE_BYTES = 1 << 20
"""The size of one hash and write, so that the data is still in the cache when it is written."""


class FileReport(msgspec.Struct, array_like=True):
    """A written file: the first byte of each span, and the hashes of its blocks."""

    file: FileEntry
    starts: list[int]
    hashes: list[list[str]]


def row_major_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a CPU tensor's elements as row-major bytes, copied only if they aren't contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type] # mypy's NumPy lacks the protocol


def hash_blocks(data: memoryview) -> list[str]:
    """Hash each block."""
    return [hash_bytes(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)]


class SafetensorsWriter:
    """A safetensors file under way: header, and the spans of its plan in order, hashed and given to a `FileWriter`."""

    def __init__(
        self, storage: Storage, save_id: str, plan: FilePlan, tensors: Mapping[str, TensorDescription]
    ) -> None:
        self.plan = plan
        self._storage = storage
        self._save_id = save_id
        tensors_in_file = []
        for span in plan.spans:
            tensor = tensors[span.key]
            name = name_in_file(span.key, span.offsets, span.shape, tensor.shape)
            tensors_in_file.append((name, tensor.dtype, span.shape))
        self._header, self._starts, self._size_bytes = make_header(tensors_in_file)
        self._ends = [*self._starts[1:], self._size_bytes]
        self._hashes: list[list[str]] = [[] for _ in plan.spans]
        self._hasher = xxhash.xxh3_128()
        self._span_index = 0
        """The span that takes the next byte."""
        self._position = len(self._header)
        self._writer: FileWriter | None = None
        self._is_closed = False

    def add(self, span: Span, data: memoryview) -> None:
        """Write the next bytes of a span, which must be the first incomplete one."""
        self._skip_complete()
        assert self.plan.spans[self._span_index] == span, "bytes come in the file's order"
        writer = self._open()
        start, end = self._starts[self._span_index], self._ends[self._span_index]
        while len(data):
            # Blocks begin at the span's first byte, and the last may be shorter.
            block_end = min(end, self._position + BLOCK_BYTES - (self._position - start) % BLOCK_BYTES)
            chunk, data = data[: block_end - self._position], data[block_end - self._position :]
            self._hasher.update(chunk)
            writer.write(chunk)
            self._position += len(chunk)
            if self._position == block_end:
                self._hashes[self._span_index].append(self._hasher.hexdigest())
                self._hasher.reset()
        self._skip_complete()
        if self._span_index == len(self.plan.spans):
            self.close()

    def close(self) -> None:
        """Make the complete file durable."""
        if self._is_closed:
            return
        assert self._position == self._size_bytes, "the file is complete"
        self._open().close()
        self._is_closed = True

    def discard(self) -> None:
        """Remove the unfinished file."""
        if self._writer is not None:
            self._writer.discard()

    def report(self) -> FileReport:
        """Describe the written file."""
        assert self._is_closed, "the file is written"
        file = FileEntry(
            name=self.plan.name,
            size_bytes=self._size_bytes,
            header_bytes=len(self._header),
            header_hash=hash_bytes(self._header),
        )
        return FileReport(file, self._starts, self._hashes)

    def _open(self) -> FileWriter:
        if self._writer is None:
            self._writer = self._storage.create(self._save_id, self.plan.name, self._size_bytes)
            self._writer.write(memoryview(self._header))
        return self._writer

    def _skip_complete(self) -> None:
        """Advance to the next span that lacks bytes."""
        while self._span_index < len(self.plan.spans) and self._position == self._ends[self._span_index]:
            self._span_index += 1


def write_safetensors(
    storage: Storage,
    save_id: str,
    plan: FilePlan,
    tensors: Mapping[str, TensorDescription],
    find: Callable[[Span], torch.Tensor],
) -> FileReport:
    """Write one file durably; ``find`` returns a span's elements on the CPU. On an error the file is removed."""
    stream = SafetensorsWriter(storage, save_id, plan, tensors)
    try:
        for span in plan.spans:
            data = row_major_bytes(find(span))
            for at in range(0, len(data), _WRITE_BYTES):
                stream.add(span, data[at : at + _WRITE_BYTES])
        stream.close()  # for files without bytes: else the last `add` has closed it
    except BaseException:
        stream.discard()
        raise
    return stream.report()


def make_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[int], int]:
    """Make the header of a file of consecutive tensors, given their names, dtype names and shapes.

    Returns the header with its length field, the first byte of each tensor in the file, and the file's size.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, starts = 0, []
    for name, dtype, shape in tensors:
        size = prod(shape) * dtype_from_name(dtype).itemsize
        st_dtype, st_shape = to_safetensors(dtype, shape)
        entries[name] = {"dtype": st_dtype, "shape": st_shape, "data_offsets": [at, at + size]}
        starts.append(at)
        at += size
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return header, [len(header) + begin for begin in starts], len(header) + at


def name_in_file(key: str, offsets: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> str:
    """Return the name of a shard in a file: the tensor's key, with the slice unless it is the full tensor."""
    if tuple(shape) == tuple(whole):
        return key
    sides = [f"{begin}:{begin + size}" for begin, size in zip(offsets, shape, strict=True)]
    return f"{key}[{', '.join(sides)}]"
