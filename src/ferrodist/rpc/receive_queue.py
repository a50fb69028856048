"""The order in which a peer's messages are taken.

[Note: message order]
Small messages overtake large ones. But the agents' internal calls don't overtake earlier ones, nor do calls and results
with references: an internal call may make an object that the next one uses. Notices overtake nothing: the references
that they give back may be in a message that is on its way.

So there is one queue of frames that are new, and one for each of the two rules, in which a frame that has to wait holds
up those behind it. One thread at a time takes frames, whichever thread received them.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from ferrodist.errors import ProtocolError
from ferrodist.rpc.messages import Frame, MessageKind

if TYPE_CHECKING:
    from collections.abc import Callable

_INTERNAL = (MessageKind.INTERNAL_CALL,)
_ALL = tuple(MessageKind)
_CANCELLABLE = (MessageKind.CALL, MessageKind.INTERNAL_CALL)

_WaitingFrames = tuple[deque[Frame], tuple[MessageKind, ...]]
"""Frames that wait, and the kinds of messages that they wait for."""


class ReceiveQueue:
    """Takes a peer's frames in the order of [Note: message order].

    ``on_frame`` returns whether the frame's message is complete and was handled; if not, `finish` is to be called when
    it was. No more frames are taken after an invalid one.
    """

    def __init__(self, peer: int, on_frame: Callable[[Frame], bool], on_error: Callable[[ProtocolError], None]) -> None:
        self._peer = peer
        self._on_frame = on_frame
        self._on_error = on_error
        self._lock = threading.Lock()
        self._is_stopped = False
        self._runner: int | None = None  # the thread that takes frames
        self._num_seen = 0
        self._new: deque[bytes] = deque()
        self._after_internal_calls: _WaitingFrames = deque(), _INTERNAL
        self._after_everything: _WaitingFrames = deque(), _ALL
        self._waiting = self._after_internal_calls, self._after_everything
        # Frames that wait, or whose messages were not handled yet, by kind in the order in which they came.
        self._pending: dict[MessageKind, dict[int, Frame]] = {kind: {} for kind in MessageKind}
        self._unfinished: dict[tuple[MessageKind, int], Frame] = {}  # the same, without notices, by call id

    def put(self, frames: list[bytes]) -> None:
        """Queue the frames and empty the list, and take those that may go; raises an interruption at the end."""
        with self._lock:
            if not self._is_stopped:
                self._new += frames
            del frames[:]
        self._run()

    def finish(self, frame: Frame) -> bool:
        """Note that a message was received and handled; returns whether it was cancelled until then."""
        self._forget(frame)
        self._run()
        return frame.is_cancelled

    def cancel(self, call_id: int) -> bool:
        """Mark a call as cancelled; returns whether it is one that was not handled yet."""
        with self._lock:
            for kind in _CANCELLABLE:
                frame = self._unfinished.get((kind, call_id))
                if frame is not None:
                    frame.is_cancelled = True
                    return True
        return False

    def stop(self) -> None:
        """Take no more frames."""
        with self._lock:
            self._is_stopped = True
            self._new.clear()
            for frames, _ in self._waiting:
                frames.clear()

    def _run(self) -> None:
        interruption: BaseException | None = None
        thread = threading.get_ident()
        while True:
            is_runner, frame = False, None
            try:
                with self._lock:
                    if self._runner is not None:
                        break  # the runner finds what is new
                    is_runner, self._runner = True, thread
                while (frame := self._next()) is not None:
                    if self._on_frame(frame):
                        self._forget(frame)
                break
            except ProtocolError as error:
                self.stop()
                self._on_error(error)
            except BaseException as error:  # noqa: BLE001 - other frames are not to be lost
                interruption = interruption or error
                if frame is not None and frame.is_complete:
                    self._forget(frame)
            finally:
                if is_runner and self._runner == thread:
                    self._runner = None
        if interruption is not None:
            raise interruption

    def _next(self) -> Frame | None:
        """The next frame that may be taken; without one this thread is the runner no more."""
        with self._lock:
            for frames, kinds in self._waiting:
                if frames and self._may_go(frames[0], kinds):
                    return frames.popleft()
            while self._new:
                frame = Frame(self._new.popleft(), self._peer)
                self._num_seen += 1
                frame.index = self._num_seen
                queue = None
                if frame.kind is MessageKind.NOTICE:
                    queue = self._after_everything
                elif frame.kind is MessageKind.INTERNAL_CALL or frame.has_references:
                    queue = self._after_internal_calls
                may_go = queue is None or self._may_go(frame, queue[1])
                if not may_go or not frame.is_complete:  # others never wait for a frame that is handled at once
                    self._remember(frame)
                if may_go:
                    return frame
                assert queue is not None
                queue[0].append(frame)
            self._runner = None
            return None

    def _may_go(self, frame: Frame, kinds: tuple[MessageKind, ...]) -> bool:
        for kind in kinds:
            pending = self._pending[kind]
            if pending and next(iter(pending)) < frame.index:
                return False
        return True

    def _remember(self, frame: Frame) -> None:
        if frame.kind is not MessageKind.NOTICE:
            key = frame.kind, frame.call_id
            if key in self._unfinished:
                text = f"rank {self._peer} sent the {frame.kind.name} {frame.call_id} twice"
                raise ProtocolError(text, ranks=(self._peer,))
            self._unfinished[key] = frame
        self._pending[frame.kind][frame.index] = frame

    def _forget(self, frame: Frame) -> None:
        if frame.index not in self._pending[frame.kind]:
            return
        with self._lock:
            del self._pending[frame.kind][frame.index]
            if frame.kind is not MessageKind.NOTICE:
                del self._unfinished[frame.kind, frame.call_id]
