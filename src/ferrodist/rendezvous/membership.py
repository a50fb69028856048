"""A rank's place in a job: what it asks for, and what it has when the others are there."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from ferrodist.rendezvous.store import PrefixStore, Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.deadline import Deadline

__all__ = ["Joining", "Membership"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One rank's place in a job: of `rendezvous` when all ranks have met, of `enter_job` before.

    Args:
        rank: This process's rank.
        world_size: Number of ranks.
        local_rank: Its number on its host, where the launcher said so.
        job: Name of the job.
        secret: The job secret; may be empty when all ranks share a host.
        store: The job's store; other jobs in the same place do not see its keys.
        host: The address on which this rank's own listeners should bind, so that the other ranks can reach
            them.
        on_close: What `close` does; the rendezvous fills it in.
    """

    rank: int
    world_size: int
    local_rank: int | None
    job: str
    secret: bytes = dataclasses.field(repr=False)
    store: Store
    host: str
    on_close: Callable[[], None] = dataclasses.field(repr=False)

    def close(self) -> None:
        """Let go of the store.

        Rank 0 of a TCP rendezvous serves on for up to 2 s, or until the other ranks have closed theirs;
        afterwards their calls raise. Of a file rendezvous the last rank to close removes the file. A store that
        was there before stays as it is. Rank 0 of a job that was entered stops to serve at once. More calls do
        nothing.
        """
        self.on_close()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """Which rank asks to join which job."""

    rank: int
    world_size: int
    local_rank: int | None
    job: str
    secret: bytes = dataclasses.field(repr=False)
    deadline: Deadline

    def member(self, store: Store, host: str, on_close: Callable[[], None], secret: bytes) -> Membership:
        """What the rank is then."""
        process = os.getpid()

        def close() -> None:
            if os.getpid() == process:  # a forked child is no rank
                on_close()

        return Membership(
            rank=self.rank,
            world_size=self.world_size,
            local_rank=self.local_rank,
            job=self.job,
            secret=secret,
            store=PrefixStore(store, f"job/{self.job}"),
            host=host,
            on_close=close,
        )
