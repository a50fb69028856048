"""Public errors for the failures of the compiled engine."""

from __future__ import annotations

import os
import struct
import sys
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from ferrodist.backends.abort_reason import pack_reason, unpack_reason
from ferrodist.backends.native.binding import signature_of_record
from ferrodist.backends.signature import FAILED_PROGRAM
from ferrodist.backends.verification import queued_error
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

_NOTICE_SECONDS = 0.1
_MAX_NOTICE_SECONDS = 1.0
_SENT_AND_EXPECTED = struct.Struct("=QQ")
_MAX_CHARACTERS, _MAX_RANKS = 3000, 100  # of an error, so that its record fits the shared memory


class FailureKind(IntEnum):
    """`FailureKind` of native/base/failure.h, with the fields of a `Failure` that matter."""

    LATE = 0  # the deadline passed; `ranks` have not called the collective
    STALLED = 1  # the deadline passed; `ranks` have called the collective and are stuck in it
    LEFT = 2  # `ranks` have left the group
    MISMATCH = 3  # the ranks made different calls; `record` holds every rank's call
    SIZES = 4  # the number of elements from `ranks` differs from the expected one; `record` is both, as uint64
    ABORTED = 5  # the group was aborted on all ranks; `record` is the reason given to `abort`
    STOPPED = 6  # this rank has left the group
    BROKEN = 7  # an earlier operation failed on this rank
    QUEUED = 8  # an operation started earlier has not ended in time
    UNSUPPORTED = 9  # the engine does not support the operation
    LOST = 10  # the connection to `ranks` has ended
    PROTOCOL = 11  # `ranks` violated the protocol; `record` says how
    FAILED = 12  # a collective has failed on `ranks`, which report the reason over the control plane
    UNREADABLE = 13  # the kernel now refuses to read the memory of `ranks`; `record` is the errno, as int32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """A failure and its circumstances."""

    group: Backend
    call: CollectiveSignature
    ranks: tuple[int, ...]
    record: bytes
    elapsed: Elapsed

    @property
    def where(self) -> str:
        return f"{self.call} on group {self.group.name!r}, operation {self.call.sequence}"


def public_error(group: Backend, failure: Exception, call: CollectiveSignature, timeout: float) -> DistributedError:
    """The public error of a failure of ``call`` in the engine."""
    kind, ranks, record, sequence, elapsed = failure.args
    failed = _Failed(group=group, call=call.at(sequence), ranks=ranks, record=record, elapsed=Elapsed(elapsed, timeout))
    return _ERRORS[FailureKind(kind)](failed)


def abort_record(error: DistributedError) -> bytes:
    """Encode an error for the other ranks of this host."""
    return pack_reason(error, max_characters=_MAX_CHARACTERS, max_ranks=_MAX_RANKS)


def _stalled_error(failed: _Failed) -> DistributedError:
    return DistributedTimeoutError(
        f"{failed.where}: {ranks_text(failed.ranks)} called it and did not go on, after {failed.elapsed}. Look at what"
        f" is going on there, or pass a larger timeout. Reported by rank {failed.group.rank}.",
        ranks=failed.ranks,
    )


def _left_error(failed: _Failed) -> DistributedError:
    own = failed.group.rank
    return PeerLostError(
        f"{failed.call}, operation {failed.call.sequence}: rank {failed.ranks[0]} of group {failed.group.name!r} has"
        f" left: it closed the group while rank {own} still needed it",
        ranks=failed.ranks,
    )


def _lost_error(failed: _Failed) -> DistributedError:
    # The control plane knows whether it left or died, but may learn of it a moment later.
    return _await_failure(failed.group, _NOTICE_SECONDS) or PeerLostError(
        f"{failed.call}, operation {failed.call.sequence}: rank {failed.ranks[0]} of group {failed.group.name!r} has"
        f" left or died: its connection to rank {failed.group.rank} has ended",
        ranks=failed.ranks,
    )


def _remote_failure_error(failed: _Failed) -> DistributedError:
    return _await_failure(failed.group, _MAX_NOTICE_SECONDS) or GroupAbortedError(
        f"{failed.where}: it has failed on {ranks_text(failed.ranks)}, which gave no reason", ranks=failed.ranks
    )


def _await_failure(group: Backend, patience: float) -> DistributedError | None:
    """The group's failure, as soon as the control plane knows it; None after ``patience`` seconds."""
    deadline = Deadline(patience)
    while group.failure is None and not deadline.expired:
        time.sleep(_NOTICE_SECONDS / 100)
    return group.failure


def _unreadable_error(failed: _Failed) -> DistributedError:
    number = int.from_bytes(failed.record, sys.byteorder, signed=True)
    own, peer = failed.group.rank, failed.ranks[0]
    # A rank that is ending may look the same for a moment.
    return _await_failure(failed.group, _NOTICE_SECONDS) or BackendUnavailable(
        f"{failed.where}: the system no longer lets rank {own} read the memory of rank {peer}, as it did when the"
        f" group was made (process_vm_readv: {os.strerror(number)}, errno {number}). Ranks that change their user or"
        " who may trace them (setuid, prctl) must do so before they make a group.",
        ranks=failed.ranks,
    )


def _protocol_error(failed: _Failed) -> DistributedError:
    return ProtocolError(
        f"{failed.where}: {ranks_text(failed.ranks)} sent {failed.record.decode(errors='replace')}", ranks=failed.ranks
    )


def _mismatch_error(failed: _Failed) -> DistributedError:
    size = len(failed.record) // failed.group.world_size
    lines = [failed.record[start : start + size] for start in range(0, len(failed.record), size)]
    calls = [signature_of_record(line, failed.call.sequence) for line in lines]
    if any(call.operation == FAILED_PROGRAM for call in calls):
        # A record has no payload. The rank whose program failed knows the reason, and ends the group with it.
        if failed.call.operation != FAILED_PROGRAM and (reason := _await_failure(failed.group, _MAX_NOTICE_SECONDS)):
            return reason
        calls[failed.group.rank] = failed.call
    return failed.group.verifier.mismatch_error(calls)


def _sizes_error(failed: _Failed) -> DistributedError:
    sent, expected = (elements // failed.call.count for elements in _SENT_AND_EXPECTED.unpack(failed.record))
    own, peer = failed.group.rank, failed.ranks[0]
    return SizeMismatchError(
        f"{failed.where}: rank {own} expects {expected} {'row' if expected == 1 else 'rows'} from rank {peer}"
        f" (recv_counts[{peer}]), which sends it {sent} (its send_counts[{own}]): they must be equal.",
        ranks=failed.ranks,
    )


def _aborted_error(failed: _Failed) -> DistributedError:
    if not failed.record:  # its writer was killed while it wrote
        return _ended_error(failed)
    try:
        return unpack_reason(failed.record, failed.group.world_size)
    except ValueError as error:
        return ProtocolError(f"{failed.where}: a rank of this host ended it with {error}")


def _ended_error(failed: _Failed) -> DistributedError:
    own = failed.group.rank
    return GroupAbortedError(f"{failed.where}: the group has ended on this rank ({own})", ranks=(own,))


_ERRORS: dict[FailureKind, Callable[[_Failed], DistributedError]] = {
    FailureKind.LATE: lambda failed: failed.group.verifier.late_error(failed.call, failed.ranks, failed.elapsed),
    FailureKind.STALLED: _stalled_error,
    FailureKind.LEFT: _left_error,
    FailureKind.MISMATCH: _mismatch_error,
    FailureKind.SIZES: _sizes_error,
    FailureKind.ABORTED: _aborted_error,
    FailureKind.STOPPED: _ended_error,
    FailureKind.BROKEN: _ended_error,
    FailureKind.QUEUED: lambda failed: queued_error(failed.group, failed.call, failed.elapsed),
    FailureKind.UNSUPPORTED: lambda failed: UnsupportedOpError(
        f"{failed.where}: the native engine can't do it. Use the tcp backend for it"
    ),
    FailureKind.LOST: _lost_error,
    FailureKind.PROTOCOL: _protocol_error,
    FailureKind.FAILED: _remote_failure_error,
    FailureKind.UNREADABLE: _unreadable_error,
}
