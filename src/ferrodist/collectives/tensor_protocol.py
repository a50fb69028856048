"""The point-to-point protocol of tensors on the host; native/bindings/tensor_p2p.cpp follows it, too.

    elements of up to `Backend.inline_limit` bytes    one message: header and elements
    more                                              two messages: header; payload, under an id from the header

The first message travels under the user's tag, so tensors with one tag stay in order however many threads send or
receive them. `TensorHeader` is dtype, shape, and the payload's id: a receiver finds a wrong shape or dtype before it
receives a payload, and receives that straight into the tensor. The size of the first message says whether the elements
are in it; a sender may choose two messages for any tensor. `start_send` sends a tensor, `TensorReceive` receives one;
`host_p2p.py` runs several at the same time.

[Note: cancelled transfers]
A send that is cancelled after its header has gone sends an empty message in place of the payload, at which the receiver
drops the header and waits for the next one. That also holds for a header that the receiver does not expect, so it
looks for the payload before it raises. A receive that is cancelled after its first message has come leaves that message
to the group, for the next receive of that tag: its payload is still to come, or waits.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import struct
import threading
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ferrodist.backends.base import check_peer
from ferrodist.backends.request import BaseRequest
from ferrodist.backends.tags import ANY_SOURCE, Channel, channel_tag, check_user_tag
from ferrodist.collectives.arguments import OutputBuffer, bytes_of, flatten, prepare_out
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError, ProtocolError, SizeMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from typing_extensions import Buffer, Self

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request
    from ferrodist.backends.stragglers import Stragglers

MAX_DIMS = 12
"""Maximum number of dims: a header has room for as many."""

_MAX_BYTES = 1 << 47  # more than any machine's memory: no tensor is as large

_MAX_INT64 = (1 << 63) - 1  # the limit of torch's arithmetic of sizes

_HEADER = struct.Struct(f"<QBB{MAX_DIMS}q")  # payload id, dtype's index in DTYPES, number of dims, shape

HEADER_BYTES = _HEADER.size

_HANDOVER_SECONDS = 5.0  # limit for a few steps of another thread, which a signal handler may have stopped for good

_PAYLOAD_IDS_KEY = "collectives.messages"
UNCLAIMED_KEY = "collectives.unclaimed_tensors"
"""The name of a group's `UnclaimedTensors` among its attachments."""


class TensorHeader(NamedTuple):
    """The start of a tensor's first message. The payload id is 0 where the elements follow in the same message."""

    payload_id: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def pack(self) -> bytes:
        """Encode the header."""
        padding = [0] * (MAX_DIMS - len(self.shape))
        return _HEADER.pack(self.payload_id, DTYPES.index(self.dtype), len(self.shape), *self.shape, *padding)

    @classmethod
    def unpack(cls, message: Buffer) -> Self | None:
        """Decode the start of a message of at least `HEADER_BYTES`; None if no tensor has such a header."""
        payload_id, dtype_index, num_dims, *padded = _HEADER.unpack_from(message)
        if dtype_index >= len(DTYPES) or num_dims > MAX_DIMS or min(padded) < 0:
            return None
        shape = tuple(padded[:num_dims])
        # As torch does: a dim of size 0 does not make up for the others.
        dtype = DTYPES[dtype_index]
        size = math.prod(max(dim, 1) for dim in shape) * dtype.itemsize
        return None if size > (_MAX_BYTES if 0 not in shape else _MAX_INT64) else cls(payload_id, dtype, shape)


def payload_ids(group: Backend) -> Iterator[int]:
    """The ids of the payloads that this rank sends in a group; they are unique per sender."""
    ids: Iterator[int] | None = group.attachments.get(_PAYLOAD_IDS_KEY)
    return group.attachments.setdefault(_PAYLOAD_IDS_KEY, itertools.count()) if ids is None else ids


class UnclaimedTensors:
    """First messages of tensors whose receives were cancelled, by tag, in the order of their arrival.

    See [Note: cancelled transfers].
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: dict[int, list[tuple[int, bytes]]] = {}

    def may_contain(self, tag: int) -> bool:
        """Return whether there may be a tensor of a user's tag; for an invalid tag, whether there is any."""
        messages = self._messages
        return bool(messages) and (type(tag) is not int or channel_tag(Channel.TENSOR, tag) in messages)

    def keep(self, tag: int, source: int, message: bytes) -> None:
        """Keep a first message for the next receive of its tag."""
        with self._lock:
            self._messages.setdefault(tag, []).append((source, message))

    def take(self, tag: int, source: int) -> tuple[int, bytes] | None:
        """Remove and return the first message of a tag from a rank, or from any, with its sender; None without one."""
        with self._lock:
            messages = self._messages.get(tag, [])
            found = next((each for each in messages if source in (ANY_SOURCE, each[0])), None)
            if found is not None:
                messages.remove(found)
                if not messages:
                    del self._messages[tag]
            return found


def unclaimed_tensors(group: Backend) -> UnclaimedTensors:
    """The unclaimed tensors of a group."""
    tensors = group.attachments.get(UNCLAIMED_KEY) or group.attachments.setdefault(UNCLAIMED_KEY, UnclaimedTensors())
    assert isinstance(tensors, UnclaimedTensors)
    return tensors


def start_send(group: Backend, tensor: torch.Tensor, dst: int, tag: int) -> list[Request]:
    """Start sending a checked tensor; returns the requests of its messages."""
    is_inline = tensor.numel() * tensor.itemsize <= group.inline_limit
    payload_id = 0 if is_inline else next(payload_ids(group))
    header = TensorHeader(payload_id, tensor.dtype, tuple(tensor.shape)).pack()
    message = b"".join((header, bytes_of(flatten(tensor)))) if is_inline else header
    requests = [group.isend(message, dst, tag=channel_tag(Channel.TENSOR, tag))]
    return requests if is_inline else [*requests, start_payload(group, tensor, dst, payload_id)]


def start_payload(group: Backend, tensor: torch.Tensor, dst: int, payload_id: int) -> Request:
    """Start sending the payload of a tensor whose header has been sent."""
    return _PayloadSend(group, flatten(tensor), dst, channel_tag(Channel.TENSOR_PAYLOAD, payload_id))


def cancel_payload(group: Backend, dst: int, payload_id: int) -> None:
    """Cancel the payload of a tensor whose header has been sent: [Note: cancelled transfers]."""
    _send_empty(group, dst, channel_tag(Channel.TENSOR_PAYLOAD, payload_id))


def _send_empty(group: Backend, dst: int, tag: int) -> None:
    with contextlib.suppress(DistributedError):  # a group that has ended needs no message
        group.isend(b"", dst, tag=tag)


class _PayloadSend:
    """The send of a payload; cancelling it sends an empty message instead: [Note: cancelled transfers]."""

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
        _send_empty(self._group, self.peer, self._tag)
        return True


class TensorReceive(BaseRequest):
    """Receives a tensor's first message, checks its header, and copies or receives its elements.

    Its states, each entered by the callback that ends the one before::

        first message   `_start`, `_take_message`: header, and elements if they are few; these end the receive
        payload         `_start_payload`, `_take_payload`: the elements, then the end
        probe           `_probe_cancelled_send`, after a payload that does not fit: was the send cancelled?
        first message   again (`_restart`) if it was, else the end, with an error

    The thread that completes the first message starts the receive of a payload: [Note: cancelled transfers].
    """

    __slots__ = (
        "_cancelled",
        "_dtype",
        "_first",
        "_given_target",
        "_group",
        "_is_complete",
        "_message",
        "_num_restarts",
        "_payload",
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
        self._tag = channel_tag(Channel.TENSOR, check_user_tag(tag))
        self._shape = None if shape is None else tuple(shape)
        self._dtype = dtype
        self._given_target = self._target = target
        self._message = memoryview(b"")  # the first message, once it has come
        self._first: Request | None = None
        self._payload: Request | None = None
        self._cancelled = self._is_complete = False
        self._num_restarts = 0
        self._starting = threading.Lock()  # between `cancel` and the start of a transfer, or the copy of elements
        check_peer(group, src, any_source=True)
        self._start()

    @property
    def is_coming(self) -> bool:
        """Return whether the other side has started to send: the header has come."""
        return self._payload is not None

    def finish(self) -> torch.Tensor:
        """Return the tensor, once the request is done."""
        assert self._target is not None
        return self._target.finish()

    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        """Ask the group: see `Backend.find_stragglers`."""
        return self._group.find_stragglers(peers, within)

    def ended_within(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the end; returns whether it has come.

        Waits for the messages themselves: with the native engine the waiting thread moves them.
        """
        deadline = Deadline(timeout)
        while not self._done and not deadline.expired:
            pending = self._payload or self._first
            if pending is None or pending.done():
                break  # another thread is about to continue from there
            try:
                pending.wait(deadline.remaining())
            except DistributedError:
                break  # the receive ends with it, too, unless it is the deadline's
        return super().ended_within(deadline.remaining())

    def cancel(self) -> bool:
        """Cancel the receive; see `Request.cancel`."""
        with self._starting:
            if self._is_complete:
                return False
            self._cancelled = True
            payload, first = self._payload, self._first
        if payload is not None:
            if not payload.cancel():
                return False
            self._leave_unclaimed()
            return True
        if first is None or first.cancel():
            return True
        # Another thread is about to use the message: it sees `_cancelled`, and leaves the message to the next receive,
        # which may be posted as soon as this returns.
        super().ended_within(_HANDOVER_SECONDS)
        return not self._done or isinstance(self.error, DistributedTimeoutError)

    def _start(self) -> None:
        """Take an unclaimed tensor, or start receiving a first message."""
        unclaimed = unclaimed_tensors(self._group).take(self._tag, self._source)
        if unclaimed is not None:
            self.peer, message = unclaimed
            self._message = memoryview(message)
            self._use_message()
            return
        limit = self._group.inline_limit
        buffer = bytearray(HEADER_BYTES + limit)
        with self._starting:
            if self._cancelled:
                self.end(DistributedTimeoutError("the receive was cancelled"))
                return
            receive = self._group.irecv_up_to if limit else self._group.irecv
            first = self._first = receive(buffer, self._source, tag=self._tag)
        first.add_done_callback(lambda: self._take_message(first, buffer))

    def _fail(self, error: Exception) -> None:
        """End with an error, without the context of another one: a cancel may be part of handling that."""
        error.__context__ = None
        self.end(error.with_traceback(None))  # whose frames refer to this receive

    def _take_message(self, first: Request, buffer: bytearray) -> None:
        try:
            self.peer = first.wait(0)
        except SizeMismatchError:
            self.peer = first.peer
            self._fail(self._protocol_error("a message that is not a tensor"))
        except Exception as error:  # noqa: BLE001 - wait() raises it
            self._fail(error)
        else:
            self._message = memoryview(buffer)[: getattr(first, "message_bytes", HEADER_BYTES)]
            self._use_message()

    def _use_message(self) -> None:
        try:
            header = self._read_header()
            payload_id, dtype, shape = header
            size_bytes = math.prod(shape) * dtype.itemsize
            inline = self._message[HEADER_BYTES:]
            if inline and len(inline) != size_bytes:
                self._fail(self._wrong_elements(header))
                return
            mismatch = self._mismatch(shape, dtype)
            if mismatch is None and self._target is None:
                self._target = prepare_out(None, shape, dtype)
            if len(inline) == size_bytes:
                self._take_inline(inline, mismatch)
                return
            tag = channel_tag(Channel.TENSOR_PAYLOAD, payload_id)
            if mismatch is not None:
                self._probe_cancelled_send(header, mismatch)
            else:
                assert self._target is not None
                self._start_payload(bytes_of(self._target.flat), tag, partial(self._take_payload, header))
        except Exception as error:  # noqa: BLE001 - wait() raises it
            self._fail(error)

    def _read_header(self) -> TensorHeader:
        if len(self._message) < HEADER_BYTES:
            raise self._protocol_error("a message that is not a tensor")
        header = TensorHeader.unpack(self._message)
        if header is None:
            raise self._protocol_error("the header of an impossible tensor")
        return header

    def _protocol_error(self, what: str) -> ProtocolError:
        return ProtocolError(f"rank {self.peer} of group {self._group.name!r} sent {what}", ranks=(self.peer,))

    def _wrong_elements(self, header: TensorHeader) -> ProtocolError:
        return self._protocol_error(f"elements that are not those of its {header.dtype} tensor of shape {header.shape}")

    def _raise_if_cancelled(self) -> None:
        """Raise if the receive was cancelled, and leave its tensor to the next one; the caller holds the lock."""
        if self._cancelled:
            self._leave_unclaimed()
            raise DistributedTimeoutError("the receive was cancelled")

    def _leave_unclaimed(self) -> None:
        unclaimed_tensors(self._group).keep(self._tag, self.peer, bytes(self._message))

    def _take_inline(self, inline: memoryview, mismatch: DistributedError | None) -> None:
        with self._starting:
            self._raise_if_cancelled()
            self._is_complete = True
            if mismatch is None and inline:
                assert self._target is not None
                bytes_of(self._target.flat)[:] = inline
        if mismatch is not None:
            raise mismatch
        self.end()

    def _start_payload(self, buffer: Buffer, tag: int, then: Callable[[Request], None]) -> None:
        with self._starting:
            self._raise_if_cancelled()
            payload = self._payload = self._group.irecv(buffer, self.peer, tag=tag)
        payload.add_done_callback(lambda: self._continue(then, payload))

    def _continue(self, then: Callable[[Request], None], payload: Request) -> None:
        try:
            then(payload)
        except Exception as error:  # noqa: BLE001 - wait() raises it
            self._fail(error)

    def _take_payload(self, header: TensorHeader, payload: Request) -> None:
        try:
            payload.wait(0)
        except SizeMismatchError:  # an empty message, if the send was cancelled
            self._probe_cancelled_send(header, self._wrong_elements(header))
        else:
            self.end()

    def _probe_cancelled_send(self, header: TensorHeader, error: DistributedError) -> None:
        """Start anew if the send was cancelled, else receive the unwanted payload and raise ``error``.

        A receive of zero bytes takes the empty message of a cancelled send, and fails at once on a payload or an offer.
        """
        tag = channel_tag(Channel.TENSOR_PAYLOAD, header.payload_id)

        def then(payload: Request) -> None:
            try:
                payload.wait(0)
            except SizeMismatchError:
                # The sender of a large payload would wait for its whole timeout.
                with contextlib.suppress(RuntimeError):  # no memory for it, or the group has ended
                    unwanted = prepare_out(None, header.shape, header.dtype).flat
                    self._group.irecv(bytes_of(unwanted), self.peer, tag=tag)
                raise error from None
            else:
                self._restart()

        self._start_payload(bytearray(), tag, then)

    def _mismatch(self, shape: tuple[int, ...], dtype: torch.dtype) -> SizeMismatchError | None:
        """Return the error of an unexpected tensor, or None."""
        if (self._shape is None or shape == self._shape) and (self._dtype is None or dtype is self._dtype):
            return None
        wanted = f"{self._dtype or 'any dtype'} of shape {self._shape if self._shape is not None else 'any'}"
        return SizeMismatchError(
            f"rank {self.peer} of group {self._group.name!r} sent a {dtype} tensor of shape {shape}; rank"
            f" {self._group.rank} expected {wanted}",
            ranks=(self.peer,),
        )

    def _restart(self) -> None:
        """Start anew, after the empty message of a cancelled send.

        The next header and its payload may have come already, and be cancelled, too: then this is called from within
        itself, and leaves the restart to the outer loop, for any number of them may follow each other.
        """
        with self._starting:
            self._payload = self._first = None
            self.peer, self._target = self._source, self._given_target
            self._num_restarts += 1
            if self._num_restarts > 1:
                return
        while True:
            self._start()
            with self._starting:
                self._num_restarts -= 1
                if not self._num_restarts:
                    return
