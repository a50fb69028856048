"""The point-to-point protocol of tensors on the host: a header and a payload for each tensor.

`TensorHeader` is the first message: dtype, shape, and the id under which the payload comes. `start_send` sends both,
`TensorReceive` receives both, and `batch_on_host` runs several sends and receives at the same time.

[Note: cancelled transfers]
A cancelled send has sent its header already. It sends an empty message in place of the payload, at which the receiver
drops the header and waits for the next one. That also holds for a header that the receiver does not expect, so it
looks for the payload before it raises. A receive that is cancelled after its header has come leaves the header to the
group, for the next receive of that tag: the payload is still to come, or waits.
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
"""The payload_id of dims that a header has room for."""

_MAX_BYTES = 1 << 47  # more than any machine's memory: no tensor is as large

_MAX_INT64 = (1 << 63) - 1  # the limit of torch's arithmetic of sizes

_HEADER = struct.Struct(f"<QBB{MAX_DIMS}q")  # payload id, dtype's index in DTYPES, payload_id of dims, shape

HEADER_BYTES = _HEADER.size

_PAYLOAD_IDS_KEY = "collectives.messages"
_HEADERS_KEY = "collectives.headers"


class TensorHeader(NamedTuple):
    """The first message of a tensor."""

    payload_id: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def pack(self) -> bytes:
        """Encode the header."""
        padding = [0] * (MAX_DIMS - len(self.shape))
        return _HEADER.pack(self.payload_id, DTYPES.index(self.dtype), len(self.shape), *self.shape, *padding)

    @classmethod
    def unpack(cls, message: bytes | bytearray) -> Self | None:
        """Decode a message of `HEADER_BYTES`; None if no tensor has such a header."""
        payload_id, dtype_index, num_dims, *padded = _HEADER.unpack(message)
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


class UnclaimedHeaders:
    """Headers whose receives were cancelled, by tag, in the order of their arrival.

    See [Note: cancelled transfers] in `tensor_protocol.py`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._headers: dict[int, list[tuple[int, bytes]]] = {}

    def may_contain(self, tag: int) -> bool:
        """Return whether there may be a header of a user's tag; for an invalid tag, whether there is any header."""
        headers = self._headers
        return bool(headers) and (type(tag) is not int or channel_tag(Channel.TENSOR_HEAD, tag) in headers)

    def keep(self, tag: int, source: int, header: bytes) -> None:
        """Keep a header for the next receive of its tag."""
        with self._lock:
            self._headers.setdefault(tag, []).append((source, header))

    def take(self, tag: int, source: int) -> tuple[int, bytes] | None:
        """Remove and return the first header of a tag from a rank, or from any, with its sender; None without one."""
        with self._lock:
            headers = self._headers.get(tag, [])
            found = next((each for each in headers if source in (ANY_SOURCE, each[0])), None)
            if found is not None:
                headers.remove(found)
                if not headers:
                    del self._headers[tag]
            return found


def unclaimed_headers(group: Backend) -> UnclaimedHeaders:
    """The unclaimed headers of a group."""
    headers = group.attachments.get(_HEADERS_KEY) or group.attachments.setdefault(_HEADERS_KEY, UnclaimedHeaders())
    assert isinstance(headers, UnclaimedHeaders)
    return headers


def start_send(group: Backend, tensor: torch.Tensor, dst: int, tag: int) -> list[Request]:
    """Start sending a checked tensor; returns the requests of its messages."""
    payload_id = next(payload_ids(group))
    header = TensorHeader(payload_id, tensor.dtype, tuple(tensor.shape)).pack()
    return [
        group.isend(header, dst, tag=channel_tag(Channel.TENSOR_HEAD, tag)),
        *start_payload(group, tensor, dst, payload_id),
    ]


def start_payload(group: Backend, tensor: torch.Tensor, dst: int, payload_id: int) -> list[Request]:
    """Start sending the payload of a tensor, if it has elements, whose header has been sent."""
    if not tensor.numel():
        return []
    return [_PayloadSend(group, flatten(tensor), dst, channel_tag(Channel.TENSOR_BODY, payload_id))]


def cancel_payload(group: Backend, dst: int, payload_id: int) -> None:
    """Cancel the payload of a tensor whose header has been sent: [Note: cancelled transfers]."""
    _send_empty(group, dst, channel_tag(Channel.TENSOR_BODY, payload_id))


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
    """Receives a header, checks it, then receives the payload: [Note: cancelled transfers].

    The thread that completes the header starts the receive of the payload.
    """

    __slots__ = (
        "_cancelled",
        "_dtype",
        "_given_target",
        "_group",
        "_header",
        "_header_request",
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
        self._tag = channel_tag(Channel.TENSOR_HEAD, check_user_tag(tag))
        self._shape = None if shape is None else tuple(shape)
        self._dtype = dtype
        self._given_target = self._target = target
        self._header = bytearray(HEADER_BYTES)
        self._header_request: Request | None = None
        self._payload: Request | None = None
        self._cancelled = False
        self._num_restarts = 0
        self._starting = threading.Lock()  # between the start of a transfer and `cancel`
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
            pending = self._payload or self._header_request
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
            self._cancelled = True
            payload, header = self._payload, self._header_request
        if payload is not None:
            if not payload.cancel():
                return False
            unclaimed_headers(self._group).keep(self._tag, self.peer, bytes(self._header))
            return True
        # Not done though the header can't be cancelled any more: `_take_headerer` sees `_cancelled`.
        return header is None or header.cancel() or not self._done

    def _start(self) -> None:
        """Take an unclaimed header, or start receiving one."""
        unclaimed = unclaimed_headers(self._group).take(self._tag, self._source)
        if unclaimed is not None:
            self.peer, self._header[:] = unclaimed
            self._use_header()
            return
        with self._starting:
            if self._cancelled:
                self.end(DistributedTimeoutError("the receive was cancelled"))
                return
            self._header_request = self._group.irecv(self._header, self._source, tag=self._tag)
        self._header_request.add_done_callback(self._take_header)

    def _fail(self, error: Exception) -> None:
        """End with an error, without the context of another one: a cancel may be part of handling that."""
        error.__context__ = None
        self.end(error.with_traceback(None))  # whose frames refer to this receive

    def _take_header(self) -> None:
        assert self._header_request is not None
        try:
            self.peer = self._header_request.wait(0)
        except Exception as error:  # noqa: BLE001 - wait() raises it
            self._fail(error)
        else:
            self._use_header()

    def _use_header(self) -> None:
        try:
            payload_id, dtype, shape = self._read_header()
            tag = channel_tag(Channel.TENSOR_BODY, payload_id)
            mismatch = self._mismatch(shape, dtype)
            if mismatch is not None and 0 not in shape:
                self._check_cancelled(tag, partial(self._refuse_payload, shape, dtype, tag, mismatch))
                return
            if mismatch is not None:
                self._fail(mismatch)
                return
            if self._target is None:
                self._target = prepare_out(None, shape, dtype)
            if not self._target.flat.numel():
                self.end()
            else:
                self._start_payload(bytes_of(self._target.flat), tag, partial(self._take_payload, shape, dtype, tag))
        except Exception as error:  # noqa: BLE001 - wait() raises it
            self._fail(error)

    def _read_header(self) -> TensorHeader:
        header = TensorHeader.unpack(self._header)
        if header is None:
            raise ProtocolError(
                f"rank {self.peer} of group {self._group.name!r} sent the header of an impossible tensor",
                ranks=(self.peer,),
            )
        return header

    def _start_payload(self, buffer: Buffer, tag: int, then: Callable[[Request], None]) -> None:
        with self._starting:
            if self._cancelled:
                unclaimed_headers(self._group).keep(self._tag, self.peer, bytes(self._header))
                raise DistributedTimeoutError("the receive was cancelled")
            payload = self._payload = self._group.irecv(buffer, self.peer, tag=tag)
        payload.add_done_callback(lambda: self._continue(then, payload))

    def _continue(self, then: Callable[[Request], None], payload: Request) -> None:
        try:
            then(payload)
        except Exception as error:  # noqa: BLE001 - wait() raises it
            self._fail(error)

    def _take_payload(self, shape: tuple[int, ...], dtype: torch.dtype, tag: int, payload: Request) -> None:
        try:
            payload.wait(0)
        except SizeMismatchError:  # an empty message, if the send was cancelled
            broken = ProtocolError(
                f"rank {self.peer} of group {self._group.name!r} sent elements that are not those of its {dtype} tensor"
                f" of shape {shape}",
                ranks=(self.peer,),
            )
            self._check_cancelled(tag, partial(self._refuse_payload, shape, dtype, tag, broken))
        else:
            self.end()

    def _check_cancelled(self, tag: int, refuse: Callable[[], None]) -> None:
        """Start anew if the send was cancelled, else call ``refuse()``, which raises.

        A receive of zero bytes takes the empty message of a cancelled send, and fails at once on a payload or an offer.
        """

        def then(payload: Request) -> None:
            try:
                payload.wait(0)
            except SizeMismatchError:
                refuse()
            else:
                self._restart()

        self._start_payload(bytearray(), tag, then)

    def _refuse_payload(self, shape: tuple[int, ...], dtype: torch.dtype, tag: int, error: DistributedError) -> None:
        """Receive an unwanted payload, or its sender waits for its whole timeout if it is large; then raise."""
        with contextlib.suppress(RuntimeError):  # no memory for it, or the group has ended
            self._group.irecv(bytes_of(prepare_out(None, shape, dtype).flat), self.peer, tag=tag)
        raise error

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
        itself, and leaves the restart to the outer loop, for any payload_id of them may follow each other.
        """
        with self._starting:
            self._payload = self._header_request = None
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
    """`batch` of checked operations on the host."""
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
    """Start a checked receive."""
    tensor = operation.tensor
    with torch.no_grad():
        target = prepare_out(tensor, tensor.shape, tensor.dtype)
    return TensorReceive(group, operation.src, operation.tag, shape=tensor.shape, dtype=tensor.dtype, target=target)


def wait_for(requests: list[Request], deadline: Deadline, group: Backend, what: str) -> None:
    """Wait for all requests; warns about stragglers, and names ``what`` in the error when the deadline passes."""

    def warn(waiting: list[Request]) -> None:
        receives = [request for request in waiting if isinstance(request, TensorReceive)]
        sends = {request.peer for request in waiting if not isinstance(request, TensorReceive)}
        stragglers = sends | {request.peer for request in receives if not request.is_coming}
        warn_about_late_peers(
            what,
            sorted(stragglers - {ANY_SOURCE}),
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
    """A peer in messages of errors."""
    return "any rank" if rank == ANY_SOURCE else f"rank {rank}"
