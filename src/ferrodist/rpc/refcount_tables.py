"""What a rank knows of an object: at its owner, and elsewhere.

What references a rank has: of objects that it keeps, and of those that other ranks keep for it.

[Note: counts of references]
An object's owner counts for each other rank how many references have been sent to it; each rank counts how many have
come. The owner knows of a reference before it is sent, and a rank whose last reference is gone gives back in one
message as many as had come. So the owner never counts less than what a rank has, or what is on its way to it: there is
no order of messages in which something is freed too early. A rank that is lost has no references. What third ranks
send is in [Note: references that third ranks send] in `pending_forks.py`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.errors import PeerLostError, RpcError
from ferrodist.rpc.future import Outcome
from ferrodist.rpc.messages import Failure, FailureKind
from ferrodist.rpc.pending_forks import Registrations
from ferrodist.rpc.rref import RRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ferrodist.rpc.executor import Errands
    from ferrodist.rpc.future import Future
    from ferrodist.rpc.pending_forks import Passage, Registration
    from ferrodist.rpc.rref import ReferenceId, Referring

FREED = "the object was freed: its owner knows of no reference to it"


def _no_handle() -> None:
    return None


class Kept:
    """An object at its owner, or one that is being made there.

    Attributes:
        id: Of it.
        counts: How many references have been sent to each other rank.
        handle: Gives this rank's own reference, while there is one.
        outcome: It, or a `Failure` that says why it could not be made.
    """

    def __init__(self, id_: ReferenceId) -> None:
        self.id = id_
        self.counts: dict[int, int] = {}
        self.handle: Callable[[], RRef | None] = _no_handle
        self.outcome: Outcome[Any] = Outcome()

    def drop(self) -> None:
        """Forget the object."""
        self.outcome.replace(Failure(FailureKind.UNKNOWN, "", FREED, ""))


class Held:
    """An object on another rank.

    Args:
        id_: Of it.
        creation: The call that makes it, where this rank made that.

    Attributes:
        id: As given.
        creation: As given.
        count: How many references have come, in
        connection: this connection with the owner, by its number.
        handle: Gives this rank's reference, while there is one.
    """

    def __init__(self, id_: ReferenceId, creation: Future | None = None) -> None:
        self.id = id_
        self.creation = creation
        self.count = self.connection = 0
        self.handle: Callable[[], RRef | None] = _no_handle

    def add(self, connection: int) -> None:
        """One more has come."""
        self.count = 1 if self.connection != connection else self.count + 1
        self.connection = connection

    def take_count(self, connection: int) -> int:
        """Give all back that have come in a connection."""
        found = self.count if self.connection == connection else 0
        self.count = 0
        return found


def part_of(reference: RRef) -> Kept | Held:
    """What is known here of a reference's object."""
    part = reference._part  # noqa: SLF001 - users have no use for it
    assert isinstance(part, (Kept, Held))
    return part


def kept_of(reference: RRef) -> Kept:
    """The object of a reference, at its owner.

    Raises:
        ValueError: It is not here.
    """
    part = part_of(reference)
    if isinstance(part, Kept):
        return part
    raise ValueError(
        f"the object is on rank {part.id.owner}, not here: take to_here() for a copy, or call its methods with"
        " rpc_sync()"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceCounts:
    """How many objects a rank has references of.

    Args:
        for_others: Objects here that other ranks have references of.
        for_itself: Objects here that only this rank has references of.
        elsewhere: Objects on other ranks that this one has references of.
    """

    for_others: int
    for_itself: int
    elsewhere: int


class _Peer:
    """Another rank: whether it is there, and as which process, by which connection."""

    __slots__ = ("connection", "has_met", "incarnation", "is_there")

    def __init__(self) -> None:
        self.incarnation = -1
        self.connection = 0
        self.is_there = False
        self.has_met = False  # that is, it knows of this connection


class Teller(Protocol):
    """Tells other ranks of counts, in the order in which it is asked to."""

    def released(self, held: Held) -> None:
        """This rank has no reference to an object any more: `Tables.give_back` says of how many."""

    def confirm(self, owner: int) -> None:
        """Something came: `Tables.take_confirmed` says what."""

    def settle(self, user: int) -> None:
        """A rank is to say what has come: `Tables.unsettled` says of which messages."""


class Tables:
    """All of one agent; threads share it.

    Args:
        objects: Who the references are of.
        errands: Does what comes when references have gone.
        teller: Tells other ranks.
    """

    def __init__(self, objects: Referring, errands: Errands, teller: Teller) -> None:
        self._objects = objects
        self._errands = errands
        self._teller = teller
        # The garbage collector may come by in here, and call whatever was to be called at the end of something.
        self._lock = threading.RLock()
        self._kept: dict[ReferenceId, Kept] = {}
        self._held: dict[ReferenceId, Held] = {}
        self._peers: defaultdict[int, _Peer] = defaultdict(_Peer)
        self._registrations = Registrations()  # at their owner
        # What owners are to be told: what has come, and by which connection with them; and of what no more will.
        self._arrived: defaultdict[int, list[tuple[int, Passage, ReferenceId]]] = defaultdict(list)
        self._settled: defaultdict[int, list[Passage]] = defaultdict(list)
        self._refused: set[tuple[int, Passage]] = set()  # with owners: what is not to come any more

    # Objects of other ranks.

    def hold(self, id_: ReferenceId, creation: Future) -> RRef:
        """A reference of what another rank makes for this one."""
        with self._lock:
            held = self._held[id_] = Held(id_, creation)
            held.add(self._peers[id_.owner].connection)
            return self._handle_of(held)

    def arrived(self, id_: ReferenceId, passage: Passage | None = None, *, is_counted: bool = True) -> RRef:
        """This rank's reference of what came.

        Args:
            id_: Of the object.
            passage: What it came by, if neither its owner sent it nor this rank.
            is_counted: Whether it was counted for this rank: not if that has sent it itself.

        Raises:
            PeerLostError: The owner has lost who sent it, and may have freed the object.
        """
        with self._lock:
            if passage is not None and (id_.owner, passage) in self._refused:
                raise PeerLostError(
                    f"rank {id_.owner} has lost rank {passage[0]}, which had sent a reference to an object there that"
                    " comes only now: it is not taken, for the object may have been freed",
                    ranks=(passage[0],),
                )
            held = self._held.get(id_)
            if held is None:
                held = self._held[id_] = Held(id_)
            connection = self._peers[id_.owner].connection
            if is_counted:
                held.add(connection)
            handle = self._handle_of(held)
            if passage is not None:
                self._arrived[id_.owner].append((connection, passage, id_))
        if passage is not None:
            self._errands.put(functools.partial(self._teller.confirm, id_.owner))
        return handle

    def refuse(self, owner: int, registrar: int, tickets: Iterable[int]) -> None:
        """Take nothing more of what a rank has sent with these tickets, and tell the owner what has come of it."""
        with self._lock:
            for ticket in tickets:
                self._refused.add((owner, (registrar, ticket)))
                self._settled[owner].append((registrar, ticket))
        self._errands.put(functools.partial(self._teller.confirm, owner))

    def take_confirmed(self, owner: int, most: int) -> tuple[list[tuple[Passage, ReferenceId]], list[Passage]]:
        """So much of what an owner is to be told: which references have come, and of which messages no more will."""
        with self._lock:
            connection = self._peers[owner].connection
            arrived, settled = self._arrived[owner], self._settled[owner]
            arrived[:] = [each for each in arrived if each[0] == connection]  # others are not counted any more
            found = [(passage, id_) for _, passage, id_ in arrived[:most]]
            last = settled[: most - len(found)]
            del arrived[: len(found)], settled[: len(last)]
            return found, last

    def give_back(self, held: Held) -> int:
        """How many references an owner is to be told of that this rank has no more."""
        with self._lock:
            return held.take_count(self._peers[held.id.owner].connection)

    # Objects of this rank.

    def keep(self, id_: ReferenceId, user: int | None = None) -> tuple[Kept, RRef | None]:
        """A new object: for a rank, or for this one, which gets a reference.

        Raises:
            ValueError: There is one of that id.
        """
        with self._lock:
            if id_ in self._kept:
                raise ValueError("there is an object of that id already")
            kept = self._kept[id_] = Kept(id_)
            if user is None:
                return kept, self._handle_of(kept)
            kept.counts[user] = 1
            return kept, None

    def own(self, id_: ReferenceId) -> RRef:
        """This rank's reference of an object of its own, or of one that is there no more."""
        with self._lock:
            kept = self._kept.get(id_)
            if kept is None:
                kept = Kept(id_)
                kept.drop()
            return self._handle_of(kept)

    def count(self, user: int, counts: Mapping[ReferenceId, int]) -> int:
        """References of objects here are about to be sent from here to a rank; gives by which connection.

        Raises:
            RpcError: One is not here.
        """
        with self._lock:
            self._check(counts)
            peer = self._peers[user]
            if peer.is_there:
                for id_, count in counts.items():
                    self._add(user, id_, count)
            return peer.connection

    def uncount(self, user: int, counts: Mapping[ReferenceId, int], connection: int) -> None:
        """They were not sent."""
        with self._lock:
            if self._peers[user].connection == connection:
                self.release(user, counts)

    def release(self, user: int, counts: Mapping[ReferenceId, int]) -> None:
        """A rank has fewer references of objects here; what is not here, or was not counted, is passed over."""
        with self._lock:
            for id_, count in counts.items():
                kept = self._kept.get(id_)
                if kept is None or user not in kept.counts:
                    continue
                kept.counts[user] -= count
                if kept.counts[user] <= 0:
                    del kept.counts[user]
                    self._free_unused(kept)

    # What third ranks send: see [Note: references that third ranks send].

    def register(self, registration: Registration) -> None:
        """References of objects here are about to be sent from one rank to another one.

        Raises:
            RpcError: One is not here.
            ValueError: Its ticket was there before.
        """
        with self._lock:
            self._check(registration.counts)
            peer = self._peers[registration.user]
            if registration.incarnation < peer.incarnation + (not peer.is_there):
                may_go = False
            else:
                self._registrations.add(registration)
                if registration.incarnation > peer.incarnation or not peer.has_met:
                    return
                may_go = True
            answers = registration.take_answer()
        for answer in answers:
            answer(may_go)

    def unregister(self, passage: Passage) -> None:
        """They were not sent."""
        with self._lock:
            registration = self._registrations.find(passage)
        if registration is not None:
            self._drop([registration])

    def met(self, user: int) -> None:
        """A rank knows of the connection with this one."""
        with self._lock:
            peer = self._peers[user]
            peer.has_met = True
            ready = [each for each in self._registrations.to(user) if each.incarnation == peer.incarnation]
            answers = [answer for each in ready for answer in each.take_answer()]
        for answer in answers:
            answer(True)

    def confirm(self, user: int, arrived: Iterable[tuple[Passage, ReferenceId]], settled: Iterable[Passage]) -> None:
        """References have come to a rank; and of those in some messages no more will."""
        with self._lock:
            for passage, id_ in arrived:
                if id_ in self._kept:
                    self._add(user, id_, 1)
                    registration = self._registrations.find(passage)
                    if registration is not None and registration.user == user:
                        self._registrations.arrive(registration, id_)
            found = [self._registrations.find(passage) for passage in settled]
            self._drop([each for each in found if each is not None and each.must_settle and each.user == user])

    def settle(self, registrar: int, user: int, ticket: int) -> None:
        """A rank has lost another one: what it has sent there, with tickets up to this one, may not come."""
        with self._lock:
            found = [each for each in self._registrations.of(registrar) if each.user == user and each.ticket <= ticket]
        self._settle(found)

    def unsettled(self, user: int) -> dict[int, list[int]]:
        """Of which messages a rank is to say what has come: tickets by senders."""
        tickets: dict[int, list[int]] = {}
        with self._lock:
            for each in self._registrations.to(user):
                if each.must_settle:
                    tickets.setdefault(each.registrar, []).append(each.ticket)
        return tickets

    # Ranks.

    def incarnation(self, rank: int) -> int:
        """Which process another rank is, or was."""
        with self._lock:
            return self._peers[rank].incarnation

    def joined(self, rank: int, incarnation: int) -> None:
        """A rank is there, perhaps once more."""
        with self._lock:
            peer = self._peers[rank]
            peer.incarnation = incarnation
            peer.connection += 1
            peer.is_there, peer.has_met = True, False
            self._refused = {each for each in self._refused if each[1][0] != rank}
            outdated = [each for each in self._registrations.to(rank) if each.incarnation < incarnation]
        self._drop(outdated)

    def lost(self, rank: int) -> None:
        """A rank is there no more."""
        with self._lock:
            peer = self._peers[rank]
            peer.is_there = peer.has_met = False
            for kept in list(self._kept.values()):
                if kept.counts.pop(rank, None) is not None:
                    self._free_unused(kept)
            ended = [each for each in self._registrations.to(rank) if each.incarnation <= peer.incarnation]
            open_ones = self._registrations.of(rank)
        self._drop(ended)
        self._settle(open_ones)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            kept, self._kept, self._held = list(self._kept.values()), {}, {}
            self._registrations = Registrations()
        for each in kept:
            each.drop()

    def look(self) -> ReferenceCounts:
        """How many there are."""
        with self._lock:
            for_others = sum(bool(kept.counts) or self._registrations.has(id_) for id_, kept in self._kept.items())
            return ReferenceCounts(
                for_others=for_others, for_itself=len(self._kept) - for_others, elsewhere=len(self._held)
            )

    def _check(self, counts: Mapping[ReferenceId, int]) -> None:
        if not counts.keys() <= self._kept.keys():
            raise RpcError(FREED)

    def _add(self, user: int, id_: ReferenceId, count: int) -> None:
        users = self._kept[id_].counts
        users[user] = users.get(user, 0) + count

    def _settle(self, registrations: Iterable[Registration]) -> None:
        """Find out what has come of messages; nothing has of those that were not answered yet."""
        with self._lock:
            unsent = [each for each in registrations if not each.is_answered]
            sent = [each for each in registrations if each.is_answered]
            for each in sent:
                each.must_settle = True
        self._drop(unsent)
        for user in {each.user for each in sent}:
            self._errands.put(functools.partial(self._teller.settle, user))

    def _drop(self, registrations: Iterable[Registration]) -> None:
        """Forget what will not come; where the answer waits, it is that the message may not go."""
        with self._lock:
            for each in registrations:
                for id_ in self._registrations.drop(each):
                    self._free_unused(self._kept[id_])
            answers = [answer for each in registrations for answer in each.take_answer()]
        for answer in answers:
            answer(False)

    def _handle_of(self, part: Kept | Held) -> RRef:
        handle = part.handle()
        if handle is None:
            handle = RRef(self._objects, part)
            part.handle = weakref.ref(handle)
            weakref.finalize(handle, self._errands.put, functools.partial(self._gone, part)).atexit = False
        return handle

    def _gone(self, part: Kept | Held) -> None:
        with self._lock:
            if part.handle() is not None:  # there is a new one since
                return
            if isinstance(part, Kept):
                self._free_unused(part)
                return
            if self._held.get(part.id) is not part:
                return
            del self._held[part.id]
        self._teller.released(part)

    def _free_unused(self, kept: Kept) -> None:
        is_used = kept.counts or self._registrations.has(kept.id) or kept.handle() is not None
        if not is_used and self._kept.get(kept.id) is kept:
            del self._kept[kept.id]
            self._errands.put(kept.drop)  # what ends with an object is not to hold up who receives messages
