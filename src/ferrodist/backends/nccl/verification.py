"""Compare the ranks' calls on GPU tensors, without waiting: calls around a ring, split sizes of all_to_all in pairs.

[Note: call ring]
Each rank sends its call, with its sequence number, to the next rank, and compares the previous rank's call with its own
of that number. All ranks made the same call exactly if each agrees with its neighbour: one message of `RECORD_BYTES`
bytes per rank and operation, which nobody waits for. So a difference is found while, or after, the GPUs do the
operation: what mismatched calls wrote is worthless, and the error is raised by the next call or wait.
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING

from ferrodist.backends.nccl.control_messages import post_persistent_recvs, send_without_waiting
from ferrodist.backends.signature import RECORD_BYTES, CollectiveSignature, fingerprint_of
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
    from ferrodist.backends.persistent_recv import PersistentRecv
    from ferrodist.backends.request import Request
    from ferrodist.deadline import Deadline

_CALL_TAG = channel_tag(Channel.DEVICE_CALL, 0)


class RingVerifier:
    """Compares this rank's calls with the previous rank's; see [Note: call ring].

    ``on_mismatch(error)`` is called in any thread and must not block. Its methods take the group, which it does not
    keep: its receives would else keep a dropped group alive.
    """

    def __init__(self, group: Backend, on_mismatch: Callable[[CollectiveMismatchError], None]) -> None:
        self._group_name, self._rank, self._world_size = group.name, group.rank, group.world_size
        self._next, self._previous = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
        self._on_mismatch = on_mismatch
        self._lock = threading.Lock()
        self._own: dict[int, bytes] = {}  # by sequence number: not compared yet, as the next
        self._theirs: dict[int, bytes] = {}
        self._unsent: list[Request] = []
        self._listeners: list[PersistentRecv] = []

    def open(self, group: Backend) -> None:
        """Begin to listen to the previous rank."""
        if self._world_size > 1:
            self._listeners = post_persistent_recvs(
                group, [self._previous], self._on_messages, tag=_CALL_TAG, size_bytes=RECORD_BYTES
            )

    def send(self, group: Backend, call: CollectiveSignature) -> None:
        """Send a call to the next rank, and compare it with the previous rank's if that has come."""
        if self._world_size == 1:
            return
        record = call.encode()
        self._unsent = [request for request in self._unsent if not request.done()]
        # A call may overtake one that was sent by `isend`; calls are matched by sequence number, so that does no harm.
        request = send_without_waiting(group, record, self._next, _CALL_TAG)
        if request is not None and not request.done():
            self._unsent.append(request)
        with self._lock:
            theirs = self._theirs.pop(call.sequence, None)
            if theirs is None:
                self._own[call.sequence] = record
        if theirs is not None:
            self._compare(record, theirs)

    @property
    def num_uncompared(self) -> int:
        """The number of this rank's calls that have not been compared yet."""
        return len(self._own)

    def is_compared(self, sequence: int) -> bool:
        """Return whether a call of this rank has been compared."""
        return sequence not in self._own

    def close(self) -> None:
        """Stop listening."""
        for listener in self._listeners:
            listener.close()

    def _on_messages(self, _rank: int, messages: list[bytes]) -> None:
        for message in messages:
            sequence = CollectiveSignature.decode(message).sequence
            with self._lock:
                own = self._own.pop(sequence, None)
                if own is None:
                    self._theirs[sequence] = message
            if own is not None:
                self._compare(own, message)

    def _compare(self, own: bytes, theirs: bytes) -> None:
        if fingerprint_of(own) == fingerprint_of(theirs):
            return
        mine, other = CollectiveSignature.decode(own), CollectiveSignature.decode(theirs)
        self._on_mismatch(
            CollectiveMismatchError(
                f"the ranks of group {self._group_name!r} disagree about operation {mine.sequence} on GPU tensors: rank"
                f" {self._previous} called {other}; rank {self._rank} called {mine}. Every rank must make the same"
                " collective calls in the same order. What these calls wrote is worth nothing.",
                ranks=tuple(sorted((self._previous, self._rank))),
            )
        )


_MESSAGE = struct.Struct("<Qqq")  # sequence number, rows sent to the receiver, rows expected from it
_COUNT_TAG = channel_tag(Channel.DEVICE_COUNT, 0)
_POLL_INTERVAL_SECONDS = 0.05


class SplitSizeVerifier:
    """Compares, pair by pair, the rows that one rank sends in an all_to_all with those that the other expects.

    NCCL would write past the end of a smaller tensor, or wait for ever. A rank can't know whether another's counts are
    uneven, so every rank sends its own to every other. A rank whose counts are all equal need not wait for the others':
    equal ones fit, and a rank with uneven ones waits, and finds the difference.

    ``on_mismatch(error)`` is called in any thread and must not block.
    """

    def __init__(self, group: Backend, on_mismatch: Callable[[DistributedError], None]) -> None:
        self._rank, self._name = group.rank, group.name
        self._others = [rank for rank in range(group.world_size) if rank != group.rank]
        self._on_mismatch = on_mismatch
        self._changed = threading.Condition()
        self._listeners: list[PersistentRecv] | None = None
        self._own: dict[int, dict[int, tuple[int, int]]] = {}  # by sequence number, then rank: not compared yet
        self._theirs: dict[tuple[int, int], tuple[int, int]] = {}  # by sequence number and rank
        self._error: DistributedError | None = None

    def send(self, group: Backend, sequence: int, send_counts: Sequence[int], receive_counts: Sequence[int]) -> None:
        """Send this rank's counts, in rows, to all others, and compare them with theirs as these come."""
        if self._listeners is None:
            self._listeners = post_persistent_recvs(
                group, self._others, self._on_messages, tag=_COUNT_TAG, size_bytes=_MESSAGE.size
            )
        for rank in self._others:
            send_without_waiting(
                group, _MESSAGE.pack(sequence, send_counts[rank], receive_counts[rank]), rank, _COUNT_TAG
            )
        if not self._others:
            return
        with self._changed:
            self._own[sequence] = {rank: (send_counts[rank], receive_counts[rank]) for rank in self._others}
            received = {
                rank: self._theirs.pop((sequence, rank)) for rank in self._others if (sequence, rank) in self._theirs
            }
        for rank, counts in received.items():
            self._compare(sequence, rank, counts)

    def wait(self, group: Backend, sequence: int, what: str, deadline: Deadline) -> None:
        """Wait until every other rank's counts have come and fit; raises the error of a difference."""
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
                self._changed.wait(min(_POLL_INTERVAL_SECONDS, deadline.remaining()))
            if self._error is not None:
                raise self._error.fresh()

    def _on_messages(self, rank: int, messages: list[bytes]) -> None:
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
            uncompared = self._own.get(sequence, {})
            if rank not in uncompared:
                return  # a second message about this operation, which no rank sends
            sent, expected = uncompared.pop(rank)
            if not uncompared:
                del self._own[sequence]
            to_here, from_here = theirs
            if to_here != expected:
                self._error = self._mismatch_error(sequence, (rank, to_here), (self._rank, expected))
            elif from_here != sent:
                self._error = self._mismatch_error(sequence, (self._rank, sent), (rank, from_here))
            error = self._error
            self._changed.notify_all()
        if error is not None:
            self._on_mismatch(error)

    def _mismatch_error(self, sequence: int, sends: tuple[int, int], expects: tuple[int, int]) -> SizeMismatchError:
        """The error of a rank that sends a number of rows other than its receiver expects."""
        (sender, sent), (receiver, expected) = sends, expects
        return SizeMismatchError(
            f"all_to_all on GPU tensors in group {self._name!r}, operation {sequence}: rank {receiver} expects"
            f" {expected} {'row' if expected == 1 else 'rows'} from rank {sender} (recv_counts[{sender}]), which"
            f" sends it {sent} (its send_counts[{receiver}]): they must be equal.",
            ranks=(sender,),
        )
