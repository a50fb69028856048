"""Point-to-point messages through the compiled p2p engine (native/engine/p2p_engine.h).

[Note: what the engine knows]
The state of groups and ranks is kept in Python, by the control plane. The engine takes its fast paths only while it
knows of no end. It learns of each after the control plane has recorded it and before transfers are ended for it. So a
transfer that starts between the two is ended too, or takes the slow path, which reads the record. What ranks had sent
before the notice came is received first: what is in shared memory or has come over a connection at once, and of a rank
that has left as many frames as it says it has sent to this one (`num_sent`), for which the notice waits. A sub-group's
fast path is closed for good once one of its ranks has left.
"""

from __future__ import annotations

import itertools
import weakref
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn, cast

from typing_extensions import Buffer, override

from ferrodist.backends import mailbox
from ferrodist.backends.base import check_peer, given_up_error
from ferrodist.backends.group_observer import EndReason, GroupObserver, PeerExit
from ferrodist.backends.native.binding import load
from ferrodist.backends.request import Request, SizedRequest, answer_seconds
from ferrodist.backends.tags import ANY_SOURCE, LOW_64_BITS, TAG_BITS, WORLD_GROUP_ID, check_tag, group_of_tag
from ferrodist.backends.weak import snapshot_weak
from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import DistributedError, DistributedTimeoutError, GroupClosedError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ferrodist.backends.mailbox_backend import MailboxBackend
    from ferrodist.backends.persistent_recv import OnEnd, OnMessages, PersistentRecv, WaitEvent
    from ferrodist.backends.stragglers import Stragglers


_DRAIN_SECONDS = 1.0
"""How long frames of a rank that has left may take to arrive, and this rank's own last frames to be sent."""

_POSTED_RECEIVES = 16  # receives that a `PersistentRecv` posts ahead: as many as come in one poll of the engine

_MAX_REASONS = 200
"""Errors kept for the transfers that they ended. A transfer that is asked later reports its group's state then."""


_Ending = tuple[int, int, int, int]
"""The end of a transfer: outcome, peer, size in bytes of the message of a receive, id of the reason."""


class _Outcome(IntEnum):
    """`Outcome` of native/engine/transfer.h."""

    UNDER_WAY = 0
    DONE = 1
    WRONG_SIZE = 2
    CANCELLED = 3
    ENDED = 4


class _PeerEvent(IntEnum):
    """`PeerEvent::Kind` of native/engine/admission.h."""

    FULL = 0
    BROKEN = 1
    GONE = 2


class _NativeRequest:
    """A `Request` of a transfer in the engine."""

    __slots__ = ("__weakref__", "_group_id", "_p2p", "_request", "_size_bytes")

    def __init__(self, p2p: NativeP2P, request: Any, group_id: int, size_bytes: int) -> None:
        self._p2p = p2p
        self._request = request
        self._group_id = group_id
        self._size_bytes = size_bytes

    @property
    def peer(self) -> int:
        """The peer's rank; `ANY_SOURCE` until it is known."""
        return int(self._request.peer)

    @property
    def error(self) -> DistributedError | None:
        """The error that the transfer has ended with, if any."""
        return self._p2p.ending_error(self._request.outcome(), self._group_id, self._size_bytes)

    @property
    def message_bytes(self) -> int:
        """Size of the message, once the request is done."""
        return int(self._request.outcome()[2])

    def wait(self, timeout: float) -> int:
        """Block until done; see `Request.wait`."""
        if not self._request.wait(check_timeout(timeout)):
            self._p2p.check_open()  # just closed, or in a forked child, where nothing else ends it
            peer, ranks = (f"rank {self.peer}", (self.peer,)) if self.peer >= 0 else ("any rank", ())
            raise DistributedTimeoutError(f"no transfer with {peer} within {timeout:g} s", ranks=ranks)
        error = self.error
        if error is not None:
            raise error.fresh()
        return self.peer

    def done(self) -> bool:
        """Return whether the transfer has ended, successfully or not."""
        return bool(self._request.done())

    def cancel(self) -> bool:
        """Cancel the transfer; see `Request.cancel`."""
        return bool(self._request.cancel())

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once when done, immediately if it is; it must not block or raise."""
        self._request.add_done_callback(callback)

    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        """Ask the group; see `Backend.find_stragglers`."""
        return self._p2p.find_stragglers(peers, within)


class NativeP2P(GroupObserver):
    """The messages of a control plane's groups, in the compiled engine. See [Note: what the engine knows]."""

    def __init__(self, control: MailboxBackend) -> None:
        self._control = control
        self._engine: Any = None
        self._reasons: dict[int, DistributedError] = {}  # why transfers ended, by id
        self._reason_ids = itertools.count(1)
        self._tensor_p2p: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by group
        self.find_stragglers = control.find_stragglers

    def open(self, engine: Any) -> None:
        """Use the compiled engine from now on; called when no message of the control plane's own is under way."""
        self._engine = engine
        self._control.add_observer(self)

    def isend(self, data: Buffer, dst: int, *, tag: int = 0) -> Request:
        """Start `Backend.send` and return immediately."""
        control = self._control
        dst = check_peer(control, dst)
        view = mailbox.read_view(data)
        group_id = group_of_tag(check_tag(tag, TAG_BITS))
        error = control.refusal(tag, dst)
        if error is not None:
            raise error.fresh()
        request = self._engine.start_send(view, dst, group_id, tag & LOW_64_BITS)
        # Its group may have ended after the check above and before the engine knew of the send.
        error = control.refusal(tag, dst)
        if error is not None:
            self._engine.end_send(request, self._id_of(error))
        return _NativeRequest(self, request, group_id, view.nbytes)

    def irecv(self, buffer: Buffer, src: int, *, tag: int = 0) -> Request:
        """Start `Backend.recv` and return immediately."""
        return self._start_recv(buffer, src, tag, accepts_shorter=False)

    def irecv_up_to(self, buffer: Buffer, src: int, *, tag: int = 0) -> SizedRequest:
        """Start to receive a message that may be shorter than ``buffer``; see `Backend.irecv_up_to`."""
        return self._start_recv(buffer, src, tag, accepts_shorter=True)

    def _start_recv(self, buffer: Buffer, src: int, tag: int, *, accepts_shorter: bool) -> _NativeRequest:
        control = self._control
        src = check_peer(control, src, any_source=True)
        view = mailbox.write_view(buffer)
        group_id = group_of_tag(check_tag(tag, TAG_BITS))
        failure = control.failure_of(group_id)
        if failure is not None:
            raise failure.fresh()
        request = self._engine.start_recv(view, src, group_id, tag & LOW_64_BITS, accepts_shorter)
        if not request.done():
            error = control.refusal(tag, src)
            if error is not None:
                self._engine.end_unmatched(request, self._id_of(error))
        return _NativeRequest(self, request, group_id, view.nbytes)

    def post_persistent_recv(
        self, src: int, size_bytes: int, heard: OnMessages, ended: OnEnd, *, tag: int = 0
    ) -> PersistentRecv:
        """Receive every message of a rank; see `Backend.post_persistent_recv`."""
        source, group_id = check_peer(self._control, src), group_of_tag(check_tag(tag, TAG_BITS))

        def end(ending: _Ending) -> None:
            error = self.ending_error(ending, group_id, size_bytes)
            assert error is not None
            ended(error.fresh())

        listener = load().post_persistent_recv(
            self._engine, size_bytes, source, group_id, tag & LOW_64_BITS, _POSTED_RECEIVES, heard, end
        )
        error = self._control.refusal(tag, source)
        if error is not None:
            listener.end(self._id_of(error))
        return cast("PersistentRecv", listener)

    def make_wait_event(self) -> WaitEvent:
        """An event whose waiting thread moves messages; see `Backend.make_wait_event`."""
        return cast("WaitEvent", load().Signal(self._engine))

    def tensor_p2p(self, group_id: int, rank: int, ranks: Iterable[int]) -> Any:
        """Make the compiled point-to-point transfer of tensors of a group of these ranks; ``rank`` is this one's."""
        made = load().TensorP2P(self._engine, group_id, rank, list(ranks))
        self._tensor_p2p[group_id] = made
        self._close_fast_paths()  # its group may have ended before
        return made

    # Errors.

    def check_open(self) -> None:
        """Raise if this rank has closed the group, or is a forked child."""
        failure = self._control.failure
        if self._control.is_over and failure is not None:
            raise failure.fresh()

    def raise_ending(self, ending: _Ending, what: str, peer: int, limit: float, size_bytes: int) -> NoReturn:
        """Raise the error of a transfer of the fast path; ``what`` says, for a timeout's error, what did not happen."""
        if ending[0] != _Outcome.CANCELLED:
            error = self.ending_error(ending, WORLD_GROUP_ID, size_bytes)
            assert error is not None
            raise error.fresh()
        control = self._control
        if control.failure is not None:
            raise control.failure.fresh()
        late = control.find_stragglers(() if peer == ANY_SOURCE else (peer,), answer_seconds(limit))
        raise given_up_error(control, what, late, limit)

    def ending_error(self, ending: _Ending, group_id: int, size_bytes: int) -> DistributedError | None:
        """The error of a transfer that has ended, or None if it succeeded or is under way."""
        control = self._control
        outcome, peer, message_bytes, reason_id = ending
        if outcome == _Outcome.WRONG_SIZE:
            return mailbox.size_error(*control.describe_rank(group_id, peer), message_bytes, size_bytes)
        if outcome == _Outcome.CANCELLED:
            return DistributedTimeoutError("the transfer was cancelled")
        if outcome != _Outcome.ENDED:
            return None
        known = self._reasons.get(reason_id) or control.failure_of(group_id) or control.peer_error(group_id, peer)
        return known or GroupClosedError(f"group {control.name!r} has ended")

    def _id_of(self, reason: DistributedError) -> int:
        reason_id = next(self._reason_ids)
        self._reasons[reason_id] = reason
        self._reasons.pop(reason_id - _MAX_REASONS, None)
        return reason_id

    # Events of the engine.

    def on_peer_event(self, event: int, rank: int, group_id: int, size_bytes: int) -> None:
        """Handle a misbehaving rank, or the end of a connection; the engine calls it, with a `_PeerEvent`.

        For FULL, ``group_id`` is the group of a message that there is no room for, and ``size_bytes`` what would have
        been kept.
        """
        control = self._control
        if event == _PeerEvent.FULL:
            control.abort_for_overflow(group_id, self._engine.fullest_source(rank, size_bytes))
        elif event == _PeerEvent.GONE:
            what = f"can't be reached: its connection to rank {control.rank} has ended"
            control.peer_left(WORLD_GROUP_ID, rank, PeerExit(what=what))
        else:
            what = "what it wrote for other ranks is no message"
            control.abort(
                ProtocolError(f"rank {rank} of group {control.name!r} broke the protocol: {what}", ranks=(rank,))
            )

    # Events of the control plane.

    @override
    def on_opened(self, group_id: int, members: tuple[int, ...]) -> None:
        self._engine.open_group(group_id, list(members))

    @override
    def on_failed(self, group_id: int, error: DistributedError) -> None:
        self._engine.end_group(group_id)

    @override
    def on_subgroup_closed(self, group_id: int) -> None:
        self._engine.end_group(group_id)

    @override
    def on_subgroup_forgotten(self, group_id: int) -> None:
        self._engine.forget_group(group_id)

    @override
    def on_closed(self) -> None:
        self._engine.close()  # ends its threads, which call Python

    @override
    def on_forked(self) -> None:
        self._engine.abandon()

    @override
    def end_transfers(self, why: EndReason) -> None:
        self._close_fast_paths()
        if self._control.failure is not None:
            self._engine.end_group(WORLD_GROUP_ID)
        for rank in self._control.gone_ranks():
            self._engine.lose(rank)
        for is_send, group_id, peer in self._engine.active_transfers():
            error = why(group_id, peer)
            if error is not None:
                self._engine.fail(is_send, group_id, peer, self._id_of(error))

    def _close_fast_paths(self) -> None:
        """Close those of sub-groups that have ended or that a rank has left; of the world the engine knows."""
        deserted = self._control.deserted_groups()
        for group_id, tensor_p2p in snapshot_weak(self._tensor_p2p.items):
            if group_id != WORLD_GROUP_ID and (group_id in deserted or self._control.failure_of(group_id) is not None):
                tensor_p2p.close()

    @override
    def sending_groups(self) -> set[int]:
        return {group_id for is_send, group_id, _ in self._engine.active_transfers() if is_send}

    @override
    def num_sent(self, rank: int) -> int:
        return int(self._engine.num_frames_to(rank))

    @override
    def await_sent(self, rank: int, count: int) -> None:
        self._engine.await_frames(rank, count, _DRAIN_SECONDS)

    @override
    def drain(self, deadline: Deadline) -> None:
        self._engine.drain(min(deadline.remaining(), _DRAIN_SECONDS))
