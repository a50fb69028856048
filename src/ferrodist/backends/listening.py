"""Messages of one size that keep coming, and a wait that other threads can end."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING, Protocol

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from ferrodist.backends.request import Request

__all__ = ["Listener", "LockSignal", "PostedListener", "Signal"]

_MOST_AT_ONCE = 64

_INTERRUPTION_SECONDS = 0.2
"""How long a signal of the system may go unseen that came just before a thread fell asleep."""


class Listener(Protocol):
    """Receives that are asked for ahead."""

    def close(self) -> None:
        """Hear nothing more."""


class Signal(Protocol):
    """What one thread waits for, and any other may give."""

    def set(self) -> None:
        """End the wait, or the next one."""

    def wait(self, timeout: float) -> bool:
        """Wait until it is set, for so many seconds; whether it was, and it no longer is."""


class Receiving(Protocol):
    """What a `PostedListener` needs of a backend."""

    def irecv(self, buffer: Buffer, src: int, *, tag: int = 0) -> Request:
        """Start to receive a message."""


class LockSignal:
    """A `Signal` for backends whose messages are moved by threads of their own."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """See `Signal`."""
        if self._lock.locked():
            with contextlib.suppress(RuntimeError):  # another thread has set it just now
                self._lock.release()

    def wait(self, timeout: float) -> bool:
        """See `Signal`."""
        deadline = Deadline(timeout)
        while not self._lock.acquire(timeout=min(deadline.remaining(), _INTERRUPTION_SECONDS)):
            if deadline.expired:
                return False
        return True


class PostedListener:
    """A `Listener` of any backend: one receive at a time; see `Backend.listen`."""

    def __init__(
        self,
        group: Receiving,
        where: tuple[int, int],
        size_bytes: int,
        heard: Callable[[list[bytes]], None],
        ended: Callable[[DistributedError], None],
    ) -> None:
        self._group = group
        self._src, self._tag = where
        self._heard = heard
        self._ended = ended
        self._buffer = bytearray(size_bytes)
        self._lock = threading.Lock()
        self._is_due = self._is_closed = False
        self._actor: int | None = None  # the thread that takes what has come
        self._messages: list[bytes] = []  # and was not heard
        self._request = self._post()
        self._request.add_done_callback(self._act)

    def close(self) -> None:
        """See `Listener`."""
        self._is_closed = True
        self._request.cancel()

    def _post(self) -> Request:
        return self._group.irecv(self._buffer, self._src, tag=self._tag)

    def _act(self) -> None:
        """A receive has ended: take what is there. Runs in whichever thread ended it, one at a time."""
        thread, is_mine, interruption = threading.get_ident(), False, None
        try:
            with self._lock:
                self._is_due = True
                if self._actor is not None:
                    return  # which looks again
                is_mine, self._actor = True, thread
            while self._is_wanted():
                try:
                    self._hear()
                except BaseException as error:  # noqa: BLE001, PERF203 - raised below, when nothing is left behind
                    self._is_due |= bool(self._messages) and interruption is None
                    interruption = interruption or error
        finally:
            if is_mine and self._actor == thread:
                self._actor = None
        if interruption is not None:
            raise interruption

    def _is_wanted(self) -> bool:
        with self._lock:
            if self._is_due and not self._is_closed:
                self._is_due = False
                return True
            self._actor = None
            return False

    def _hear(self) -> None:
        error = None
        if not self._messages:
            error = self._take(self._messages)
        try:
            if self._messages and not self._is_closed:
                self._heard(self._messages)
                self._messages.clear()
        finally:
            if error is None and not self._is_closed:
                self._request.add_done_callback(self._act)
        if error is not None and not self._is_closed:
            self._is_closed = True
            self._ended(error)

    def _take(self, messages: list[bytes]) -> DistributedError | None:
        try:
            while self._request.done() and len(messages) < _MOST_AT_ONCE:
                self._request.wait(math.inf)
                messages.append(bytes(self._buffer))
                self._request = self._post()
        except DistributedError as error:
            return error
        return None
