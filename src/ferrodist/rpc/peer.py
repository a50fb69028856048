"""Peers: the ranks that an agent calls and is called by, which include the rank itself."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.errors import DistributedError
from ferrodist.rpc.messages import NO_NUMBER, Call, Content, MessageKind, pack_call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.request import WaitEvent
    from ferrodist.rpc.executor import Executor, WaitEvents
    from ferrodist.rpc.large_messages import TensorPool

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
        return timeout > 0 and self._wait(time.monotonic() + timeout)

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

    def _wait(self, end: float) -> bool:
        event = self._wait_events.current()
        with self._lock:
            self._waiting.append(event)
        has_slot = False
        try:
            while not (has_slot := self._take()) and (left := end - time.monotonic()) > 0:
                event.wait(min(left, _POLL_INTERVAL_SECONDS))
        finally:
            with self._lock:
                self._waiting.remove(event)
        return has_slot

    def _take(self) -> bool:
        with self._lock:
            self._are_woken = False
            if self._num_free <= 0:
                return False
            self._num_free -= 1
            return True


class IncomingCall:
    """A call by a peer, until it is answered; `RpcServer` serves it."""

    def __init__(self, peer: Peer, number: int | None, content: Content) -> None:
        self.peer = peer
        self.number = number  # among the caller's calls; None for a notice, which has no response
        self.content: Content | None = content  # the packed call, or
        self.call: Call | None = None  # the unpacked one, until it is served
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

    Methods must not block: until they return, nothing else is received.
    """

    def on_message(self, peer: Peer, kind: MessageKind, number: int, content: Content) -> None:
        """Handle a message."""

    def on_cancelled_message(self, peer: Peer, number: int, content: Content) -> None:
        """Refuse a call that was cancelled while its tensors were on their way, which may have changed."""

    def on_undecodable(self, peer: Peer, kind: MessageKind, number: int, error: DistributedError) -> None:
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
    """A rank that is called, and makes calls here."""

    def __init__(self, rank: int, options: PeerOptions, handler: MessageHandler) -> None:
        self.rank = rank
        self.window = CallWindow(options.max_outstanding, options.executor.wait_events)
        self.incoming: dict[int, IncomingCall] = {}  # the peer's calls that are not answered, by number
        self.internal_lock = threading.RLock()  # held while an internal call of the peer is handled
        self.internal_thread: int | None = None  # the thread that handles one
        self.deferred: list[tuple[int, Any]] = []  # results of internal calls, to be sent once the lock is released
        self.is_lost = False  # whether internal calls are handled no more
        self._handler = handler

    @abstractmethod
    def send(self, kind: MessageKind, number: int, content: Content) -> None:
        """Send a message; its tensors must not be changed until it has arrived.

        Raises ValueError if it is too large, TypeError if a tensor can't be sent, DistributedError if the peer was
        lost.
        """

    def notify(self, name: str, *arguments: Any) -> None:
        """Send an internal call of plain values that has no response; a peer that is lost is passed over."""
        with contextlib.suppress(DistributedError):
            self.send(MessageKind.NOTICE, NO_NUMBER, pack_call(Call(name, arguments, {}), ()))

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

    def send(self, kind: MessageKind, number: int, content: Content) -> None:
        """Handle a message of this rank's own."""
        self._handler.on_message(self, kind, number, content)
