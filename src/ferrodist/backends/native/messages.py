"""Messages through the engine: its part of a mailbox, and its requests."""

from __future__ import annotations

import atexit
import weakref
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrodist.backends.tags import group_tag
from ferrodist.deadline import check_timeout
from ferrodist.errors import DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.mailbox import Message
    from ferrodist.backends.native.backend import NativeBackend
    from ferrodist.backends.request import Late
    from ferrodist.errors import DistributedError

__all__ = ["NativeMailbox", "NativeRequest", "Outcome", "close_at_exit"]


class Outcome(IntEnum):
    """`Outcome` of native/engine/transfer.h."""

    UNDER_WAY = 0
    DONE = 1
    WRONG_SIZE = 2
    CANCELLED = 3
    ENDED = 4


class _Waiting(NamedTuple):
    """What `MailboxBackend` looks at of a message that waits."""

    source: int
    tag: int


class NativeMailbox:
    """The `Inbox` of messages that come over connections: in the engine they meet those from shared memory.

    Args:
        messenger: The engine's part.
    """

    def __init__(self, messenger: Any) -> None:
        self._messenger = messenger

    @property
    def unasked_bytes(self) -> int:
        """See `Inbox`."""
        return int(self._messenger.unasked_bytes())

    def arrive(self, message: Message) -> bool:
        """See `Inbox`."""
        return bool(self._messenger.arrive(message))

    def write(self, message: Message, fill: Callable[[memoryview], int], start: int, stop: int) -> int:
        """See `Inbox`. ``fill`` runs without a lock, and a receive that is cancelled meanwhile waits for it."""
        target = self._messenger.begin_write(message, start, stop)
        count = 0
        try:
            count = fill(memoryview(bytearray(stop - start)) if target is None else target)
        finally:
            self._messenger.end_write(message, count)
        return count

    def withdraw(self, message: Message) -> None:
        """See `Inbox`."""
        self._messenger.withdraw(message)

    def forget(self, applies: Callable[[Message], bool]) -> None:
        """See `Inbox`."""
        for number, source, group, tag in self._messenger.waiting_messages():
            if applies(_Waiting(source, group_tag(group, tag))):  # type: ignore[arg-type]
                self._messenger.drop(number)

    def fullest_source(self, newest: Message) -> int:
        """See `Inbox`."""
        return int(self._messenger.fullest_source(newest.source, 0 if newest.grant else newest.size_bytes))


class NativeRequest:
    """A `Request` of a transfer in the engine.

    Args:
        backend: Its group.
        request: The engine's part.
        group_id: What it is of: the group itself, or a sub-group.
        size_bytes: Of its buffer.
    """

    __slots__ = ("__weakref__", "_backend", "_group_id", "_request", "_size_bytes")

    def __init__(self, backend: NativeBackend, request: Any, group_id: int, size_bytes: int) -> None:
        self._backend = backend
        self._request = request
        self._group_id = group_id
        self._size_bytes = size_bytes

    @property
    def peer(self) -> int:
        """The rank of the other side; `ANY_SOURCE` until it is known."""
        return int(self._request.peer)

    @property
    def error(self) -> DistributedError | None:
        """What the transfer ended with, if it has ended and not well."""
        return self._backend.ending_error(self._request.ending(), self._group_id, self._size_bytes)

    def wait(self, timeout: float) -> int:
        """Block until done; see `Request.wait`."""
        if not self._request.wait(check_timeout(timeout)):
            if self._backend.is_ended:  # just now, or in a forked child, where nothing else ends it
                assert self._backend.failure is not None
                raise self._backend.failure.fresh()
            whom, ranks = (f"rank {self.peer}", (self.peer,)) if self.peer >= 0 else ("any rank", ())
            raise DistributedTimeoutError(f"no transfer with {whom} within {timeout:g} s", ranks=ranks)
        error = self.error
        if error is not None:
            raise error.fresh()
        return self.peer

    def done(self) -> bool:
        """Whether the transfer has ended, well or not."""
        return bool(self._request.done())

    def cancel(self) -> bool:
        """Give the transfer up; see `Request.cancel`."""
        return bool(self._request.cancel())

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once when done, at once if it is; it must not block or raise."""
        self._request.add_done_callback(callback)

    def find_late(self, peers: tuple[int, ...], within: float) -> Late:
        """Ask the group; see `Backend.find_late`."""
        return self._backend.find_late(peers, within)


_messengers: weakref.WeakSet[NativeBackend] = weakref.WeakSet()


def close_at_exit(backend: NativeBackend) -> None:
    """Have the engine's thread of a group end before the interpreter does, which it calls."""
    _messengers.add(backend)


@atexit.register
def _close_all() -> None:
    for backend in list(_messengers):
        backend.close_messages()
