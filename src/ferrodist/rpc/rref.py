"""`RRef`: a reference to an object that may be on another rank."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.rpc.future import Future


class ReferenceId(NamedTuple):
    """Of an object.

    Args:
        owner: The rank that keeps it.
        creator: The rank that had it made.
        incarnation: Of the creator's agent; no other one has the same.
        number: Among the creator's.
    """

    owner: int
    creator: int
    incarnation: int
    number: int

    @classmethod
    def of(cls, plain: Any, world_size: int) -> ReferenceId:
        """What came from another rank.

        Raises:
            ValueError: It is no id.
        """
        if isinstance(plain, tuple) and len(plain) == 4 and all(type(each) is int for each in plain):
            found = cls(*plain)
            if 0 <= found.owner < world_size and 0 <= found.creator < world_size:
                return found
        raise ValueError("what should name a remote object does not")


class _Part(Protocol):
    """What a rank knows of an object."""

    @property
    def id(self) -> ReferenceId:
        """Of the object."""


class Referring(Protocol):
    """What an agent does for references; see `RRef` for each."""

    rank: int

    def local_value(self, reference: RRef, timeout: float | None) -> Any:
        """The object itself."""

    def fetch(self, reference: RRef, timeout: float | None) -> Future:
        """A copy."""

    def call_method(
        self, reference: RRef, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any], *, timeout: float | None
    ) -> Future:
        """Call a method."""

    def create_by_method(
        self, reference: RRef, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any], *, timeout: float | None
    ) -> RRef:
        """Have a method make another object."""


class RRef:
    """Refers to an object that one rank, its owner, keeps for as long as any rank has a reference to it.

    `RpcAgent.remote` and `RpcAgent.reference` make them. They may stand anywhere in arguments and results of calls: the
    other rank gets a reference to the same object, and the owner its own one. A rank has one `RRef` for an object at a
    time, so ``is`` compares them; a copy is the same one, and there is no pickling.
    """

    __slots__ = ("__weakref__", "_objects", "_part")

    def __init__(self, objects: Referring, part: _Part) -> None:
        self._objects = objects
        self._part = part

    @property
    def owner(self) -> int:
        """The rank that has the object."""
        return self._part.id.owner

    @property
    def is_owner(self) -> bool:
        """Whether this rank has it."""
        return self._objects.rank == self.owner

    def local_value(self, timeout: float | None = None) -> Any:
        """The object itself, at its owner; waits until it is made.

        Args:
            timeout: Seconds until this gives up; None takes the backend's.

        Raises:
            ValueError: This rank is not the owner.
            RpcError: What was to make the object raised.
            DistributedTimeoutError: It is not made in time.
        """
        return self._objects.local_value(self, timeout)

    def to_here(self, timeout: float | None = None) -> Any:
        """A copy of the object, at the owner too; waits until the object is made.

        Args:
            timeout: As for `local_value`.

        Raises:
            RpcError: What was to make the object raised, or the object can't travel.
            DistributedTimeoutError: It does not come in time.
            PeerLostError: The owner died or left.
        """
        return self._objects.fetch(self, timeout).result()

    def to_here_async(self, timeout: float | None = None) -> Future:
        """A copy of the object, as `to_here`, when it comes: the future's result, which can be awaited.

        Args:
            timeout: As for `local_value`.
        """
        return self._objects.fetch(self, timeout)

    def rpc_sync(self, timeout: float | None = None) -> Methods:
        """The object's methods: ``reference.rpc_sync().add(3)`` calls one at the owner, and waits for its result.

        Only public methods of classes that are registered with the owner's agent, or of their subclasses, are called.

        Args:
            timeout: As for `RpcAgent.rpc_sync`, whose errors these calls raise.
        """
        return Methods(lambda *call: self._objects.call_method(self, *call, timeout=timeout).result())

    def rpc_async(self, timeout: float | None = None) -> Methods:
        """The object's methods, as `rpc_sync`; calls give futures."""
        return Methods(lambda *call: self._objects.call_method(self, *call, timeout=timeout))

    def remote(self, timeout: float | None = None) -> Methods:
        """The object's methods, as `rpc_sync`; results stay at the owner, and calls give references to them."""
        return Methods(lambda *call: self._objects.create_by_method(self, *call, timeout=timeout))

    def __copy__(self) -> RRef:
        return self

    def __deepcopy__(self, memory: dict[int, Any]) -> RRef:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("an RRef can't be pickled, as its owner would not know of it: pass it in a call's arguments")

    def __repr__(self) -> str:
        return f"RRef(owner={self.owner}, created by rank {self._part.id.creator}, number {self._part.id.number})"


class Methods:
    """Methods of a remote object: attributes that can be called.

    Args:
        call: Called with a method's name, the arguments and the keywords.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[str, tuple[Any, ...], dict[str, Any]], Future | RRef | Any]) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is no public method, and only those are called on other ranks")
        return functools.partial(_call_one, self._call, name)


def _call_one(call: Callable[..., Any], method: str, /, *arguments: Any, **keywords: Any) -> Any:
    return call(method, arguments, keywords)
