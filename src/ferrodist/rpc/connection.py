"""The way to one other rank: a group of two, and what is asked for ahead in it.

See [Note: frames] in `framing.py`, and [Note: turns] in `framing.py`.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Protocol

from ferrodist.collectives.arguments import bytes_of
from ferrodist.collectives.serialization import UnreadableError, decode_value_from_bytes, encode_value_to_bytes
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
    FRAME_TAG,
    MOST_CONTENT_BYTES,
    ROOM,
    Form,
    Turns,
    outside_of_modes,
    pack_frame,
    tag_of,
)
from ferrodist.rpc.large_messages import Arrival, Intake
from ferrodist.rpc.messages import REFERENCE_MARK, MessageKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import PersistentRecv, Request
    from ferrodist.rpc.framing import Frame
    from ferrodist.rpc.large_messages import Buffers
    from ferrodist.rpc.messages import Content


class Receiver(Protocol):
    """Who is told of what comes, in any thread; frames of one link in the order in which they were sent.

    It must not block, for until it returns nothing else comes.
    """

    @property
    def buffers(self) -> Buffers:
        """Where large tensors arrive."""

    @property
    def marks(self) -> Sequence[str]:
        """Of the extensions that values may have."""

    def attend(self, change: int) -> None:
        """So many large messages more are on their way, and are moved by who waits for a `Signal`."""

    def received(self, peer: int, kind: MessageKind, number: int, content: Content) -> None:
        """A message has come."""

    def withdrawn(self, peer: int, kind: MessageKind, number: int, content: Content) -> None:
        """A call has come whose caller has given up while its tensors were on their way; they may have changed."""

    def garbled(self, peer: int, kind: MessageKind, number: int, error: DistributedError) -> None:
        """Of a message no more could be read than this."""

    def lost(self, peer: int, error: DistributedError) -> None:
        """Nothing comes any more. Called once, and not after `Link.close`."""


class Link:
    """Sends messages to a rank, and receives from it.

    Args:
        pair: A group of this rank and the other one; the link closes it.
        peer: The other one's number for who uses this.
        receiver: Who is told of what comes.
        limit: Bytes that a message may have.
    """

    def __init__(self, pair: Backend, peer: int, receiver: Receiver, limit: int) -> None:
        self._pair = pair
        self._other = 1 - pair.rank
        self._peer = peer
        self._receiver = receiver
        self._limit = limit
        self._lock = threading.Lock()
        self._over: DistributedError | None = None  # why it has ended
        self._listener: PersistentRecv | None = None
        self._under_way: set[Request] = set()  # what is larger than a frame, both ways
        self._turns = Turns(peer, self._take, pair.abort)
        self._intake = Intake(
            pair, peer, limit, receiver.buffers, receiver.marks, self._keep, self._failed, self._settle
        )

    def start(self) -> None:
        """Receive from now on."""
        try:
            self._listener = self._pair.listen(self._other, FRAME_BYTES, self._turns.put, self._ended, tag=FRAME_TAG)
        except DistributedError as error:
            self._ended(error)

    def send(self, kind: MessageKind, number: int, content: Content) -> None:
        """Send a message; its tensors are not to be changed until it is there.

        Raises:
            ValueError: It is too large.
            TypeError: A tensor can't travel.
            DistributedError: The rank was lost, or the link is closed.
        """
        if self._over is not None:  # looked at after whoever waits for an answer can be found by who is told of it
            raise self._over.fresh()
        apart: list[torch.Tensor] = []
        has_references = False
        if isinstance(content, bytes):
            form, memory = Form.PLAIN, memoryview(content)
        else:
            if any(content.is_on_gpu):
                raise UnsupportedOpError(
                    "what is sent has a tensor on a GPU: calls carry those on the CPU, pass tensor.cpu()"
                )
            letter, apart = encode_value_to_bytes(content, "what is sent")
            form, memory = Form.LETTER, memoryview(letter)
            has_references = REFERENCE_MARK in content.tags
        size = memory.nbytes
        if kind is not MessageKind.FAILURE or size > ROOM:  # why there is no result is to be told in any case
            self._check_size(size + sum([tensor.nbytes for tensor in apart]), size)
        frame = pack_frame(kind, form, number, memory, has_references=has_references)
        if not self._pair.try_send(frame, self._other, tag=FRAME_TAG):
            self._pair.isend(frame, self._other, tag=FRAME_TAG)
        if size > ROOM:
            self._send_apart(memory, kind, number)
        for tensor in apart:
            self._send_apart(bytes_of(tensor), kind, number)

    def close(self, seconds: float) -> None:
        """Send nothing more, and receive nothing more.

        Args:
            seconds: How long the other side may take to take the goodbye.
        """
        self._over = GroupClosedError("the agent was closed")
        if self._listener is not None:
            self._listener.close()
        self._pair.close(seconds)

    def _check_size(self, size: int, size_of_content: int) -> None:
        if size > self._limit:
            raise ValueError(
                f"a message of {size:,} bytes is larger than {self._limit:,}, which agents take: send it in parts, or"
                " make the agents with a larger message_limit"
            )
        if size_of_content > MOST_CONTENT_BYTES:
            raise ValueError(f"a message of {size:,} bytes has more than 4 GiB beside its tensors: send it in parts")

    def _send_apart(self, memory: memoryview, kind: MessageKind, number: int) -> None:
        self._keep(self._pair.isend(memory, self._other, tag=tag_of(kind, number)), _nothing)

    def _keep(self, request: Request, then: Callable[[], None]) -> None:
        """Keep a transfer until it has ended, and do something then."""
        if request.done():  # a small one, most often
            then()
            return
        with self._lock:
            self._under_way.add(request)
        self._receiver.attend(1)

        def end() -> None:
            with self._lock:
                self._under_way.discard(request)
            self._receiver.attend(-1)
            then()

        request.add_done_callback(end)

    # What comes.

    def _take(self, frame: Frame) -> bool:
        """Deal with a message, or begin to receive what follows; see `Turns`."""
        try:
            if not frame.is_whole:
                return bool(outside_of_modes(self._take_more, frame))
            if frame.kind is not MessageKind.WITHDRAWAL or not self._turns.withdraw(frame.number):
                self._give(frame, frame.content())
        except Exception as error:  # noqa: BLE001 - nothing that comes ends more than this link
            self._failed(error)
        return True

    def _take_more(self, frame: Frame) -> bool:
        if frame.size <= ROOM and frame.form == Form.LETTER:
            text = memoryview(bytearray(frame.content()))
            with contextlib.suppress(UnreadableError):
                parcel, apart = decode_value_from_bytes(text, self._intake.marks)
                if not apart:
                    self._give(frame, parcel)
                    return True
        self._intake.check_size(frame.size)
        Arrival(frame, self._intake).start()
        return False

    def _settle(self, frame: Frame, content: Content | ProtocolError, num_apart: int) -> None:
        """A message has come whole: deal with it, and with what waited for that."""
        kind, number = frame.kind, frame.number
        is_told = False
        try:
            if isinstance(content, ProtocolError):
                self._receiver.garbled(self._peer, kind, number, content)
            elif frame.is_withdrawn and num_apart:
                is_told = True
                self._receiver.withdrawn(self._peer, kind, number, content)
            else:
                self._receiver.received(self._peer, kind, number, content)
        finally:
            if self._turns.settle(frame) and not is_told:
                self._receiver.received(self._peer, MessageKind.WITHDRAWAL, number, b"")

    def _give(self, frame: Frame, content: Content) -> None:
        self._receiver.received(self._peer, frame.kind, frame.number, content)
        if frame.is_withdrawn:  # while it was held up
            self._receiver.received(self._peer, MessageKind.WITHDRAWAL, frame.number, b"")

    def _failed(self, error: Exception) -> None:
        """Whatever is wrong with what comes ends this link and nothing else."""
        if isinstance(error, (ProtocolError, SizeMismatchError)):
            self._abort(f"rank {self._peer} broke the protocol: {error}")
        elif isinstance(error, DistributedError):
            pass  # the group has ended, which is told apart
        elif threading.current_thread() is threading.main_thread():
            raise error  # most probably the handler of an interruption did
        else:
            self._abort(f"a message of rank {self._peer} can't be taken: {describe_error(error)}")

    def _abort(self, text: str) -> None:
        self._turns.stop()
        self._pair.abort(ProtocolError(text, ranks=(self._peer,)))

    def _ended(self, error: DistributedError) -> None:
        if self._over is None:
            self._over = error
            self._receiver.lost(self._peer, error)


def _nothing() -> None:
    pass
