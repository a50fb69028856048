"""Nested values on their way from rank to rank: whatever their shapes are, they travel with them.

[Note: letter]
A value goes as a letter, which is one tensor of bytes, and the tensors that are too large for it:

    length of the head | head: the plan of the value, and dtype, shape, place of each tensor | padding | small tensors

So a small activation costs one message, and nobody has to know beforehand what comes. All of it goes under one tag,
in this order.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ferrodist.backends.request import wait_all
from ferrodist.collectives.point_to_point import begin_send, recv
from ferrodist.collectives.prepare import check_tensor
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.collectives.tensor_transfers import TensorReceive, start_send
from ferrodist.collectives.views import bytes_of
from ferrodist.errors import DistributedError, ProtocolError
from ferrodist.parallel.pipeline.values import Plan, check_plan, flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request
    from ferrodist.deadline import Deadline

__all__ = ["Parcel", "Receipt", "send_parcel"]

_MOST_INSIDE_BYTES = 240 << 10
"""Of a letter: what costs less to copy than to send by itself, and what the engine takes at once."""

_ALIGNMENT = 64
_LENGTH = struct.Struct("<Q")
_APART = -1


@dataclass(frozen=True, slots=True)
class Parcel:
    """A value, taken apart.

    Args:
        plan: How it is nested.
        tensors: Its tensors; what is received has no history.
        wants_gradient: For each of them whether the sender has a use for its gradient.
    """

    plan: Plan
    tensors: list[torch.Tensor]
    wants_gradient: list[bool]

    @classmethod
    def of(cls, value: Any, what: str) -> Parcel:
        """Take a value apart; see `flatten`."""
        plan, tensors = flatten(value, what)
        return cls(plan, tensors, [tensor.requires_grad for tensor in tensors])

    def copy(self) -> Parcel:
        """The same with tensors of its own."""
        return Parcel(self.plan, [tensor.detach().clone() for tensor in self.tensors], self.wants_gradient)

    def open(self) -> Any:
        """The value, with the parcel's tensors."""
        return unflatten(self.plan, self.tensors)


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    """What a letter says of a tensor.

    Args:
        dtype: Its place among those that travel.
        shape: Of it.
        wants_gradient: As in `Parcel`.
        start: Where it begins in the letter; or that it comes by itself.
    """

    dtype: int
    shape: tuple[int, ...]
    wants_gradient: bool
    start: int


class _Head(msgspec.Struct, frozen=True, array_like=True):
    plan: Plan
    pieces: list[_Piece]


_HEADS = msgspec.msgpack.Decoder(_Head)


def send_parcel(parcel: Parcel, dst: int, tag: int, group: Backend) -> list[Request]:
    """Start to send a value; its tensors are not to be changed until the requests are done.

    Raises:
        TypeError: A tensor can't travel.
    """
    tensors = [tensor.detach() for tensor in parcel.tensors]
    for tensor in tensors:
        check_tensor(tensor, "what goes from stage to stage")
    is_inside, room = [], _MOST_INSIDE_BYTES
    for tensor in tensors:
        is_inside.append(_aligned(tensor.nbytes) <= room)
        room -= _aligned(tensor.nbytes) if is_inside[-1] else 0
    requests = begin_send(_write_letter(parcel, tensors, is_inside), dst, tag=tag, group=group)
    for tensor, inside in zip(tensors, is_inside, strict=True):
        if not inside:
            requests += start_send(group, tensor, dst, tag)
    return requests


def _write_letter(parcel: Parcel, tensors: Sequence[torch.Tensor], is_inside: Sequence[bool]) -> torch.Tensor:
    pieces = []
    end = 0  # of the small tensors, from where these begin
    for tensor, wants, inside in zip(tensors, parcel.wants_gradient, is_inside, strict=True):
        pieces.append(_Piece(DTYPES.index(tensor.dtype), tuple(tensor.shape), wants, end if inside else _APART))
        end += _aligned(tensor.nbytes) if inside else 0
    head = msgspec.msgpack.encode(_Head(parcel.plan, pieces))
    first = _aligned(_LENGTH.size + len(head))
    letter = torch.empty(first + end, dtype=torch.uint8, device="cpu")
    memory = bytes_of(letter)
    memory[: _LENGTH.size] = _LENGTH.pack(len(head))
    memory[_LENGTH.size : _LENGTH.size + len(head)] = head
    for tensor, piece in zip(tensors, pieces, strict=True):
        if piece.start != _APART:
            _tensor_at(memory, first + piece.start, tensor.dtype, tensor.shape).copy_(tensor)
    return letter


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def _tensor_at(memory: memoryview, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor in a letter; no view of it, for what is written to one tensor is no change of the others."""
    numel = prod(shape)
    if not numel:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start).view(tuple(shape))


class Receipt:
    """A value that is on its way to this rank: the receive of its letter has begun.

    Args:
        src: The rank that sends it.
        tag: Under which.
        group: The group.
        is_ahead: Whether to begin at once, which is worth it for what is large. Else what is small comes by itself, and
            taking it when it is needed costs a fraction.
    """

    def __init__(self, src: int, tag: int, group: Backend, *, is_ahead: bool) -> None:
        self._group = group
        self._src = src
        self._tag = tag
        self._lock = threading.Lock()
        self._parcel: Parcel | None = None
        self._error: Exception | None = None
        self._bodies: list[tuple[int, TensorReceive]] = []
        """Of the tensors that come by themselves, with their numbers."""
        self._is_given_up = False
        self._letter: TensorReceive | None = None
        if is_ahead:
            self._letter = TensorReceive(group, src, tag, shape=None, dtype=torch.uint8)
            self._letter.add_done_callback(self._read_ahead)

    def wait(self, deadline: Deadline) -> Parcel:
        """Wait until all of it is there.

        Raises:
            ProtocolError: It is no letter.
            DistributedError: A rank is late, or was lost.
        """
        if self._letter is not None:
            wait_all([self._letter], deadline)
            self._read_ahead()
        else:
            letter = recv(None, torch.uint8, self._src, tag=self._tag, group=self._group, timeout=deadline.remaining())
            self._read(letter)
        if self._error is not None:
            raise self._error
        assert self._parcel is not None, "it was read"
        wait_all([body for _, body in self._bodies], deadline)
        for number, body in self._bodies:
            self._parcel.tensors[number] = body.finish()
        return self._parcel

    @property
    def has_bodies(self) -> bool:
        """Whether some of it came apart from the letter."""
        return bool(self._bodies)

    def cancel(self) -> None:
        """Give it up."""
        with self._lock:
            self._is_given_up = True
        if self._letter is not None:
            self._letter.cancel()
        for _, body in self._bodies:
            body.cancel()

    def _read_ahead(self) -> None:
        """Read the letter once, whoever is first: who waits for it, or who brings it."""
        with self._lock:
            is_read = self._parcel is not None or self._error is not None
            if self._letter is not None and not (is_read or self._is_given_up or self._letter.error):
                self._read(self._letter.finish())

    def _read(self, letter: torch.Tensor) -> None:
        """Read the letter, and begin to receive what comes apart from it."""
        try:
            self._parcel = self._take_apart(letter)
        except DistributedError as error:  # the group has failed meanwhile; these are RuntimeErrors, too
            self._error = error
        except (msgspec.MsgspecError, struct.error, IndexError, RuntimeError, ValueError) as error:
            text = f"rank {self._src} of group {self._group.name!r} sent what is no value of a pipeline: {error}"
            self._error = ProtocolError(text, ranks=(self._src,))
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            self._error = error

    def _take_apart(self, letter: torch.Tensor) -> Parcel:
        memory = bytes_of(letter)
        (length,) = _LENGTH.unpack_from(memory)
        head = _HEADS.decode(memory[_LENGTH.size : _LENGTH.size + length])
        check_plan(head.plan, len(head.pieces))
        first = _aligned(_LENGTH.size + length)
        tensors: list[Any] = []
        for number, piece in enumerate(head.pieces):
            dtype = DTYPES[piece.dtype]
            if piece.start == _APART:
                body = TensorReceive(self._group, self._src, self._tag, shape=piece.shape, dtype=dtype)
                self._bodies.append((number, body))
                tensors.append(None)
            else:
                tensors.append(_tensor_at(memory, first + piece.start, dtype, piece.shape))
        return Parcel(head.plan, tensors, [piece.wants_gradient for piece in head.pieces])
