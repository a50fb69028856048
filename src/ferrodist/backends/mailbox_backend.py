"""What the in-process and the TCP backend have in common: a mailbox, and who may still be waited for.

A transport below it starts sends (`_start_send`), takes them back (`_take_back`), and carries two notices to other
ranks: that a group has been aborted, and that this rank has left one. It reports what comes in through `_mailbox`,
`fail_group`, `peer_left` and `peer_died`.

[Note: left and died]
A rank that closes a group has *left*: what it sent is still delivered, then whatever needs it fails, and ranks that
need nothing more of it go on. A rank that vanishes has *died*: every group it was a member of fails at once on every
rank. Sub-groups without it go on in both cases.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet, finalize

from ferrodist.backends.base import Backend, NonBlockingBackend, as_abort_error, check_peer
from ferrodist.backends.mailbox import Mailbox, Message, Receive, read_view, write_view
from ferrodist.backends.request import BaseRequest
from ferrodist.backends.tags import ANY_SOURCE, check_tag, group_of_tag
from ferrodist.errors import (
    DistributedError,
    DistributedTimeoutError,
    GroupAbortedError,
    GroupClosedError,
    NoConnectionError,
    PeerLostError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Buffer

    from ferrodist.backends.request import Request, Stragglers
    from ferrodist.deadline import Deadline

    EndReason = Callable[[int, int], DistributedError | None]

_WORLD = 0
_TAG_BITS = 128

MAX_AHEAD = 1 << 16
"""Groups that this rank has not made (yet) and of whose end it keeps what one other rank tells."""

_SILENT_KEPT = 1000
"""Ids kept of closed sub-groups that all members have left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerExit:
    """Why a rank is gone, to be told to each of its groups in that group's own terms.

    Args:
        what: Follows the rank in the error's message, as "died: ...".
        kind: Class of the error.
        relay: The rank that passed on this one's messages, when that one is gone and not this one.
    """

    what: str
    kind: type[DistributedError] = PeerLostError
    relay: int | None = None


CLOSED = PeerExit(what="has left: it closed the group while others still needed it")


class GroupObserver:
    """Is notified of groups that open, fail and close on this rank, and carries data of them by another path.

    The control plane has recorded what it notifies of. Each method may do nothing.
    """

    def on_opened(self, group_id: int, members: tuple[int, ...]) -> None:
        """This rank has made a sub-group."""

    def on_failed(self, group_id: int, error: DistributedError) -> None:
        """A group has failed, and its transfers have been ended."""

    def on_peer_left(self, rank: int, departure: PeerExit) -> None:
        """A rank has left a group."""

    def on_subgroup_closed(self, group_id: int) -> None:
        """This rank has closed a sub-group and told the others."""

    def on_subgroup_forgotten(self, group_id: int) -> None:
        """No more messages come for a sub-group that this rank has closed."""

    def on_closed(self) -> None:
        """This rank has closed all groups, and is about to tell the others."""

    def on_forked(self) -> None:
        """This is a forked child: everything belongs to the parent."""

    def end_transfers(self, why: EndReason) -> None:
        """End the transfers for which ``why(group_id, peer)`` is an error."""

    def sending_groups(self) -> set[int]:
        """The groups with a message on its way out."""
        return set()

    def num_sent(self, rank: int) -> int:
        """How many frames this rank has sent to another by this path, which a notice of its exit may overtake."""
        del rank
        return 0

    def await_sent(self, rank: int, count: int) -> None:
        """Wait, not long, until so many frames have come from a rank."""

    def drain(self, deadline: Deadline) -> None:
        """Wait until what has been sent is out."""


class Send(BaseRequest):
    """A message on its way out."""

    __slots__ = ("_backend", "data", "tag")

    def __init__(self, backend: MailboxBackend, data: memoryview, dst: int, tag: int) -> None:
        super().__init__(dst)
        self._backend = backend
        self.data = data
        self.tag = tag

    def cancel(self) -> bool:
        """Take the message back; see `Request.cancel`."""
        return self._backend._cancel_send(self)  # noqa: SLF001 - the two are one mechanism

    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        """Ask the group; see `Backend.find_stragglers`."""
        return self._backend.find_stragglers(peers, within)


class GroupReceive(Receive):
    """A receive that knows its group."""

    __slots__ = ("_backend",)

    def __init__(self, backend: MailboxBackend, mailbox: Mailbox, buffer: memoryview, source: int, tag: int) -> None:
        super().__init__(mailbox, buffer, source, tag)
        self._backend = backend

    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        """Ask the group; see `Backend.find_stragglers`."""
        return self._backend.find_stragglers(peers, within)


class _Subgroups(WeakSet[Backend]):
    """The sub-groups that somebody still holds, and the ids of those that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        # Written to by the garbage collector, in whatever thread and at whatever moment: so without a lock.
        self.dropped: deque[int] = deque()

    def add(self, item: Backend) -> None:
        """Add a sub-group."""
        super().add(item)
        finalize(item, self.dropped.append, item.group_id).atexit = False


class MailboxBackend(NonBlockingBackend):
    """A backend whose messages arrive in a `Mailbox`; see the module's docstring for what a transport adds."""

    def __init__(self, rank: int, world_size: int, *, timeout: float | None, name: str) -> None:
        super().__init__(rank, world_size, timeout=timeout, name=name)
        self.subgroups: _Subgroups = _Subgroups()
        self._mailbox = Mailbox(lambda tag, source: self.describe_rank(group_of_tag(tag), source))
        self._state_lock = threading.Lock()
        self._sends: set[Send] = set()
        self._observers: list[GroupObserver] = []
        self._members: dict[int, tuple[int, ...]] = {_WORLD: tuple(range(world_size))}
        self._names: dict[int, str] = {_WORLD: name}
        self._followers: dict[int, set[int]] = {}  # groups that fail with a group
        self._failures: dict[int, DistributedError] = {}  # by group
        self._left: dict[tuple[int, int], PeerExit] = {}  # by group and rank
        self._died: dict[int, PeerExit] = {}  # by rank
        self._ended: DistributedError | None = None  # why nothing works here any more: closed, or a forked child
        self._closed: dict[int, set[int]] = {}  # sub-groups this rank has closed, and who may still send in them
        self._silent: deque[int] = deque()  # those of them in which nobody may, the first such one first
        # By rank: the groups that this one has not made and of whose end it has told. Bounded by MAX_AHEAD, and with it
        # `_failures` and `_left`, which otherwise have one entry for each group this rank has made, and rank in it.
        self._ahead: dict[int, set[int]] = {}

    # What a transport adds.

    @abstractmethod
    def _start_send(self, send: Send) -> None:
        """Begin to move ``send`` and call `_finish_send` when its data may be changed again."""

    @abstractmethod
    def _take_back(self, send: Send) -> bool:
        """Undo `_start_send`: the message must not be delivered after this.

        False when it is too late for that; the transport then ends the send at once by itself.
        """

    @abstractmethod
    def _notify_abort(self, group_id: int, members: tuple[int, ...], error: DistributedError) -> None:
        """Have `fail_group(group_id, error)` run on the other members."""

    @abstractmethod
    def _notify_left(self, group_id: int, members: tuple[int, ...]) -> None:
        """Have `peer_left(group_id, this rank)` run on the other members after all that was sent to them before."""

    # What a transport may have beside the mailbox.

    def _post(self, buffer: memoryview, source: int, tag: int) -> Request:
        """Ask for a message; ends with what `refusal` says when none is there and none will come."""
        receive = GroupReceive(self, self._mailbox, buffer, source, tag)
        self._mailbox.post(receive, partial(self.refusal, tag, source))
        return receive

    def add_observer(self, observer: GroupObserver) -> None:
        """Notify an observer from now on, and have it end the transfers with ranks that are gone."""
        self._observers.append(observer)
        observer.end_transfers(self.departure_error)

    # Sending and receiving.

    @property
    def failure(self) -> DistributedError | None:
        """Why the group can't be used any more, or None while it can."""
        return self.failure_of(_WORLD)

    def isend(self, data: Buffer, dst: int, *, tag: int = 0) -> Request:
        """Start `send` and return at once."""
        dst = check_peer(self, dst)
        send = Send(self, read_view(data), dst, check_tag(tag, _TAG_BITS))
        with self._state_lock:
            error = self.refusal(send.tag, dst)
            if error is not None:
                raise error.fresh()
            self._sends.add(send)
        self._start_send(send)
        # Its group may have ended after the look above and before the transport knew of the send.
        error = self.refusal(send.tag, dst)
        if error is not None:
            self._cancel_send(send, error)
        return send

    def irecv(self, buffer: Buffer, src: int, *, tag: int = 0) -> Request:
        """Start `recv` and return at once."""
        src = check_peer(self, src, any_source=True)
        view = write_view(buffer)
        failure = self.failure_of(group_of_tag(check_tag(tag, _TAG_BITS)))
        if failure is not None:
            raise failure.fresh()
        return self._post(view, src, tag)

    def failure_of(self, group_id: int) -> DistributedError | None:
        """Why a group can't be used on this rank any more, or None."""
        if self._ended is not None:
            return self._ended
        if group_id in self._closed:
            return GroupClosedError(f"this sub-group of {self.name!r} was closed on this rank ({self.rank})")
        return self._failures.get(group_id)

    def refusal(self, tag: int, peer: int) -> DistributedError | None:
        """Why nothing can go to or come from ``peer`` any more, or None."""
        group_id = group_of_tag(tag)
        return self.failure_of(group_id) or self.departure_error(group_id, peer)

    def departure_error(self, group_id: int, peer: int) -> DistributedError | None:
        """Why ``peer``, or every peer for `ANY_SOURCE`, is gone from a group, or None."""
        if peer != ANY_SOURCE:
            departure = self._left.get((_WORLD, peer)) or self._left.get((group_id, peer)) or self._died.get(peer)
            return None if departure is None else self.exit_error(group_id, peer, departure)
        others = [rank for rank in self._members.get(group_id, ()) if rank != self.rank]
        gone = [self.departure_error(group_id, rank) for rank in others]
        return gone[0] if gone and all(gone) else None

    def describe_rank(self, group_id: int, rank: int) -> tuple[int, str]:
        """A rank's number in a group, and what the group's errors call it."""
        members = self._members.get(group_id, ())
        in_world = f"rank {rank} of group {self.name!r}"
        if group_id == _WORLD or rank not in members:
            return rank, in_world
        number = members.index(rank)
        return number, f"rank {number} of group {self._names.get(group_id)!r} ({in_world})"

    def gone_ranks(self) -> set[int]:
        """The ranks that have left the world, or died."""
        with self._state_lock:
            return {*self._died, *(rank for group_id, rank in self._left if group_id == _WORLD)}

    def deserted_groups(self) -> set[int]:
        """The groups that some rank has left."""
        with self._state_lock:
            return {group_id for group_id, _ in self._left}

    def members_of(self, group_id: int) -> tuple[int, ...]:
        """The ranks of a group that this rank has made; none of another."""
        return self._members.get(group_id, ())

    @property
    def is_over(self) -> bool:
        """Whether nothing works here any more: this rank has closed the group, or is a forked child."""
        return self._ended is not None

    def exit_error(self, group_id: int, rank: int, departure: PeerExit) -> DistributedError:
        """The error of a rank's exit, in the terms of one of its groups."""
        number, who = self.describe_rank(group_id, rank)
        if departure.relay is None:
            return departure.kind(f"{who} {departure.what}", ranks=(number,))
        number, relay = self.describe_rank(group_id, departure.relay)
        error = NoConnectionError(
            f"{relay}, which passes on the messages of other ranks, is gone: {who} can't be reached", ranks=(number,)
        )
        error.relay = departure.relay
        return error

    def _accept(self, message: Message) -> bool:
        """Take in a message; one more than this rank can keep unasked ends its group.

        Returns:
            False when it is not kept, and its bytes go nowhere: its group has ended, or its sender is no member.
        """
        group_id = group_of_tag(message.tag)
        if self.failure_of(group_id) is not None or not self._is_member(group_id, message.source):
            return False
        if self._mailbox.arrive(message):
            if self.failure_of(group_id) is None:
                return True
            self._mailbox.withdraw(message)  # it has ended between the two
            return False
        self.abort_for_overflow(group_id, self._mailbox.fullest_source(message))
        return False

    def abort_for_overflow(self, group_id: int, flooder: int) -> None:
        """End a group for messages that this rank does not receive, most of them from ``flooder``."""
        number, who = self.describe_rank(group_id, flooder)
        error = GroupAbortedError(
            f"{self.describe_rank(group_id, self.rank)[1]} ran out of room: {who} keeps sending what it does not"
            " receive. Receive it, or check the tags of send and recv.",
            ranks=(number,) if self._is_member(group_id, flooder) else (),
        )
        self.abort_subgroup(group_id, self._members.get(group_id, self._members[_WORLD]), error)

    def _is_member(self, group_id: int, rank: int) -> bool:
        """Whether a rank belongs to a group; of one that this rank has not made any may."""
        return rank in self._members.get(group_id, self._members[_WORLD])

    def _forget_messages(self, applies: Callable[[Message], bool]) -> None:
        """Free every message that waits and ``applies(message)``."""
        self._mailbox.forget(applies)

    def _finish_send(self, send: Send, error: DistributedError | None = None) -> bool:
        """End a send; False when another thread has."""
        with self._state_lock:
            if send not in self._sends:
                return False
            self._sends.discard(send)
        send.end(error)
        return True

    def _cancel_send(self, send: Send, error: DistributedError | None = None) -> bool:
        return self._take_back(send) and self._finish_send(
            send, error or DistributedTimeoutError("the send was cancelled")
        )

    # Groups and their ends.

    def abort(self, reason: str | DistributedError) -> None:
        """End the group on all ranks; see `Backend.abort`."""
        self.abort_subgroup(_WORLD, self._members[_WORLD], as_abort_error(self, reason))

    def abort_subgroup(self, group_id: int, members: tuple[int, ...], error: DistributedError) -> None:
        """End one sub-group on all its members; the world and its other sub-groups go on."""
        if self.fail_group(group_id, error):
            self._notify_abort(group_id, members, error)

    def fail_with(self, group_id: int, leader_id: int) -> None:
        """Have a sub-group fail on this rank when another group does here."""
        with self._state_lock:
            self._followers.setdefault(leader_id, set()).add(group_id)
            failure = self._failures.get(leader_id)
        if failure is not None:
            self.fail_group(group_id, failure)

    def open_subgroup(self, group_id: int, members: tuple[int, ...], name: str) -> None:
        """Learn who belongs to a sub-group, so that the death of one fails it.

        Sub-groups that were dropped without `close` are left now.
        """
        if self._ended is not None:
            return
        self._close_dropped()
        with self._state_lock:
            self._names[group_id] = name
            self._members[group_id] = members
            for ahead in self._ahead.values():
                ahead.discard(group_id)
            dead = next((rank for rank in members if rank in self._died), None)
        self._forget_messages(lambda message: group_of_tag(message.tag) == group_id and message.source not in members)
        if dead is not None:
            self.fail_group(group_id, self.exit_error(group_id, dead, self._died[dead]))
        if self._ended is None:
            for observer in self._observers:
                observer.on_opened(group_id, members)

    def close_subgroup(self, group_id: int, members: tuple[int, ...]) -> None:
        """Leave a sub-group. Of a closed one no more than its id is kept, to refuse what still comes for it.

        Nothing comes once all members have left it. Then only the last ids are kept: a thread may be in a call.
        """
        if self._ended is not None:
            return
        with self._state_lock:
            senders = {rank for rank in members if rank != self.rank and not self._has_left(group_id, rank)}
            self._closed[group_id] = senders
            if not senders:
                self._silent.append(group_id)
            self._followers.pop(group_id, None)
            self._members.pop(group_id, None)
            self._names.pop(group_id, None)
            failure = self._failures.pop(group_id, None)
            for rank in members:
                self._left.pop((group_id, rank), None)
        error = self.failure_of(group_id)
        assert error is not None
        self._end_transfers(lambda group, _: error if group == group_id else None)
        self._forget_messages(lambda message: group_of_tag(message.tag) == group_id)
        self._say_goodbye(group_id, members, failure)
        with self._state_lock:
            forgotten = [self._silent.popleft() for _ in range(len(self._silent) - _SILENT_KEPT)]
            for silent in forgotten:
                del self._closed[silent]
        if self._ended is None:
            for observer in self._observers:
                for silent in forgotten:
                    observer.on_subgroup_forgotten(silent)
                observer.on_subgroup_closed(group_id)

    def _has_left(self, group_id: int, rank: int) -> bool:
        return (_WORLD, rank) in self._left or (group_id, rank) in self._left or rank in self._died

    def _note_silence(self, groups: Iterable[int], rank: int) -> None:
        """Note that a rank sends nothing any more in groups that this one has closed. With the lock."""
        for group_id in groups:
            senders = self._closed[group_id]
            if rank in senders:
                senders.discard(rank)
                if not senders:
                    self._silent.append(group_id)

    def _close_dropped(self) -> None:
        """Leave the sub-groups whose handles are gone, except those with a message still on its way."""
        dropped = self.subgroups.dropped
        busy = self._sending_groups()
        for _ in range(len(dropped)):
            try:
                group_id = dropped.popleft()
            except IndexError:  # another thread does the same
                return
            members = self._members.get(group_id)
            if group_id in busy:
                dropped.append(group_id)
            elif members is not None:  # it was not closed
                self.close_subgroup(group_id, members)

    def _sending_groups(self) -> set[int]:
        """The groups with a message on its way out."""
        with self._state_lock:
            groups = {group_of_tag(send.tag) for send in self._sends}
        return groups.union(*(observer.sending_groups() for observer in self._observers))

    def subgroup_failure(self, group_id: int, members: tuple[int, ...]) -> DistributedError | None:
        """Why a sub-group can't be used any more, or None."""
        del members
        return self.failure_of(group_id)

    def _say_goodbye(self, group_id: int, members: tuple[int, ...], failure: DistributedError | None) -> None:
        """Tell the members that this rank has left, and before that why the group failed, if it did.

        A rank may know of a failure from the one that detected it, whose notices to others are still on their way. They
        must not take this rank's leaving for the reason.
        """
        if failure is not None:
            self._notify_abort(group_id, members, failure)
        self._notify_left(group_id, members)

    def _close_groups(self) -> bool:
        """End every group of this backend here; False when that was done before. `_leave_groups` tells the others."""
        error = GroupClosedError(f"group {self.name!r} was closed on this rank ({self.rank})")
        with self._state_lock:
            if self._ended is not None:
                return False
            # Also where it had failed: the caller has seen the failure, and left.
            self._ended = error
        self._end_transfers(lambda _group, _peer: error)
        for observer in self._observers:
            observer.on_closed()
        return True

    def _leave_groups(self) -> None:
        """Tell the others that this rank has closed its groups."""
        for group_id, failure in self._failures.copy().items():  # another thread may be closing a sub-group
            members = self._members.get(group_id)
            if group_id != _WORLD and members is not None:
                self._notify_abort(group_id, members, failure)
        self._say_goodbye(_WORLD, self._members[_WORLD], self._failures.get(_WORLD))

    def fail_group(self, group_id: int, error: DistributedError) -> bool:
        """End a group on this rank; False when it had failed before, which then keeps its reason."""
        error = error.fresh()
        with self._state_lock:
            if self._ended is not None or group_id in self._failures or group_id in self._closed:
                return False
            self._failures[group_id] = error
            followers = tuple(self._followers.get(group_id, ()))
        self._end_transfers(lambda group, _: error if group == group_id else None)
        self._forget_messages(lambda message: group_of_tag(message.tag) == group_id)
        for follower in followers:
            self.fail_group(follower, error)
        for observer in self._observers:
            observer.on_failed(group_id, error)
        return True

    def _may_be_ahead(self, group_id: int, rank: int) -> bool:
        """Note that a rank tells of a group's end; False when it has told of too many that this rank has not made."""
        with self._state_lock:
            if group_id in self._closed or group_id in self._members:
                return True
            ahead = self._ahead.setdefault(rank, set())
            if len(ahead) < MAX_AHEAD:
                ahead.add(group_id)
            return group_id in ahead

    def peer_left(self, group_id: int, rank: int, departure: PeerExit = CLOSED) -> None:
        """Record that a rank has left a group, and end the transfers with it."""
        with self._state_lock:
            if group_id in self._closed:
                self._note_silence((group_id,), rank)
                return
            self._left.setdefault((group_id, rank), departure)
            if group_id == _WORLD:
                self._note_silence(self._closed, rank)
        self._end_transfers(
            lambda group, peer: (
                self.departure_error(group, peer)
                if group_id in (_WORLD, group) and peer in (rank, ANY_SOURCE)
                else None
            )
        )
        for observer in self._observers:
            observer.on_peer_left(rank, departure)

    def peer_died(self, rank: int, departure: PeerExit) -> None:
        """Record that a rank has died, which ends every group that it was in."""
        with self._state_lock:
            if rank in self._died:
                return
            self._died[rank] = departure
            self._note_silence(self._closed, rank)
            groups = [group_id for group_id, members in self._members.items() if rank in members]
        for group_id in groups:
            self.fail_group(group_id, self.exit_error(group_id, rank, departure))
        self._end_transfers(lambda group, peer: self.departure_error(group, peer) if peer == rank else None)

    def _end_transfers(self, why: EndReason) -> None:
        """End what there is a ``why(group, peer)`` for. New ones are refused already, by what the caller recorded."""
        self._mailbox.fail(lambda receive: why(group_of_tag(receive.tag), receive.source))
        for observer in self._observers:
            observer.end_transfers(why)
        with self._state_lock:
            sends = list(self._sends)
        for send in sends:
            error = why(group_of_tag(send.tag), send.peer)
            if error is not None:
                self._cancel_send(send, error)
