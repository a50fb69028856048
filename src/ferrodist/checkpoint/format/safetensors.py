"""safetensors files: an 8-byte length, then a header of JSON with the tensors in the file; and names of dtypes.

Manifests have torch's names of dtypes, files those of safetensors.
"""

from __future__ import annotations

import msgspec
import torch

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of a header, without its length field, in all readers."""

_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}

_WITHOUT_SAFETENSORS_NAME = ("complex128", "complex32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
"""Stored in safetensors files as bytes, with one more dim."""

_READ_ONLY = {"F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
"""Dtypes that other writers of safetensors files use."""

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*_SAFETENSORS, *_WITHOUT_SAFETENSORS_NAME) if hasattr(torch, name)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in manifests."""
    if dtype not in _NAMES:
        raise TypeError(f"checkpoints don't carry {dtype}: convert the tensor, or save its components")
    return _NAMES[dtype]


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of a name."""
    if name not in _DTYPES:
        raise ValueError(f"there is no dtype {name!r}")
    return _DTYPES[name]


def to_safetensors(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the name of a dtype and the shape of a tensor in safetensors files."""
    if name in _SAFETENSORS:
        return _SAFETENSORS[name], shape
    return "U8", (*shape, dtype_from_name(name).itemsize)


def from_safetensors(st_dtype: str) -> str:
    """Return the name in manifests of a dtype of safetensors files."""
    names = {**{st_dtype: name for name, st_dtype in _SAFETENSORS.items()}, **_READ_ONLY}
    if names.get(st_dtype) not in _DTYPES:
        raise ValueError(f"checkpoints don't carry the dtype {st_dtype!r}")
    return names[st_dtype]


class HeaderEntry(msgspec.Struct, frozen=True):
    """A tensor of a file: its safetensors dtype, its shape, and its bytes relative to the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


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
