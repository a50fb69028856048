"""The native engine as a backend."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from ferrodist.backends import mailbox
from ferrodist.backends.base import check_peer
from ferrodist.backends.call import Call
from ferrodist.backends.native.collectives import NativeCollectives
from ferrodist.backends.native.hosts import Place, address_of_interface, host_id
from ferrodist.backends.native.library import load
from ferrodist.backends.native.messages import NativeMailbox, NativeRequest, Outcome, close_at_exit
from ferrodist.backends.native.opening import open_messages
from ferrodist.backends.request import answer_seconds
from ferrodist.backends.sub import SubBackend
from ferrodist.backends.tags import ANY_SOURCE, check_tag, group_of_tag, group_tag
from ferrodist.backends.tcp.backend import TcpBackend
from ferrodist.deadline import DEFAULT_COLLECTIVE_TIMEOUT, Deadline, check_timeout
from ferrodist.errors import DistributedTimeoutError, GroupAbortedError, ProtocolError
from ferrodist.rendezvous import rendezvous
from ferrodist.rendezvous.secret import resolve_secret

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from typing_extensions import Buffer

    from ferrodist.backends.base import Backend
    from ferrodist.backends.mailbox import Inbox, Message
    from ferrodist.backends.request import Request
    from ferrodist.backends.tcp.frame import Frame
    from ferrodist.errors import DistributedError

__all__ = ["GlooBackend", "NativeBackend"]

_WORLD = 0
_TAG_BITS = 128
_LOW_64 = (1 << 64) - 1


class NativeBackend(TcpBackend):
    """A rank of a group whose collectives and messages are the native engine's.

    Ranks of one host share memory: groups and sub-groups of them touch the network for no collective and no message.
    Ranks of different hosts are connected each to each, on the interface that leads to rank 0 or the one that the
    environment's FERRODIST_SOCKET_IFNAME names. Messages between hosts, and what tells of the ends of groups and ranks, go
    over TCP through rank 0, as in `TcpBackend`, whose arguments and errors these are.

    Args:
        shares_memory: Whether ranks of one host share memory; if not, all are connected by TCP.

    Raises:
        BackendUnavailable: This installation has no native engine, or the ranks of a host can't share memory.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str,
        *,
        secret: str | bytes | None = None,
        timeout: float = DEFAULT_COLLECTIVE_TIMEOUT,
        name: str = "world",
        job: str = "default",
        listener: socket.socket | None = None,
        connect_timeout: float | None = None,
        socket_buffer_bytes: int | None = None,
        shares_memory: bool = True,
    ) -> None:
        load()
        deadline = Deadline(timeout if connect_timeout is None else check_timeout(connect_timeout))
        self._engines: weakref.WeakValueDictionary[int, NativeCollectives] = weakref.WeakValueDictionary()  # by group
        self._hosts: tuple[bytes, ...] = ()
        self._neighbours: frozenset[int] = frozenset()  # ranks whose messages go through shared memory
        self._reasons: list[DistributedError | None] = [None]  # why the engine's transfers ended, by number
        super().__init__(
            rank,
            world_size,
            address,
            secret=secret,
            timeout=timeout,
            name=name,
            job=job,
            listener=listener,
            connect_timeout=connect_timeout,
            socket_buffer_bytes=socket_buffer_bytes,
        )
        try:
            own_host = host_id() if shares_memory else rank.to_bytes(8, "little")
            self._hosts = tuple(self.agreement.reach(Call(operation="hosts", payload=own_host), deadline.remaining()))
            self._place = Place(hosts=self._hosts, address=self._own_address(), secret=resolve_secret(secret), job=job)
            open_messages(self, self._place, self._messenger, Call(operation="open messages"), deadline.remaining())
            self._neighbours = frozenset(self._place.neighbours(rank)) - {rank}
            self.collectives = self._make_engine(self, tuple(range(world_size)))
            self.collectives.open(Call(operation="open"), deadline.remaining())
        except GroupAbortedError:
            pass  # by a rank that had all it needed and went ahead: the next call says so
        except BaseException:
            self.close()
            raise

    def subgroup_collectives(self, subgroup: Backend) -> NativeCollectives:
        """The engine of a sub-group."""
        assert isinstance(subgroup, SubBackend)
        return self._make_engine(subgroup, subgroup.root_ranks)

    def _make_engine(self, group: Backend, members: tuple[int, ...]) -> NativeCollectives:
        place = replace(self._place, hosts=tuple(self._hosts[rank] for rank in members))
        engine = self._engines[group.group_id] = NativeCollectives(group, place)
        return engine

    def _own_address(self) -> str:
        """Where other hosts reach this rank: on the interface that leads to rank 0, unless the user names one."""
        interface = os.environ.get("FERRODIST_SOCKET_IFNAME")
        if interface:
            return address_of_interface(interface)
        for link in self._links.values():
            return str(link.sock.getsockname()[0])
        return "127.0.0.1"

    # Messages: see native/engine/messenger.h. What it knows of the ends of groups and ranks it is told in this class.

    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Send bytes to one rank; see `Backend.send`."""
        limit = self._timeout if timeout is None else timeout
        ending = self._messenger.quick_send(data, dst, tag, limit)
        if ending is not True:
            if ending is None:
                super().send(data, dst, tag=tag, timeout=timeout)
            else:
                self._raise_ending(ending, f"send to rank {dst}: it did not receive the message", dst, limit, 0)

    def recv(self, buffer: Buffer, src: int, *, tag: int = 0, timeout: float | None = None) -> int:
        """Receive the next message from ``src``; see `Backend.recv`."""
        limit = self._timeout if timeout is None else timeout
        ending = self._messenger.quick_recv(buffer, src, tag, limit)
        if type(ending) is int:
            return ending
        if ending is None:
            return super().recv(buffer, src, tag=tag, timeout=timeout)
        whom = "any rank" if src == ANY_SOURCE else f"rank {src}"
        return self._raise_ending(ending, f"recv from {whom}: nothing came", src, limit, memoryview(buffer).nbytes)

    def isend(self, data: Buffer, dst: int, *, tag: int = 0) -> Request:
        """Start `send` and return at once."""
        dst = check_peer(self, dst)
        if dst not in self._neighbours:
            return super().isend(data, dst, tag=tag)
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
        return NativeRequest(self, request, group_id, view.nbytes)

    def _post(self, buffer: memoryview, source: int, tag: int) -> Request:
        group_id = group_of_tag(tag)
        request = self._messenger.start_recv(buffer, source, group_id, tag & _LOW_64)
        if not request.done():
            error = self._refusal(tag, source)
            if error is not None:
                self._messenger.end_unmatched(request, self._number_of(error))
        return NativeRequest(self, request, group_id, buffer.nbytes)

    def _raise_ending(self, ending: tuple[int, int, int, int], what: str, peer: int, limit: float, room: int) -> NoReturn:
        """Raise what a transfer of the short ways has ended with."""
        if ending[0] != Outcome.CANCELLED:
            error = self.ending_error(ending, _WORLD, room)
            assert error is not None
            raise error.fresh()
        if self.failure is not None:
            raise self.failure.fresh()
        late = self.find_late(() if peer == ANY_SOURCE else (peer,), answer_seconds(limit))
        raise DistributedTimeoutError(
            f"{what} within {limit:g} s (group {self.name!r}, rank {self.rank}){late.detail}. The group is still good:"
            " the call may be made again.",
            ranks=late.ranks,
        )

    def ending_error(self, ending: tuple[int, int, int, int], group_id: int, room: int) -> DistributedError | None:
        """What a transfer in the engine has ended with, or None if well, or not yet.

        Args:
            ending: What the engine says.
            group_id: The group of the transfer.
            room: Bytes of its buffer.
        """
        outcome, peer, size_bytes, reason = ending
        if outcome == Outcome.WRONG_SIZE:
            return mailbox.size_error(*self._describe(group_id, peer), size_bytes, room)
        if outcome == Outcome.CANCELLED:
            return DistributedTimeoutError("the transfer was cancelled")
        return (self._reasons[reason] or self._ended) if outcome == Outcome.ENDED else None

    def _number_of(self, reason: DistributedError) -> int:
        with self._state_lock:
            self._reasons.append(reason)
            return len(self._reasons) - 1

    def _make_mailbox(self) -> Inbox:
        backend = weakref.ref(self)

        def tell(is_full: bool, rank: int, group_id: int, size_bytes: int) -> None:  # noqa: FBT001 - the engine calls it
            this = backend()
            if this is not None:
                this._blame(rank, group_id, size_bytes if is_full else -1)

        self._messenger = load().Messenger(
            self.rank, self.world_size, mailbox.EAGER_LIMIT, mailbox.MAX_UNASKED_BYTES, tell
        )
        close_at_exit(self)
        return NativeMailbox(self._messenger)

    def _blame(self, rank: int, group_id: int, size_bytes: int) -> None:
        """End a group for what a rank of this host sent: more than there is room for, or what is no message."""
        if size_bytes >= 0:
            self._run_out_of_room(group_id, self._messenger.fullest_source(rank, size_bytes))
            return
        what = "what it wrote to shared memory is no message"
        self.abort(ProtocolError(f"rank {rank} of group {self.name!r} broke the protocol: {what}", ranks=(rank,)))

    def _new_message(self, frame: Frame) -> Message:
        tag = group_tag(frame.group, frame.tag)
        message: Message = load().LinkedMessage(frame.source, tag, frame.group, frame.tag, frame.size_bytes)
        return message

    def _is_relayed(self, peers: tuple[int, ...]) -> bool:
        return not self._neighbours.issuperset(peers or [rank for rank in range(self.world_size) if rank != self.rank])

    def _sending_groups(self) -> set[int]:
        started = {group_id for is_send, group_id, _ in self._messenger.parties() if is_send}
        return super()._sending_groups() | started

    def _end_receives(self, why: Callable[[int, int], DistributedError | None]) -> None:
        """End the engine's receives, and its sends."""
        with self._state_lock:
            has_ended = self._failure_of(_WORLD) is not None
            gone = {*self._died, *(rank for group_id, rank in self._left if group_id == _WORLD)}
        if has_ended:
            self._messenger.end_group(_WORLD)
        for rank in gone:
            self._messenger.lose(rank)
        for is_send, group_id, peer in self._messenger.parties():
            error = why(group_id, peer)
            if error is not None:
                self._messenger.fail(is_send, group_id, peer, self._number_of(error))

    def close_messages(self) -> None:
        """End the engine's thread, which calls Python; no message goes anywhere after this."""
        self._messenger.close()

    @property
    def is_ended(self) -> bool:
        """Whether nothing works here any more: this rank has closed the group, or is a forked child."""
        return self._ended is not None

    # The ends of groups reach their engines.

    def open_subgroup(self, group_id: int, members: tuple[int, ...], name: str) -> None:
        """Learn who belongs to a sub-group."""
        super().open_subgroup(group_id, members, name)
        if self._ended is None:
            self._messenger.open_group(group_id, list(members))

    def _fail_group(self, group_id: int, error: DistributedError) -> bool:
        is_first = super()._fail_group(group_id, error)
        engine = self._engines.get(group_id)
        if is_first:
            self._messenger.end_group(group_id)
            if engine is not None:
                engine.abort(error)
        return is_first

    def close_subgroup(self, group_id: int, members: tuple[int, ...]) -> None:
        """Leave a sub-group, and its engine."""
        engine = self._engines.pop(group_id, None)
        if engine is not None:
            engine.leave()
        super().close_subgroup(group_id, members)
        if self._ended is None:
            self._messenger.end_group(group_id)

    def _close_groups(self) -> bool:
        is_first = super()._close_groups()
        if is_first:
            for engine in list(self._engines.values()):
                engine.leave()
            self.close_messages()
        return is_first

    def _forget_in_child(self) -> None:
        self._messenger.abandon()
        for engine in list(self._engines.values()):
            engine.stop()


class GlooBackend(NativeBackend):
    """The native engine over TCP alone, as gloo is: for hosts that can't share memory, and to compare.

    Arguments and errors are those of `NativeBackend`.
    """

    def __init__(self, rank: int, world_size: int, address: str, **settings: Any) -> None:
        super().__init__(rank, world_size, address, **{**settings, "shares_memory": False})

    @classmethod
    def from_env(cls, *, timeout: float = DEFAULT_COLLECTIVE_TIMEOUT, secret: str | bytes | None = None) -> GlooBackend:
        """Meet the other ranks as the environment says (torchrun's variables), and make a group of them.

        Args:
            timeout: Seconds for all ranks to meet, and the group's default for blocking calls.
            secret: The job secret; None takes FERRODIST_SECRET.

        Raises:
            ValueError: The environment lacks a variable.
            RendezvousError: On every rank, when some did not come.
        """
        deadline = Deadline(check_timeout(timeout))
        membership = rendezvous(None, rank=None, world_size=None, timeout=deadline.remaining(), secret=secret)
        try:
            group = cls.from_membership(membership, timeout, deadline)
        except BaseException:
            membership.close()
            raise
        group.on_close(membership.close)
        return group
