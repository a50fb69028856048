"""Several messages at the same time, of tensors on the CPU.

The heads of tensors that travel from rank to rank: what each tensor is, and under which number its elements come.

A tensor on its way: the two messages of one send, and the receive that takes them.

[Note: given up]
A send that is given up has sent its head already. It leaves an empty message where its elements would be, on which
the receiver drops the head and waits for the next one: also where the head is not what it expects, so it looks whether
the elements are there before it complains. A receive that is given up after its head has come keeps the
head with the group, for the next receive of that tag: the elements are still to come, or wait.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import struct
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ferrodist.backends.base import check_peer
from ferrodist.backends.request import BaseRequest, wait_all
from ferrodist.backends.stragglers import warn_about_late_peers
from ferrodist.backends.tags import ANY_SOURCE, Channel, channel_tag, check_user_tag
from ferrodist.collectives.arguments import OutputBuffer, bytes_of, flatten, prepare_out
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.deadline import Deadline, Elapsed
from ferrodist.errors import DistributedError, DistributedTimeoutError, ProtocolError, SizeMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer, Self

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request, Stragglers

MAX_DIMS = 12
"""Dims that a head has room for."""

_MAX_BYTES = 1 << 47
"""More than any machine's memory: a tensor can't have as many."""

_MOST = (1 << 63) - 1
"""What torch's arithmetic of sizes holds."""

_HEAD = struct.Struct(f"<QBB{MAX_DIMS}q")  # number of the body, dtype's place in DTYPES, dims, shape

HEADER_BYTES = _HEAD.size

_NUMBERS = "collectives.messages"
_HEADS = "collectives.heads"


class TensorHeader(NamedTuple):
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
        """The head in a message of `HEADER_BYTES`; None when no tensor has it."""
        number, place, num_dims, *padded = _HEAD.unpack(message)
        if place >= len(DTYPES) or num_dims > MAX_DIMS or min(padded) < 0:
            return None
        shape = tuple(padded[:num_dims])
        # torch counts so, too: a dim without elements does not make up for the others.
        size = math.prod(max(dim, 1) for dim in shape) * DTYPES[place].itemsize
        return None if size > (_MAX_BYTES if 0 not in shape else _MOST) else cls(number, DTYPES[place], shape)


def payload_ids(group: Backend) -> Iterator[int]:
    """Numbers for the bodies this rank sends in a group; a receiver reads them per sender."""
    numbers: Iterator[int] | None = group.attachments.get(_NUMBERS)
    return group.attachments.setdefault(_NUMBERS, itertools.count()) if numbers is None else numbers


class UnclaimedHeaders:
    """Heads of tensors whose receives were given up, by tag, in the order they came.

    See [Note: given up] in `tensor_protocol.py`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heads: dict[int, list[tuple[int, bytes]]] = {}

    def may_contain(self, tag: int) -> bool:
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


def unclaimed_headers(group: Backend) -> UnclaimedHeaders:
    """The heads that are kept in a group."""
    heads = group.attachments.get(_HEADS) or group.attachments.setdefault(_HEADS, UnclaimedHeaders())
    assert isinstance(heads, UnclaimedHeaders)
    return heads


def start_send(group: Backend, tensor: torch.Tensor, dst: int, tag: int) -> list[Request]:
    """Start to send a tensor that can travel; returns its messages."""
    number = next(payload_ids(group))
    head = TensorHeader(number, tensor.dtype, tuple(tensor.shape)).pack()
    return [
        group.isend(head, dst, tag=channel_tag(Channel.TENSOR_HEAD, tag)),
        *start_payload(group, tensor, dst, number),
    ]


def start_payload(group: Backend, tensor: torch.Tensor, dst: int, number: int) -> list[Request]:
    """Start to send the elements of a tensor, if it has any, whose head has gone with ``number``."""
    return (
        [_PayloadSend(group, flatten(tensor), dst, channel_tag(Channel.TENSOR_BODY, number))] if tensor.numel() else []
    )


def cancel_payload(group: Backend, dst: int, number: int) -> None:
    """Send no elements of a tensor whose head has gone with ``number``; see [Note: given up]."""
    _leave_empty(group, dst, channel_tag(Channel.TENSOR_BODY, number))


def _leave_empty(group: Backend, dst: int, tag: int) -> None:
    with contextlib.suppress(DistributedError):  # a group that has ended needs no message
        group.isend(b"", dst, tag=tag)


class _PayloadSend:
    """The send of a tensor's elements. Given up, it leaves an empty message in their place; see [Note: given up]."""

    __slots__ = ("_group", "_request", "_tag", "peer")

    def __init__(self, group: Backend, flat: torch.Tensor, dst: int, tag: int) -> None:
        self.peer = dst
        self._group = group
        self._tag = tag
        self._request = group.isend(bytes_of(flat), dst, tag=tag)

    def wait(self, timeout: float) -> int:
        return self._request.wait(timeout)

    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        return self._group.find_stragglers(peers, within)

    def done(self) -> bool:
        return self._request.done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._request.add_done_callback(callback)

    def cancel(self) -> bool:
        if not self._request.cancel():
            return False
        _leave_empty(self._group, self.peer, self._tag)
        return True


class TensorReceive(BaseRequest):
    """Receives a head, checks it, then receives the body: whichever thread brings the head starts the body.

    See [Note: given up].
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
        target: OutputBuffer | None = None,
    ) -> None:
        super().__init__(src)
        self._group = group
        self._source = src
        self._tag = channel_tag(Channel.TENSOR_HEAD, check_user_tag(tag))
        self._shape = None if shape is None else tuple(shape)
        self._dtype = dtype
        self._given = self._target = target
        self._head = bytearray(HEADER_BYTES)
        self._head_request: Request | None = None
        self._body: Request | None = None
        self._cancelled = False
        self._num_restarts = 0
        self._starting = threading.Lock()  # between the start of a transfer and `cancel`
        check_peer(group, src, any_source=True)
        self._begin()

    @property
    def is_coming(self) -> bool:
        """Whether the other side has begun to send: the head has come."""
        return self._body is not None

    def finish(self) -> torch.Tensor:
        """The tensor, once the request is done."""
        assert self._target is not None
        return self._target.finish()

    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        """Ask the group, whose ranks may be in between; see `Backend.find_stragglers`."""
        return self._group.find_stragglers(peers, within)

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
            unclaimed_headers(self._group).keep(self._tag, self.peer, bytes(self._head))
            return True
        # Not done though the head can't be given up any more: `_take_head` sees the mark.
        return head is None or head.cancel() or not self._done

    def _begin(self) -> None:
        """Take a head that was kept, or wait for one."""
        kept = unclaimed_headers(self._group).take(self._tag, self._source)
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

    def _fail(self, error: Exception) -> None:
        """End with an error, as it would be if nothing else had failed: a cancel may be part of handling that."""
        error.__context__ = None
        self.end(error.with_traceback(None))  # which has frames that have this receive

    def _take_head(self) -> None:
        assert self._head_request is not None
        try:
            self.peer = self._head_request.wait(0)
        except Exception as error:  # noqa: BLE001 - it is raised again in wait()
            self._fail(error)
        else:
            self._use_head()

    def _use_head(self) -> None:
        try:
            number, dtype, shape = self._read_head()
            tag = channel_tag(Channel.TENSOR_BODY, number)
            mismatch = self._mismatch(shape, dtype)
            if mismatch is not None and 0 not in shape:
                self._look_for_body(tag, partial(self._refuse_body, shape, dtype, tag, mismatch))
                return
            if mismatch is not None:
                self._fail(mismatch)
                return
            if self._target is None:
                self._target = prepare_out(None, shape, dtype)
            if not self._target.flat.numel():
                self.end()
            else:
                self._start_body(bytes_of(self._target.flat), tag, partial(self._take_body, shape, dtype, tag))
        except Exception as error:  # noqa: BLE001 - it is raised again in wait()
            self._fail(error)

    def _read_head(self) -> TensorHeader:
        head = TensorHeader.unpack(self._head)
        if head is None:
            raise ProtocolError(
                f"rank {self.peer} of group {self._group.name!r} sent the head of a tensor that can't be",
                ranks=(self.peer,),
            )
        return head

    def _start_body(self, buffer: Buffer, tag: int, then: Callable[[Request], None]) -> None:
        with self._starting:
            if self._cancelled:
                unclaimed_headers(self._group).keep(self._tag, self.peer, bytes(self._head))
                raise DistributedTimeoutError("the receive was cancelled")
            body = self._body = self._group.irecv(buffer, self.peer, tag=tag)
        body.add_done_callback(lambda: self._go_on(then, body))

    def _go_on(self, then: Callable[[Request], None], body: Request) -> None:
        try:
            then(body)
        except Exception as error:  # noqa: BLE001 - it is raised again in wait()
            self._fail(error)

    def _take_body(self, shape: tuple[int, ...], dtype: torch.dtype, tag: int, body: Request) -> None:
        try:
            body.wait(0)
        except SizeMismatchError:  # an empty message, if its sender has given up
            broken = ProtocolError(
                f"rank {self.peer} of group {self._group.name!r} sent elements that are not those of its {dtype} tensor"
                f" of shape {shape}",
                ranks=(self.peer,),
            )
            self._look_for_body(tag, partial(self._refuse_body, shape, dtype, tag, broken))
        else:
            self.end()

    def _look_for_body(self, tag: int, refuse: Callable[[], None]) -> None:
        """Begin anew if the sender has given up, else ``refuse()``, which raises.

        A receive of nothing takes the empty message of a sender that has, and fails at once on elements, or an offer.
        """

        def then(body: Request) -> None:
            try:
                body.wait(0)
            except SizeMismatchError:
                refuse()
            else:
                self._restart()

        self._start_body(bytearray(), tag, then)

    def _refuse_body(self, shape: tuple[int, ...], dtype: torch.dtype, tag: int, error: DistributedError) -> None:
        """Take the elements of a tensor, or the sender of a large one waits for its whole timeout, and raise."""
        with contextlib.suppress(RuntimeError):  # no memory for what nobody wants, or the group has ended
            self._group.irecv(bytes_of(prepare_out(None, shape, dtype).flat), self.peer, tag=tag)
        raise error

    def _mismatch(self, shape: tuple[int, ...], dtype: torch.dtype) -> SizeMismatchError | None:
        """Why a tensor is not the one that was asked for, or None."""
        if (self._shape is None or shape == self._shape) and (self._dtype is None or dtype is self._dtype):
            return None
        wanted = f"{self._dtype or 'any dtype'} of shape {self._shape if self._shape is not None else 'any'}"
        return SizeMismatchError(
            f"rank {self.peer} of group {self._group.name!r} sent a {dtype} tensor of shape {shape}; rank"
            f" {self._group.rank} expected {wanted}",
            ranks=(self.peer,),
        )

    def _restart(self) -> None:
        """Begin anew, when the empty message has been taken.

        The next head and its body may have come already, and be another that was given up: then this is called again
        from within, and leaves it to the loop outside, for any number of them may follow each other.
        """
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


def batch_on_host(operations: Sequence[Send | Recv], group: Backend, timeout: float) -> list[int]:
    """`batch` of operations that have been checked, with tensors on the CPU."""
    receives: dict[int, TensorReceive] = {}
    requests: list[Request] = []
    try:
        for i, operation in enumerate(operations):
            if isinstance(operation, Recv):
                receives[i] = receive_into(group, operation)
                requests.append(receives[i])
        for operation in operations:
            if isinstance(operation, Send):
                requests.extend(start_send(group, operation.tensor, operation.dst, operation.tag))
    except BaseException:
        for request in requests:
            request.cancel()
        raise
    what = ", ".join(
        f"send to {peer_name(op.dst)}" if isinstance(op, Send) else f"recv from {peer_name(op.src)}"
        for op in operations
    )
    wait_for(requests, Deadline(timeout), group, what)
    for receive in receives.values():
        receive.finish()
    return [op.dst if isinstance(op, Send) else receives[i].peer for i, op in enumerate(operations)]


def receive_into(group: Backend, operation: Recv) -> TensorReceive:
    """Start a receive."""
    tensor = operation.tensor
    with torch.no_grad():
        target = prepare_out(tensor, tensor.shape, tensor.dtype)
    return TensorReceive(group, operation.src, operation.tag, shape=tensor.shape, dtype=tensor.dtype, target=target)


def wait_for(requests: list[Request], deadline: Deadline, group: Backend, what: str) -> None:
    """Wait for all of these; warn when it takes long, and when the deadline passes say ``what`` did not happen."""

    def warn(waiting: list[Request]) -> None:
        receives = [request for request in waiting if isinstance(request, TensorReceive)]
        sends = {request.peer for request in waiting if not isinstance(request, TensorReceive)}
        late = sends | {request.peer for request in receives if not request.is_coming}
        warn_about_late_peers(
            what,
            sorted(late - {ANY_SOURCE}),
            is_sent=len(receives) < len(waiting),
            group=group.name,
            rank=group.rank,
            elapsed=Elapsed.of(deadline),
        )

    try:
        wait_all(requests, deadline, warn)
    except DistributedTimeoutError as error:
        if group.failure is not None:
            raise
        raise DistributedTimeoutError(
            f"{what} on group {group.name!r}: not done after {deadline.elapsed():.2f} s of"
            f" {deadline.timeout:g} s allowed{error.detail} (rank {group.rank}). The other side has not made the"
            " matching call.",
            ranks=tuple(rank for rank in error.ranks if rank != ANY_SOURCE),
        ) from None


def peer_name(rank: int) -> str:
    """What messages call a peer."""
    return "any rank" if rank == ANY_SOURCE else f"rank {rank}"
