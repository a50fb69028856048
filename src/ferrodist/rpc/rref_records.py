"""Records of single objects and messages in a rank's reference counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.rpc.future import Future, OneShot
from ferrodist.rpc.messages import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ferrodist.rpc.rref import ReferenceId, RRef

ForkKey = tuple[int, int]
"""A message with references of third ranks: its sender, and its fork id."""

FREED = "the object was freed: its owner knows of no reference to it"


class OwnedObject:
    """An object at its owner, or one that is being made there."""

    def __init__(self, id_: ReferenceId) -> None:
        self.id = id_
        self.counts: dict[int, int] = {}  # by rank, the number of references sent to it
        self.handle: Callable[[], RRef | None] = lambda: None  # this rank's own reference, while there is one
        self.value: OneShot[Any] = OneShot()  # the object, or a `Failure` that says why it could not be made

    def drop(self) -> None:
        """Forget the object."""
        self.value.set(Failure(FailureKind.UNKNOWN, "", FREED, ""), replace=True)


class UserRRef:
    """This rank's references to an object on another rank."""

    def __init__(self, id_: ReferenceId, creation: Future | None = None) -> None:
        self.id = id_
        self.creation = creation  # the call that makes the object, if this rank made that call
        self.count = self.connection = 0  # references received, in this connection with the owner
        self.handle: Callable[[], RRef | None] = lambda: None

    def add(self, connection: int) -> None:
        """Count a received reference."""
        self.count = 1 if self.connection != connection else self.count + 1
        self.connection = connection

    def take_count(self, connection: int) -> int:
        """Take the count of those received in a connection, to give them back."""
        count = self.count if self.connection == connection else 0
        self.count = 0
        return count


def record_of(reference: RRef) -> OwnedObject | UserRRef:
    """This rank's record of a reference's object."""
    record = reference._record
    assert isinstance(record, (OwnedObject, UserRRef))
    return record


def owned_object(reference: RRef) -> OwnedObject:
    """The object of a reference, at its owner; raises ValueError elsewhere."""
    record = record_of(reference)
    if isinstance(record, OwnedObject):
        return record
    raise ValueError(
        f"the object is on rank {record.id.owner}, not here: take to_here() for a copy, or call its methods with"
        " rpc_sync()"
    )


class PendingFork:
    """References in one message from a third rank, as their owner knows them until they have arrived."""

    def __init__(
        self, key: ForkKey, user: int, incarnation: int, counts: dict[ReferenceId, int], respond: Callable[[Any], None]
    ) -> None:
        self.key = key
        self.sender, self.fork_id = key
        self.user = user
        self.incarnation = incarnation
        self.counts = counts  # by object; those that have arrived are taken off
        self.must_settle = False  # whether the user is asked which have arrived, for no more will
        self._respond: Callable[[Any], None] | None = respond  # takes whether the message may be sent

    @property
    def is_answered(self) -> bool:
        """True once the message may have been sent."""
        return self._respond is None

    def take_respond(self) -> list[Callable[[Any], None]]:
        """The function that takes the answer, in a list; an empty list after the first time."""
        respond, self._respond = self._respond, None
        return [] if respond is None else [respond]


class PendingForks:
    """All pending forks of an owner's objects; the caller's lock guards them."""

    def __init__(self) -> None:
        self._by_key: dict[ForkKey, PendingFork] = {}
        self._totals: dict[ReferenceId, int] = {}

    def add(self, fork: PendingFork) -> None:
        """Add a fork; raises ValueError if there is one with its id."""
        if self._by_key.setdefault(fork.key, fork) is not fork:
            raise ValueError(f"rank {fork.sender} has sent ticket {fork.fork_id} before")
        for id_, count in fork.counts.items():
            self._totals[id_] = self._totals.get(id_, 0) + count

    def has(self, id_: ReferenceId) -> bool:
        """Return True if a reference to an object is pending."""
        return id_ in self._totals

    def find(self, key: ForkKey) -> PendingFork | None:
        """The pending fork of a message."""
        return self._by_key.get(key)

    def sent_by(self, sender: int) -> list[PendingFork]:
        """The pending forks of a sender."""
        return [each for each in self._by_key.values() if each.sender == sender]

    def sent_to(self, user: int) -> list[PendingFork]:
        """The pending forks for a receiver."""
        return [each for each in self._by_key.values() if each.user == user]

    def arrive(self, fork: PendingFork, id_: ReferenceId) -> None:
        """Take off a reference that has arrived."""
        if id_ in fork.counts:
            self._subtract(fork.counts, id_, 1)
            self._subtract(self._totals, id_, 1)
            if not fork.counts:
                del self._by_key[fork.key]

    def drop(self, fork: PendingFork) -> Iterable[ReferenceId]:
        """Forget what has not arrived, if the fork is pending; returns the objects."""
        if self._by_key.get(fork.key) is not fork:
            return ()
        del self._by_key[fork.key]
        for id_, count in fork.counts.items():
            self._subtract(self._totals, id_, count)
        return fork.counts

    @staticmethod
    def _subtract(counts: dict[ReferenceId, int], id_: ReferenceId, count: int) -> None:
        counts[id_] -= count
        if not counts[id_]:
            del counts[id_]
