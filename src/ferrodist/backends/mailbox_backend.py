"""The control plane of the in-process, TCP and MPI backends: a mailbox, and the record of the ranks that may still
be waited for.

A transport below it starts sends (`_start_send`), takes them back (`_take_back`), and carries two notices to other
ranks: that a group has been aborted, and that this rank has left one. It reports what arrives through `_mailbox`,
`fail_group`, `peer_left` and `peer_died`.

[Note: left and died]
A rank that closes a group has *left*: its messages are still delivered, then calls that need it fail, and ranks that
don't need it go on. A rank that vanishes has *died*: every group it was a member of fails at once on every rank.
Sub-groups without it go on in both cases.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import Buffer, override

from ferrodist.backends.base import NonBlockingBackend, as_abort_error, check_peer
from ferrodist.backends.group_observer import CLOSED, EndReason, GroupObserver, PeerExit
from ferrodist.backends.mailbox import INLINE_LIMIT, Mailbox, Message, Receive, read_view, write_view
from ferrodist.backends.request import BaseRequest, Request, SizedRequest
from ferrodist.backends.stragglers import Stragglers
from ferrodist.backends.subgroup_registry import SubgroupRegistry
from ferrodist.backends.tags import ANY_SOURCE, TAG_BITS, WORLD_GROUP_ID, check_tag, group_of_tag
from ferrodist.errors import (
    DistributedError,
    DistributedTimeoutError,
    GroupAbortedError,
    GroupClosedError,
    NoConnectionError,
    ranks_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_AHEAD = 1 << 16  # how many ends of groups that this rank has not made (yet) it records for one other rank
_MAX_DRAINED_IDS = 1000  # how many ids it keeps of closed sub-groups that all members have left


class Send(BaseRequest):
    """An outgoing message."""

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


class MailboxBackend(NonBlockingBackend):
    """A backend whose messages arrive in a `Mailbox`; see the module's docstring for the duties of a transport."""

    def __init__(self, rank: int, world_size: int, *, timeout: float | None, name: str) -> None:
        super().__init__(rank, world_size, timeout=timeout, name=name)
        self.subgroups: SubgroupRegistry = SubgroupRegistry()
        self._mailbox = Mailbox(
            lambda tag, source: self.describe_rank(group_of_tag(tag), source),
            self.find_stragglers,
        )
        self._state_lock = threading.Lock()
        self._sends: set[Send] = set()
        self._observers: list[GroupObserver] = []
        self._members: dict[int, tuple[int, ...]] = {WORLD_GROUP_ID: tuple(range(world_size))}
        self._names: dict[int, str] = {WORLD_GROUP_ID: name}
        self._followers: dict[int, set[int]] = {}  # groups that fail with a group
        self.failures: dict[int, DistributedError] = {}  # by group
        self._left: dict[tuple[int, int], PeerExit] = {}  # by group and rank
        self._died: dict[int, PeerExit] = {}  # by rank
        self._ended: DistributedError | None = None  # the end of all groups: closed here, or a forked child
        self._closed: dict[int, set[int]] = {}  # closed sub-groups, and the ranks that may still send in them
        self._drained: deque[int] = deque()  # closed sub-groups in which no rank may send, oldest first
        # By rank: the groups not made here whose end that rank has reported. MAX_AHEAD bounds it,
        # and so `_failures` and `_left`, which otherwise have one entry for each group of this rank, and rank in it.
        self._ahead: dict[int, set[int]] = {}

    # The duties of a transport.

    @abstractmethod
    def _start_send(self, send: Send) -> None:
        """Begin to move ``send``, and call `_finish_send` when its data may be changed again."""

    @abstractmethod
    def _take_back(self, send: Send) -> bool:
        """Undo `_start_send`: the message must not be delivered after this.

        False if it is too late for that; the transport then ends the send immediately by itself.
        """

    @abstractmethod
    def _notify_abort(self, group_id: int, members: tuple[int, ...], error: DistributedError) -> None:
        """Have `fail_group(group_id, error)` run on the other members."""

    @abstractmethod
    def _notify_left(self, group_id: int, members: tuple[int, ...]) -> None:
        """Have `peer_left(group_id, this rank)` run on the other members after all that was sent to them before."""

    def _make_receive(self, buffer: memoryview, source: int, tag: int) -> Receive:
        return Receive(self._mailbox, buffer, source, tag)

    def add_observer(self, observer: GroupObserver) -> None:
        """Notify an observer from now on, and have it end its transfers with ranks that are gone."""
        self._observers.append(observer)
        observer.end_transfers(self.peer_error)

    # Sending and receiving.

    @property
    def failure(self) -> DistributedError | None:
        """Why the group can't be used any more, or None while it can."""
        return self.failure_of(WORLD_GROUP_ID)

    @override
    def isend(self, data: Buffer, dst: int, *, tag: int = 0) -> Request:
        dst = check_peer(self, dst)
        send = Send(self, read_view(data), dst, check_tag(tag, TAG_BITS))
        with self._state_lock:
            error = self.refusal(send.tag, dst)
            if error is not None:
                raise error.fresh()
            self._sends.add(send)
        self._start_send(send)
        # Its group may have ended after the check above and before the transport knew of the send.
        error = self.refusal(send.tag, dst)
        if error is not None:
            self._cancel_send(send, error)
        return send

    @override
    def irecv(self, buffer: Buffer, src: int, *, tag: int = 0) -> Request:
        return self._post(buffer, src, tag, accepts_shorter=False)

    @override
    @property
    def inline_limit(self) -> int:
        return INLINE_LIMIT

    @override
    def irecv_up_to(self, buffer: Buffer, src: int, *, tag: int = 0) -> SizedRequest:
        return self._post(buffer, src, tag, accepts_shorter=True)

    def _post(self, buffer: Buffer, src: int, tag: int, *, accepts_shorter: bool) -> Receive:
        """Post a receive; it ends with the error of `refusal` if no message is there and none will come."""
        src = check_peer(self, src, any_source=True)
        view = write_view(buffer)
        failure = self.failure_of(group_of_tag(check_tag(tag, TAG_BITS)))
        if failure is not None:
            raise failure.fresh()
        receive = self._make_receive(view, src, tag)
        receive.accepts_shorter = accepts_shorter
        self._mailbox.post(receive, partial(self.refusal, tag, src))
        return receive

    def failure_of(self, group_id: int) -> DistributedError | None:
        """The reason why a group can't be used on this rank any more, or None."""
        if self._ended is not None:
            return self._ended
        if group_id in self._closed:
            return GroupClosedError(f"this sub-group of {self.name!r} was closed on this rank ({self.rank})")
        return self.failures.get(group_id)

    def refusal(self, tag: int, peer: int) -> DistributedError | None:
        """The reason why no message can go to or come from ``peer`` any more, or None."""
        group_id = group_of_tag(tag)
        return self.failure_of(group_id) or self.peer_error(group_id, peer)

    def peer_error(self, group_id: int, peer: int) -> DistributedError | None:
        """The reason why ``peer``, or for `ANY_SOURCE` every peer, is gone from a group, or None."""
        if peer != ANY_SOURCE:
            peer_exit = (
                self._left.get((WORLD_GROUP_ID, peer)) or self._left.get((group_id, peer)) or self._died.get(peer)
            )
            return None if peer_exit is None else self.exit_error(group_id, peer, peer_exit)
        others = [rank for rank in self._members.get(group_id, ()) if rank != self.rank]
        gone = [self.peer_error(group_id, rank) for rank in others]
        return gone[0] if gone and all(gone) else None

    def describe_rank(self, group_id: int, rank: int) -> tuple[int, str]:
        """A rank's index in a group, and the words for it in the group's errors."""
        members = self._members.get(group_id, ())
        in_world = f"rank {rank} of group {self.name!r}"
        if group_id == WORLD_GROUP_ID or rank not in members:
            return rank, in_world
        index = members.index(rank)
        return index, f"rank {index} of group {self._names.get(group_id)!r} ({in_world})"

    def gone_ranks(self) -> set[int]:
        """The ranks that have left the world, or died."""
        with self._state_lock:
            return {*self._died, *(rank for group_id, rank in self._left if group_id == WORLD_GROUP_ID)}

    def deserted_groups(self) -> set[int]:
        """The groups that some rank has left."""
        with self._state_lock:
            return {group_id for group_id, _ in self._left}

    def members_of(self, group_id: int) -> tuple[int, ...]:
        """The ranks of a group that this rank has made; none of another."""
        return self._members.get(group_id, ())

    @property
    def is_over(self) -> bool:
        """Return whether this rank has closed the group, or is a forked child."""
        return self._ended is not None

    def _silent_or_all(self, silent: tuple[int, ...], peers: tuple[int, ...]) -> Stragglers:
        """Put a timeout down to the peers that don't answer, or to all of them if every one does."""
        if not silent:
            return Stragglers(ranks=peers)
        who = f"{ranks_text(silent)} of group {self.name!r}"
        return Stragglers(ranks=silent, detail=f" ({who} {'does' if len(silent) == 1 else 'do'} not answer)")

    def exit_error(self, group_id: int, rank: int, peer_exit: PeerExit) -> DistributedError:
        """The error of a rank's exit, in the terms of one of its groups."""
        index, name = self.describe_rank(group_id, rank)
        if peer_exit.relay is None:
            return peer_exit.kind(f"{name} {peer_exit.what}", ranks=(index,))
        index, relay = self.describe_rank(group_id, peer_exit.relay)
        error = NoConnectionError(
            f"{relay}, which passes on the messages of other ranks, is gone: {name} can't be reached", ranks=(index,)
        )
        error.relay = peer_exit.relay
        return error

    def _accept(self, message: Message) -> bool:
        """Add a message, whose overflow aborts its group; False if the group has ended or the sender is no member."""
        group_id = group_of_tag(message.tag)
        if self.failure_of(group_id) is not None or not self._is_member(group_id, message.source):
            return False
        if self._mailbox.arrive(message):
            if self.failure_of(group_id) is None:
                return True
            self._mailbox.withdraw(message)  # it has ended meanwhile
            return False
        self.abort_for_overflow(group_id, self._mailbox.fullest_source(message))
        return False

    def abort_for_overflow(self, group_id: int, flooder: int) -> None:
        """Abort a group because of unexpected messages, most of them from ``flooder``."""
        index, name = self.describe_rank(group_id, flooder)
        error = GroupAbortedError(
            f"{self.describe_rank(group_id, self.rank)[1]} ran out of room: {name} keeps sending messages that"
            " it does not receive. Receive them, or check the tags of send and recv.",
            ranks=(index,) if self._is_member(group_id, flooder) else (),
        )
        self.abort_subgroup(group_id, self._members.get(group_id, self._members[WORLD_GROUP_ID]), error)

    def _is_member(self, group_id: int, rank: int) -> bool:
        """Return whether a rank belongs to a group; in a group that this rank has not made, any rank may."""
        return rank in self._members.get(group_id, self._members[WORLD_GROUP_ID])

    def _forget_messages(self, applies: Callable[[Message], bool]) -> None:
        """Drop every waiting message for which ``applies(message)``."""
        self._mailbox.forget(applies)

    def _finish_send(self, send: Send, error: DistributedError | None = None) -> bool:
        """End a send; False if another thread did."""
        with self._state_lock:
            if send not in self._sends:
                return False
            self._sends.discard(send)
        send.end(error)
        return True

    def _cancel_send(self, send: Send, error: DistributedError | None = None) -> bool:
        error = error or DistributedTimeoutError("the send was cancelled")
        return self._take_back(send) and self._finish_send(send, error)

    # Groups and their ends.

    @override
    def abort(self, reason: str | DistributedError) -> None:
        self.abort_subgroup(WORLD_GROUP_ID, self._members[WORLD_GROUP_ID], as_abort_error(self, reason))

    @override
    def abort_subgroup(self, group_id: int, members: tuple[int, ...], error: DistributedError) -> None:
        if self.fail_group(group_id, error):
            self._notify_abort(group_id, members, error)

    @override
    def fail_with(self, group_id: int, leader_id: int) -> None:
        with self._state_lock:
            self._followers.setdefault(leader_id, set()).add(group_id)
            failure = self.failures.get(leader_id)
        if failure is not None:
            self.fail_group(group_id, failure)

    def open_subgroup(self, group_id: int, members: tuple[int, ...], name: str) -> bool:
        """Record the members of a sub-group, so that it fails when one dies.

        Sub-groups that the program dropped without `close` are left now.
        """
        if self._ended is not None:
            return True
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
        return True

    def close_subgroup(self, group_id: int, members: tuple[int, ...]) -> None:
        """Leave a sub-group. Only its id is kept, to refuse messages that still come for it.

        Once all members have left, no messages come, and the id is needed only while another thread may be in a call:
        of such groups the newest ids are kept.
        """
        if self._ended is not None:
            return
        with self._state_lock:
            senders = {rank for rank in members if rank != self.rank and not self._has_left(group_id, rank)}
            self._closed[group_id] = senders
            if not senders:
                self._drained.append(group_id)
            self._followers.pop(group_id, None)
            self._members.pop(group_id, None)
            self._names.pop(group_id, None)
            failure = self.failures.pop(group_id, None)
            for rank in members:
                self._left.pop((group_id, rank), None)
        error = self.failure_of(group_id)
        assert error is not None
        self._end_transfers(lambda group, _: error if group == group_id else None)
        self._forget_messages(lambda message: group_of_tag(message.tag) == group_id)
        self._say_goodbye(group_id, members, failure)
        with self._state_lock:
            forgotten = [self._drained.popleft() for _ in range(len(self._drained) - _MAX_DRAINED_IDS)]
            for drained in forgotten:
                del self._closed[drained]
        if self._ended is None:
            for observer in self._observers:
                for drained in forgotten:
                    observer.on_subgroup_forgotten(drained)
                observer.on_subgroup_closed(group_id)

    def _has_left(self, group_id: int, rank: int) -> bool:
        return (WORLD_GROUP_ID, rank) in self._left or (group_id, rank) in self._left or rank in self._died

    def _note_end_of_sends(self, groups: Iterable[int], rank: int) -> None:
        """Record that a rank sends nothing more in groups that this one has closed. The lock is held."""
        for group_id in groups:
            senders = self._closed[group_id]
            if rank in senders:
                senders.discard(rank)
                if not senders:
                    self._drained.append(group_id)

    def _close_dropped(self) -> None:
        """Leave the sub-groups that the program has dropped, except those with a message on its way out."""
        dropped = self.subgroups.dropped
        with self._state_lock:
            busy = {group_of_tag(send.tag) for send in self._sends}
        busy.update(*(observer.sending_groups() for observer in self._observers))
        for _ in range(len(dropped)):
            try:
                group_id = dropped.popleft()
            except IndexError:  # another thread took it
                return
            members = self._members.get(group_id)
            if group_id in busy:
                dropped.append(group_id)
            elif members is not None:  # not closed yet
                self.close_subgroup(group_id, members)

    @override
    def subgroup_failure(self, group_id: int, members: tuple[int, ...]) -> DistributedError | None:
        del members
        return self.failure_of(group_id)

    def _say_goodbye(self, group_id: int, members: tuple[int, ...], failure: DistributedError | None) -> None:
        """Notify the members that this rank has left, and before that why the group failed, if it did.

        The rank that detected a failure may not have notified all others yet; they must not mistake this rank's leaving
        for the reason.
        """
        if failure is not None:
            self._notify_abort(group_id, members, failure)
        self._notify_left(group_id, members)

    def _close_groups(self) -> bool:
        """End every group of this backend here; False if that was done before. `_leave_groups` notifies the others."""
        error = GroupClosedError(f"group {self.name!r} was closed on this rank ({self.rank})")
        with self._state_lock:
            if self._ended is not None:
                return False
            # Also if it had failed: the caller has seen the failure, and left.
            self._ended = error
        self._end_transfers(lambda _group, _peer: error)
        for observer in self._observers:
            observer.on_closed()
        return True

    def leave_to_parent(self, error: DistributedError) -> None:
        """In a forked child, make every use of the group raise ``error``: it remains the parent's."""
        self._state_lock = threading.Lock()  # the parent's threads may have held it
        self._ended = error  # checked before anything that could wait for another of its locks
        for observer in self._observers:
            observer.on_forked()

    def _leave_groups(self) -> None:
        """Notify the others that this rank has closed its groups."""
        for group_id, failure in self.failures.copy().items():  # another thread may be closing a sub-group
            members = self._members.get(group_id)
            if group_id != WORLD_GROUP_ID and members is not None:
                self._notify_abort(group_id, members, failure)
        self._say_goodbye(WORLD_GROUP_ID, self._members[WORLD_GROUP_ID], self.failures.get(WORLD_GROUP_ID))

    def fail_group(self, group_id: int, error: DistributedError) -> bool:
        """End a group on this rank; False if it had failed before, and keeps its first reason."""
        error = error.fresh()
        with self._state_lock:
            if self._ended is not None or group_id in self.failures or group_id in self._closed:
                return False
            self.failures[group_id] = error
            followers = tuple(self._followers.get(group_id, ()))
        self._end_transfers(lambda group, _: error if group == group_id else None)
        self._forget_messages(lambda message: group_of_tag(message.tag) == group_id)
        for follower in followers:
            self.fail_group(follower, error)
        for observer in self._observers:
            observer.on_failed(group_id, error)
        return True

    def _may_be_ahead(self, group_id: int, rank: int) -> bool:
        """Record a notice about a group; False if its sender has sent too many about groups not made here."""
        with self._state_lock:
            if group_id in self._closed or group_id in self._members:
                return True
            ahead = self._ahead.setdefault(rank, set())
            if len(ahead) < MAX_AHEAD:
                ahead.add(group_id)
            return group_id in ahead

    def peer_left(self, group_id: int, rank: int, peer_exit: PeerExit = CLOSED) -> None:
        """Record that a rank has left a group, and end the transfers with it."""
        with self._state_lock:
            if group_id in self._closed:
                self._note_end_of_sends((group_id,), rank)
                return
            self._left.setdefault((group_id, rank), peer_exit)
            if group_id == WORLD_GROUP_ID:
                self._note_end_of_sends(self._closed, rank)
        self._end_transfers(
            lambda group, peer: (
                self.peer_error(group, peer)
                if group_id in (WORLD_GROUP_ID, group) and peer in (rank, ANY_SOURCE)
                else None
            )
        )
        for observer in self._observers:
            observer.on_peer_left(rank, peer_exit)

    def peer_died(self, rank: int, peer_exit: PeerExit) -> None:
        """Record that a rank has died, which ends every group that it was in."""
        with self._state_lock:
            if rank in self._died:
                return
            self._died[rank] = peer_exit
            self._note_end_of_sends(self._closed, rank)
            groups = [group_id for group_id, members in self._members.items() if rank in members]
        for group_id in groups:
            self.fail_group(group_id, self.exit_error(group_id, rank, peer_exit))
        self._end_transfers(lambda group, peer: self.peer_error(group, peer) if peer == rank else None)

    def _end_transfers(self, why: EndReason) -> None:
        """End the transfers for which ``why(group, peer)`` is an error. New ones are refused by the caller's record."""
        self._mailbox.fail(lambda receive: why(group_of_tag(receive.tag), receive.source))
        for observer in self._observers:
            observer.end_transfers(why)
        with self._state_lock:
            sends = list(self._sends)
        for send in sends:
            error = why(group_of_tag(send.tag), send.peer)
            if error is not None:
                self._cancel_send(send, error)
