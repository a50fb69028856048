"""`RemotePeer`: the connection to another rank, with its flow control; `LoopbackPeer`, for calls of the rank itself.

A connection is a group of two, which the transport makes, with a receive posted for the next frame. See [Note: frames]
in `messages.py`, and [Note: message order] in `receive_queue.py`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ferrodist.collectives.arguments import bytes_of
from ferrodist.collectives.serialization import UnreadableError, decode_value, encode_value
from ferrodist.errors import (
    DistributedError,
    GroupClosedError,
    ProtocolError,
    SizeMismatchError,
    UnsupportedOpError,
    describe_error,
)
from ferrodist.rpc.large_messages import LargeMessage, TensorPool
from ferrodist.rpc.messages import (
    FRAME_BYTES,
    FRAME_CONTENT_BYTES,
    FRAME_TAG,
    MAX_CONTENT_BYTES,
    NO_CALL_ID,
    REFERENCE_TAG,
    Call,
    Content,
    Form,
    Frame,
    MessageKind,
    pack_call,
    pack_frame,
    payload_tag,
)
from ferrodist.rpc.receive_queue import ReceiveQueue
from ferrodist.torch_private.modes import no_modes, num_dispatch_modes, num_function_modes
from ferrodist.torch_private.tensors import no_torch_function

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.persistent_recv import PersistentRecv, WaitEvent
    from ferrodist.backends.request import Request
    from ferrodist.rpc.executor import Executor, WaitEvents

_POLL_INTERVAL_SECONDS = 0.002


class CallWindow:
    """Flow control: the number of calls to a peer that may be without a result.

    Waking a thread for each free slot costs more than a call, so waiting threads are woken when several slots are free.
    For the last slots, which may never be joined by others, they poll.
    """

    def __init__(self, size: int, wait_events: WaitEvents) -> None:
        self._num_free = size
        self._wake_threshold = max(1, size // 4)
        self._wait_events = wait_events
        self._lock = threading.Lock()
        self._waiting: list[WaitEvent] = []
        self._are_woken = False

    def acquire(self, timeout: float) -> bool:
        """Take a slot, waiting for one; returns whether there was one. Threads that wait already come first."""
        with self._lock:
            if self._num_free > len(self._waiting):
                self._num_free -= 1
                return True
        if timeout <= 0:
            return False
        end = time.monotonic() + timeout
        event = self._wait_events.current()
        with self._lock:
            self._waiting.append(event)
        try:
            while True:
                with self._lock:
                    self._are_woken = False
                    if self._num_free > 0:
                        self._num_free -= 1
                        return True
                if (left := end - time.monotonic()) <= 0:
                    return False
                event.wait(min(left, _POLL_INTERVAL_SECONDS))
        finally:
            with self._lock:
                self._waiting.remove(event)

    def release(self) -> None:
        """Give a slot back."""
        with self._lock:
            self._num_free += 1
            if self._num_free < self._wake_threshold or self._are_woken or not self._waiting:
                return
            self._are_woken = True
            woken = self._waiting.copy()
        for event in woken:
            event.set()

    def close(self) -> None:
        """Let all threads in: sending tells them what is wrong."""
        with self._lock:
            self._num_free = self._wake_threshold = 1 << 62
            woken = self._waiting.copy()
        for event in woken:
            event.set()


class IncomingCall:
    """A call by a peer, until it is answered; `RpcServer` serves it."""

    def __init__(self, peer: Peer, call_id: int | None, content: Content) -> None:
        self.peer = peer
        self.call_id = call_id  # the caller's; None for a notice, which has no response
        self.content: Content | None = content  # the packed call, until it is unpacked
        self.call: Call | None = None  # the call in place of the packed one, until it is served
        self.function: Callable[..., Any] | None = None  # in place of the one registered under the call's name
        self.on_result: Callable[[Any], Any] | None = None  # makes the result an object; returns what is sent instead
        self.is_submitted = False  # whether a function of the user's is to be called
        self.is_cancelled = False  # whether the caller waits no more
        self._cancel: Callable[[], object] | None = None

    def cancel(self) -> None:
        """Note that the caller waits no more: a function that has not begun is not called, a coroutine is cancelled.

        A call that makes an object goes on: the caller may use its reference later.
        """
        if self.on_result is not None:
            return
        self.is_cancelled = True
        if self._cancel is not None:
            self._cancel()

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Have `cancel` call a function, at least once; at once if the call was cancelled already."""
        self._cancel = callback
        if self.is_cancelled:
            callback()


class MessageHandler(Protocol):
    """Handles the messages of peers, in the threads that receive them; those of one peer in their order.

    Methods must not block: until they return, nothing else is received. `MessageDispatcher` implements this.
    """

    def on_message(self, peer: Peer, kind: MessageKind, call_id: int, content: Content) -> None:
        """Handle a message."""

    def on_cancelled_message(self, peer: Peer, call_id: int, content: Content) -> None:
        """Refuse a call that was cancelled while its tensors were on their way, which may have changed."""

    def on_undecodable(self, peer: Peer, kind: MessageKind, call_id: int, error: DistributedError) -> None:
        """Handle a message of which no more could be read than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """The options and resources that the peers of one agent share."""

    executor: Executor
    tensor_pool: TensorPool  # for received tensors
    tags: Sequence[str]  # of the codecs that received values may use
    max_outstanding: int  # calls to one peer
    message_limit: int  # in bytes


class Peer(ABC):
    """A rank of the agents, this one included, that is called and makes calls here."""

    def __init__(self, rank: int, options: PeerOptions, handler: MessageHandler) -> None:
        self.rank = rank
        self.window = CallWindow(options.max_outstanding, options.executor.wait_events)
        self.incoming: dict[int, IncomingCall] = {}  # the peer's calls that are not answered, by call id
        self.internal_lock = threading.RLock()  # held while an internal call of the peer is handled
        self.internal_thread: int | None = None  # the thread that handles one
        self.deferred: list[tuple[int, Any]] = []  # results of internal calls, to be sent once the lock is released
        self.is_lost = False  # whether internal calls are handled no more
        self._handler = handler

    @abstractmethod
    def send(self, kind: MessageKind, call_id: int, content: Content) -> None:
        """Send a message; its tensors must not be changed until it has arrived.

        Raises ValueError if it is too large, TypeError if a tensor can't be sent, DistributedError if the peer was
        lost.
        """

    def notify(self, name: str, *arguments: Any) -> None:
        """Send an internal call of plain values that has no response; a peer that is lost is passed over."""
        with contextlib.suppress(DistributedError):
            self.send(MessageKind.NOTICE, NO_CALL_ID, pack_call(Call(name, arguments, {}), ()))

    def forget(self) -> None:
        """Handle no more internal calls of the peer: what it leaves behind is about to be cleared away.

        Messages that follow a frame may be received after the connection's end was reported.
        """
        with self.internal_lock:
            self.is_lost = True

    def close(self, timeout: float) -> None:
        """Cancel the peer's calls, and let go the threads that wait to call it; a goodbye may take that long."""
        del timeout
        self.window.close()
        for call in self.incoming.copy().values():
            call.cancel()


class LoopbackPeer(Peer):
    """The rank itself, called without a network; tensors are not copied."""

    def send(self, kind: MessageKind, call_id: int, content: Content) -> None:
        """Handle a message of this rank's own."""
        self._handler.on_message(self, kind, call_id, content)


class RemotePeer(Peer):
    """Another rank: sends messages to it, and receives from it, by a group of two, which it closes.

    `on_disconnect` is called once when nothing can be received any more, but not after `close`. It must not block.
    """

    def __init__(
        self,
        rank: int,
        options: PeerOptions,
        handler: MessageHandler,
        group: Backend,
        on_disconnect: Callable[[RemotePeer, DistributedError], None],
    ) -> None:
        super().__init__(rank, options, handler)
        self.group = group
        self._group_rank = 1 - group.rank
        self._executor = options.executor
        self._limit = options.message_limit
        self._pool = options.tensor_pool
        self._tags = options.tags
        self._on_disconnect = on_disconnect
        self._lock = threading.Lock()
        self._error: DistributedError | None = None  # why the connection has ended
        self._frames: PersistentRecv | None = None
        self._transfers: set[Request] = set()  # those larger than a frame, both ways
        self._queue = ReceiveQueue(rank, self._take, group.abort)

    def start(self) -> None:
        """Receive from now on."""
        try:
            # Not a socket: it posts a receive for the next frame, and after each one for the one behind it.
            self._frames = self.group.post_persistent_recv(
                self._group_rank, FRAME_BYTES, self._queue.put, self._disconnected, tag=FRAME_TAG
            )
        except DistributedError as error:
            self._disconnected(error)

    def send(self, kind: MessageKind, call_id: int, content: Content) -> None:
        """Send a message; see `Peer.send`."""
        if self._error is not None:  # checked after the call is in the table that `on_disconnect` looks into
            raise self._error.fresh()
        out_of_band: list[torch.Tensor] = []
        has_references = False
        if isinstance(content, bytes):
            form, memory = Form.PLAIN, memoryview(content)
        else:
            if any(content.is_on_gpu):
                raise UnsupportedOpError(
                    "what is sent has a tensor on a GPU: calls carry those on the CPU, pass tensor.cpu()"
                )
            in_band, out_of_band = encode_value(content, "what is sent")
            form, memory = Form.ENCODED, memoryview(in_band)
            has_references = REFERENCE_TAG in content.tags
        size = memory.nbytes
        if kind is not MessageKind.FAILURE or size > FRAME_CONTENT_BYTES:  # a small failure is sent whatever the limit
            self._check_size(size + sum([tensor.nbytes for tensor in out_of_band]), size)
        frame = pack_frame(kind, form, call_id, memory, has_references=has_references)
        if not self.group.try_send(frame, self._group_rank, tag=FRAME_TAG):
            self.group.isend(frame, self._group_rank, tag=FRAME_TAG)  # keeps itself and the frame alive
        payloads = [bytes_of(tensor) for tensor in out_of_band]
        if size > FRAME_CONTENT_BYTES:
            payloads.insert(0, memory)
        for payload in payloads:
            self._retain(self.group.isend(payload, self._group_rank, tag=payload_tag(kind, call_id)), lambda: None)

    def close(self, timeout: float) -> None:
        """Send and receive nothing more; see `Peer.close`."""
        self._error = GroupClosedError("the agent was closed")
        if self._frames is not None:
            self._frames.close()
        self.group.close(timeout)
        super().close(timeout)

    def _check_size(self, size: int, content_size: int) -> None:
        if size > self._limit:
            raise ValueError(
                f"a message of {size:,} bytes is larger than {self._limit:,}, which agents take: send it in parts, or"
                " make the agents with a larger message_limit"
            )
        if content_size > MAX_CONTENT_BYTES:
            raise ValueError(f"a message of {size:,} bytes has more than 4 GiB beside its tensors: send it in parts")

    def _retain(self, request: Request, then: Callable[[], None]) -> None:
        """Keep a transfer until it has ended, and call a function then."""
        if request.done():  # a small one, most often
            then()
            return
        with self._lock:
            self._transfers.add(request)
        self._executor.add_transfers(1)

        def end() -> None:
            with self._lock:
                self._transfers.discard(request)
            self._executor.add_transfers(-1)
            then()

        request.add_done_callback(end)

    # Receiving.

    def _take(self, frame: Frame) -> bool:
        """Handle a message, or begin to receive the rest of it; see `ReceiveQueue`."""
        try:
            if not frame.is_complete:
                return bool(outside_of_modes(self._take_incomplete, frame))
            if frame.kind is not MessageKind.CANCEL or not self._queue.cancel(frame.call_id):
                self._deliver(frame, frame.content())
        except Exception as error:  # noqa: BLE001 - whatever is received ends this connection at most
            self._failed(error)
        return True

    def _take_incomplete(self, frame: Frame) -> bool:
        if frame.size <= FRAME_CONTENT_BYTES and frame.form == Form.ENCODED:
            in_band = memoryview(bytearray(frame.content()))
            with contextlib.suppress(UnreadableError):
                value, out_of_band = decode_value(in_band, self._tags)
                if not out_of_band:
                    self._deliver(frame, value)
                    return True
        _LargeReceive(self, LargeMessage(frame, self.rank, self._limit, self._pool, self._tags)).advance()
        return False

    def _deliver(self, frame: Frame, content: Content) -> None:
        self._handler.on_message(self, frame.kind, frame.call_id, content)
        if frame.is_cancelled:  # while it was held up
            self._handler.on_message(self, MessageKind.CANCEL, frame.call_id, b"")

    def _deliver_large(self, message: LargeMessage) -> None:
        """Handle a large message that was received, and those that waited for it."""
        frame = message.frame
        content, num_out_of_band = message.take_content()
        was_refused = False
        try:
            if isinstance(content, ProtocolError):
                self._handler.on_undecodable(self, frame.kind, frame.call_id, content)
            elif frame.is_cancelled and num_out_of_band:
                was_refused = True
                self._handler.on_cancelled_message(self, frame.call_id, content)
            else:
                self._handler.on_message(self, frame.kind, frame.call_id, content)
        finally:
            if self._queue.finish(frame) and not was_refused:
                self._handler.on_message(self, MessageKind.CANCEL, frame.call_id, b"")

    def _failed(self, error: Exception) -> None:
        """End this connection, and nothing else, for an error while receiving."""
        if isinstance(error, (ProtocolError, SizeMismatchError)):
            text = f"rank {self.rank} broke the protocol: {error}"
        elif isinstance(error, DistributedError):
            return  # the group has ended, which `_disconnected` is called for
        elif threading.current_thread() is threading.main_thread():
            raise error  # most probably the handler of an interruption did
        else:
            text = f"a message of rank {self.rank} can't be taken: {describe_error(error)}"
        self._queue.stop()
        self.group.abort(ProtocolError(text, ranks=(self.rank,)))

    def _disconnected(self, error: DistributedError) -> None:
        if self._error is None:
            self._error = error
            self._on_disconnect(self, error)


class _LargeReceive:
    """The transfers of one large message, one after the other. They may end while another thread begins the next."""

    def __init__(self, peer: RemotePeer, message: LargeMessage) -> None:
        self._peer = peer
        self._message = message
        self._lock = threading.Lock()
        self._is_busy = self._is_due = self._has_ended = False
        self._request: Request | None = None

    def advance(self) -> None:
        """Go on; the message may be there at once."""
        with self._lock:
            self._is_due = True
            if self._is_busy:
                return  # the busy thread looks again
            self._is_busy = True
        try:
            while True:
                with self._lock:
                    self._is_busy, self._is_due = self._is_due and not self._has_ended, False
                    if not self._is_busy:
                        return
                outside_of_modes(self._try_to_advance)
        except BaseException:
            self._is_busy = False
            raise

    def _try_to_advance(self) -> None:
        peer = self._peer
        try:
            while True:
                if self._request is None:
                    buffer = self._message.next_buffer()
                    if buffer is None:
                        self._has_ended = True
                        peer._deliver_large(self._message)
                        return
                    tag = payload_tag(self._message.frame.kind, self._message.frame.call_id)
                    self._request = peer.group.irecv(buffer, peer._group_rank, tag=tag)
                if not self._request.done():
                    peer._retain(self._request, self.advance)
                    return
                self._request.wait(math.inf)
                self._request = None
        except Exception as error:  # noqa: BLE001 - whatever it is, it was received
            peer._failed(error)


def outside_of_modes(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that makes tensors for others, outside of torch's modes: to look costs 0.3 us, to leave 20."""
    if not (torch.is_inference_mode_enabled() or num_dispatch_modes() or num_function_modes()):
        return function(*arguments)
    with torch.inference_mode(False), no_modes(), no_torch_function():
        return function(*arguments)
