"""Nested values as messages: whatever their shapes are, they travel with them.

[Note: letter]
A value goes as a letter, which is one tensor of bytes, and the tensors that are too large for it:

    length of the head | head: the plan of the value, and dtype, shape, place of each tensor | padding | small tensors

So what is small costs one message, and nobody has to know beforehand what comes. Tensors on a GPU are copied to the
host's memory to be written.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ferrodist.collectives.arguments import bytes_of, check_tensor
from ferrodist.collectives.pytree import LeafCodec, Plan, check_plan, flatten, unflatten
from ferrodist.collectives.reduce_op import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST_INSIDE_BYTES = 240 << 10
"""Of a letter: what costs less to copy than to send by itself, and what the engine takes at once."""

_ALIGNMENT = 64
_LENGTH = struct.Struct("<Q")
_APART = -1
_COPIED_BYTES = 4096
"""Of a tensor that is copied faster than a view of its place is made."""

_MOST_BYTES = 1 << 62
_MOST_DIMS_NAMED = 64

_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


@dataclass(frozen=True, slots=True)
class PackedValue:
    """A value, taken apart.

    Args:
        plan: How it is nested.
        tensors: Its tensors; what is received has no history.
        wants_gradient: For each of them whether the sender has a use for its gradient.
        is_on_gpu: For each whether the sender has it on a GPU; here it is on the CPU until somebody moves it.
        marks: Of the extensions that took parts of it apart; none of what was received.
    """

    plan: Plan
    tensors: list[torch.Tensor]
    wants_gradient: list[bool]
    is_on_gpu: list[bool]
    marks: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        value: Any,
        what: str,
        extensions: Sequence[LeafCodec] = (),
        check: Callable[[torch.Tensor], None] | None = None,
    ) -> PackedValue:
        """Take a value apart; see `flatten`."""
        marks: set[str] = set()
        plan, tensors = flatten(value, what, extensions, check, marks)
        wants_gradient, is_on_gpu = [each.requires_grad for each in tensors], [each.is_cuda for each in tensors]
        return cls(plan, tensors, wants_gradient, is_on_gpu, frozenset(marks))

    def copy(self) -> PackedValue:
        """The same with tensors of its own."""
        tensors = [tensor.detach().clone() for tensor in self.tensors]
        return PackedValue(self.plan, tensors, self.wants_gradient, self.is_on_gpu)

    def open(self, extensions: Sequence[LeafCodec] = ()) -> Any:
        """The value, with the parcel's tensors."""
        return unflatten(self.plan, self.tensors, extensions)


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    """What a letter says of a tensor.

    Args:
        dtype: Its place among those that travel.
        shape: Of it.
        wants_gradient: As in `PackedValue`.
        is_on_gpu: As in `PackedValue`.
        start: Where it begins, in bytes from the first of the small tensors; or that it comes by itself.
    """

    dtype: int
    shape: tuple[int, ...]
    wants_gradient: bool
    is_on_gpu: bool
    start: int


class _Head(msgspec.Struct, frozen=True, array_like=True):
    plan: Plan
    pieces: list[_Piece]


_HEADS = msgspec.msgpack.Decoder(_Head)


@dataclass(frozen=True, slots=True)
class OutOfBandTensor:
    """A tensor that comes by itself.

    Args:
        number: Among those of the parcel.
        dtype: Of it.
        shape: Of it.
    """

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of it."""
        return prod(self.shape) * self.dtype.itemsize

    def check(self) -> int:
        """See that there may be such a tensor; gives its size.

        Raises:
            ValueError: There may not.
        """
        size = self.dtype.itemsize
        for dim in self.shape:
            size *= max(dim, 1)  # torch counts so, too: a dim without elements does not make up for the others
            if dim < 0 or size > _MOST_BYTES:
                raise ValueError(f"there is no tensor of shape {self.shape[:_MOST_DIMS_NAMED]}")
        return size


class UnreadableError(ValueError):
    """A letter is no value.

    Args:
        wrong: What is wrong with it.
        apart: What comes after it, or None where that can't be said.
    """

    def __init__(self, wrong: str, apart: list[OutOfBandTensor] | None) -> None:
        super().__init__(wrong)
        self.apart = apart


def encode_value(
    parcel: PackedValue, what: str, room: int = _MOST_INSIDE_BYTES
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Write a value down.

    Args:
        parcel: The value.
        what: What it is, for errors.
        room: Bytes of tensors that the letter may have; the first ones that find room are in it.

    Returns:
        The letter, and the tensors that don't have room in it, in their order, contiguous.

    Raises:
        TypeError: A tensor can't travel.
    """
    memory, apart = encode_value_bytes(parcel, what, room)
    return torch.frombuffer(memory, dtype=torch.uint8), apart


def encode_value_bytes(
    parcel: PackedValue, what: str, room: int = _MOST_INSIDE_BYTES
) -> tuple[bytearray, list[torch.Tensor]]:
    """`encode_value`, for who sends bytes."""
    pieces, inside, apart = [], [], []
    end = 0  # of the small tensors, from where these begin
    for given, wants, is_on_gpu in zip(parcel.tensors, parcel.wants_gradient, parcel.is_on_gpu, strict=True):
        check_tensor(given, what)
        tensor = given.detach().resolve_conj().resolve_neg().cpu()
        size = _aligned(tensor.nbytes)
        fits = end + size <= room
        pieces.append(
            _Piece(_DTYPE_NUMBERS[tensor.dtype], tuple(tensor.shape), wants, is_on_gpu, end if fits else _APART)
        )
        if fits:
            inside.append((tensor, end))
            end += size
        else:
            apart.append(tensor.contiguous())
    head = msgspec.msgpack.encode(_Head(parcel.plan, pieces))
    first = _aligned(_LENGTH.size + len(head))
    memory = bytearray(first + end)
    memory[: _LENGTH.size] = _LENGTH.pack(len(head))
    memory[_LENGTH.size : _LENGTH.size + len(head)] = head
    for tensor, start in inside:
        if tensor.nbytes <= _COPIED_BYTES:
            dense = tensor.contiguous()
            memory[first + start : first + start + dense.nbytes] = ctypes.string_at(dense.data_ptr(), dense.nbytes)
        else:
            _tensor_at(memory, first + start, tensor.dtype, tensor.shape).copy_(tensor)
    return memory, apart


def decode_value(letter: torch.Tensor, marks: Sequence[str] = ()) -> tuple[PackedValue, list[OutOfBandTensor]]:
    """Take a letter apart; nothing in it is believed.

    Args:
        letter: It.
        marks: Of the extensions that it may have.

    Returns:
        The value, whose small tensors lie in the letter's memory, with None in the place of what comes by itself; and
        what that is, in the order in which it comes.

    Raises:
        UnreadableError: It is no letter, or what it holds is no value, or has other marks.
    """
    return decode_value_bytes(bytes_of(letter), marks)


def decode_value_bytes(memory: memoryview, marks: Sequence[str] = ()) -> tuple[PackedValue, list[OutOfBandTensor]]:
    """`decode_value`, for who receives bytes; these are writable."""
    try:
        (length,) = _LENGTH.unpack_from(memory)
        head = _HEADS.decode(memory[_LENGTH.size : _LENGTH.size + length])
        dtypes = [DTYPES[piece.dtype] for piece in head.pieces]
    except Exception as error:
        raise UnreadableError(str(error), None) from error
    apart = [
        OutOfBandTensor(number, dtype, piece.shape)
        for number, (piece, dtype) in enumerate(zip(head.pieces, dtypes, strict=True))
        if piece.start == _APART
    ]
    first = _aligned(_LENGTH.size + length)
    tensors: list[Any] = []
    try:
        check_plan(head.plan, len(head.pieces), marks)
        for piece, dtype in zip(head.pieces, dtypes, strict=True):
            is_apart = piece.start == _APART
            tensors.append(None if is_apart else _tensor_at(memory, first + piece.start, dtype, piece.shape))
    except Exception as error:
        raise UnreadableError(str(error), apart) from error
    wants, is_on_gpu = [piece.wants_gradient for piece in head.pieces], [piece.is_on_gpu for piece in head.pieces]
    return PackedValue(head.plan, tensors, wants, is_on_gpu), apart


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def _tensor_at(memory: bytearray | memoryview, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor in a letter; no view of it, for what is written to one tensor is no change of the others."""
    numel = prod(shape)
    if not numel:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start).view(tuple(shape))
