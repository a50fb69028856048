"""Writing one rank's files: safetensors, hashed block by block on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch
import xxhash

from ferrodist.checkpoint.format.manifest import hash_bytes
from ferrodist.checkpoint.format.safetensors import make_header, name_in_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ferrodist.checkpoint.save_plan import FilePlan, Span, TensorReport
    from ferrodist.checkpoint.storage.base import FileWriter, Storage

BLOCK_BYTES = 4 << 20
"""What each hash is of: a reader that wants a part of a shard reads the blocks that have it."""

_STEP_BYTES = 1 << 20
"""Hashed and written at once, so that it is in the cache when it is written."""


class FileReport(msgspec.Struct, array_like=True):
    """A file as it was written.

    Args:
        name: Its name.
        size_bytes: All of it.
        header_bytes: Where tensors begin.
        header_hash: Of the bytes before.
        starts: Where each span begins.
        hashes: For each span those of its blocks.
    """

    name: str
    size_bytes: int
    header_bytes: int
    header_hash: str
    starts: list[int]
    hashes: list[list[str]]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's memory, row-major; a copy of what doesn't lie so."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type] # mypy's NumPy lacks the protocol


def hash_blocks(data: memoryview) -> list[str]:
    """The hash of each block of some bytes."""
    return [hash_bytes(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)]


class FileStream:
    """A file that gets what was planned for it.

    Args:
        storage: Where.
        save_id: The save.
        plan: What lies in the file.
        tensors: The whole tensors, by key.
    """

    def __init__(self, storage: Storage, save_id: str, plan: FilePlan, tensors: Mapping[str, TensorReport]) -> None:
        self.plan = plan
        self._storage = storage
        self._save_id = save_id
        parts = [
            (
                name_in_file(span.key, span.offsets, span.shape, tensors[span.key].shape),
                tensors[span.key].dtype,
                span.shape,
            )
            for span in plan.spans
        ]
        self._header, self._starts, self._size_bytes = make_header(parts)
        self._ends = [*self._starts[1:], self._size_bytes]
        self._hashes: list[list[str]] = [[] for _ in plan.spans]
        self._hasher = xxhash.xxh3_128()
        self._number = 0
        """Which span gets the next byte."""
        self._at = len(self._header)
        self._writer: FileWriter | None = None
        self._is_closed = False

    def add(self, span: Span, data: memoryview) -> None:
        """Write the next bytes of a span; the first that has not got all yet.

        Raises:
            OSError: What the storage says.
        """
        self._skip_full()
        assert self.plan.spans[self._number] == span, "bytes come in the file's order"
        writer = self._open()
        start, end = self._starts[self._number], self._ends[self._number]
        while len(data):
            # A hash is of a block of the span, and the last may be shorter.
            block_end = min(end, self._at + BLOCK_BYTES - (self._at - start) % BLOCK_BYTES)
            piece, data = data[: block_end - self._at], data[block_end - self._at :]
            self._hasher.update(piece)
            writer.write(piece)
            self._at += len(piece)
            if self._at == block_end:
                self._hashes[self._number].append(self._hasher.hexdigest())
                self._hasher.reset()
        self._skip_full()
        if self._number == len(self.plan.spans):
            self.close()

    def close(self) -> None:
        """Make the file last; it must have got all.

        Raises:
            OSError: What the storage says.
        """
        if self._is_closed:
            return
        assert self._at == self._size_bytes, "all has come"
        self._open().close()
        self._is_closed = True

    def discard(self) -> None:
        """Give up."""
        if self._writer is not None:
            self._writer.discard()

    def report(self) -> FileReport:
        """The file as it was written."""
        assert self._is_closed, "the file is written"
        return FileReport(
            self.plan.name,
            self._size_bytes,
            len(self._header),
            hash_bytes(self._header),
            self._starts,
            self._hashes,
        )

    def _open(self) -> FileWriter:
        if self._writer is None:
            self._writer = self._storage.create(self._save_id, self.plan.name, self._size_bytes)
            self._writer.write(memoryview(self._header))
        return self._writer

    def _skip_full(self) -> None:
        """Go to the next span that lacks bytes."""
        while self._number < len(self.plan.spans) and self._at == self._ends[self._number]:
            self._number += 1


def write_file(
    storage: Storage,
    save_id: str,
    plan: FilePlan,
    tensors: Mapping[str, TensorReport],
    find: Callable[[Span], torch.Tensor],
) -> FileReport:
    """Write a file, and make it last.

    Args:
        storage: Where.
        save_id: The save.
        plan: What.
        tensors: The whole tensors, by key.
        find: Gives the elements of a span, on the CPU.

    Raises:
        OSError: What the storage says; nothing of the file stays.
    """
    stream = FileStream(storage, save_id, plan, tensors)
    try:
        for span in plan.spans:
            data = bytes_of(find(span))
            for at in range(0, len(data), _STEP_BYTES):
                stream.add(span, data[at : at + _STEP_BYTES])
        stream.close()
    except BaseException:
        stream.discard()
        raise
    return stream.report()
