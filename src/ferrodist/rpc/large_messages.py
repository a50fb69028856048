"""Messages that don't fit into their frames: what follows the frame, and the memory that it is received into.

Everything that was sent is received, and dropped where it can't be used: until then its sender is not done.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.arguments import bytes_of
from ferrodist.collectives.serialization import OutOfBandTensor, PackedValue, UnreadableError, decode_value
from ferrodist.errors import ProtocolError
from ferrodist.rpc.messages import FRAME_CONTENT_BYTES, Form, Frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.rpc.messages import Content


class LargeMessage:
    """A message that follows its frame: the buffers of its transfers, in order, and its content at the end."""

    def __init__(self, frame: Frame, peer: int, limit: int, pool: TensorPool, tags: Sequence[str]) -> None:
        self.frame = frame
        self._peer = peer
        self._limit = limit
        self._pool = pool
        self._tags = tags
        self._in_band: memoryview | None = None  # the content without tensors
        self._value: PackedValue | None = None
        self._out_of_band: list[OutOfBandTensor] | None = None  # known once the in-band content is there
        self._num_begun = 0  # of these
        self._error: ProtocolError | None = None
        self._check_size(frame.size)

    def next_buffer(self) -> memoryview | None:
        """The buffer of the next transfer, or None if all is there; raises ProtocolError if there can be none."""
        if self._in_band is None:
            if self.frame.size > FRAME_CONTENT_BYTES:
                self._in_band = self._allocate(self.frame.size)
                return self._in_band
            self._in_band = memoryview(bytearray(self.frame.content()))
        if self._out_of_band is None:
            self._out_of_band = self._decode(self._in_band)
        if self._num_begun == len(self._out_of_band):
            return None
        each = self._out_of_band[self._num_begun]
        self._num_begun += 1
        if self._value is not None:
            try:
                tensor = self._pool.make(each.shape, each.dtype)
            except (RuntimeError, MemoryError):
                self._value = None
                self._error = self._no_memory(each.size_bytes)
            else:
                self._value.tensors[each.index] = tensor
                return bytes_of(tensor)
        return self._allocate(each.size_bytes)

    def take_content(self) -> tuple[Content | ProtocolError, int]:
        """The content once everything has been received, or its error; and the number of out-of-band tensors."""
        assert self._in_band is not None
        content = self._error or self._value or bytes(self._in_band)
        self._value = self._in_band = None
        return content, len(self._out_of_band or ())

    def _decode(self, in_band: memoryview) -> list[OutOfBandTensor]:
        if self.frame.form == Form.PLAIN:
            return []
        peer = self._peer
        try:
            self._value, out_of_band = decode_value(in_band, self._tags)
        except UnreadableError as error:
            self._error = ProtocolError(f"rank {peer} sent something that is not a value: {error}", ranks=(peer,))
            if error.out_of_band is None:
                raise self._error from None
            out_of_band = error.out_of_band
        try:
            size = in_band.nbytes + sum([each.check() for each in out_of_band])
        except ValueError as error:
            raise ProtocolError(f"rank {peer} sent something that is not a value: {error}", ranks=(peer,)) from None
        self._check_size(size)
        return out_of_band

    def _check_size(self, size: int) -> None:
        if size > self._limit:
            text = (
                f"rank {self._peer} sent a message of {size:,} bytes where the message_limit is {self._limit:,}: make"
                " all agents with the same"
            )
            raise ProtocolError(text, ranks=(self._peer,))

    def _allocate(self, size: int) -> memoryview:
        try:
            return bytes_of(torch.empty(size, dtype=torch.uint8, device="cpu"))
        except (RuntimeError, MemoryError):
            raise self._no_memory(size) from None

    def _no_memory(self, size: int) -> ProtocolError:
        text = f"there is no memory for {size:,} bytes that rank {self._peer} sent"
        return ProtocolError(text, ranks=(self._peer,))


_MIN_POOLED_BYTES = 1 << 20  # smaller memory is reused by the allocator itself

_MAX_FREE_BYTES = 128 << 20


class TensorPool:
    """Memory for large received tensors, used again once nobody has them any more; threads share it.

    Fresh memory has to be mapped and zeroed, page by page, which takes longer than receiving into it.
    """

    def __init__(self, max_free_bytes: int = _MAX_FREE_BYTES) -> None:
        self._max_free_bytes = max_free_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.Tensor]] = {}  # by size, no list is empty
        self._num_free_bytes = 0

    def make(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor."""
        size = dtype.itemsize
        for dim in shape:
            size *= dim
        if not _MIN_POOLED_BYTES <= size <= self._max_free_bytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with self._lock:
            memory = self._free[size].pop() if size in self._free else None
            if memory is not None:
                self._num_free_bytes -= size
                if not self._free[size]:
                    del self._free[size]
        if memory is None:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        # Whatever is made of the tensor holds this array, and through it the memory.
        holder = memory.numpy()
        weakref.finalize(holder, self._release, memory).atexit = False
        return torch.from_numpy(holder).view(dtype).view(shape)

    def _release(self, memory: torch.Tensor) -> None:
        """Retain memory; called wherever its last user goes. If the lock is held, maybe by this thread, free it."""
        size = memory.nbytes
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._num_free_bytes + size > self._max_free_bytes:
                self._free.clear()  # sizes that may not be wanted any more
                self._num_free_bytes = 0
            self._num_free_bytes += size
            self._free.setdefault(size, []).append(memory)
        finally:
            self._lock.release()
