"""Tensors from rank to rank.

A tensor travels as two messages: a head that says what it is, under the user's tag, and its elements, under a number
that the head names. So a receiver finds a wrong shape or dtype before it takes the elements, and tensors with one
tag stay in order however many threads send or receive them.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import torch

from ferrodist.backends.base import check_peer
from ferrodist.backends.request import BaseRequest, wait_all
from ferrodist.backends.tags import ANY_SOURCE, Channel, channel_tag, check_user_tag
from ferrodist.collectives.prepare import (
    Target,
    check_integer,
    check_out,
    check_tensor,
    flatten,
    group_and_timeout,
    prepare_out,
)
from ferrodist.collectives.reduce_op import DTYPES, check_dtype
from ferrodist.collectives.views import bytes_of
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError, ProtocolError, SizeMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Late, Request

__all__ = ["ANY_SOURCE", "Recv", "Send", "batch", "recv", "recv_into", "send", "sendrecv"]

_MAX_DIMS = 12
_HEAD = struct.Struct(f"<QBB{_MAX_DIMS}q")  # number of the body, dtype's place in DTYPES, dims, shape
_NUMBERS = "collectives.messages"
_HEADS = "collectives.heads"


@dataclass(frozen=True, slots=True)
class Send:
    """A send for `batch`: ``tensor`` to rank ``dst``, under ``tag``."""

    tensor: torch.Tensor
    dst: int
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Recv:
    """A receive for `batch`: into ``tensor`` from rank ``src`` (or `ANY_SOURCE`), under ``tag``."""

    tensor: torch.Tensor
    src: int
    tag: int = 0


def send(
    tensor: torch.Tensor,
    dst: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
) -> None:
    """Send a tensor to one rank, which calls `recv`, `recv_into`, `sendrecv` or `batch`.

    Args:
        tensor: Of at most 12 dims; any strides. It may be changed when the call returns. What is received has no
            autograd history.
        dst: The receiving rank.
        tag: From 0 to 2**56-1; only a receive with the same tag gets it.
        group: The group; None is the default group.
        timeout: Seconds; None takes the group's.

    Raises:
        TypeError: ``tensor`` can't travel: no dense CPU tensor of a known dtype.
        ValueError: ``tensor`` has more than 12 dims, or ``tag`` is out of range.
        SelfSendError, InvalidRankError: ``dst`` is this rank, or not in the group.
        DistributedTimeoutError: A large tensor was not received in time; it will not be.
        PeerLostError: ``dst`` died or left.
    """
    batch([Send(tensor, dst, tag)], group=group, timeout=timeout)


@overload
def recv(
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
    return_source: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def recv(
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
    return_source: Literal[True],
) -> tuple[torch.Tensor, int]: ...
def recv(
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
    return_source: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, int]:
    """Receive a tensor.

    Args:
        shape: Its shape, which is compared with what was sent; None takes what comes.
        dtype: Its dtype, compared too; None takes what comes.
        src: The sending rank, or `ANY_SOURCE`.
        tag: The tag it is sent with.
        group: The group; None is the default group.
        timeout: Seconds; None takes the group's.
        return_source: Return the rank that sent it too, for `ANY_SOURCE`.

    Returns:
        The tensor; with ``return_source`` a tuple of it and the sending rank.

    Raises:
        SizeMismatchError: A tensor of another shape or dtype came. It is lost.
        DistributedTimeoutError: None came in time. The call may be made again.
        ProtocolError: What came is no tensor.
        TypeError: ``shape`` is no sequence of integers, or collectives and messages don't carry ``dtype``.
        ValueError: ``shape`` has a size below 0 or more than 12 dims, or ``tag`` is out of range.
        SelfSendError, InvalidRankError, PeerLostError: As for `send`.
    """
    chosen, limit = group_and_timeout(group, timeout)
    if dtype is not None:
        check_dtype(dtype)
    shape = None if shape is None else _check_shape(shape)
    receive = _TensorReceive(chosen, src, tag, shape=shape, dtype=dtype)
    _wait_for([receive], Deadline(limit), chosen, f"recv from {_whom(src)}")
    return (receive.finish(), receive.peer) if return_source else receive.finish()


def recv_into(
    tensor: torch.Tensor,
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
) -> int:
    """Receive a tensor into one of the same shape and dtype; returns the rank that sent it.

    ``tensor`` may have any strides, but no elements that share memory, and at most 12 dims: else ValueError is raised.
    All else is as for `recv`.
    """
    chosen, limit = group_and_timeout(group, timeout)
    incoming = Recv(tensor, src, tag)
    _check(incoming, chosen)
    receive = _receive_into(chosen, incoming)
    _wait_for([receive], Deadline(limit), chosen, f"recv_into from {_whom(src)}")
    receive.finish()
    return receive.peer


@overload
def sendrecv(
    tensor: torch.Tensor,
    dst: int,
    shape: Sequence[int] | None,
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
    return_source: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def sendrecv(
    tensor: torch.Tensor,
    dst: int,
    shape: Sequence[int] | None,
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
    return_source: Literal[True],
) -> tuple[torch.Tensor, int]: ...
def sendrecv(
    tensor: torch.Tensor,
    dst: int,
    shape: Sequence[int] | None,
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
    return_source: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, int]:
    """Send a tensor to ``dst`` and receive one from ``src`` at the same time, so that rings of ranks don't block.

    Args:
        tensor: What to send.
        dst: The rank to send it to.
        shape: Shape of what comes, in ``tensor``'s dtype; None takes what comes.
        src: The rank to receive from, or `ANY_SOURCE`.
        tag: Tag of both.
        group: The group; None is the default group.
        timeout: Seconds for both together; None takes the group's.
        return_source: Return the rank that sent what came too, for `ANY_SOURCE`.

    Returns:
        The tensor that came; with ``return_source`` a tuple of it and the rank that sent it.

    Raises:
        As `send` and `recv`.
    """
    chosen, limit = group_and_timeout(group, timeout)
    outgoing = Send(tensor, dst, tag)
    _check(outgoing, chosen)
    shape = None if shape is None else _check_shape(shape)
    receive = _TensorReceive(chosen, src, tag, shape=shape, dtype=tensor.dtype)
    requests: list[Request] = [receive]
    try:
        requests.extend(_start_send(chosen, outgoing))
    except BaseException:
        receive.cancel()
        raise
    _wait_for(requests, Deadline(limit), chosen, f"sendrecv with {_whom(dst)} and {_whom(src)}")
    return (receive.finish(), receive.peer) if return_source else receive.finish()


def batch(
    operations: Iterable[Send | Recv], *, group: Backend | None = None, timeout: float | None = None
) -> list[int]:
    """Do several sends and receives at the same time; returns when all are done.

    Args:
        operations: `Send` and `Recv` values, in any order; those with the same peer and tag keep theirs.
        group: The group; None is the default group.
        timeout: Seconds for all together; None takes the group's.

    Returns:
        The other rank of each operation, in their order: who got it, or who sent it.

    Raises:
        TypeError: A member is neither, or its tensor can't travel.
        As `send` and `recv_into`; when one operation fails the others are given up.
    """
    chosen, limit = group_and_timeout(group, timeout)
    operations = list(operations)
    for operation in operations:
        _check(operation, chosen)
    receives: dict[int, _TensorReceive] = {}
    requests: list[Request] = []
    try:
        for i, operation in enumerate(operations):
            if isinstance(operation, Recv):
                receives[i] = _receive_into(chosen, operation)
                requests.append(receives[i])
        for operation in operations:
            if isinstance(operation, Send):
                requests.extend(_start_send(chosen, operation))
    except BaseException:
        for request in requests:
            request.cancel()
        raise
    what = ", ".join(
        f"send to {_whom(op.dst)}" if isinstance(op, Send) else f"recv from {_whom(op.src)}" for op in operations
    )
    _wait_for(requests, Deadline(limit), chosen, what)
    for receive in receives.values():
        receive.finish()
    return [op.dst if isinstance(op, Send) else receives[i].peer for i, op in enumerate(operations)]


def _check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` as a tuple of ints, or an error: no tensor would fit a wrong one."""
    try:
        sizes = tuple(shape)
    except TypeError:
        raise TypeError(f"shape must be a sequence of integers or None, not {shape!r}") from None
    checked = tuple(check_integer(size, f"shape[{dim}]") for dim, size in enumerate(sizes))
    if any(size < 0 for size in checked):
        raise ValueError(f"shape has a size below 0: {checked}; pass None to take what comes")
    if len(checked) > _MAX_DIMS:
        raise ValueError(f"shape has {len(checked)} dims, a tensor that is sent has at most {_MAX_DIMS}")
    return checked


def _check(operation: Send | Recv, group: Backend) -> None:
    """Raise for a wrong send or receive, before anything has gone out."""
    if not isinstance(operation, (Send, Recv)):
        raise TypeError(f"batch takes Send(...) and Recv(...), not {type(operation).__name__}")
    tensor = operation.tensor
    check_tensor(tensor)
    if tensor.dim() > _MAX_DIMS:
        raise ValueError(f"messages carry tensors of at most {_MAX_DIMS} dims, not {tensor.dim()}: reshape it")
    check_user_tag(operation.tag)
    if isinstance(operation, Send):
        check_peer(group, operation.dst)
    else:
        check_peer(group, operation.src, any_source=True)
        with torch.no_grad():
            check_out(tensor)


def _start_send(group: Backend, operation: Send) -> list[Request]:
    tensor = operation.tensor
    number = next(_message_numbers(group))
    shape = [*tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())]
    head = _HEAD.pack(number, DTYPES.index(tensor.dtype), tensor.dim(), *shape)
    tag = channel_tag(Channel.TENSOR_HEAD, operation.tag)
    requests: list[Request] = [group.isend(head, operation.dst, tag=tag)]
    if tensor.numel():
        requests.append(_BodySend(group, flatten(tensor), operation.dst, channel_tag(Channel.TENSOR_BODY, number)))
    return requests


class _BodySend:
    """The send of a tensor's elements. Given up, it leaves an empty message in their place; see [Note: given up]."""

    __slots__ = ("_group", "_request", "_tag", "peer")

    def __init__(self, group: Backend, flat: torch.Tensor, dst: int, tag: int) -> None:
        self.peer = dst
        self._group = group
        self._tag = tag
        self._request = group.isend(bytes_of(flat), dst, tag=tag)

    def wait(self, timeout: float) -> int:
        return self._request.wait(timeout)

    def find_late(self, peers: tuple[int, ...], within: float) -> Late:
        return self._group.find_late(peers, within)

    def done(self) -> bool:
        return self._request.done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._request.add_done_callback(callback)

    def cancel(self) -> bool:
        if not self._request.cancel():
            return False
        with contextlib.suppress(DistributedError):  # a group that has ended needs no message
            self._group.isend(b"", self.peer, tag=self._tag)
        return True


def _message_numbers(group: Backend) -> Iterator[int]:
    """Numbers for the bodies this rank sends in a group; a receiver reads them per sender."""
    numbers: Iterator[int] = group.attachments.setdefault(_NUMBERS, itertools.count())
    return numbers


def _receive_into(group: Backend, operation: Recv) -> _TensorReceive:
    tensor = operation.tensor
    with torch.no_grad():
        target = prepare_out(tensor, tensor.shape, tensor.dtype)
    return _TensorReceive(group, operation.src, operation.tag, shape=tensor.shape, dtype=tensor.dtype, target=target)


class _TensorReceive(BaseRequest):
    """Receives a head, checks it, then receives the body: whichever thread brings the head starts the body.

    [Note: given up]
    A send that is given up has sent its head already. It leaves an empty message where its elements would be, on which
    the receiver drops the head and waits for the next one. A receive that is given up after its head has come keeps the
    head with the group, for the next receive of that tag: the elements are still to come, or wait.
    """

    __slots__ = (
        "_body",
        "_cancelled",
        "_dtype",
        "_given",
        "_group",
        "_head",
        "_head_request",
        "_num_restarts",
        "_shape",
        "_source",
        "_starting",
        "_tag",
        "_target",
    )

    def __init__(
        self,
        group: Backend,
        src: int,
        tag: int,
        *,
        shape: Sequence[int] | None,
        dtype: torch.dtype | None,
        target: Target | None = None,
    ) -> None:
        super().__init__(src)
        self._group = group
        self._source = src
        self._tag = channel_tag(Channel.TENSOR_HEAD, check_user_tag(tag))
        self._shape = None if shape is None else tuple(shape)
        self._dtype = dtype
        self._given = self._target = target
        self._head = bytearray(_HEAD.size)
        self._head_request: Request | None = None
        self._body: Request | None = None
        self._cancelled = False
        self._num_restarts = 0
        self._starting = threading.Lock()  # between the start of a transfer and `cancel`
        check_peer(group, src, any_source=True)
        self._begin()

    def finish(self) -> torch.Tensor:
        """The tensor, once the request is done."""
        assert self._target is not None
        return self._target.finish()

    def find_late(self, peers: tuple[int, ...], within: float) -> Late:
        """Ask the group, whose ranks may be in between; see `Backend.find_late`."""
        return self._group.find_late(peers, within)

    def ended_within(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the end; False when it has not come.

        It waits for the head and the body themselves: with an engine messages are moved by who waits for them.
        """
        deadline = Deadline(timeout)
        while not self._done and not deadline.expired:
            under_way = self._body or self._head_request
            if under_way is None or under_way.done():
                break  # another thread is about to go on from there
            try:
                under_way.wait(deadline.remaining())
            except DistributedError:
                break  # which this ends with, too, unless it is the deadline
        return super().ended_within(deadline.remaining())

    def cancel(self) -> bool:
        """Give the receive up; see `Request.cancel`."""
        with self._starting:
            self._cancelled = True
            body, head = self._body, self._head_request
        if body is not None:
            if not body.cancel():
                return False
            _kept_heads(self._group).keep(self._tag, self.peer, bytes(self._head))
            return True
        # Not done though the head can't be given up any more: `_take_head` sees the mark.
        return head is None or head.cancel() or not self._done

    def _begin(self) -> None:
        """Take a head that was kept, or wait for one."""
        kept = _kept_heads(self._group).take(self._tag, self._source)
        if kept is not None:
            self.peer, self._head[:] = kept
            self._use_head()
            return
        with self._starting:
            if self._cancelled:
                self.end(DistributedTimeoutError("the receive was cancelled"))
                return
            self._head_request = self._group.irecv(self._head, self._source, tag=self._tag)
        self._head_request.add_done_callback(self._take_head)

    def _take_head(self) -> None:
        assert self._head_request is not None
        try:
            self.peer = self._head_request.wait(0)
        except Exception as error:  # noqa: BLE001 - it is raised again in wait()
            self.end(error)
        else:
            self._use_head()

    def _use_head(self) -> None:
        try:
            number, shape, dtype = self._read_head()
            tag = channel_tag(Channel.TENSOR_BODY, number)
            if self._target is None or (shape, dtype) != (self._shape, self._dtype):
                self._check(shape, dtype, tag)
                self._target = prepare_out(None, shape, dtype)
            if not self._target.flat.numel():
                self.end()
            else:
                self._start_body(self._target, tag)
        except Exception as error:  # noqa: BLE001 - it is raised again in wait()
            self.end(error)

    def _read_head(self) -> tuple[int, tuple[int, ...], torch.dtype]:
        number, place, num_dims, *padded = _HEAD.unpack(self._head)
        if place >= len(DTYPES) or num_dims > _MAX_DIMS or min(padded) < 0:
            raise ProtocolError(
                f"rank {self.peer} of group {self._group.name!r} sent the head of a tensor that can't be",
                ranks=(self.peer,),
            )
        return number, tuple(padded[:num_dims]), DTYPES[place]

    def _start_body(self, target: Target, tag: int) -> None:
        with self._starting:
            if self._cancelled:
                _kept_heads(self._group).keep(self._tag, self.peer, bytes(self._head))
                raise DistributedTimeoutError("the receive was cancelled")
            body = self._body = self._group.irecv(bytes_of(target.flat), self.peer, tag=tag)
        body.add_done_callback(partial(self._take_body, body, tag))

    def _check(self, shape: tuple[int, ...], dtype: torch.dtype, tag: int) -> None:
        if (self._shape is not None and shape != self._shape) or (self._dtype is not None and dtype is not self._dtype):
            unwanted = prepare_out(None, shape, dtype).flat
            if unwanted.numel():  # take its elements, or the sender of a large one waits for its whole timeout
                self._group.irecv(bytes_of(unwanted), self.peer, tag=tag)
            wanted = f"{self._dtype or 'any dtype'} of shape {self._shape if self._shape is not None else 'any'}"
            raise SizeMismatchError(
                f"rank {self.peer} of group {self._group.name!r} sent a {dtype} tensor of shape {shape}; rank"
                f" {self._group.rank} expected {wanted}",
                ranks=(self.peer,),
            )

    def _take_body(self, body: Request, tag: int) -> None:
        try:
            body.wait(0)
        except SizeMismatchError:  # an empty message: the sender has given up
            try:
                self._restart(tag)
            except Exception as error:  # noqa: BLE001 - it is raised again in wait()
                self.end(error)
        except Exception as error:  # noqa: BLE001 - it is raised again in wait()
            self.end(error)
        else:
            self.end()

    def _restart(self, tag: int) -> None:
        """Take the empty message and begin anew.

        The next head and its body may have come already, and be another that was given up: then this is called again
        from within, and leaves it to the loop outside, for any number of them may follow each other.
        """
        self._group.irecv(bytearray(), self.peer, tag=tag)
        with self._starting:
            self._body = self._head_request = None
            self.peer, self._target = self._source, self._given
            self._num_restarts += 1
            if self._num_restarts > 1:
                return
        while True:
            self._begin()
            with self._starting:
                self._num_restarts -= 1
                if not self._num_restarts:
                    return


class _KeptHeads:
    """Heads of tensors whose receives were given up, by tag, in the order they came; see [Note: given up]."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heads: dict[int, list[tuple[int, bytes]]] = {}

    def keep(self, tag: int, source: int, head: bytes) -> None:
        with self._lock:
            self._heads.setdefault(tag, []).append((source, head))

    def take(self, tag: int, source: int) -> tuple[int, bytes] | None:
        with self._lock:
            heads = self._heads.get(tag, [])
            found = next((kept for kept in heads if source in (ANY_SOURCE, kept[0])), None)
            if found is not None:
                heads.remove(found)
                if not heads:
                    del self._heads[tag]
            return found


def _kept_heads(group: Backend) -> _KeptHeads:
    heads = group.attachments.setdefault(_HEADS, _KeptHeads())
    assert isinstance(heads, _KeptHeads)
    return heads


def _wait_for(requests: list[Request], deadline: Deadline, group: Backend, what: str) -> None:
    try:
        wait_all(requests, deadline)
    except DistributedTimeoutError as error:
        if group.failure is not None:
            raise
        raise DistributedTimeoutError(
            f"{what} on group {group.name!r}: not done after {deadline.elapsed():.2f} s of"
            f" {deadline.timeout:g} s allowed{error.detail} (rank {group.rank}). The other side has not made the"
            " matching call.",
            ranks=tuple(rank for rank in error.ranks if rank != ANY_SOURCE),
        ) from None


def _whom(rank: int) -> str:
    return "any rank" if rank == ANY_SOURCE else f"rank {rank}"
