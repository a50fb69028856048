"""Frames over an MPI communicator, in order but for urgent ones, and the thread that moves them.

MPI gets copies, so a user's buffer is never MPI's, whatever becomes of a message. A send that MPI has started can't be
taken back; so MPI gets no more frames for a rank while over `_WINDOW_BYTES` are on their way, and the rest waits in a
queue.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrodist.backends.frame_type import URGENT
from ferrodist.backends.mpi.runtime import leak_request
from ferrodist.backends.mpi.wire import HEADER_SIZE, MAX_FRAME, Frame
from ferrodist.backends.polling import Backoff
from ferrodist.deadline import Deadline
from ferrodist.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

_WINDOW_BYTES = 4 << 20
_TAG = 0
_MAX_FRAMES_PER_POLL = 64


@dataclass(slots=True, eq=False)
class QueuedFrame:
    """A frame to be sent."""

    frame: Frame
    payload: memoryview | bytes = b""  # read when MPI gets the frame
    owner: object = None  # the object for which `FrameTransport.drop` drops it
    on_sent: Callable[[], object] | None = None  # called when MPI has a copy, so that the payload may change


@dataclass(slots=True)
class _PeerQueue:
    """The frames to and from one rank."""

    waiting: deque[QueuedFrame] = field(default_factory=deque)
    sending: deque[tuple[Any, int]] = field(default_factory=deque)  # MPI's requests, and their sizes in bytes
    sending_bytes: int = 0
    receiving: deque[tuple[Any, Any]] = field(default_factory=deque)  # MPI's requests, and their buffers
    is_lost: bool = False


class FrameTransport:
    """One rank's frames to and from the others of a communicator, which nothing else uses.

    ``on_frame(source, frame, payload)`` acts on a received frame; it is called for one at a time, in order.
    """

    def __init__(self, mpi: Any, communicator: Any, on_frame: Callable[[int, Frame, memoryview], None]) -> None:
        self._mpi = mpi
        self._communicator = communicator
        self._on_frame = on_frame
        self._peers = [_PeerQueue() for _ in range(communicator.Get_size())]
        self._send_lock = threading.Lock()  # not held during callbacks
        self._poll_lock = threading.Lock()  # held while frames move, callbacks included
        self._status = mpi.Status()
        self._is_closed = False
        self.num_receiving = 0

    def push(self, destination: int, queued: QueuedFrame) -> None:
        """Send a frame as soon as the window allows; frames to a lost rank are dropped."""
        peer = self._peers[destination]
        sent: list[QueuedFrame] = []
        try:
            with self._send_lock:
                if peer.is_lost or self._is_closed:
                    return
                if queued.frame.kind in URGENT:
                    self._send(peer, destination, queued, sent)
                else:
                    peer.waiting.append(queued)
                    self._fill_window(peer, destination, sent)
        finally:
            _notify_sent(sent)

    def drop(self, destination: int, owner: object) -> int:
        """Drop an owner's frames that MPI has not been given; returns their number."""
        peer = self._peers[destination]
        with self._send_lock:
            others = [queued for queued in peer.waiting if queued.owner is not owner]
            num_dropped = len(peer.waiting) - len(others)
            peer.waiting = deque(others)
        return num_dropped

    def is_lost(self, rank: int) -> bool:
        """Return whether a rank is lost."""
        return self._peers[rank].is_lost

    def mark_lost(self, rank: int) -> None:
        """Note that a rank is lost: nothing is sent to it any more, and pending requests may never end."""
        peer = self._peers[rank]
        with self._send_lock:
            peer.is_lost = True
            peer.waiting.clear()
            for request, _ in peer.sending:
                leak_request(request)
            peer.sending.clear()

    def is_idle(self) -> bool:
        """Return whether every frame has been sent."""
        return not any(peer.waiting or peer.sending for peer in self._peers)

    def close(self) -> None:
        """Stop using the communicator, in all threads, so that it can be freed."""
        with self._poll_lock, self._send_lock:
            self._is_closed = True

    def poll(self, timeout: float = 0) -> bool:
        """Move frames; whether there were any. Raises MPI's exceptions.

        While another thread polls, this waits for it, ``timeout`` seconds at most.
        """
        if not self._poll_lock.acquire(timeout=timeout):
            return False
        try:
            return False if self._is_closed else self._poll_sends() | self._poll_receives()
        finally:
            self._poll_lock.release()

    # Sending.

    def _poll_sends(self) -> bool:
        moved = False
        sent: list[QueuedFrame] = []
        try:
            with self._send_lock:
                for destination, peer in enumerate(self._peers):
                    while peer.sending and peer.sending[0][0].Test():
                        peer.sending_bytes -= peer.sending.popleft()[1]
                        moved = True
                    if peer.waiting:
                        self._fill_window(peer, destination, sent)
        finally:  # also after an exception of MPI's for a later frame
            _notify_sent(sent)
        return moved or bool(sent)

    def _fill_window(self, peer: _PeerQueue, destination: int, sent: list[QueuedFrame]) -> None:
        while peer.waiting and peer.sending_bytes <= _WINDOW_BYTES:
            self._send(peer, destination, peer.waiting.popleft(), sent)

    def _send(self, peer: _PeerQueue, destination: int, queued: QueuedFrame, sent: list[QueuedFrame]) -> None:
        size = HEADER_SIZE + len(queued.payload)
        data = np.empty(size, np.uint8)
        data[:HEADER_SIZE] = np.frombuffer(queued.frame.pack(), np.uint8)
        if size > HEADER_SIZE:
            data[HEADER_SIZE:] = np.frombuffer(queued.payload, np.uint8)
        peer.sending.append((self._communicator.Isend([data, size, self._mpi.BYTE], destination, _TAG), size))
        peer.sending_bytes += size
        sent.append(queued)

    # Receiving.

    def _poll_receives(self) -> bool:
        mpi, status = self._mpi, self._status
        moved = False
        for _ in range(_MAX_FRAMES_PER_POLL):
            message = self._communicator.Improbe(mpi.ANY_SOURCE, _TAG, status)
            if message is None:
                break
            moved = True
            source, size = status.Get_source(), status.Get_count(mpi.BYTE)
            data = np.empty(size, np.uint8)
            self._peers[source].receiving.append((message.Irecv([data, size, mpi.BYTE]), data))
            self.num_receiving += 1
            if size > MAX_FRAME:  # received all the same: MPI has matched the message
                raise ProtocolError(
                    f"rank {source} sent a frame of {size} bytes, more than the limit of {MAX_FRAME}: do all ranks run"
                    " the same version of ferrodist?",
                    ranks=(source,),
                )
        if self.num_receiving:
            for source, peer in enumerate(self._peers):
                while self._has_next(peer):
                    data = peer.receiving.popleft()[1].data
                    self.num_receiving -= 1
                    moved = True
                    self._act_on(source, data)
        return moved

    def _act_on(self, source: int, data: memoryview) -> None:
        try:
            self._on_frame(source, Frame.unpack(data), data[HEADER_SIZE:])
        except ProtocolError as error:
            raise ProtocolError(f"rank {source} broke the protocol: {error.message}", ranks=(source,)) from None

    def _has_next(self, peer: _PeerQueue) -> bool:
        """Return whether a rank's next frame has come.

        A frame that a lost rank had begun to send may never come: MPI raises, once, and then says that it has.
        """
        if not peer.receiving:
            return False
        try:
            has_come = bool(peer.receiving[0][0].Test())
        except self._mpi.Exception:
            self._leak_receives(peer)
            raise
        if peer.is_lost and not has_come:
            self._leak_receives(peer)
        return has_come

    def _leak_receives(self, peer: _PeerQueue) -> None:
        self.num_receiving -= len(peer.receiving)
        for request, _ in peer.receiving:
            leak_request(request)
        peer.receiving.clear()


def _notify_sent(sent: list[QueuedFrame]) -> None:
    for queued in sent:
        if queued.on_sent is not None:
            queued.on_sent()


_BUSY_SECONDS = 2e-3  # how long the thread goes on polling often after a frame has come
_BUSY_POLL_INTERVAL_SECONDS = 50e-6
_AWAITED_POLL_INTERVAL_SECONDS = 0.5e-3
_IDLE_POLL_INTERVAL_SECONDS = 2e-3

_DEATH_CHECK_INTERVAL_SECONDS = 0.05


class ProgressThread:
    """Moves a group's frames until the group is over."""

    def __init__(
        self,
        *,
        poll: Callable[[], bool],  # moves the frames that can be moved; whether there were any; does not raise
        check_deaths: Callable[[], None],  # called every 50 ms
        is_awaited: Callable[[], bool],  # whether frames are expected, so that polling often pays
        is_over: Callable[[], bool],  # whether no frame will come any more
        on_end: Callable[[], None],  # called when the thread ends
        name: str,
    ) -> None:
        self._poll = poll
        self._check_deaths = check_deaths
        self._is_awaited = is_awaited
        self._is_over = is_over
        self._on_end = on_end
        self._num_waiting, self._num_waiting_lock = 0, threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end; whether it has come."""
        if self._thread is not threading.current_thread():
            self._thread.join(Deadline(timeout).remaining())
        return not self._thread.is_alive()

    def wait_until(self, done: Callable[[], bool], timeout: float) -> bool:
        """Move frames until ``done()``; False after ``timeout`` seconds."""
        if done():
            return True
        deadline = Deadline(timeout)
        backoff = Backoff()
        self._count_waiting(1)
        try:
            while not done():
                if deadline.expired:
                    return done()
                if self._poll():
                    backoff.reset()
                else:
                    backoff.pause(deadline.remaining())
        finally:
            self._count_waiting(-1)
        return True

    def _count_waiting(self, change: int) -> None:
        with self._num_waiting_lock:
            self._num_waiting += change

    def _run(self) -> None:
        busy_until = next_check = 0.0
        while not self._is_over():
            now = time.monotonic()
            if now >= next_check:
                self._check_deaths()
                next_check = now + _DEATH_CHECK_INTERVAL_SECONDS
            if self._poll():
                busy_until = now + _BUSY_SECONDS
            if self._num_waiting:  # waiting threads move the frames
                time.sleep(_IDLE_POLL_INTERVAL_SECONDS)
            elif now < busy_until:
                time.sleep(_BUSY_POLL_INTERVAL_SECONDS)
            else:
                time.sleep(_AWAITED_POLL_INTERVAL_SECONDS if self._is_awaited() else _IDLE_POLL_INTERVAL_SECONDS)
        self._on_end()
