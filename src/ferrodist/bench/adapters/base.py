"""What the worker needs of a library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ferrodist.bench.arrays import Arrays
    from ferrodist.bench.cases import Case, Operation

_LACKING = "it has no such operation"


class NotOfferedError(Exception):
    """The library has no such operation; the message says what it lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank is.

    Args:
        rank: This one; an MPI rank is told by its library instead.
        num_ranks: How many there are.
        folder: Empty when the peer starts, and all its own: for the files through which ranks meet.
        address: Where the ranks of several hosts meet, "host:port"; None on one host, where a file will do.
    """

    rank: int
    num_ranks: int
    folder: Path
    address: str | None = None

    @property
    def init_method(self) -> str:
        """Where the ranks meet first, as torch and ferrodist write it."""
        return f"file://{self.folder / 'meeting'}" if self.address is None else f"tcp://{self.address}"


class Adapter(Protocol):
    """One rank of a group of one library. The methods with a body are for operations that not every library has."""

    rank: int
    num_ranks: int
    arrays: Arrays
    versions: dict[str, str]
    copies: ClassVar[bool] = False
    """Whether every operation is a copy of the input: true for the limit."""
    not_offered: ClassVar[Mapping[Operation, str]] = {}
    """What the library lacks, and why."""

    def make_call(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        """The operation on these arrays, ready to be called; for those in place, ``target`` is ``source``.

        For an exchange of messages: on the first rank, send and then receive; on the last one, the reverse.

        Raises:
            NotOfferedError: The library can't.
        """

    def make_start(self, case: Case, source: Any, target: Any) -> Callable[[], Any]:
        """An allreduce in place, ready to be started by a call that returns what `wait` takes."""
        raise NotOfferedError(_LACKING)

    def wait(self, started: Any) -> None:
        """Wait for what `make_start`'s call has started."""
        raise NotOfferedError(_LACKING)

    def finish(self) -> None:
        """Wait for this rank's part of what was called, where calls return before: they do on GPUs."""
        return

    def barrier(self) -> None:
        """Wait for all ranks, by the library's own means."""

    def join(self, init_method: str) -> None:
        """Make the default group, meeting the other ranks at ``init_method``."""
        raise NotOfferedError(_LACKING)

    def leave(self) -> None:
        """End the default group."""
        raise NotOfferedError(_LACKING)

    def new_group(self) -> Any:
        """Another group of all ranks."""
        raise NotOfferedError(_LACKING)

    def add_up(self, array: Any, group: Any) -> None:
        """An allreduce in place, over what `new_group` has made or the default group (None)."""
        raise NotOfferedError(_LACKING)

    def end_group(self, group: Any) -> None:
        """End what `new_group` has made."""
        raise NotOfferedError(_LACKING)

    def close(self) -> None:
        """Leave the group for good."""
