"""The bytes by which the ranks of an NCCL communicator find each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrodist.backends.nccl.library import load_nccl

if TYPE_CHECKING:
    from ferrodist.backends.nccl.communicator import Library

__all__ = ["NcclUniqueId"]

_SIZE = 128
"""NCCL_UNIQUE_ID_BYTES of nccl.h."""


@dataclass(frozen=True, slots=True)
class NcclUniqueId:
    """What NCCL's ``ncclGetUniqueId`` gives one rank, which the others need to make a communicator with it.

    Groups make and share theirs by themselves. This is for programs that make communicators of their own, with
    NVIDIA's ``nccl4py``.

    Args:
        internal: 128 bytes.

    Raises:
        ValueError: They are not 128.
    """

    internal: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.internal, bytes):
            raise TypeError(f"a unique id is made from bytes, not {type(self.internal).__name__}")
        if len(self.internal) != _SIZE:
            raise ValueError(f"a unique id of NCCL has {_SIZE} bytes, not {len(self.internal)}")

    @classmethod
    def create(cls, library: Library | None = None) -> NcclUniqueId:
        """Make a new one, on one rank.

        Raises:
            BackendUnavailable: There is no NCCL here.
        """
        return cls((library or load_nccl()).unique_id())

    def __bytes__(self) -> bytes:
        return self.internal

    def __repr__(self) -> str:
        return f"NcclUniqueId({self.internal[:4].hex()}...)"  # it lets whoever has it into the communicator
