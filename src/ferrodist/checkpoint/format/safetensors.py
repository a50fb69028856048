"""Headers of safetensors files: 8 bytes with a length, then JSON of the tensors in the file."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ferrodist.checkpoint.format.dtypes import dtype_from_name, safetensors_form
from ferrodist.checkpoint.format.manifest import LENGTH_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.checkpoint.format.manifest import Manifest


class HeaderEntry(NamedTuple):
    """A tensor of a file: its dtype as these files call it, its shape, and where its bytes are after the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def make_header(parts: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[int], int]:
    """The header of a file of tensors that lie one after the other.

    Args:
        parts: For each its name in the file, dtype (torch's name) and shape.

    Returns:
        The header with its length before it, where each tensor begins in the file, and the file's size.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, begins = 0, []
    for name, dtype, shape in parts:
        size = prod(shape) * dtype_from_name(dtype).itemsize
        form, form_shape = safetensors_form(dtype, shape)
        entries[name] = {"dtype": form, "shape": form_shape, "data_offsets": [at, at + size]}
        begins.append(at)
        at += size
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return header, [len(header) + begin for begin in begins], len(header) + at


def most_entry_bytes(key: str, num_dims: int) -> int:
    """The most that a tensor's entry takes of a header."""
    return 6 * len(key) + 100 * num_dims + 300  # JSON writes some characters as six


def parse_header(data: bytes) -> dict[str, HeaderEntry]:
    """The tensors that a header has, by name.

    Args:
        data: The header with its length before it.

    Raises:
        ValueError: It is none.
    """
    if len(data) < LENGTH_BYTES or int.from_bytes(data[:LENGTH_BYTES], "little") != len(data) - LENGTH_BYTES:
        raise ValueError("its first 8 bytes are not the length of its header")
    try:
        entries = msgspec.json.decode(data[LENGTH_BYTES:], type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        return {name: HeaderEntry(*_fields(raw)) for name, raw in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"its header can't be read: {error}") from error


class _Fields(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _fields(raw: msgspec.Raw) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    fields = msgspec.json.decode(raw, type=_Fields)
    return fields.dtype, fields.shape, fields.data_offsets


def expected_entries(manifest: Manifest, place: int) -> dict[str, tuple[str, HeaderEntry]]:
    """What the header of a manifest's file should have: keys of tensors, and entries, by names in the file."""
    begin = manifest.files[place].header_bytes
    found = {}
    for key, tensor in manifest.tensors.items():
        for shard in tensor.shards:
            if shard.file == place:
                dtype, shape = safetensors_form(tensor.dtype, shard.shape)
                entry = HeaderEntry(dtype, shape, (shard.start - begin, shard.stop - begin))
                found[name_in_file(key, shard.offsets, shard.shape, tensor.shape)] = key, entry
    return found


def name_in_file(key: str, offsets: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> str:
    """A tensor's key, and which part of it is meant, unless it is all."""
    if tuple(shape) == tuple(whole):
        return key
    sides = [f"{begin}:{begin + size}" for begin, size in zip(offsets, shape, strict=True)]
    return f"{key}[{', '.join(sides)}]"
