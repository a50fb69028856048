"""Names of dtypes: torch's, and those of safetensors files."""

from __future__ import annotations

import torch

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

_OTHERS = ("complex128", "complex32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
"""These have no name in safetensors files, where they are bytes along one dim more."""

_FOREIGN = {"F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
"""Names that others write in safetensors files."""

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*_SAFETENSORS, *_OTHERS) if hasattr(torch, name)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name by which manifests know a dtype.

    Raises:
        TypeError: Checkpoints don't carry it.
    """
    if dtype not in _NAMES:
        raise TypeError(f"checkpoints don't carry {dtype}: convert the tensor, or save what it is made of")
    return _NAMES[dtype]


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype of a name.

    Raises:
        ValueError: There is none of this name.
    """
    if name not in _DTYPES:
        raise ValueError(f"there is no dtype {name!r}")
    return _DTYPES[name]


def safetensors_form(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """How a safetensors file calls a dtype, and the shape of a tensor of it there."""
    if name in _SAFETENSORS:
        return _SAFETENSORS[name], shape
    return "U8", (*shape, dtype_from_name(name).itemsize)


def name_of_safetensors_dtype(form: str) -> str:
    """The name of a dtype of a safetensors file.

    Raises:
        ValueError: Checkpoints don't carry it.
    """
    names = {**{own: name for name, own in _SAFETENSORS.items()}, **_FOREIGN}
    if names.get(form) not in _DTYPES:
        raise ValueError(f"checkpoints don't carry the dtype {form!r}")
    return names[form]
