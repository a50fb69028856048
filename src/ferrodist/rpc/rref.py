"""`RRef`: a reference to an object that may be on another rank; the records of objects, here and elsewhere."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from ferrodist.rpc.future import Future, OneShot
from ferrodist.rpc.messages import OWN_NAMES, Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable

FETCH = f"{OWN_NAMES}to_here"
"""(object): the internal call that returns a copy."""

METHOD = f"{OWN_NAMES}RRef."
"""Followed by a method's name. (id, object, arguments, keywords): call it; with an id, the owner keeps the result."""


class ReferenceId(NamedTuple):
    """The global id of a remote object: its number among those that one agent has had made."""

    owner: int
    creator: int  # the rank that had it made
    agent_token: int  # a random number of that rank's agent
    number: int

    @classmethod
    def parse(cls, plain: Any, world_size: int) -> ReferenceId:
        """Check an id from another rank; raises ValueError for anything else."""
        if isinstance(plain, tuple) and len(plain) == 4 and all(type(each) is int for each in plain):
            found = cls(*plain)
            if 0 <= found.owner < world_size and 0 <= found.creator < world_size:
                return found
        raise invalid_id_error(plain)


def invalid_id_error(plain: Any) -> ValueError:
    """The error for data that should be the id of a remote object."""
    return ValueError(
        f"{plain!r:.100} is not the id of a remote object: do all ranks run the same version of ferrodist?"
    )


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


class RRefOperations(Protocol):
    """The agent's side of its references, which `RRefManager` implements."""

    rank: int

    def local_value(self, reference: RRef, timeout: float | None) -> Any:
        """Return the object itself."""

    def call(self, owner: int, name: str, arguments: tuple[Any, ...], timeout: float | None) -> Future:
        """Make an internal call."""

    def create(self, owner: int, name: str, arguments_after_id: tuple[Any, ...], timeout: float | None) -> RRef:
        """Make an internal call whose result stays at the owner; its first argument is the object's id."""


class RRef:
    """A reference to an object on its owner's rank, which keeps the object while any rank has a reference to it.

    `RpcAgent.remote` and `RpcAgent.reference` make references. Calls may have them anywhere in arguments and results:
    the other rank receives a reference to the same object. A rank has one `RRef` for an object at a time, so ``is``
    compares them. A copy is the same `RRef`, and none can be pickled.
    """

    __slots__ = ("__weakref__", "_manager", "_record")

    def __init__(self, manager: RRefOperations, record: OwnedObject | UserRRef) -> None:
        self._manager = manager
        self._record = record

    @property
    def owner(self) -> int:
        """The rank that has the object."""
        return self._record.id.owner

    @property
    def is_owner(self) -> bool:
        """True if this rank has the object."""
        return self._manager.rank == self.owner

    def local_value(self, timeout: float | None = None) -> Any:
        """The object itself, at its owner; waits until it is made.

        Args:
            timeout: Seconds to wait; None takes the backend's timeout.

        Raises:
            ValueError: This rank is not the owner.
            RpcError: The function that was to make the object raised.
            DistributedTimeoutError: The object is not made in time.
        """
        return self._manager.local_value(self, timeout)

    def to_here(self, timeout: float | None = None) -> Any:
        """A copy of the object, at the owner too; waits until the object is made.

        Args:
            timeout: As for `local_value`.

        Raises:
            RpcError: The function that was to make the object raised, or the object can't be sent.
            DistributedTimeoutError: The copy does not arrive in time.
            PeerLostError: The owner died or left.
        """
        return self.to_here_async(timeout).result()

    def to_here_async(self, timeout: float | None = None) -> Future:
        """A copy of the object, as `to_here`, as the result of a future that can be awaited.

        Args:
            timeout: As for `local_value`.
        """
        return self._manager.call(self.owner, FETCH, (self,), timeout)

    def rpc_sync(self, timeout: float | None = None) -> Methods:
        """The object's methods: ``reference.rpc_sync().add(3)`` calls one at the owner, and waits for its result.

        Only public methods of classes registered with the owner's agent, and of their subclasses, can be called.

        Args:
            timeout: As for `RpcAgent.rpc_sync`, whose errors these calls raise.
        """
        return Methods(lambda *call: self._call_method(timeout, *call).result())

    def rpc_async(self, timeout: float | None = None) -> Methods:
        """The object's methods, as `rpc_sync`; calls give futures."""
        return Methods(functools.partial(self._call_method, timeout))

    def remote(self, timeout: float | None = None) -> Methods:
        """The object's methods, as `rpc_sync`; results stay at the owner, and calls give references to them."""

        def create(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> RRef:
            return self._manager.create(self.owner, f"{METHOD}{name}", (self, arguments, keywords), timeout)

        return Methods(create)

    def _call_method(
        self, timeout: float | None, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Future:
        return self._manager.call(self.owner, f"{METHOD}{name}", (None, self, arguments, keywords), timeout)

    def __copy__(self) -> RRef:
        return self

    def __deepcopy__(self, memory: dict[int, Any]) -> RRef:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("an RRef can't be pickled, as its owner would not know of it: pass it in a call's arguments")

    def __repr__(self) -> str:
        return f"RRef(owner={self.owner}, created by rank {self._record.id.creator}, number {self._record.id.number})"


class Methods:
    """Methods of a remote object, as attributes that can be called."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[str, tuple[Any, ...], dict[str, Any]], Future | RRef | Any]) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is no public method, and only those are called on other ranks")
        return lambda *arguments, **keywords: self._call(name, arguments, keywords)


def owned_object(reference: RRef) -> OwnedObject:
    """The object of a reference, at its owner; raises ValueError elsewhere."""
    record = reference._record
    if isinstance(record, OwnedObject):
        return record
    raise ValueError(
        f"the object is on rank {record.id.owner}, not here: take to_here() for a copy, or call its methods with"
        " rpc_sync()"
    )
