"""The comparison of calls, without waiting for it.

[Note: call ring]
Each rank sends its call, with its place among the group's, to the next rank, and compares what comes from the one
before with its own call of that place. All ranks called the same exactly if each agrees with its neighbour: one message
of `CALL_SIZE` bytes a rank and operation, which nobody waits for. So a difference is found while, or after, the GPUs
work on it: what an operation of different calls wrote is worth nothing, and the error comes with the next call or wait.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ferrodist.backends.call import CALL_SIZE, Call, fingerprint_of
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.errors import CollectiveMismatchError, DistributedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend
    from ferrodist.backends.listening import Listener
    from ferrodist.backends.request import Request

__all__ = ["CallRing"]

_CALL_TAG = channel_tag(Channel.DEVICE_CALL, 0)


class CallRing:
    """This rank's place in the comparison of a group's calls; see [Note: call ring].

    Args:
        group: The group.
        found: Takes the error of a difference, in any thread; must not block.
    """

    def __init__(self, group: Backend, found: Callable[[CollectiveMismatchError], None]) -> None:
        self._group_name, self._rank, self._world_size = group.name, group.rank, group.world_size
        self._next, self._previous = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
        self._found = found
        self._lock = threading.Lock()
        self._own: dict[int, bytes] = {}
        self._theirs: dict[int, bytes] = {}
        self._unsent: list[Request] = []
        self._listener: Listener | None = None

    def open(self, group: Backend) -> None:
        """Begin to listen."""
        if self._world_size > 1:
            self._listener = group.listen(self._previous, CALL_SIZE, self._hear, _on_end_of_call, tag=_CALL_TAG)

    def tell(self, group: Backend, call: Call) -> None:
        """Send this rank's call to the next rank, and compare it with the previous rank's if that has come."""
        if self._world_size == 1:
            return
        record = call.encode()
        self._unsent = [request for request in self._unsent if not request.done()]
        # Messages that went another way before could be overtaken; places are compared, so that would do no harm.
        if not group.try_send(record, self._next, tag=_CALL_TAG):
            request = group.isend(record, self._next, tag=_CALL_TAG)
            if not request.done():
                self._unsent.append(request)
        with self._lock:
            theirs = self._theirs.pop(call.sequence, None)
            if theirs is None:
                self._own[call.sequence] = record
        if theirs is not None:
            self._compare(record, theirs)

    @property
    def num_uncompared(self) -> int:
        """How many calls of this rank have not been compared yet."""
        return len(self._own)

    def is_compared(self, sequence: int) -> bool:
        """Whether a call of this rank has been compared."""
        return sequence not in self._own

    def close(self) -> None:
        """Hear nothing more."""
        if self._listener is not None:
            self._listener.close()

    def _hear(self, messages: list[bytes]) -> None:
        for message in messages:
            place = Call.decode(message).sequence
            with self._lock:
                own = self._own.pop(place, None)
                if own is None:
                    self._theirs[place] = message
            if own is not None:
                self._compare(own, message)

    def _compare(self, own: bytes, theirs: bytes) -> None:
        if fingerprint_of(own) == fingerprint_of(theirs):
            return
        mine, other = Call.decode(own), Call.decode(theirs)
        self._found(
            CollectiveMismatchError(
                f"the ranks of group {self._group_name!r} disagree about operation {mine.sequence} on GPU tensors: rank"
                f" {self._previous} called {other}; rank {self._rank} called {mine}. Every rank must make the same"
                " collective calls in the same order. What these calls wrote is worth nothing.",
                ranks=tuple(sorted((self._previous, self._rank))),
            )
        )


def _on_end_of_call(error: DistributedError) -> None:
    """The group has ended, which the watch sees by itself."""
    del error
