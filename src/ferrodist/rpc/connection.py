"""`RemotePeer`: the connection to another rank, a group of two with a receive posted for the next frame.

See [Note: frames] and [Note: message order] in `framing.py`.
"""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING

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
from ferrodist.rpc.framing import (
    FRAME_BYTES,
    FRAME_CONTENT_BYTES,
    FRAME_TAG,
    MAX_CONTENT_BYTES,
    Form,
    Frame,
    ReceiveQueue,
    outside_of_modes,
    pack_frame,
    payload_tag,
)
from ferrodist.rpc.large_messages import LargeMessage
from ferrodist.rpc.messages import REFERENCE_TAG, Content, MessageKind
from ferrodist.rpc.peer import MessageHandler, Peer, PeerOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import PersistentRecv, Request


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
            self._frames = self.group.listen(
                self._group_rank, FRAME_BYTES, self._queue.put, self._disconnected, tag=FRAME_TAG
            )
        except DistributedError as error:
            self._disconnected(error)

    def send(self, kind: MessageKind, number: int, content: Content) -> None:
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
        frame = pack_frame(kind, form, number, memory, has_references=has_references)
        if not self.group.try_send(frame, self._group_rank, tag=FRAME_TAG):
            self.group.isend(frame, self._group_rank, tag=FRAME_TAG)
        if size > FRAME_CONTENT_BYTES:
            self._send_payload(memory, kind, number)
        for tensor in out_of_band:
            self._send_payload(bytes_of(tensor), kind, number)

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

    def _send_payload(self, memory: memoryview, kind: MessageKind, number: int) -> None:
        self._retain(self.group.isend(memory, self._group_rank, tag=payload_tag(kind, number)), lambda: None)

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
                return bool(outside_of_modes(self._take_encoded, frame))
            if frame.kind is not MessageKind.CANCEL or not self._queue.cancel(frame.number):
                self._deliver(frame, frame.content())
        except Exception as error:  # noqa: BLE001 - whatever is received ends this connection at most
            self._failed(error)
        return True

    def _take_encoded(self, frame: Frame) -> bool:
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
        self._handler.on_message(self, frame.kind, frame.number, content)
        if frame.is_cancelled:  # while it was held up
            self._handler.on_message(self, MessageKind.CANCEL, frame.number, b"")

    def _deliver_large(self, message: LargeMessage) -> None:
        """Handle a large message that was received, and those that waited for it."""
        frame = message.frame
        content, num_out_of_band = message.take_content()
        was_refused = False
        try:
            if isinstance(content, ProtocolError):
                self._handler.on_undecodable(self, frame.kind, frame.number, content)
            elif frame.is_cancelled and num_out_of_band:
                was_refused = True
                self._handler.on_cancelled_message(self, frame.number, content)
            else:
                self._handler.on_message(self, frame.kind, frame.number, content)
        finally:
            if self._queue.finish(frame) and not was_refused:
                self._handler.on_message(self, MessageKind.CANCEL, frame.number, b"")

    def _failed(self, error: Exception) -> None:
        """End this connection, and nothing else, for an error while receiving."""
        if isinstance(error, (ProtocolError, SizeMismatchError)):
            self._abort(f"rank {self.rank} broke the protocol: {error}")
        elif isinstance(error, DistributedError):
            pass  # the group has ended, which `_disconnected` is called for
        elif threading.current_thread() is threading.main_thread():
            raise error  # most probably the handler of an interruption did
        else:
            self._abort(f"a message of rank {self.rank} can't be taken: {describe_error(error)}")

    def _abort(self, text: str) -> None:
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
            while self._is_wanted():
                outside_of_modes(self._try_to_advance)
        finally:
            self._is_busy = False

    def _is_wanted(self) -> bool:
        with self._lock:
            self._is_busy, self._is_due = self._is_due and not self._has_ended, False
            return self._is_busy

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
                    tag = payload_tag(self._message.frame.kind, self._message.frame.number)
                    self._request = peer.group.irecv(buffer, peer._group_rank, tag=tag)
                if not self._request.done():
                    peer._retain(self._request, self.advance)
                    return
                self._request.wait(math.inf)
                self._request = None
        except Exception as error:  # noqa: BLE001 - whatever it is, it was received
            peer._failed(error)
