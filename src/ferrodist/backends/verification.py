"""Verification: before a collective moves data, its ranks learn that all of them called the same one.

[Note: verification]
Every collective begins with it. Each rank sends its encoded call to rank 0; rank 0 sends the table of all calls to each
rank. Two steps, 192 bytes up and 192*p down for each rank. After it nothing can go wrong unnoticed:

- every rank finds a mismatch in the same table, so all raise the same error, which names both calls;
- a late rank is known by name: rank 0 sees whose call is missing. A rank whose own deadline passes first notifies
  rank 0 (`Channel.LATE`) and gives it half a second to answer all; without an answer it is rank 0 that is late;
- after a long wait, before any deadline, a warning names the late ranks: rank 0's, or, if rank 0 does not answer the
  question whether it is there, that of the rank which asked;
- no rank starts a collective's data before all have entered it, so the memory for operations that a rank has not called
  yet is bounded by one call;
- where others may alter messages, each call and the table carry a tag under the group's key: ranks agree on each
  other's calls, or raise AuthenticationError;
- up to `MAX_PAYLOAD` bytes of each rank travel along: all of a tiny collective, or sizes that ranks don't know of each
  other.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import math
import struct
import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ferrodist.backends import stragglers
from ferrodist.backends.request import Request, answer_seconds, wait_all
from ferrodist.backends.signature import (
    FAILED_PROGRAM,
    RECORD_BYTES,
    CollectiveSignature,
    fingerprint_of,
    payload_of,
)
from ferrodist.backends.tags import ANY_SOURCE, LOW_64_BITS, Channel, channel_tag
from ferrodist.deadline import Deadline, Elapsed, long_wait
from ferrodist.errors import (
    AuthenticationError,
    CollectiveMismatchError,
    DistributedError,
    DistributedTimeoutError,
    GroupClosedError,
    RankFailedError,
    describe_error,
    ranks_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from ferrodist.backends.sequencer import Sequencer
    from ferrodist.backends.stragglers import Stragglers

_TAG_BYTES = 16
_TAGGED_FIELDS = struct.Struct("<QQQi")  # group id, in two halves; sequence; the call's rank, or _ALL
_ALL = -1


class CallAuthenticator:
    """The authentication tags of one verification: one for each rank's call, and one for the table of all.

    ``size`` is that of a tag in bytes, 0 without a key; ``record_size`` that of a call with its tag.
    """

    __slots__ = ("_fields", "_key", "record_size", "size")

    def __init__(self, key: bytes, group_id: int, sequence: int) -> None:
        self._key = key
        self._fields = group_id & LOW_64_BITS, group_id >> 64 & LOW_64_BITS, sequence
        self.size = _TAG_BYTES if key else 0
        self.record_size = RECORD_BYTES + self.size

    def table_size(self, world_size: int) -> int:
        """Size of the table of all calls, in bytes."""
        return self.record_size * world_size + self.size

    def seal_call(self, call: bytes, rank: int) -> bytes:
        """Append the tag to a rank's call."""
        return call + self._tag(call, rank)

    def check_calls(self, table: memoryview) -> None:
        """Raise AuthenticationError unless each record is its rank's."""
        for rank in range(len(table) // self.record_size if self.size else 0):
            record = table[rank * self.record_size :][: self.record_size]
            self._check(record[:RECORD_BYTES], record[RECORD_BYTES:], rank, f"the call of rank {rank} was altered")

    def seal_table(self, table: memoryview) -> None:
        """Write the tag of the whole table at its end."""
        if self.size:
            table[-self.size :] = self._tag(table[: -self.size], _ALL)

    def check_table(self, table: memoryview) -> None:
        """Raise AuthenticationError unless the table is that of the group's rank 0."""
        if self.size:
            self._check(table[: -self.size], table[-self.size :], _ALL, "the list of all ranks' calls was altered")

    def _tag(self, data: bytes | memoryview, rank: int) -> bytes:
        if not self._key:
            return b""
        fields = _TAGGED_FIELDS.pack(*self._fields, rank)
        return hashlib.blake2b(fields + bytes(data), key=self._key, digest_size=_TAG_BYTES).digest()

    def _check(self, data: memoryview, tag: memoryview, rank: int, what: str) -> None:
        if not hmac.compare_digest(tag, self._tag(data, rank)):
            raise AuthenticationError(f"{what} on its way: something between the hosts alters messages")


_COORDINATOR = 0
_GIVES_UP, _ASKS = b"\0", b"\1"  # messages to rank 0 on `Channel.LATE`: my deadline has passed; have you called, too?
_ANSWER_GRACE_SECONDS = 0.5  # how long past its deadline a rank waits for rank 0 to name the late ranks


def left_reason(rank: int, call: object, error: BaseException) -> str:
    """The reason to abort a group when a rank leaves a collective in which others wait for it.

    A rank leaves by any exception that is no failure of the group: an interruption, the exception of a signal handler,
    a lack of memory.
    """
    return f"rank {rank} left {call} by {describe_error(error)}"


class _Group(Protocol):
    """The part of a backend that verification uses."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def failure(self) -> DistributedError | None: ...
    @property
    def group_id(self) -> int: ...
    @property
    def verification_key(self) -> bytes: ...
    def isend(self, data: Buffer, dst: int, *, tag: int = 0) -> Request: ...
    def irecv(self, buffer: Buffer, src: int, *, tag: int = 0) -> Request: ...
    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers: ...
    def abort(self, reason: str | DistributedError) -> None: ...


def queued_error(group: _Group, call: CollectiveSignature, elapsed: Elapsed) -> DistributedTimeoutError:
    """The error of a call whose turn did not come by the deadline."""
    return DistributedTimeoutError(
        f"{call} on group {group.name!r}, operation {call.sequence}: the operations before it on rank {group.rank}"
        f" had not ended after {elapsed}. Collectives of a group run one after the other: wait for those that were"
        " started, or pass a larger timeout.",
        ranks=(group.rank,),
    )


def _has_ended(request: Request, seconds: float, deadline: Deadline) -> bool:
    """Wait so many seconds at most; raises like `Request.wait` if the request fails or the deadline passes."""
    try:
        request.wait(min(seconds, deadline.remaining()))
    except DistributedTimeoutError:
        if request.done():  # it has ended meanwhile, or the error is its own
            request.wait(0)
            return True
        if deadline.expired:
            raise
        return False
    return True


class Verification(NamedTuple):
    """One verification that is under way on this rank."""

    call: CollectiveSignature
    deadline: Deadline
    pending: list[Request]  # cancelled at the end


class CollectiveVerifier:
    """Counts and compares the collectives of one group. See [Note: verification].

    ``hint`` is a sentence about another possible reason for a late rank, used until a first verification
    has succeeded. The ``sequencer`` runs collectives one at a time and numbers them, where an engine needs that.
    """

    def __init__(self, group: _Group, *, hint: str = "", first: int = 0, sequencer: Sequencer | None = None) -> None:
        self._group = group
        self._hint = hint
        self._counter = itertools.count(first)
        self._sequencer = sequencer

    def reserve(self) -> int:
        """Take the next sequence number of the group's collectives. Ranks must reserve in the same order."""
        return next(self._counter) if self._sequencer is None else self._sequencer.reserve()

    def verify(self, call: CollectiveSignature, timeout: float, sequence: int | None = None) -> list[bytes]:
        """Block until every rank has made the same call; returns every rank's payload, by rank.

        ``sequence`` is from `reserve`; None takes the next one now. When two calls differ, or a rank is late, the group
        has failed, and all ranks raise CollectiveMismatchError or DistributedTimeoutError.
        """
        deadline = Deadline(timeout)
        call = call.at(self.reserve() if sequence is None else sequence)
        if self._sequencer is None:
            return self._verify(call, deadline)
        with self._sequencer.hold(call.sequence, timeout) as has_turn:
            return self._verify(call, deadline, has_turn=has_turn)

    def _verify(self, call: CollectiveSignature, deadline: Deadline, *, has_turn: bool = True) -> list[bytes]:
        group = self._group
        current = Verification(call, deadline, [])
        try:
            return self._exchange(current, has_turn=has_turn)
        except GroupClosedError:
            raise
        except DistributedError as error:
            group.abort(error)
            raise (group.failure or error).fresh() from None
        except BaseException as error:
            group.abort(left_reason(group.rank, call, error))
            raise
        finally:  # after the abort, so that the others learn of it first
            for request in current.pending:
                request.cancel()

    def _exchange(self, current: Verification, *, has_turn: bool) -> list[bytes]:
        group = self._group
        if group.failure is not None:
            raise group.failure.fresh()
        if not has_turn:
            raise queued_error(group, current.call, Elapsed.of(current.deadline))
        if group.world_size == 1:
            return [current.call.payload]
        records = self._gather_calls(current)
        self._hint = ""
        self._compare(records)
        return [payload_of(record) for record in records]

    def _gather_calls(self, current: Verification) -> list[memoryview]:
        """Every rank's encoded call, by rank; a transport may override this."""
        group = self._group
        auth = CallAuthenticator(group.verification_key, group.group_id, current.call.sequence)
        table = memoryview(bytearray(auth.table_size(group.world_size)))
        (self._collect if group.rank == _COORDINATOR else self._report)(current, table, auth)
        return [table[auth.record_size * rank :][:RECORD_BYTES] for rank in range(group.world_size)]

    def _collect(self, current: Verification, table: memoryview, auth: CallAuthenticator) -> None:
        """Rank 0: receive every rank's call, then send all of them to every rank."""
        group, (call, deadline, pending) = self._group, current
        tag = channel_tag(Channel.CALL, call.sequence)
        size = auth.record_size
        table[:size] = auth.seal_call(call.encode(), _COORDINATOR)
        missing: dict[int, Request] = {}
        for rank in range(1, group.world_size):
            missing[rank] = group.irecv(table[rank * size : (rank + 1) * size], rank, tag=tag)
            pending.append(missing[rank])
        self._await_calls(current, missing)
        auth.check_calls(table)
        auth.seal_table(table)
        try:
            wait_all([group.isend(table, rank, tag=tag) for rank in range(1, group.world_size)], deadline)
        except DistributedTimeoutError as error:
            if group.failure is not None:
                raise
            raise DistributedTimeoutError(
                f"{call} on group {group.name!r}, operation {call.sequence}: all ranks have called it, but"
                f" {ranks_text(error.ranks)} did not take rank {group.rank}'s answer, after {Elapsed.of(deadline)}"
                f"{error.detail}. Look at what is going on there, or pass a larger timeout. Reported by rank"
                f" {group.rank}.",
                ranks=error.ranks,
            ) from None

    def _await_calls(self, current: Verification, missing: dict[int, Request]) -> None:
        """Empty ``missing`` as calls come; raise when one fails, or this rank's or a reporter's deadline passes."""
        call, deadline, _ = current
        changed = threading.Semaphore(0)
        message = bytearray(1)
        notice = self._receive_notice(current, message, changed)
        for request in missing.values():
            request.add_done_callback(changed.release)
        warning = long_wait()
        while True:
            notice = self._answer_questions(current, notice, message, changed)
            for rank in [rank for rank, request in missing.items() if request.done()]:
                missing.pop(rank).wait(0)
            if not missing:
                return
            late = tuple(missing)
            if notice.done():
                detail = f" (rank {notice.wait(0)}'s deadline passed first)"
                raise self.late_error(call, late, Elapsed.of(deadline), detail)
            if not changed.acquire(timeout=min(deadline.remaining(), warning.remaining())):
                if deadline.expired:
                    raise self.late_error(call, late, Elapsed.of(deadline))
                self._warn(call, late, deadline)
                warning = Deadline(math.inf)

    def _answer_questions(
        self, current: Verification, notice: Request, message: bytearray, changed: threading.Semaphore
    ) -> Request:
        """Answer the ranks that ask whether this one has called; returns the receive of the next notice."""
        while notice.done() and message == _ASKS:
            reply = self._group.isend(b"\0", notice.wait(0), tag=channel_tag(Channel.LATE, current.call.sequence))
            current.pending.append(reply)
            notice = self._receive_notice(current, message, changed)
        return notice

    def _receive_notice(self, current: Verification, message: bytearray, changed: threading.Semaphore) -> Request:
        """Receive another rank's notice: a question, or that its deadline has passed."""
        notice = self._group.irecv(message, ANY_SOURCE, tag=channel_tag(Channel.LATE, current.call.sequence))
        current.pending.append(notice)
        notice.add_done_callback(changed.release)
        return notice

    def _report(self, current: Verification, table: memoryview, auth: CallAuthenticator) -> None:
        """Every other rank: send the call to rank 0 and receive its answer."""
        group, (call, deadline, pending) = self._group, current
        tag, late_tag = (channel_tag(channel, call.sequence) for channel in (Channel.CALL, Channel.LATE))
        answer = group.irecv(table, _COORDINATOR, tag=tag)
        pending.append(answer)
        try:
            group.isend(auth.seal_call(call.encode(), group.rank), _COORDINATOR, tag=tag).wait(deadline.remaining())
            self._await_answer(current, answer, late_tag)
        except DistributedTimeoutError:
            if group.failure is not None:  # by a timeout
                raise
            if answer.done():  # it has ended meanwhile, or the error is its own
                answer.wait(0)
            else:  # rank 0 has a moment to name the late ranks
                group.isend(_GIVES_UP, _COORDINATOR, tag=late_tag)
                try:
                    answer.wait(_ANSWER_GRACE_SECONDS)
                except DistributedTimeoutError:
                    raise (group.failure or self.late_error(call, (_COORDINATOR,), Elapsed.of(deadline))) from None
        auth.check_table(table)

    def _await_answer(self, current: Verification, answer: Request, late_tag: int) -> None:
        """Wait for rank 0's answer; warn on the way if rank 0 is late itself."""
        call, deadline, pending = current
        if _has_ended(answer, long_wait().timeout, deadline):
            return
        reply = self._group.irecv(bytearray(1), _COORDINATOR, tag=late_tag)
        pending += [reply, self._group.isend(_ASKS, _COORDINATOR, tag=late_tag)]
        if _has_ended(answer, _ANSWER_GRACE_SECONDS, deadline):
            return
        if not reply.done():
            self._warn(call, (_COORDINATOR,), deadline)
        answer.wait(deadline.remaining())

    def _warn(self, call: CollectiveSignature, ranks: tuple[int, ...], deadline: Deadline) -> None:
        group = self._group
        stragglers.warn_about_stragglers(call, ranks, group=group.name, rank=group.rank, elapsed=Elapsed.of(deadline))

    def late_error(
        self, call: CollectiveSignature, ranks: tuple[int, ...], elapsed: Elapsed, detail: str = ""
    ) -> DistributedTimeoutError | RankFailedError:
        """The error of a deadline that passed before ``ranks`` had made their call."""
        group = self._group
        if call.operation == FAILED_PROGRAM:
            return RankFailedError(
                f"the program failed on rank {group.rank} of group {group.name!r}: see the error there."
                f" {ranks_text(ranks).capitalize()} did not fail alike, nor call a collective, within"
                f" {elapsed.timeout:.3g} s, so the group has ended.",
                ranks=(group.rank,),
            )
        late = group.find_stragglers(ranks, answer_seconds(elapsed.timeout))
        who, hint = f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} not called it", self._hint
        if late.is_relay:  # calls may have been made, and not come through
            ranks = late.ranks
            who, hint = f"{ranks_text(ranks)} did not relay the messages of others", ""
        return DistributedTimeoutError(
            f"{call} on group {group.name!r}, operation {call.sequence}: {who}, after {elapsed}{late.detail}{detail}."
            f"{hint and ' ' + hint} Look at what is going on there, or pass a larger timeout for it. Reported by"
            f" rank {group.rank}.",
            ranks=ranks,
        )

    def _compare(self, records: list[memoryview]) -> None:
        """Raise, the same on every rank, when the calls in ``records`` are not all equal."""
        if len({fingerprint_of(record) for record in records}) == 1:
            return
        error = self.mismatch_error([CollectiveSignature.decode(record) for record in records])
        self._group.abort(error)
        raise error

    def mismatch_error(self, calls: Sequence[CollectiveSignature]) -> CollectiveMismatchError | RankFailedError:
        """The error of different calls; ``calls`` are those of all ranks, by rank."""
        failed = {rank: call.payload for rank, call in enumerate(calls) if call.operation == FAILED_PROGRAM}
        if failed:
            reason = next(filter(None, failed.values()), b"").decode(errors="replace")
            other = next(rank for rank in range(len(calls)) if rank not in failed)
            return RankFailedError(
                f"the program failed on {ranks_text(tuple(failed))} of group"
                f" {self._group.name!r}{reason and f', in {reason}'}. Rank {other} called {calls[other]} meanwhile, so"
                " the group has ended: see the error there.",
                ranks=tuple(failed),
            )
        callers: dict[CollectiveSignature, list[int]] = {}
        for rank, call in enumerate(calls):
            callers.setdefault(call.with_payload(b""), []).append(rank)
        lines = "; ".join(f"{ranks_text(ranks)} called {call}" for call, ranks in callers.items())
        odd = min(callers.values(), key=len)
        return CollectiveMismatchError(
            f"the ranks of group {self._group.name!r} disagree about operation {calls[0].sequence}: {lines}. Every rank"
            " must make the same collective calls in the same order.",
            ranks=tuple(odd) if len(callers) == 2 and len(odd) < len(calls) - len(odd) else (),
        )
