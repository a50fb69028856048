"""Messages through the engine.

native/engine/p2p_engine.h says how they move, `MailboxBackend` who may still be waited for.

[Note: what the engine is told]
The state of groups and ranks is Python's. The engine takes its short ways only while it knows of no end: it is told of
each after it has been recorded here and before transfers are ended for it, so what starts between the two is ended
too, or takes the long way, which looks at the record. What ranks had sent before the news came is taken in first: what
is in shared memory or has come over a connection at once, and of a rank that has left what it says it has sent to this
one (`_num_sent`), for which the news waits. A sub-group's short way is closed for good once one of
its ranks has left.
"""

from __future__ import annotations

import weakref
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn, cast

from ferrodist.backends import mailbox
from ferrodist.backends.base import check_peer
from ferrodist.backends.lifecycle import snapshot_weak
from ferrodist.backends.mailbox_backend import PeerExit
from ferrodist.backends.native.binding import load
from ferrodist.backends.request import answer_seconds
from ferrodist.backends.subgroup import SubBackend
from ferrodist.backends.tags import ANY_SOURCE, check_tag, group_of_tag
from ferrodist.backends.tcp.backend import TcpBackend
from ferrodist.deadline import check_timeout
from ferrodist.errors import DistributedTimeoutError, GroupClosedError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Buffer

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import PersistentRecv, Request, Stragglers, WaitEvent
    from ferrodist.deadline import Deadline
    from ferrodist.errors import DistributedError

_WORLD = 0
_LAST_WORDS_SECONDS = 1.0
"""How long what a rank has sent may take to come after the news that it has left, and its goodbye to be taken."""

_PLACES_LISTENING = 16
"""Receives that a listener has asked for: what comes in one look of the engine."""

_REASONS_KEPT = 200
"""Errors kept for the transfers that they ended. A transfer that is asked later says how its group stands then."""

_TAG_BITS = 128
_LOW_64 = (1 << 64) - 1

_Ending = tuple[int, int, int, int]
"""How a transfer has ended: outcome, peer, bytes of the message of a wrong size, number of the reason."""


class _Outcome(IntEnum):
    """`Outcome` of native/engine/transfer.h."""

    UNDER_WAY = 0
    DONE = 1
    WRONG_SIZE = 2
    CANCELLED = 3
    ENDED = 4


class _PeerEvent(IntEnum):
    """`News::Kind` of native/engine/admission.h."""

    FULL = 0
    BROKEN = 1
    GONE = 2


class _NativeRequest:
    """A `Request` of a transfer in the engine.

    Args:
        backend: Its group.
        request: The engine's part.
        group_id: What it is of: the group itself, or a sub-group.
        size_bytes: Of its buffer.
    """

    __slots__ = ("__weakref__", "_backend", "_group_id", "_request", "_size_bytes")

    def __init__(self, backend: MessagesBackend, request: Any, group_id: int, size_bytes: int) -> None:
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

    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        """Ask the group; see `Backend.find_stragglers`."""
        return self._backend.find_stragglers(peers, within)


class MessagesBackend(TcpBackend):
    """A rank whose messages are the engine's once `use_messenger` has been called, and the star's until then.

    See [Note: what the engine is told].
    """

    _messenger: Any = None

    def use_messenger(self, messenger: Any) -> None:
        """From now on send and receive through the engine; called when no message of the star is under way."""
        self._reasons: dict[int, DistributedError] = {}  # why transfers ended, by number
        self._num_reasons = 0
        self._messenger = messenger
        self._short_ways: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by group
        self.tensor_messages = self._make_tensor_messages(_WORLD, self.rank, range(self.world_size))
        self._end_receives(self._departure)  # it has not been told of anything yet

    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Send bytes to one rank; see `Backend.send`."""
        limit = self._timeout if timeout is None else timeout
        ending = None if self._messenger is None else self._messenger.quick_send(data, dst, tag, limit)
        if ending is not True:
            if ending is None:
                super().send(data, dst, tag=tag, timeout=timeout)
            else:
                self._raise_ending(ending, f"send to rank {dst}: it did not receive the message", dst, limit, 0)

    def recv(self, buffer: Buffer, src: int, *, tag: int = 0, timeout: float | None = None) -> int:
        """Receive the next message from ``src``; see `Backend.recv`."""
        limit = self._timeout if timeout is None else timeout
        ending = None if self._messenger is None else self._messenger.quick_recv(buffer, src, tag, limit)
        if type(ending) is int:
            return ending
        if ending is None:
            return super().recv(buffer, src, tag=tag, timeout=timeout)
        whom = "any rank" if src == ANY_SOURCE else f"rank {src}"
        return self._raise_ending(ending, f"recv from {whom}: nothing came", src, limit, memoryview(buffer).nbytes)

    def isend(self, data: Buffer, dst: int, *, tag: int = 0) -> Request:
        """Start `send` and return at once."""
        if self._messenger is None:
            return super().isend(data, dst, tag=tag)
        dst = check_peer(self, dst)
        view = mailbox.read_view(data)
        group_id = group_of_tag(check_tag(tag, _TAG_BITS))
        error = self._refusal(tag, dst)
        if error is not None:
            raise error.fresh()
        request = self._messenger.start_send(view, dst, group_id, tag & _LOW_64)
        # Its group may have ended after the look above and before the engine knew of the send.
        error = self._refusal(tag, dst)
        if error is not None:
            self._messenger.end_send(request, self._number_of(error))
        return _NativeRequest(self, request, group_id, view.nbytes)

    def _post(self, buffer: memoryview, source: int, tag: int) -> Request:
        if self._messenger is None:
            return super()._post(buffer, source, tag)
        group_id = group_of_tag(tag)
        request = self._messenger.start_recv(buffer, source, group_id, tag & _LOW_64)
        if not request.done():
            error = self._refusal(tag, source)
            if error is not None:
                self._messenger.end_unmatched(request, self._number_of(error))
        return _NativeRequest(self, request, group_id, buffer.nbytes)

    def try_send(self, data: bytes, dst: int, *, tag: int = 0) -> bool:
        """See `Backend.try_send`."""
        if self._messenger is None:
            return False
        return bool(self._messenger.try_send(data, dst, group_of_tag(tag), tag & _LOW_64))

    def listen(
        self,
        src: int,
        size_bytes: int,
        heard: Callable[[list[bytes]], None],
        ended: Callable[[DistributedError], None],
        *,
        tag: int = 0,
    ) -> PersistentRecv:
        """Receive whatever comes from a rank; see `Backend.listen`."""
        if self._messenger is None:
            return super().listen(src, size_bytes, heard, ended, tag=tag)
        source, group_id = check_peer(self, src), group_of_tag(check_tag(tag, _TAG_BITS))

        def end(ending: _Ending) -> None:
            error = self.ending_error(ending, group_id, size_bytes)
            assert error is not None
            ended(error.fresh())

        listener = load().listen(
            self._messenger, size_bytes, source, group_id, tag & _LOW_64, _PLACES_LISTENING, heard, end
        )
        error = self._refusal(tag, source)
        if error is not None:
            listener.end(self._number_of(error))
        return cast("PersistentRecv", listener)

    def signal(self) -> WaitEvent:
        """Something to wait for; who does moves messages. See `Backend.signal`."""
        return super().signal() if self._messenger is None else cast("WaitEvent", load().Signal(self._messenger))

    def _raise_ending(self, ending: _Ending, what: str, peer: int, limit: float, room: int) -> NoReturn:
        """Raise what a transfer of the short ways has ended with."""
        if ending[0] != _Outcome.CANCELLED:
            error = self.ending_error(ending, _WORLD, room)
            assert error is not None
            raise error.fresh()
        if self.failure is not None:
            raise self.failure.fresh()
        late = self.find_stragglers(() if peer == ANY_SOURCE else (peer,), answer_seconds(limit))
        raise DistributedTimeoutError(
            f"{what} within {limit:g} s (group {self.name!r}, rank {self.rank}){late.detail}. The group is still good:"
            " the call may be made again.",
            ranks=late.ranks,
        )

    def ending_error(self, ending: _Ending, group_id: int, room: int) -> DistributedError | None:
        """What a transfer in the engine has ended with, or None if well, or not yet.

        Args:
            ending: What the engine says.
            group_id: The group of the transfer.
            room: Bytes of its buffer.
        """
        outcome, peer, size_bytes, reason = ending
        if outcome == _Outcome.WRONG_SIZE:
            return mailbox.size_error(*self._describe(group_id, peer), size_bytes, room)
        if outcome == _Outcome.CANCELLED:
            return DistributedTimeoutError("the transfer was cancelled")
        if outcome != _Outcome.ENDED:
            return None
        known = self._reasons.get(reason) or self._failure_of(group_id) or self._departure(group_id, peer)
        return known or self._ended or GroupClosedError(f"group {self.name!r} has ended")

    def _number_of(self, reason: DistributedError) -> int:
        with self._state_lock:
            self._num_reasons += 1
            self._reasons[self._num_reasons] = reason
            self._reasons.pop(self._num_reasons - _REASONS_KEPT, None)
            return self._num_reasons

    def weak_blame(self) -> Callable[[int, int, int, int], None]:
        """`blame`, for the engine, which must not keep this backend."""
        method = weakref.WeakMethod(self.blame)

        def tell(kind: int, rank: int, group_id: int, size_bytes: int) -> None:
            blame = method()
            if blame is not None:
                blame(kind, rank, group_id, size_bytes)

        return tell

    def blame(self, kind: int, rank: int, group_id: int, size_bytes: int) -> None:
        """Act on what a rank did, or on the end of its connection; the engine calls it.

        Args:
            kind: A `_PeerEvent`.
            rank: The rank.
            group_id: Of a message that there is no room for: its group.
            size_bytes: And what of it would be kept.
        """
        if kind == _PeerEvent.FULL:
            self._run_out_of_room(group_id, self._messenger.fullest_source(rank, size_bytes))
        elif kind == _PeerEvent.GONE:
            what = f"can't be reached: its connection to rank {self.rank} has ended"
            self._peer_left(_WORLD, rank, PeerExit(what=what))
        else:
            what = "what it wrote for other ranks is no message"
            self.abort(ProtocolError(f"rank {rank} of group {self.name!r} broke the protocol: {what}", ranks=(rank,)))

    def _is_relayed(self, peers: tuple[int, ...]) -> bool:
        return self._messenger is None and super()._is_relayed(peers)

    def _sending_groups(self) -> set[int]:
        groups = super()._sending_groups()
        if self._messenger is not None:
            groups |= {group_id for is_send, group_id, _ in self._messenger.parties() if is_send}
        return groups

    def _end_receives(self, why: Callable[[int, int], DistributedError | None]) -> None:
        """End the star's receives, and the engine's, and the engine's sends."""
        super()._end_receives(why)
        if self._messenger is None:
            return
        with self._state_lock:
            has_ended = self._failure_of(_WORLD) is not None
            gone = {*self._died, *(rank for group_id, rank in self._left if group_id == _WORLD)}
        self._close_short_ways()
        if has_ended:
            self._messenger.end_group(_WORLD)
        for rank in gone:
            self._messenger.lose(rank)
        for is_send, group_id, peer in self._messenger.parties():
            error = why(group_id, peer)
            if error is not None:
                self._messenger.fail(is_send, group_id, peer, self._number_of(error))

    def subgroup_tensor_messages(self, subgroup: Backend) -> Any:
        """The short way of a sub-group's tensors."""
        if self._messenger is None:
            return None
        assert isinstance(subgroup, SubBackend)
        messages = self._make_tensor_messages(subgroup.group_id, subgroup.rank, subgroup.root_ranks)
        self._close_short_ways()
        return messages

    def _make_tensor_messages(self, group_id: int, rank: int, ranks: Iterable[int]) -> Any:
        messages = load().TensorP2P(self._messenger, group_id, rank, list(ranks))
        self._short_ways[group_id] = messages
        return messages

    def _close_short_ways(self) -> None:
        """Close those of sub-groups that have ended or that a rank has left; of the world the messenger knows."""
        with self._state_lock:
            left = {group_id for group_id, _ in self._left}
        for group_id, messages in snapshot_weak(self._short_ways.items):
            if group_id != _WORLD and (group_id in left or self._failure_of(group_id) is not None):
                messages.close()

    def _num_sent(self, rank: int) -> int:
        return 0 if self._messenger is None else int(self._messenger.num_frames_to(rank))

    def _await_sent(self, rank: int, count: int) -> None:
        if self._messenger is not None:
            self._messenger.await_frames(rank, count, _LAST_WORDS_SECONDS)

    def open_subgroup(self, group_id: int, members: tuple[int, ...], name: str) -> None:
        """Learn who belongs to a sub-group."""
        super().open_subgroup(group_id, members, name)
        if self._ended is None and self._messenger is not None:
            self._messenger.open_group(group_id, list(members))

    def close_subgroup(self, group_id: int, members: tuple[int, ...]) -> None:
        """Leave a sub-group."""
        super().close_subgroup(group_id, members)
        if self._ended is None and self._messenger is not None:
            self._messenger.end_group(group_id)

    def _forget_subgroup(self, group_id: int) -> None:
        if self._ended is None and self._messenger is not None:
            self._messenger.forget_group(group_id)

    def _fail_group(self, group_id: int, error: DistributedError) -> bool:
        is_first = super()._fail_group(group_id, error)
        if is_first and self._messenger is not None:
            self._messenger.end_group(group_id)
        return is_first

    def _close_groups(self) -> bool:
        is_first = super()._close_groups()
        if is_first:
            self.close_messages()
        return is_first

    def _forget_in_child(self) -> None:
        super()._forget_in_child()
        if self._messenger is not None:
            self._messenger.abandon()

    def close_messages(self) -> None:
        """End the engine's threads, which call Python; no message is started after this."""
        if self._messenger is not None:
            self._messenger.close()

    def _drain(self, deadline: Deadline) -> None:
        if self._messenger is not None:
            self._messenger.drain(min(deadline.remaining(), _LAST_WORDS_SECONDS))
        super()._drain(deadline)

    @property
    def is_ended(self) -> bool:
        """Whether nothing works here any more: this rank has closed the group, or is a forked child."""
        return self._ended is not None
