"""What references a rank has: of objects that it keeps, and of those that other ranks keep for it.

[Note: counts of references]
An object's owner counts for each other rank how many references have been sent to it; each rank counts how many have
come. The owner is told of a reference before it is sent, and a rank whose last reference is gone gives back in one
message as many as had come. So the owner's count of a rank is never less than what that rank has, or what is on its
way to it: there is no order of messages in which something is freed too early. A rank that is lost has no references.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ferrodist.errors import RpcError
from ferrodist.rpc.messages import Failure, FailureKind
from ferrodist.rpc.outcome import Outcome
from ferrodist.rpc.references import RRef

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ferrodist.rpc.errands import Errands
    from ferrodist.rpc.futures import Future
    from ferrodist.rpc.references import ReferenceId, Referring

__all__ = ["Held", "Kept", "ReferenceCounts", "Tables", "kept_of", "part_of"]

_FREED = "the object was freed: its owner knows of no reference to it"


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
        self.outcome.replace(Failure(FailureKind.UNKNOWN, "", _FREED, ""))


class Held:
    """An object on another rank.

    Args:
        id_: Of it.
        creation: The call that makes it, where this rank made that.

    Attributes:
        id: As given.
        creation: As given.
        count: How many references have come.
        handle: Gives this rank's reference, while there is one.
    """

    def __init__(self, id_: ReferenceId, creation: Future | None = None) -> None:
        self.id = id_
        self.creation = creation
        self.count = 1
        self.handle: Callable[[], RRef | None] = _no_handle


class Tables:
    """All of one agent; threads share it.

    Args:
        objects: Who the references are of.
        errands: Does what comes when references have gone.
        release: Called there with what this rank has no reference of any more.
    """

    def __init__(self, objects: Referring, errands: Errands, release: Callable[[Held], None]) -> None:
        self._objects = objects
        self._errands = errands
        self._release = release
        # The garbage collector may come by in here, and call whatever was to be called at the end of something.
        self._lock = threading.RLock()
        self._kept: dict[ReferenceId, Kept] = {}
        self._held: dict[ReferenceId, Held] = {}
        self._lost: set[int] = set()

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

    def hold(self, id_: ReferenceId, creation: Future) -> RRef:
        """A reference of what another rank makes for this one."""
        with self._lock:
            held = self._held[id_] = Held(id_, creation)
            return self._handle_of(held)

    def arrived(self, id_: ReferenceId, *, is_counted: bool) -> RRef:
        """This rank's reference of what came; a reference that comes from another rank was counted for this one."""
        with self._lock:
            held = self._held.get(id_)
            if held is None:
                held = self._held[id_] = Held(id_)
            elif is_counted:
                held.count += 1
            return self._handle_of(held)

    def own(self, id_: ReferenceId) -> RRef:
        """This rank's reference of an object of its own, or of one that is there no more."""
        with self._lock:
            kept = self._kept.get(id_)
            if kept is None:
                kept = Kept(id_)
                kept.drop()
            return self._handle_of(kept)

    def register(self, user: int, counts: Mapping[ReferenceId, int]) -> None:
        """References of objects here are about to be sent to a rank.

        Raises:
            RpcError: One is not here.
        """
        with self._lock:
            if not counts.keys() <= self._kept.keys():
                raise RpcError(_FREED)
            if user in self._lost:
                return
            for id_, count in counts.items():
                users = self._kept[id_].counts
                users[user] = users.get(user, 0) + count

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

    def joined(self, user: int) -> None:
        """A rank is there, perhaps once more."""
        with self._lock:
            self._lost.discard(user)

    def lost(self, user: int) -> None:
        """A rank is there no more."""
        with self._lock:
            self._lost.add(user)
            for kept in list(self._kept.values()):
                if kept.counts.pop(user, None) is not None:
                    self._free_unused(kept)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            kept, self._kept, self._held = list(self._kept.values()), {}, {}
        for each in kept:
            each.drop()

    def look(self) -> ReferenceCounts:
        """How many there are."""
        with self._lock:
            for_others = sum(bool(kept.counts) for kept in self._kept.values())
            return ReferenceCounts(
                for_others=for_others, for_itself=len(self._kept) - for_others, elsewhere=len(self._held)
            )

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
        self._release(part)

    def _free_unused(self, kept: Kept) -> None:
        if not kept.counts and kept.handle() is None and self._kept.get(kept.id) is kept:
            del self._kept[kept.id]
            self._errands.put(kept.drop)  # what ends with an object is not to hold up who receives messages


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
