"""What the worker needs of a library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ferrodist.bench.arrays import Arrays
    from ferrodist.bench.cases import Case

__all__ = ["Adapter", "NotOfferedError", "Place"]


class NotOfferedError(Exception):
    """The library has no such operation; the message says what it lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank is.

    Args:
        rank: This one; an MPI rank is told by its library instead.
        num_ranks: How many there are.
        folder: Empty when the peer starts, and all its own: for the files through which ranks meet.
    """

    rank: int
    num_ranks: int
    folder: Path


class Adapter(Protocol):
    """One rank of a group of one library."""

    rank: int
    num_ranks: int
    arrays: Arrays
    versions: dict[str, str]
    copies: bool
    """Whether every operation is a copy of the input: true for the limit."""

    def make_call(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        """The collective on these arrays, ready to be called; for those in place, ``target`` is ``source``.

        Raises:
            NotOfferedError: The library can't.
        """

    def barrier(self) -> None:
        """Wait for all ranks, by the library's own means."""

    def close(self) -> None:
        """Leave the group."""
