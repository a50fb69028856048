"""The interface of a library to the worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ferrodist.bench.adapters.arrays import Arrays
    from ferrodist.bench.cases import Case, Operation


class UnsupportedError(Exception):
    """The library does not offer an operation; the message says why."""

    def __init__(self, reason: str = "it has no such operation") -> None:
        super().__init__(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """A rank of a peer, and where it meets the others.

    MPI ranks learn their rank from the library instead. ``folder``, the peer's own and empty at first, is for the files
    of the rendezvous. ``address`` is the rendezvous "host:port" of ranks on several hosts; None on one host, where a
    file does.
    """

    rank: int
    num_ranks: int
    folder: Path
    address: str | None = None

    @property
    def init_method(self) -> str:
        """The URL of the rendezvous, as torch and ferrodist write it."""
        return f"file://{self.folder / 'meeting'}" if self.address is None else f"tcp://{self.address}"


class Adapter:
    """One rank of a group of one library. Methods that are not overridden are operations that the library lacks."""

    rank: int
    num_ranks: int
    arrays: Arrays
    versions: dict[str, str]
    copies: ClassVar[bool] = False  # whether every operation is a copy of the input: true for the limit
    unsupported: ClassVar[Mapping[Operation, str]] = {}  # operations that the library lacks, with the reasons

    def make_call(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        """A callable for the operation, in place if ``target`` is ``source``; UnsupportedError if the library can't."""
        raise NotImplementedError

    def make_exchange(
        self, case: Case, send: Callable[..., object], receive: Callable[..., object], source: Any, target: Any
    ) -> Callable[[], object]:
        """A callable for a round trip: the first rank sends and then receives, the last one the reverse."""
        partner = case.partner(self.rank)
        if partner is None:
            return lambda: None

        def ping() -> None:
            send(source, partner)
            receive(target, partner)

        def pong() -> None:
            receive(target, partner)
            send(source, partner)

        return ping if self.rank == 0 else pong

    def make_start(self, case: Case, source: Any, target: Any) -> Callable[[], Any]:
        """A callable that starts an allreduce in place, and returns a work for `wait`."""
        raise UnsupportedError

    def wait(self, work: Any) -> None:
        """Wait for a work that `make_start`'s callable has started."""
        raise UnsupportedError

    def synchronize(self) -> None:
        """Wait for this rank's part of earlier calls, where calls return before: they do on GPUs."""
        return

    def barrier(self) -> None:
        """Wait for all ranks, by the library's own barrier."""
        raise NotImplementedError

    def init_group(self, init_method: str) -> None:
        """Create the default group."""
        raise UnsupportedError

    def destroy_group(self) -> None:
        """End the default group."""
        raise UnsupportedError

    def new_group(self) -> Any:
        """Create another group of all ranks."""
        raise UnsupportedError

    def allreduce(self, array: Any, group: Any) -> None:
        """Sum an array in place, over a group that `new_group` has created or the default group (None)."""
        raise UnsupportedError

    def destroy_subgroup(self, group: Any) -> None:
        """End a group that `new_group` has created."""
        raise UnsupportedError

    def close(self) -> None:
        """Leave the group for good."""
        self.destroy_group()
