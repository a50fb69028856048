"""``.metadata`` of torch.distributed.checkpoint: a pickle, of which only the classes are made that belong in it."""

from __future__ import annotations

import io
import pickle
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as classes

__all__ = ["METADATA_NAME", "decode_metadata"]

METADATA_NAME = ".metadata"

_KNOWN = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}
_MODULES = {"torch.distributed.checkpoint.metadata": classes, "torch.distributed.checkpoint.filesystem": filesystem}


def decode_metadata(data: bytes) -> classes.Metadata:
    """Read the file's bytes.

    Raises:
        ValueError: They are something else, or name a class that doesn't belong there; none of its code has run.
    """
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a pickle of any bytes may end in any way
        raise ValueError(f"{METADATA_NAME} is not what torch.distributed.checkpoint writes: {error}") from error
    if not isinstance(found, classes.Metadata):
        raise ValueError(  # noqa: TRY004 - of the bytes
            f"{METADATA_NAME} is a {type(found).__name__}, not what torch.distributed.checkpoint writes"
        )
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Only what is known to do nothing but be."""
        if name in _KNOWN.get(module, ()):
            return getattr(_MODULES[module], name)
        if module == "torch":
            found = getattr(torch, name, None)
            if found is torch.Size or isinstance(found, torch.dtype):
                return found
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath", "PurePosixPath"):
            return PurePosixPath
        raise pickle.UnpicklingError(f"it names {module}.{name}, which doesn't belong there")


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"it has a tensor of layout {name}")
    return torch.strided
