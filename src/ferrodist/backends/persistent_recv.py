"""Persistent receives, and the events by which they wake the threads that wait for their messages."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError

if TYPE_CHECKING:
    from ferrodist.backends.request import Request

OnMessages = Callable[[list[bytes]], None]
OnEnd = Callable[[DistributedError], None]

_MAX_BATCH = 64
_INTERRUPTION_SECONDS = 0.2  # how long a signal may go unnoticed that came just before a thread fell asleep


class PersistentRecv(Protocol):
    """Receives that are posted ahead, as by MPI_Recv_init."""

    def close(self) -> None:
        """Stop receiving."""


class WaitEvent(Protocol):
    """An event that one thread waits for and any other may set."""

    def set(self) -> None:
        """End the current wait, or the next one."""

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until the event is set, and clear it; whether it was set.

        Where waiting threads drive progress, as in a native group, the waiting thread moves the group's messages and
        runs the callbacks of persistent receives.
        """


class LockWaitEvent:
    """A `WaitEvent` for backends whose own threads move the messages."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """End the current wait, or the next one."""
        if self._lock.locked():
            with contextlib.suppress(RuntimeError):  # another thread set it just now
                self._lock.release()

    def wait(self, timeout: float) -> bool:
        """Wait for the event, and clear it; see `WaitEvent.wait`."""
        deadline = Deadline(timeout)
        while not self._lock.acquire(timeout=min(deadline.remaining(), _INTERRUPTION_SECONDS)):
            if deadline.expired:
                return False
        return True


class PostedPersistentRecv:
    """A `PersistentRecv` of any backend, which posts one receive at a time by ``post(buffer)``."""

    def __init__(self, post: Callable[[bytearray], Request], size_bytes: int, heard: OnMessages, ended: OnEnd) -> None:
        self._post_receive = post
        self._on_messages = heard
        self._on_end = ended
        self._buffer = bytearray(size_bytes)
        self._lock = threading.Lock()
        self._is_due = self._is_closed = False
        self._active_thread: int | None = None  # the thread that takes messages
        self._messages: list[bytes] = []  # taken and not delivered
        self._request = self._post_receive(self._buffer)
        self._request.add_done_callback(self._on_receive_done)

    def close(self) -> None:
        """Stop receiving."""
        self._is_closed = True
        self._request.cancel()

    def _on_receive_done(self) -> None:
        """Take the messages that are there. Runs in the thread that ended a receive, in one at a time."""
        thread, is_active, interruption = threading.get_ident(), False, None
        try:
            with self._lock:
                self._is_due = True
                if self._active_thread is not None:
                    return  # which checks again
                is_active, self._active_thread = True, thread
            while self._is_wanted():
                try:
                    self._deliver()
                except BaseException as error:  # noqa: BLE001, PERF203 - raised below, once all is delivered
                    self._is_due |= bool(self._messages) and interruption is None
                    interruption = interruption or error
        finally:
            if is_active and self._active_thread == thread:
                self._active_thread = None
        if interruption is not None:
            raise interruption

    def _is_wanted(self) -> bool:
        with self._lock:
            if self._is_due and not self._is_closed:
                self._is_due = False
                return True
            self._active_thread = None
            return False

    def _deliver(self) -> None:
        error = None
        if not self._messages:
            error = self._take(self._messages)
        try:
            if self._messages and not self._is_closed:
                self._on_messages(self._messages)
                self._messages.clear()
        finally:
            if self._is_closed:
                self._request.cancel()  # `close` may have cancelled the one before
            elif error is None:
                self._request.add_done_callback(self._on_receive_done)
        if error is not None and not self._is_closed:
            self._is_closed = True
            self._on_end(error)

    def _take(self, messages: list[bytes]) -> DistributedError | None:
        try:
            while self._request.done() and len(messages) < _MAX_BATCH:
                self._request.wait(math.inf)
                messages.append(bytes(self._buffer))
                self._request = self._post_receive(self._buffer)
        except DistributedError as error:
            return error
        return None
