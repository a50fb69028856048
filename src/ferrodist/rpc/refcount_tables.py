"""The reference counts of an agent: of objects here, at their owner, and of references to objects elsewhere.

[Note: reference counts]
An object's owner counts for each other rank how many references have been sent to it; each rank counts how many it has
received. The owner knows of a reference before it is sent, and a rank whose last reference is gone gives back in one
message as many as it had received. So the owner's count is never below the references that a rank has or that are on
their way to it: no order of messages frees an object too early. A rank that is lost has no references. References sent
by third ranks are in [Note: references from third ranks] in `refcount_protocol.py`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.errors import PeerLostError, RpcError
from ferrodist.rpc.rref import FREED, OwnedObject, ReferenceId, RRef, RRefOperations, UserRRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ferrodist.rpc.executor import SerialExecutor
    from ferrodist.rpc.future import Future


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceCounts:
    """The number of objects that a rank has references to.

    Args:
        for_others: Objects here that other ranks have references to.
        for_itself: Objects here that only this rank has references to.
        elsewhere: Objects on other ranks that this one has references to.
    """

    for_others: int
    for_itself: int
    elsewhere: int


@dataclass(slots=True)
class _PeerState:
    """The state of another rank: its process, and its connection."""

    incarnation: int = -1  # which process of the rank it is
    connection: int = 0
    is_there: bool = False
    has_met: bool = False  # whether the peer knows of this connection


TransferKey = tuple[int, int]
"""A message with references of third ranks: its sender, and its transfer id."""


class PendingTransfer:
    """References in one message from a third rank, as their owner knows them until they have arrived."""

    def __init__(
        self,
        key: TransferKey,
        user: int,
        incarnation: int,
        counts: dict[ReferenceId, int],
        respond: Callable[[Any], None],
    ) -> None:
        self.key = key
        self.sender, self.transfer_id = key
        self.user = user
        self.incarnation = incarnation
        self.counts = counts  # by object; those that have arrived are taken off
        self.must_settle = False  # whether the user is asked which have arrived, for no more will
        # Takes whether the message may be sent; None once it may have been.
        self.respond: Callable[[Any], None] | None = respond

    def take_respond(self) -> list[Callable[[Any], None]]:
        """The function that takes the answer, in a list; an empty list after the first time."""
        respond, self.respond = self.respond, None
        return [] if respond is None else [respond]


class PendingTransfers:
    """All pending transfers of an owner's objects; the caller's lock guards them."""

    def __init__(self) -> None:
        self.by_key: dict[TransferKey, PendingTransfer] = {}
        self.totals: dict[ReferenceId, int] = {}  # pending references, by object

    def add(self, transfer: PendingTransfer) -> None:
        """Add a transfer; raises ValueError if there is one with its id."""
        if self.by_key.setdefault(transfer.key, transfer) is not transfer:
            raise ValueError(f"rank {transfer.sender} has sent transfer id {transfer.transfer_id} before")
        for id_, count in transfer.counts.items():
            self.totals[id_] = self.totals.get(id_, 0) + count

    def sent_by(self, sender: int) -> list[PendingTransfer]:
        """The pending transfers of a sender."""
        return [each for each in self.by_key.values() if each.sender == sender]

    def sent_to(self, user: int) -> list[PendingTransfer]:
        """The pending transfers for a receiver."""
        return [each for each in self.by_key.values() if each.user == user]

    def arrive(self, transfer: PendingTransfer, id_: ReferenceId) -> None:
        """Take off a reference that has arrived."""
        if id_ in transfer.counts:
            self._subtract(transfer.counts, id_, 1)
            self._subtract(self.totals, id_, 1)
            if not transfer.counts:
                del self.by_key[transfer.key]

    def drop(self, transfer: PendingTransfer) -> Iterable[ReferenceId]:
        """Forget what has not arrived, if the transfer is pending; returns the objects."""
        if self.by_key.get(transfer.key) is not transfer:
            return ()
        del self.by_key[transfer.key]
        for id_, count in transfer.counts.items():
            self._subtract(self.totals, id_, count)
        return transfer.counts

    @staticmethod
    def _subtract(counts: dict[ReferenceId, int], id_: ReferenceId, count: int) -> None:
        counts[id_] -= count
        if not counts[id_]:
            del counts[id_]


class RefCountSender(Protocol):
    """Sends what other ranks have to know of the counts, in the order of the calls. `RefCountClient` implements it."""

    def send_release(self, user_rref: UserRRef) -> None:
        """Give back the references to an object, as many as `RRefTable.give_back` says."""

    def send_confirmations(self, owner: int) -> None:
        """Send what `RRefTable.take_confirmations` returns."""

    def send_settle(self, user: int) -> None:
        """Ask a rank what has arrived of the messages that `RRefTable.unsettled` returns."""


class RRefTable:
    """All reference counts of one agent; threads share them."""

    def __init__(self, manager: RRefOperations, tasks: SerialExecutor, sender: RefCountSender) -> None:
        self._manager = manager
        self._tasks = tasks
        self._sender = sender
        # Reentrant: the garbage collector may run in here, and call any finalizer.
        self._lock = threading.RLock()
        self._owned: dict[ReferenceId, OwnedObject] = {}
        self._used: dict[ReferenceId, UserRRef] = {}
        self._peers: defaultdict[int, _PeerState] = defaultdict(_PeerState)
        self._transfers = PendingTransfers()  # of objects here
        # To be confirmed to owners: references received, and by which connection with the owner; and messages of which
        # no more references will be accepted.
        self._arrived: defaultdict[int, list[tuple[int, TransferKey, ReferenceId]]] = defaultdict(list)
        self._settled: defaultdict[int, list[TransferKey]] = defaultdict(list)
        self._refused: set[tuple[int, TransferKey]] = set()  # owners, and messages that are refused

    # Objects of other ranks.

    def create(self, id_: ReferenceId, creation: Future) -> RRef:
        """A reference to an object that another rank makes for this one."""
        with self._lock:
            used = self._used[id_] = UserRRef(id_, creation)
            used.add(self._peers[id_.owner].connection)
            return self._handle_of(used)

    def receive(self, id_: ReferenceId, key: TransferKey | None = None, *, is_counted: bool = True) -> RRef:
        """This rank's reference to an object, for one that was received, which the owner has counted unless this rank
        sent it.

        Raises PeerLostError if the owner has lost the sender of a third rank's message: it may have freed the object.
        """
        with self._lock:
            if key is not None and (id_.owner, key) in self._refused:
                raise PeerLostError(
                    f"rank {id_.owner} has lost rank {key[0]}, which had sent a reference to an object there that"
                    " comes only now: it is not taken, for the object may have been freed",
                    ranks=(key[0],),
                )
            used = self._used.get(id_)
            if used is None:
                used = self._used[id_] = UserRRef(id_)
            connection = self._peers[id_.owner].connection
            if is_counted:
                used.add(connection)
            handle = self._handle_of(used)
            if key is not None:
                self._arrived[id_.owner].append((connection, key, id_))
        if key is not None:
            self._tasks.submit(functools.partial(self._sender.send_confirmations, id_.owner))
        return handle

    def refuse_transfers(self, owner: int, sender: int, transfer_ids: Iterable[int]) -> None:
        """Accept no more references of these messages, and confirm to the owner what has arrived of them."""
        with self._lock:
            for transfer_id in transfer_ids:
                self._refused.add((owner, (sender, transfer_id)))
                self._settled[owner].append((sender, transfer_id))
        self._tasks.submit(functools.partial(self._sender.send_confirmations, owner))

    def take_confirmations(
        self, owner: int, limit: int
    ) -> tuple[list[tuple[TransferKey, ReferenceId]], list[TransferKey]]:
        """Take some confirmations for an owner: references that have arrived, and settled messages."""
        with self._lock:
            connection = self._peers[owner].connection
            arrived, settled = self._arrived[owner], self._settled[owner]
            arrived[:] = [each for each in arrived if each[0] == connection]  # others are not counted any more
            found = [(key, id_) for _, key, id_ in arrived[:limit]]
            last = settled[: limit - len(found)]
            del arrived[: len(found)], settled[: len(last)]
            return found, last

    def give_back(self, user_rref: UserRRef) -> int:
        """Take the number of references that an owner is to be sent back."""
        with self._lock:
            count, user_rref.count = user_rref.count, 0
            return count if user_rref.connection == self._peers[user_rref.id.owner].connection else 0

    # Objects of this rank.

    def add(self, id_: ReferenceId, user: int | None = None) -> tuple[OwnedObject, RRef | None]:
        """Add an object: for a rank, or for this one, which gets a reference; raises ValueError if the id is taken."""
        with self._lock:
            if id_ in self._owned:
                raise ValueError("there is an object of that id already")
            owned = self._owned[id_] = OwnedObject(id_)
            if user is None:
                return owned, self._handle_of(owned)
            owned.counts[user] = 1
            return owned, None

    def own_reference(self, id_: ReferenceId) -> RRef:
        """This rank's reference to an object of its own, which may have been freed."""
        with self._lock:
            owned = self._owned.get(id_)
            if owned is None:
                owned = OwnedObject(id_)
                owned.drop()
            return self._handle_of(owned)

    def count(self, user: int, counts: Mapping[ReferenceId, int]) -> int:
        """Count references to objects here before they are sent to a rank; returns the connection's number."""
        with self._lock:
            self._check_owned(counts)
            peer = self._peers[user]
            if peer.is_there:
                for id_, count in counts.items():
                    self._add(user, id_, count)
            return peer.connection

    def uncount(self, user: int, counts: Mapping[ReferenceId, int], connection: int) -> None:
        """Undo `count` for references that were not sent."""
        with self._lock:
            if self._peers[user].connection == connection:
                self.release(user, counts)

    def release(self, user: int, counts: Mapping[ReferenceId, int]) -> None:
        """Take references off a rank's counts; objects that are not here, or not counted, are passed over."""
        with self._lock:
            for id_, count in counts.items():
                owned = self._owned.get(id_)
                if owned is None or user not in owned.counts:
                    continue
                owned.counts[user] -= count
                if owned.counts[user] <= 0:
                    del owned.counts[user]
                    self._free_unused(owned)

    # References from third ranks: see [Note: references from third ranks].

    def register(self, transfer: PendingTransfer) -> None:
        """Register references to objects here before one rank sends them to another."""
        with self._lock:
            self._check_owned(transfer.counts)
            peer = self._peers[transfer.user]
            if transfer.incarnation < peer.incarnation + (not peer.is_there):
                may_go = False
            else:
                self._transfers.add(transfer)
                if transfer.incarnation > peer.incarnation or not peer.has_met:
                    return
                may_go = True
            responses = transfer.take_respond()
        for respond in responses:
            respond(may_go)

    def unregister(self, key: TransferKey) -> None:
        """Drop the pending transfer of a message that was not sent."""
        with self._lock:
            transfer = self._transfers.by_key.get(key)
        if transfer is not None:
            self._drop([transfer])

    def met(self, user: int) -> None:
        """Note that a rank knows of the connection with this one."""
        with self._lock:
            peer = self._peers[user]
            peer.has_met = True
            ready = [each for each in self._transfers.sent_to(user) if each.incarnation == peer.incarnation]
            responses = [respond for each in ready for respond in each.take_respond()]
        for respond in responses:
            respond(True)

    def confirm(
        self, user: int, arrived: Iterable[tuple[TransferKey, ReferenceId]], settled: Iterable[TransferKey]
    ) -> None:
        """Count references that a rank has received; of messages that are settled no more will arrive."""
        with self._lock:
            for key, id_ in arrived:
                if id_ in self._owned:
                    self._add(user, id_, 1)
                    transfer = self._transfers.by_key.get(key)
                    if transfer is not None and transfer.user == user:
                        self._transfers.arrive(transfer, id_)
            found = [self._transfers.by_key.get(key) for key in settled]
            self._drop([each for each in found if each is not None and each.must_settle and each.user == user])

    def settle(self, sender: int, user: int, transfer_id: int) -> None:
        """Settle messages up to a transfer id, whose sender has lost their receiver: they may not arrive."""
        with self._lock:
            found = [
                each
                for each in self._transfers.sent_by(sender)
                if each.user == user and each.transfer_id <= transfer_id
            ]
        self._settle(found)

    def unsettled(self, user: int) -> dict[int, list[int]]:
        """Transfer ids by sender of the messages about which a rank is to be asked."""
        transfer_ids: dict[int, list[int]] = {}
        with self._lock:
            for each in self._transfers.sent_to(user):
                if each.must_settle:
                    transfer_ids.setdefault(each.sender, []).append(each.transfer_id)
        return transfer_ids

    # Ranks.

    def incarnation(self, rank: int) -> int:
        """Which process another rank is, or was."""
        with self._lock:
            return self._peers[rank].incarnation

    def joined(self, rank: int, incarnation: int) -> None:
        """Note that a rank is there, for the first time or again."""
        with self._lock:
            peer = self._peers[rank]
            peer.incarnation = incarnation
            peer.connection += 1
            peer.is_there, peer.has_met = True, False
            self._refused = {each for each in self._refused if each[1][0] != rank}
            outdated = [each for each in self._transfers.sent_to(rank) if each.incarnation < incarnation]
        self._drop(outdated)

    def lost(self, rank: int) -> None:
        """Note that a rank is gone."""
        with self._lock:
            peer = self._peers[rank]
            peer.is_there = peer.has_met = False
            for owned in list(self._owned.values()):
                if owned.counts.pop(rank, None) is not None:
                    self._free_unused(owned)
            ended = [each for each in self._transfers.sent_to(rank) if each.incarnation <= peer.incarnation]
            unsettled = self._transfers.sent_by(rank)
        self._drop(ended)
        self._settle(unsettled)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            owned, self._owned, self._used = list(self._owned.values()), {}, {}
            self._transfers = PendingTransfers()
        for each in owned:
            each.drop()

    def snapshot(self) -> ReferenceCounts:
        """The number of objects."""
        with self._lock:
            for_others = sum(bool(owned.counts) or id_ in self._transfers.totals for id_, owned in self._owned.items())
            return ReferenceCounts(
                for_others=for_others, for_itself=len(self._owned) - for_others, elsewhere=len(self._used)
            )

    def _check_owned(self, counts: Mapping[ReferenceId, int]) -> None:
        if not counts.keys() <= self._owned.keys():
            raise RpcError(FREED)

    def _add(self, user: int, id_: ReferenceId, count: int) -> None:
        users = self._owned[id_].counts
        users[user] = users.get(user, 0) + count

    def _settle(self, transfers: Iterable[PendingTransfer]) -> None:
        """Find out what has arrived of messages; those that were not answered yet were not sent."""
        with self._lock:
            unsent = [each for each in transfers if each.respond is not None]
            sent = [each for each in transfers if each.respond is None]
            for each in sent:
                each.must_settle = True
        self._drop(unsent)
        for user in {each.user for each in sent}:
            self._tasks.submit(functools.partial(self._sender.send_settle, user))

    def _drop(self, transfers: Iterable[PendingTransfer]) -> None:
        """Forget references that will not arrive; messages that wait for an answer may not be sent."""
        with self._lock:
            for each in transfers:
                for id_ in self._transfers.drop(each):
                    self._free_unused(self._owned[id_])
            responses = [respond for each in transfers for respond in each.take_respond()]
        for respond in responses:
            respond(False)

    def _handle_of(self, record: OwnedObject | UserRRef) -> RRef:
        handle = record.handle()
        if handle is None:
            handle = RRef(self._manager, record)
            record.handle = weakref.ref(handle)
            weakref.finalize(handle, self._tasks.submit, functools.partial(self._handle_gone, record)).atexit = False
        return handle

    def _handle_gone(self, record: OwnedObject | UserRRef) -> None:
        with self._lock:
            if record.handle() is not None:  # there is a new one since
                return
            if isinstance(record, OwnedObject):
                self._free_unused(record)
                return
            if self._used.get(record.id) is not record:
                return
            del self._used[record.id]
        self._sender.send_release(record)

    def _free_unused(self, owned: OwnedObject) -> None:
        is_used = owned.counts or owned.id in self._transfers.totals or owned.handle() is not None
        if not is_used and self._owned.get(owned.id) is owned:
            del self._owned[owned.id]
            self._tasks.submit(owned.drop)  # the end of an object must not hold up the thread that receives messages
