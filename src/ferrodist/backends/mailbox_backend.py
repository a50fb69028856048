"""What the in-process and the TCP backend have in common: a mailbox, and who may still be waited for.

A transport below it starts sends (`_start_send`), takes them back (`_take_back`), and carries two notices to other
ranks: that a group has been aborted, and that this rank has left one. It reports what comes in through `_mailbox`,
`_fail_group`, `_peer_left` and `_peer_died`.

[Note: left and died]
A rank that closes a group has *left*: what it sent is still delivered, then whatever needs it fails, and ranks that
need nothing more of it go on. A rank that vanishes has *died*: every group it was a member of fails at once on every
rank. Sub-groups without it go on in both cases.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING

from ferrodist.backends.base import Backend, as_abort_error, check_peer
from ferrodist.backends.mailbox import Mailbox, Message, Receive, read_view, write_view
from ferrodist.backends.request import BaseRequest
from ferrodist.backends.tags import ANY_SOURCE, check_tag, group_of_tag
from ferrodist.deadline import check_timeout
from ferrodist.errors import (
    DistributedError,
    DistributedTimeoutError,
    GroupAbortedError,
    GroupClosedError,
    PeerLostError,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ferrodist.backends.request import Request

__all__ = ["MailboxBackend", "Send"]

_WORLD = 0
_TAG_BITS = 128


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


class MailboxBackend(Backend):
    """A backend whose messages arrive in a `Mailbox`; see the module's docstring for what a transport adds."""

    def __init__(self, rank: int, world_size: int, *, timeout: float, name: str) -> None:
        super().__init__(rank, world_size, timeout=timeout, name=name)
        self._mailbox = Mailbox()
        self._state_lock = threading.Lock()
        self._sends: set[Send] = set()
        self._members: dict[int, tuple[int, ...]] = {_WORLD: tuple(range(world_size))}
        self._failures: dict[int, DistributedError] = {}  # by group
        self._left: dict[tuple[int, int], DistributedError] = {}  # by group and rank
        self._died: dict[int, DistributedError] = {}  # by rank
        self._ended: DistributedError | None = None  # why nothing works here any more: closed, or a forked child
        self._closed: set[int] = set()  # sub-groups this rank has closed

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
        """Have `_fail_group(group_id, error)` run on the other members."""

    @abstractmethod
    def _notify_left(self, group_id: int, members: tuple[int, ...]) -> None:
        """Have `_peer_left(group_id, this rank)` run on the other members after all that was sent to them before."""

    # Sending and receiving.

    @property
    def failure(self) -> DistributedError | None:
        """Why the group can't be used any more, or None while it can."""
        return self._failure_of(_WORLD)

    def isend(self, data: Buffer, dst: int, *, tag: int = 0) -> Request:
        """Start `send` and return at once."""
        dst = check_peer(self, dst)
        send = Send(self, read_view(data), dst, check_tag(tag, _TAG_BITS))
        with self._state_lock:
            error = self._refusal(send.tag, dst)
            if error is not None:
                raise error.fresh()
            self._sends.add(send)
        self._start_send(send)
        # Its group may have ended after the look above and before the transport knew of the send.
        error = self._refusal(send.tag, dst)
        if error is not None:
            self._cancel_send(send, error)
        return send

    def irecv(self, buffer: Buffer, src: int, *, tag: int = 0) -> Request:
        """Start `recv` and return at once."""
        src = check_peer(self, src, any_source=True)
        receive = Receive(self._mailbox, write_view(buffer), src, check_tag(tag, _TAG_BITS))
        failure = self._failure_of(group_of_tag(tag))
        if failure is not None:
            raise failure.fresh()
        self._mailbox.post(receive, partial(self._refusal, tag, src))
        return receive

    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Send bytes to one rank; see `Backend.send`."""
        limit = self._limit(timeout)
        request = self.isend(data, dst, tag=tag)
        self._wait_or_give_up(request, f"send to rank {dst}: it did not receive the message", limit)

    def recv(self, buffer: Buffer, src: int, *, tag: int = 0, timeout: float | None = None) -> int:
        """Receive the next message from ``src``; see `Backend.recv`."""
        limit = self._limit(timeout)
        whom = "any rank" if src == ANY_SOURCE else f"rank {src}"
        return self._wait_or_give_up(self.irecv(buffer, src, tag=tag), f"recv from {whom}: nothing came", limit)

    def _limit(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else check_timeout(timeout)

    def _failure_of(self, group_id: int) -> DistributedError | None:
        if self._ended is not None:
            return self._ended
        if group_id in self._closed:
            return GroupClosedError(f"this sub-group of {self.name!r} was closed on this rank ({self.rank})")
        return self._failures.get(group_id)

    def _refusal(self, tag: int, peer: int) -> DistributedError | None:
        """Why nothing can go to or come from ``peer`` any more, or None."""
        group_id = group_of_tag(tag)
        return self._failure_of(group_id) or self._departure(group_id, peer)

    def _departure(self, group_id: int, peer: int) -> DistributedError | None:
        """Why ``peer``, or every peer for `ANY_SOURCE`, is gone from a group, or None."""
        if peer != ANY_SOURCE:
            return self._left.get((_WORLD, peer)) or self._left.get((group_id, peer)) or self._died.get(peer)
        others = [rank for rank in self._members.get(group_id, ()) if rank != self.rank]
        gone = [self._departure(group_id, rank) for rank in others]
        return gone[0] if gone and all(gone) else None

    def _accept(self, message: Message) -> None:
        """Take in a message; one more than this rank can keep unasked ends its group.

        One for a group that has ended is not kept: its bytes go nowhere.
        """
        group_id = group_of_tag(message.tag)
        if self._failure_of(group_id) is not None or self._mailbox.arrive(message):
            return
        error = GroupAbortedError(
            f"rank {self.rank} of group {self.name!r} ran out of room: rank {message.source} keeps sending what it"
            " does not receive. Receive it, or check the tags of send and recv.",
            ranks=(message.source,),
        )
        self.abort_subgroup(group_id, self._members.get(group_id, self._members[_WORLD]), error)

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
        if self._fail_group(group_id, error):
            self._notify_abort(group_id, members, error)

    def open_subgroup(self, group_id: int, members: tuple[int, ...]) -> None:
        """Learn who belongs to a sub-group, so that the death of one fails it."""
        if self._ended is not None:
            return
        with self._state_lock:
            self._members[group_id] = members
            dead = next((self._died[rank] for rank in members if rank in self._died), None)
        if dead is not None:
            self._fail_group(group_id, dead)

    def close_subgroup(self, group_id: int, members: tuple[int, ...]) -> None:
        """Leave a sub-group. Of a closed one no more than its id is kept, to refuse what still comes for it."""
        if self._ended is not None:
            return
        with self._state_lock:
            self._closed.add(group_id)
            self._members.pop(group_id, None)
            failure = self._failures.pop(group_id, None)
            for rank in members:
                self._left.pop((group_id, rank), None)
        error = self._failure_of(group_id)
        assert error is not None
        self._end_transfers(lambda group, _: group == group_id, error)
        self._mailbox.forget(lambda message: group_of_tag(message.tag) == group_id)
        self._say_goodbye(group_id, members, failure)

    def subgroup_failure(self, group_id: int, members: tuple[int, ...]) -> DistributedError | None:
        """Why a sub-group can't be used any more, or None."""
        del members
        return self._failure_of(group_id)

    def _say_goodbye(self, group_id: int, members: tuple[int, ...], failure: DistributedError | None) -> None:
        """Tell the members that this rank has left, and before that why the group failed, if it did.

        A rank may know of a failure from the one that detected it, whose notices to others are still on their way. They
        must not take this rank's leaving for the reason.
        """
        if failure is not None:
            self._notify_abort(group_id, members, failure)
        self._notify_left(group_id, members)

    def _close_groups(self) -> bool:
        """Leave every group of this backend, and say so; False when that was done before."""
        error = GroupClosedError(f"group {self.name!r} was closed on this rank ({self.rank})")
        with self._state_lock:
            if self._ended is not None:
                return False
            # Also where it had failed: the caller has seen the failure, and left.
            self._ended = error
        self._end_transfers(lambda _group, _peer: True, error)
        for group_id, failure in self._failures.items():
            if group_id != _WORLD and group_id in self._members:
                self._notify_abort(group_id, self._members[group_id], failure)
        self._say_goodbye(_WORLD, self._members[_WORLD], self._failures.get(_WORLD))
        return True

    def _fail_group(self, group_id: int, error: DistributedError) -> bool:
        """End a group on this rank; False when it had failed before, which then keeps its reason."""
        error = error.fresh()
        with self._state_lock:
            if self._ended is not None or group_id in self._failures or group_id in self._closed:
                return False
            self._failures[group_id] = error
        self._end_transfers(lambda group, _: group == group_id, error)
        self._mailbox.forget(lambda message: group_of_tag(message.tag) == group_id)
        return True

    def _peer_left(self, group_id: int, rank: int, error: DistributedError | None = None) -> None:
        error = error or PeerLostError(
            f"rank {rank} of group {self.name!r} has left: it closed the group while rank {self.rank} still needed it",
            ranks=(rank,),
        )
        with self._state_lock:
            if group_id in self._closed:
                return
            self._left.setdefault((group_id, rank), error)
        self._end_transfers(
            lambda group, peer: (
                group_id in (_WORLD, group)
                and (peer == rank or (peer == ANY_SOURCE and self._departure(group, peer) is not None))
            ),
            error,
        )

    def _peer_died(self, rank: int, error: DistributedError) -> None:
        with self._state_lock:
            if rank in self._died:
                return
            self._died[rank] = error
            groups = [group_id for group_id, members in self._members.items() if rank in members]
        for group_id in groups:
            self._fail_group(group_id, error)
        self._end_transfers(lambda _, peer: peer == rank, error)

    def _end_transfers(self, applies: _Applies, error: DistributedError) -> None:
        """End what ``applies(group, peer)`` to. New ones are refused already, by what the caller recorded."""
        self._mailbox.fail(lambda receive: applies(group_of_tag(receive.tag), receive.source), error)
        with self._state_lock:
            sends = [send for send in self._sends if applies(group_of_tag(send.tag), send.peer)]
        for send in sends:
            self._cancel_send(send, error)


if TYPE_CHECKING:
    from collections.abc import Callable

    _Applies = Callable[[int, int], bool]
