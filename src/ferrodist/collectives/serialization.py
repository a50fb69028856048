"""Serialization of nested values that hold tensors; receivers need to know nothing beforehand.

[Note: in-band and out-of-band]
As in pickle 5, small tensors are in-band: in the encoded value, which is one tensor of bytes. Large ones are
out-of-band: each is sent by itself.

    length of the header | header: tree spec; dtype, shape, offset of each tensor | padding | in-band tensors

So a small value costs one send. Tensors on a GPU are copied to the host.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch

from ferrodist.collectives.arguments import check_tensor
from ferrodist.collectives.pytree import LeafCodec, TreeSpec, check_spec, flatten, unflatten
from ferrodist.collectives.reduce_op import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MAX_INBAND_BYTES = 240 << 10
"""Up to here a copy costs less than another send, and engines take the encoded value without asking the receiver."""

_ALIGNMENT = 64
_LENGTH = struct.Struct("<Q")
_OUT_OF_BAND = -1
_MAX_MEMCPY_BYTES = 4096  # up to here copying a tensor's bytes is faster than making a tensor at their offset

_MAX_TENSOR_BYTES = 1 << 62
_MAX_DIMS_IN_ERROR = 64

_DTYPE_INDICES = {dtype: index for index, dtype in enumerate(DTYPES)}


@dataclass(frozen=True, slots=True)
class PackedValue:
    """A flattened value."""

    spec: TreeSpec
    tensors: list[torch.Tensor]  # without autograd history, if received
    wants_gradient: list[bool]  # whether each requires grad on the sender
    is_on_gpu: list[bool]  # whether each is on a GPU on the sender; received ones are on the CPU
    tags: frozenset[str] = frozenset()  # of the codecs that encoded leaves; empty for a received value

    @classmethod
    def of(
        cls,
        value: Any,
        what: str,
        codecs: Sequence[LeafCodec] = (),
        check: Callable[[torch.Tensor], None] | None = None,
    ) -> PackedValue:
        """Flatten a value; see `flatten`."""
        tags: set[str] = set()
        spec, tensors = flatten(value, what, codecs, check, tags)
        wants_gradient, is_on_gpu = [each.requires_grad for each in tensors], [each.is_cuda for each in tensors]
        return cls(spec, tensors, wants_gradient, is_on_gpu, frozenset(tags))

    def copy(self) -> PackedValue:
        """Copy the tensors, too."""
        tensors = [tensor.detach().clone() for tensor in self.tensors]
        return PackedValue(self.spec, tensors, self.wants_gradient, self.is_on_gpu)

    def open(self, codecs: Sequence[LeafCodec] = ()) -> Any:
        """Rebuild the value, with these tensors."""
        return unflatten(self.spec, self.tensors, codecs)


class _TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the header."""

    dtype: Annotated[int, msgspec.Meta(ge=0)]  # its index in `DTYPES`
    shape: tuple[int, ...]
    wants_gradient: bool
    is_on_gpu: bool
    start: int  # the offset among the in-band tensors, in bytes, or `_OUT_OF_BAND`


class _Header(msgspec.Struct, frozen=True, array_like=True):
    spec: TreeSpec
    tensors: list[_TensorEntry]


_HEADER_DECODER = msgspec.msgpack.Decoder(_Header)


@dataclass(frozen=True, slots=True)
class OutOfBandTensor:
    """A tensor that comes in a message of its own."""

    index: int  # in `PackedValue.tensors`
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The number of bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def check(self) -> int:
        """Return the size in bytes; raises ValueError if no tensor has such a shape."""
        size = self.dtype.itemsize
        for dim in self.shape:
            size *= max(dim, 1)  # as torch does: a dim of size 0 does not make up for the others
            if dim < 0 or size > _MAX_TENSOR_BYTES:
                raise ValueError(f"there is no tensor of shape {self.shape[:_MAX_DIMS_IN_ERROR]}")
        return size


class UnreadableError(ValueError):
    """A message that is not an encoded value; ``out_of_band`` follow it, or None where they are unknown."""

    def __init__(self, problem: str, out_of_band: list[OutOfBandTensor] | None) -> None:
        super().__init__(problem)
        self.out_of_band = out_of_band


def encode_value(
    value: PackedValue, what: str, max_inband_bytes: int = _MAX_INBAND_BYTES
) -> tuple[bytearray, list[torch.Tensor]]:
    """Encode a value: [Note: in-band and out-of-band]; raises TypeError, with ``what``, for a tensor that can't travel.

    The first tensors that have room are in-band. The out-of-band ones are returned contiguous and on the host.
    """
    entries, in_band, out_of_band = [], [], []
    end = 0  # of the in-band tensors, from where they begin
    for given, wants, is_on_gpu in zip(value.tensors, value.wants_gradient, value.is_on_gpu, strict=True):
        check_tensor(given, what)
        tensor = given.detach().resolve_conj().resolve_neg().cpu()
        size = _aligned(tensor.nbytes)
        fits = end + size <= max_inband_bytes
        start = end if fits else _OUT_OF_BAND
        entries.append(_TensorEntry(_DTYPE_INDICES[tensor.dtype], tuple(tensor.shape), wants, is_on_gpu, start))
        if fits:
            in_band.append((tensor, end))
            end += size
        else:
            out_of_band.append(tensor.contiguous())
    header = msgspec.msgpack.encode(_Header(value.spec, entries))
    first = _aligned(_LENGTH.size + len(header))
    memory = bytearray(first + end)
    memory[: _LENGTH.size] = _LENGTH.pack(len(header))
    memory[_LENGTH.size : _LENGTH.size + len(header)] = header
    for tensor, start in in_band:
        if tensor.nbytes <= _MAX_MEMCPY_BYTES:
            dense = tensor.contiguous()
            memory[first + start : first + start + dense.nbytes] = ctypes.string_at(dense.data_ptr(), dense.nbytes)
        else:
            _tensor_at(memory, first + start, tensor.dtype, tensor.shape).copy_(tensor)
    return memory, out_of_band


def decode_value(memory: memoryview, tags: Sequence[str] = ()) -> tuple[PackedValue, list[OutOfBandTensor]]:
    """Decode a value from writable bytes; nothing in them is trusted. Raises UnreadableError.

    In-band tensors use the message's memory. Out-of-band ones are None in the value, and come in the order of the list.
    """
    try:
        (length,) = _LENGTH.unpack_from(memory)
        header = _HEADER_DECODER.decode(memory[_LENGTH.size : _LENGTH.size + length])
        dtypes = [DTYPES[entry.dtype] for entry in header.tensors]
    except Exception as error:
        raise UnreadableError(str(error), None) from error
    out_of_band = [
        OutOfBandTensor(index, dtype, entry.shape)
        for index, (entry, dtype) in enumerate(zip(header.tensors, dtypes, strict=True))
        if entry.start == _OUT_OF_BAND
    ]
    first = _aligned(_LENGTH.size + length)
    tensors: list[Any] = []
    try:
        check_spec(header.spec, len(header.tensors), tags)
        for entry, dtype in zip(header.tensors, dtypes, strict=True):
            is_inband = entry.start != _OUT_OF_BAND
            tensors.append(_tensor_at(memory, first + entry.start, dtype, entry.shape) if is_inband else None)
    except Exception as error:
        raise UnreadableError(str(error), out_of_band) from error
    wants, is_on_gpu = [entry.wants_gradient for entry in header.tensors], [entry.is_on_gpu for entry in header.tensors]
    return PackedValue(header.spec, tensors, wants, is_on_gpu), out_of_band


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def _tensor_at(memory: bytearray | memoryview, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor at an offset; not a view of a common tensor, so that writes to one don't bump the others' versions."""
    numel = prod(shape)
    if numel <= 0:  # below 0 this raises, where `frombuffer` takes -1 for all that is left
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start).view(tuple(shape))
