"""What a rank knows of an object: at its owner, and elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.rpc.messages import Failure, FailureKind
from ferrodist.rpc.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.rpc.futures import Future
    from ferrodist.rpc.references import ReferenceId, RRef

__all__ = ["FREED", "Held", "Kept", "kept_of", "part_of"]

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
