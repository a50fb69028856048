"""The engine's failures, as public errors."""

from __future__ import annotations

import os
import struct
import sys
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from ferrodist.backends.abort_reason import pack_reason, unpack_reason
from ferrodist.backends.native.binding import call_of_line
from ferrodist.deadline import Deadline, Elapsed
from ferrodist.errors import (
    BackendUnavailable,
    DistributedError,
    DistributedTimeoutError,
    GroupAbortedError,
    PeerLostError,
    ProtocolError,
    SizeMismatchError,
    UnsupportedOpError,
    ranks_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend
    from ferrodist.backends.signature import CollectiveSignature

_NEWS_SECONDS = 0.1
_LONGEST_NEWS_SECONDS = 1.0
_SENT_AND_EXPECTED = struct.Struct("=QQ")
_MAX_REASON = 3000  # characters of a message, and
_MAX_RANKS = 100  # ranks, so that a record fits the shared memory


class FailureKind(IntEnum):
    """`FailureKind` of native/base/failure.h."""

    LATE = 0
    STALLED = 1
    LEFT = 2
    MISMATCH = 3
    SIZES = 4
    ABORTED = 5
    STOPPED = 6
    BROKEN = 7
    QUEUED = 8
    UNSUPPORTED = 9
    LOST = 10
    PROTOCOL = 11
    FAILED = 12
    UNREADABLE = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """A failure with all that is known of it."""

    group: Backend
    call: CollectiveSignature
    ranks: tuple[int, ...]
    record: bytes
    elapsed: Elapsed

    @property
    def where(self) -> str:
        return f"{self.call} on group {self.group.name!r}, operation {self.call.sequence}"


def public_error(group: Backend, failure: Exception, call: CollectiveSignature, timeout: float) -> DistributedError:
    """What a failure of ``call`` in the engine is called in public."""
    kind, ranks, record, place, elapsed = failure.args
    failed = _Failed(group=group, call=call.at(place), ranks=ranks, record=record, elapsed=Elapsed(elapsed, timeout))
    return _ERRORS[FailureKind(kind)](failed)


def abort_record(error: DistributedError) -> bytes:
    """An error as the other ranks of this host are told it."""
    return pack_reason(error, letters=_MAX_REASON, ranks=_MAX_RANKS)


def queued_error(group: Backend, call: CollectiveSignature, elapsed: Elapsed) -> DistributedTimeoutError:
    """The error of a call that was not reached, for one before it has not ended."""
    return DistributedTimeoutError(
        f"{call} on group {group.name!r}, operation {call.sequence}: a collective that rank {group.rank} started before"
        f" it has not ended, after {elapsed}",
        ranks=(group.rank,),
    )


def _late(failed: _Failed) -> DistributedError:
    return failed.group.verifier.late_error(failed.call, failed.ranks, failed.elapsed)


def _stalled(failed: _Failed) -> DistributedError:
    return DistributedTimeoutError(
        f"{failed.where}: {ranks_text(failed.ranks)} called it and did not go on, after {failed.elapsed}. Look at what"
        f" is going on there, or pass a larger timeout. Reported by rank {failed.group.rank}.",
        ranks=failed.ranks,
    )


def _left(failed: _Failed) -> DistributedError:
    own = failed.group.rank
    return PeerLostError(
        f"{failed.call}, operation {failed.call.sequence}: rank {failed.ranks[0]} of group {failed.group.name!r} has"
        f" left: it closed the group while rank {own} still needed it",
        ranks=failed.ranks,
    )


def _lost(failed: _Failed) -> DistributedError:
    # The group's own connections say whether it left or died; they may take a moment longer to hear of it.
    return _news(failed.group, _NEWS_SECONDS) or PeerLostError(
        f"{failed.call}, operation {failed.call.sequence}: rank {failed.ranks[0]} of group {failed.group.name!r} has"
        f" left or died: its connection to rank {failed.group.rank} has ended",
        ranks=failed.ranks,
    )


def _failed_there(failed: _Failed) -> DistributedError:
    return _news(failed.group, _LONGEST_NEWS_SECONDS) or GroupAbortedError(
        f"{failed.where}: it has failed on {ranks_text(failed.ranks)}, which did not say why", ranks=failed.ranks
    )


def _news(group: Backend, patience: float) -> DistributedError | None:
    """Why the group has failed, as soon as its own connections tell."""
    deadline = Deadline(patience)
    while group.failure is None and not deadline.expired:
        time.sleep(_NEWS_SECONDS / 100)
    return group.failure


def _unreadable(failed: _Failed) -> DistributedError:
    number = int.from_bytes(failed.record, sys.byteorder, signed=True)
    own, peer = failed.group.rank, failed.ranks[0]
    # A rank that ends may be taken for it in passing.
    return _news(failed.group, _NEWS_SECONDS) or BackendUnavailable(
        f"{failed.where}: the system no longer lets rank {own} read the memory of rank {peer}, as it did when they met"
        f" (process_vm_readv: {os.strerror(number)}, errno {number}). Ranks that change their user or who may trace"
        " them (setuid, prctl) must do so before they make a group.",
        ranks=failed.ranks,
    )


def _protocol(failed: _Failed) -> DistributedError:
    return ProtocolError(
        f"{failed.where}: {ranks_text(failed.ranks)} sent {failed.record.decode(errors='replace')}", ranks=failed.ranks
    )


def _mismatch(failed: _Failed) -> DistributedError:
    size = len(failed.record) // failed.group.world_size
    lines = [failed.record[start : start + size] for start in range(0, len(failed.record), size)]
    return failed.group.verifier.mismatch_error([call_of_line(line, failed.call.sequence) for line in lines])


def _sizes(failed: _Failed) -> DistributedError:
    sent, expected = (elements // failed.call.count for elements in _SENT_AND_EXPECTED.unpack(failed.record))
    own, peer = failed.group.rank, failed.ranks[0]
    return SizeMismatchError(
        f"{failed.where}: rank {own} expects {expected} {'row' if expected == 1 else 'rows'} from rank {peer}"
        f" (recv_counts[{peer}]), which sends it {sent} (its send_counts[{own}]): they must be equal.",
        ranks=failed.ranks,
    )


def _aborted(failed: _Failed) -> DistributedError:
    if not failed.record:  # who wrote it was killed before it had
        return _ended(failed)
    try:
        return unpack_reason(failed.record, failed.group.world_size)
    except ValueError as error:
        return ProtocolError(f"{failed.where}: a rank of this host ended it with {error}")


def _ended(failed: _Failed) -> DistributedError:
    own = failed.group.rank
    return GroupAbortedError(f"{failed.where}: the group has ended on this rank ({own})", ranks=(own,))


def _queued(failed: _Failed) -> DistributedError:
    return queued_error(failed.group, failed.call, failed.elapsed)


def _unsupported(failed: _Failed) -> DistributedError:
    return UnsupportedOpError(f"{failed.where}: the native engine can't do it")


_ERRORS: dict[FailureKind, Callable[[_Failed], DistributedError]] = {
    FailureKind.LATE: _late,
    FailureKind.STALLED: _stalled,
    FailureKind.LEFT: _left,
    FailureKind.MISMATCH: _mismatch,
    FailureKind.SIZES: _sizes,
    FailureKind.ABORTED: _aborted,
    FailureKind.STOPPED: _ended,
    FailureKind.BROKEN: _ended,
    FailureKind.QUEUED: _queued,
    FailureKind.UNSUPPORTED: _unsupported,
    FailureKind.LOST: _lost,
    FailureKind.PROTOCOL: _protocol,
    FailureKind.FAILED: _failed_there,
    FailureKind.UNREADABLE: _unreadable,
}
