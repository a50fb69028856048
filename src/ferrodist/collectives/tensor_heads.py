"""The heads of tensors that travel from rank to rank: what each tensor is, and under which number its elements come."""

from __future__ import annotations

import itertools
import math
import struct
import threading
from typing import TYPE_CHECKING, NamedTuple

from ferrodist.backends.tags import ANY_SOURCE, Channel, channel_tag
from ferrodist.collectives.reduce_op import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from typing_extensions import Self

    from ferrodist.backends.base import Backend

__all__ = ["HEAD_BYTES", "MAX_DIMS", "KeptHeads", "TensorHead", "body_numbers", "kept_heads"]

MAX_DIMS = 12
"""Dims that a head has room for."""

_MAX_BYTES = 1 << 47
"""More than any machine's memory: a tensor can't have as many."""

_MOST = (1 << 63) - 1
"""What torch's arithmetic of sizes holds."""

_HEAD = struct.Struct(f"<QBB{MAX_DIMS}q")  # number of the body, dtype's place in DTYPES, dims, shape

HEAD_BYTES = _HEAD.size

_NUMBERS = "collectives.messages"
_HEADS = "collectives.heads"


class TensorHead(NamedTuple):
    """What a tensor is that travels."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def pack(self) -> bytes:
        """The message."""
        padding = [0] * (MAX_DIMS - len(self.shape))
        return _HEAD.pack(self.number, DTYPES.index(self.dtype), len(self.shape), *self.shape, *padding)

    @classmethod
    def unpack(cls, message: bytes | bytearray) -> Self | None:
        """The head in a message of `HEAD_BYTES`; None when no tensor has it."""
        number, place, num_dims, *padded = _HEAD.unpack(message)
        if place >= len(DTYPES) or num_dims > MAX_DIMS or min(padded) < 0:
            return None
        shape = tuple(padded[:num_dims])
        # torch counts so, too: a dim without elements does not make up for the others.
        size = math.prod(max(dim, 1) for dim in shape) * DTYPES[place].itemsize
        return None if size > (_MAX_BYTES if 0 not in shape else _MOST) else cls(number, DTYPES[place], shape)


def body_numbers(group: Backend) -> Iterator[int]:
    """Numbers for the bodies this rank sends in a group; a receiver reads them per sender."""
    numbers: Iterator[int] | None = group.attachments.get(_NUMBERS)
    return group.attachments.setdefault(_NUMBERS, itertools.count()) if numbers is None else numbers


class KeptHeads:
    """Heads of tensors whose receives were given up, by tag, in the order they came.

    See [Note: given up] in `tensor_transfers.py`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heads: dict[int, list[tuple[int, bytes]]] = {}

    def may_have(self, tag: int) -> bool:
        """Whether a head of a user's tag may be kept; for what is no tag that is so when any head is."""
        heads = self._heads
        return bool(heads) and (type(tag) is not int or channel_tag(Channel.TENSOR_HEAD, tag) in heads)

    def keep(self, tag: int, source: int, head: bytes) -> None:
        """Keep a head, for the next receive of its tag."""
        with self._lock:
            self._heads.setdefault(tag, []).append((source, head))

    def take(self, tag: int, source: int) -> tuple[int, bytes] | None:
        """The first head with a tag from a rank, or from any, and the rank that sent it; None when there is none."""
        with self._lock:
            heads = self._heads.get(tag, [])
            found = next((kept for kept in heads if source in (ANY_SOURCE, kept[0])), None)
            if found is not None:
                heads.remove(found)
                if not heads:
                    del self._heads[tag]
            return found


def kept_heads(group: Backend) -> KeptHeads:
    """The heads that are kept in a group."""
    heads = group.attachments.get(_HEADS) or group.attachments.setdefault(_HEADS, KeptHeads())
    assert isinstance(heads, KeptHeads)
    return heads
