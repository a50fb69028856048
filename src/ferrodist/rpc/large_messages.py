"""Messages that don't fit into their frames: what follows is received, in its order.

Whatever was sent is received, and dropped where nobody can use it: a sender is not done before that.

Memory that large tensors arrive in, used again once nobody has them any more.

Fresh memory has to be mapped and filled with zeros, page by page, which takes longer than to receive into it.
"""

from __future__ import annotations

import math
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.arguments import bytes_of
from ferrodist.collectives.serialization import OutOfBandTensor, PackedValue, UnreadableError, decode_value_from_bytes
from ferrodist.errors import ProtocolError
from ferrodist.rpc.framing import ROOM, Form, outside_of_modes, tag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request
    from ferrodist.rpc.framing import Frame
    from ferrodist.rpc.messages import Content


@dataclass(frozen=True, slots=True)
class Intake:
    """What the messages that come on one link have in common.

    Args:
        pair: Where they come from.
        peer: The rank that sends them, for errors.
        limit: Bytes that a message may have.
        buffers: Where large tensors arrive.
        marks: Of the extensions that values may have.
        keep: Keeps a transfer, and calls something when it has ended.
        failed: Called with what was raised.
        done: Called with a frame, its message or what was wrong with it, and how many tensors came by themselves.
    """

    pair: Backend
    peer: int
    limit: int
    buffers: Buffers
    marks: Sequence[str]
    keep: Callable[[Request, Callable[[], None]], None]
    failed: Callable[[Exception], None]
    done: Callable[[Frame, Content | ProtocolError, int], None]

    def check_size(self, size: int) -> None:
        """See that a message is one that agents take.

        Raises:
            ProtocolError: It is not.
        """
        if size > self.limit:
            text = (
                f"rank {self.peer} sent a message of {size:,} bytes where the message_limit is {self.limit:,}: make all"
                " agents with the same"
            )
            raise ProtocolError(text, ranks=(self.peer,))


class Arrival:
    """One message, from its frame on.

    Args:
        frame: It; `start` does the rest.
        intake: Of its link.
    """

    def __init__(self, frame: Frame, intake: Intake) -> None:
        self._frame = frame
        self._intake = intake
        self._lock = threading.Lock()
        self._is_busy = self._is_due = self._has_ended = False
        self._request: Request | None = None
        self._text: memoryview | None = None  # all that is no tensor
        self._parcel: PackedValue | None = None
        self._apart: list[OutOfBandTensor] | None = None  # known once the text is there
        self._num_begun = 0  # of those
        self._error: ProtocolError | None = None

    def start(self) -> None:
        """Receive it; it may be there at once."""
        with self._lock:
            self._is_due = True
            if self._is_busy:
                return  # whoever is at it looks again
            self._is_busy = True
        try:
            while self._is_wanted():
                outside_of_modes(self._try_to_go_on)
        finally:
            self._is_busy = False

    def _is_wanted(self) -> bool:
        with self._lock:
            self._is_busy, self._is_due = self._is_due and not self._has_ended, False
            return self._is_busy

    def _try_to_go_on(self) -> None:
        try:
            self._go_on()
        except Exception as error:  # noqa: BLE001 - whatever it is, it came
            self._intake.failed(error)

    def _go_on(self) -> None:
        while True:
            if self._request is None:
                memory = self._next_memory()
                if memory is None:
                    self._end()
                    return
                tag = tag_of(self._frame.kind, self._frame.number)
                self._request = self._intake.pair.irecv(memory, 1 - self._intake.pair.rank, tag=tag)
            if not self._request.done():
                self._intake.keep(self._request, self.start)
                return
            self._request.wait(math.inf)
            self._request = None

    def _next_memory(self) -> memoryview | None:
        """Where the next part goes, or None if all has come."""
        if self._text is None:
            if self._frame.size > ROOM:
                self._text = self._memory(self._frame.size)
                return self._text
            self._text = memoryview(bytearray(self._frame.content()))
        if self._apart is None:
            self._apart = self._open(self._text)
        if self._num_begun == len(self._apart):
            return None
        each = self._apart[self._num_begun]
        self._num_begun += 1
        if self._parcel is not None:
            try:
                tensor = self._intake.buffers.make(each.shape, each.dtype)
            except (RuntimeError, MemoryError):
                self._parcel = None
                self._error = self._no_memory(each.size_bytes)
            else:
                self._parcel.tensors[each.index] = tensor
                return bytes_of(tensor)
        return self._memory(each.size_bytes)

    def _open(self, text: memoryview) -> list[OutOfBandTensor]:
        """Look for what follows."""
        if self._frame.form == Form.PLAIN:
            return []
        peer = self._intake.peer
        try:
            self._parcel, apart = decode_value_from_bytes(text, self._intake.marks)
        except UnreadableError as error:
            self._error = ProtocolError(f"rank {peer} sent what is no value: {error}", ranks=(peer,))
            if error.out_of_band is None:
                raise self._error from None
            apart = error.out_of_band
        try:
            size = text.nbytes + sum([each.check() for each in apart])
        except ValueError as error:
            raise ProtocolError(f"rank {peer} sent what is no value: {error}", ranks=(peer,)) from None
        self._intake.check_size(size)
        return apart

    def _memory(self, size: int) -> memoryview:
        try:
            return bytes_of(torch.empty(size, dtype=torch.uint8, device="cpu"))
        except (RuntimeError, MemoryError):
            raise self._no_memory(size) from None

    def _no_memory(self, size: int) -> ProtocolError:
        peer = self._intake.peer
        return ProtocolError(f"there is no memory for {size:,} bytes that rank {peer} sent", ranks=(peer,))

    def _end(self) -> None:
        assert self._text is not None
        self._has_ended = True
        content = self._error or self._parcel or bytes(self._text)
        self._parcel = self._text = None
        self._intake.done(self._frame, content, len(self._apart or ()))


_LEAST_BYTES = 1 << 20
"""What is smaller the allocator keeps by itself."""

_MOST_KEPT_BYTES = 128 << 20


class Buffers:
    """Makes tensors whose memory comes back, of which so much is kept; threads share it."""

    def __init__(self, most_kept_bytes: int = _MOST_KEPT_BYTES) -> None:
        self._most_kept_bytes = most_kept_bytes
        self._lock = threading.Lock()
        self._kept: dict[int, list[torch.Tensor]] = {}  # by their sizes, none empty
        self._num_kept_bytes = 0

    def make(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of any content."""
        size = dtype.itemsize
        for dim in shape:
            size *= dim
        if not _LEAST_BYTES <= size <= self._most_kept_bytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with self._lock:
            memory = self._kept[size].pop() if size in self._kept else None
            if memory is not None:
                self._num_kept_bytes -= size
                if not self._kept[size]:
                    del self._kept[size]
        if memory is None:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        # Whatever is made of the tensor holds this, and through it the memory.
        holder = memory.numpy()
        weakref.finalize(holder, self._take_back, memory).atexit = False
        return torch.from_numpy(holder).view(dtype).view(shape)

    def _take_back(self, memory: torch.Tensor) -> None:
        """Runs wherever the last one let go of it: where somebody has the lock, who may be this thread, it is freed."""
        size = memory.nbytes
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._num_kept_bytes + size > self._most_kept_bytes:
                self._kept.clear()  # of sizes that may not be wanted any more
                self._num_kept_bytes = 0
            self._num_kept_bytes += size
            self._kept.setdefault(size, []).append(memory)
        finally:
            self._lock.release()
