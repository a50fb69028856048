"""The comparison of calls, without waiting for it.

[Note: call ring]
Each rank sends its call, with its place among the group's, to the next rank, and compares what comes from the one
before with its own call of that place. All ranks called the same exactly if each agrees with its neighbour: one message
of `CALL_SIZE` bytes a rank and operation, which nobody waits for. So a difference is found while, or after, the GPUs
work on it: what an operation of different calls wrote is worth nothing, and the error comes with the next call or wait.

What ranks send each other in an all_to_all, compared: NCCL would write past what fits, or wait for ever.
"""

from __future__ import annotations

import struct
import threading
from functools import partial
from typing import TYPE_CHECKING

from ferrodist.backends.signature import CALL_SIZE, CollectiveSignature, fingerprint_of
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.errors import (
    CollectiveMismatchError,
    DistributedError,
    DistributedTimeoutError,
    SizeMismatchError,
    ranks_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import PersistentRecv, Request
    from ferrodist.deadline import Deadline

_CALL_TAG = channel_tag(Channel.DEVICE_CALL, 0)


class RingVerifier:
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
        self._listener: PersistentRecv | None = None

    def open(self, group: Backend) -> None:
        """Begin to listen."""
        if self._world_size > 1:
            self._listener = group.listen(self._previous, CALL_SIZE, self._hear, _on_end_of_call, tag=_CALL_TAG)

    def tell(self, group: Backend, call: CollectiveSignature) -> None:
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
            place = CollectiveSignature.decode(message).sequence
            with self._lock:
                own = self._own.pop(place, None)
                if own is None:
                    self._theirs[place] = message
            if own is not None:
                self._compare(own, message)

    def _compare(self, own: bytes, theirs: bytes) -> None:
        if fingerprint_of(own) == fingerprint_of(theirs):
            return
        mine, other = CollectiveSignature.decode(own), CollectiveSignature.decode(theirs)
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


_MESSAGE = struct.Struct("<Qqq")  # sequence, rows to the receiver, rows expected from it
_COUNT_TAG = channel_tag(Channel.DEVICE_COUNT, 0)
_LOOK_SECONDS = 0.05


class SplitSizeVerifier:
    """Compares, pair by pair, what one rank sends with what the other expects.

    A rank can't see whether another's counts are uneven, so every rank tells every other. Whose own are all equal need
    not wait for that: if the other's are, too, they fit, and if they are not, the other waits, and finds what does not.

    Args:
        group: The group.
        found: Takes the error of a difference, in any thread; must not block.
    """

    def __init__(self, group: Backend, found: Callable[[DistributedError], None]) -> None:
        self._rank, self._name = group.rank, group.name
        self._others = [rank for rank in range(group.world_size) if rank != group.rank]
        self._found = found
        self._changed = threading.Condition()
        self._listeners: list[PersistentRecv] | None = None
        self._own: dict[int, dict[int, tuple[int, int]]] = {}  # by sequence, of the ranks that have not told theirs
        self._theirs: dict[tuple[int, int], tuple[int, int]] = {}  # by sequence and rank
        self._error: DistributedError | None = None

    def tell(self, group: Backend, sequence: int, send_counts: Sequence[int], receive_counts: Sequence[int]) -> None:
        """Tell all others, and compare with what they have told or will tell."""
        if self._listeners is None:
            self._listeners = [
                group.listen(rank, _MESSAGE.size, partial(self._hear, rank), _on_end_of_counts, tag=_COUNT_TAG)
                for rank in self._others
            ]
        for rank in self._others:
            message = _MESSAGE.pack(sequence, send_counts[rank], receive_counts[rank])
            if not group.try_send(message, rank, tag=_COUNT_TAG):
                group.isend(message, rank, tag=_COUNT_TAG)
        if not self._others:
            return
        with self._changed:
            self._own[sequence] = {rank: (send_counts[rank], receive_counts[rank]) for rank in self._others}
            told = {
                rank: self._theirs.pop((sequence, rank)) for rank in self._others if (sequence, rank) in self._theirs
            }
        for rank, counts in told.items():
            self._compare(sequence, rank, counts)

    def wait(self, group: Backend, sequence: int, what: str, deadline: Deadline) -> None:
        """Return when all others have told theirs, and they fit; raises what does not."""
        with self._changed:
            while self._own.get(sequence) and self._error is None:
                if group.failure is not None:
                    raise group.failure.fresh()
                if deadline.expired:
                    late = tuple(self._own[sequence])
                    raise DistributedTimeoutError(
                        f"{what} on group {group.name!r}, operation {sequence}: {ranks_text(late)} did not say within"
                        f" {deadline.timeout:g} s how much {'it sends' if len(late) == 1 else 'they send'}. Look at"
                        f" what is going on there, or pass a larger timeout. Reported by rank {group.rank}.",
                        ranks=late,
                    )
                self._changed.wait(min(_LOOK_SECONDS, deadline.remaining()))
            if self._error is not None:
                raise self._error.fresh()

    def close(self) -> None:
        """Hear nothing more."""
        for listener in self._listeners or ():
            listener.close()

    def _hear(self, rank: int, messages: list[bytes]) -> None:
        for message in messages:
            sequence, *counts = _MESSAGE.unpack(message)
            with self._changed:
                is_known = sequence in self._own
                if not is_known:
                    self._theirs[sequence, rank] = (counts[0], counts[1])
            if is_known:
                self._compare(sequence, rank, (counts[0], counts[1]))

    def _compare(self, sequence: int, rank: int, theirs: tuple[int, int]) -> None:
        with self._changed:
            left = self._own.get(sequence, {})
            if rank not in left:
                return  # it has told of this operation already, as no rank does
            sent, expected = left.pop(rank)
            if not left:
                del self._own[sequence]
            to_here, from_here = theirs
            if to_here != expected:
                self._error = self._mismatch(sequence, (rank, to_here), (self._rank, expected))
            elif from_here != sent:
                self._error = self._mismatch(sequence, (self._rank, sent), (rank, from_here))
            error = self._error
            self._changed.notify_all()
        if error is not None:
            self._found(error)

    def _mismatch(self, sequence: int, sends: tuple[int, int], expects: tuple[int, int]) -> SizeMismatchError:
        """The error of a rank that sends another number than a rank expects."""
        (sender, sent), (receiver, expected) = sends, expects
        return SizeMismatchError(
            f"all_to_all on GPU tensors in group {self._name!r}, operation {sequence}: rank {receiver} expects"
            f" {expected} {'row' if expected == 1 else 'rows'} from rank {sender} (recv_counts[{sender}]), which"
            f" sends it {sent} (its send_counts[{receiver}]): they must be equal.",
            ranks=(sender,),
        )


def _on_end_of_counts(error: DistributedError) -> None:
    """The group has ended, which who waits sees by itself."""
    del error
