"""Headers of safetensors files: an 8-byte length, then JSON with the tensors in the file."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import msgspec

from ferrodist.checkpoint.format.dtypes import dtype_from_name, to_safetensors
from ferrodist.checkpoint.format.manifest import LENGTH_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.checkpoint.format.manifest import Manifest


class HeaderEntry(msgspec.Struct, frozen=True):
    """A tensor of a file: its safetensors dtype, its shape, and its bytes relative to the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


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


def max_entry_bytes(key: str, num_dims: int) -> int:
    """Return an upper bound of the size of a tensor's entry in a header."""
    return 6 * len(key) + 100 * num_dims + 300  # JSON writes some characters as six


def parse_header(data: bytes) -> dict[str, HeaderEntry]:
    """Return the tensors of a header, given with its length field, by name."""
    if len(data) < LENGTH_BYTES or int.from_bytes(data[:LENGTH_BYTES], "little") != len(data) - LENGTH_BYTES:
        raise ValueError("its first 8 bytes are not the length of its header")
    try:
        entries = msgspec.json.decode(data[LENGTH_BYTES:], type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        return {name: msgspec.json.decode(raw, type=HeaderEntry) for name, raw in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"its header can't be read: {error}") from error


def expected_entries(manifest: Manifest, file_index: int) -> dict[str, tuple[str, HeaderEntry]]:
    """Return the key and expected header entry of each shard in a file, by its name in the file."""
    begin = manifest.files[file_index].header_bytes
    found = {}
    for key, tensor in manifest.tensors.items():
        for shard in tensor.shards:
            if shard.file == file_index:
                dtype, shape = to_safetensors(tensor.dtype, shard.shape)
                entry = HeaderEntry(dtype, shape, (shard.start - begin, shard.stop - begin))
                found[name_in_file(key, shard.offsets, shard.shape, tensor.shape)] = key, entry
    return found


def name_in_file(key: str, offsets: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> str:
    """Return the name of a shard in a file: the tensor's key, with the slice unless it is the full tensor."""
    if tuple(shape) == tuple(whole):
        return key
    sides = [f"{begin}:{begin + size}" for begin, size in zip(offsets, shape, strict=True)]
    return f"{key}[{', '.join(sides)}]"
