"""A rank's request to join a job, and its membership."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from ferrodist.rendezvous.store import PrefixStore, Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.deadline import Deadline


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One rank's membership of a job: from `rendezvous` after all ranks have met, from `enter_job` before.

    Args:
        rank: This process's rank.
        world_size: The number of ranks.
        local_rank: The rank on its host, if the launcher set it.
        job: The name of the job.
        secret: The job secret; may be empty if all ranks share a host.
        store: The job's store; other jobs in the same store do not see its keys.
        host: The address to which this rank's own listeners should bind, so that the other ranks can reach them.
        on_close: The implementation of `close`, set by the rendezvous.
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
        """Release the store.

        Rank 0 of a TCP rendezvous continues to serve for up to 2 s, or until the other ranks have closed theirs;
        afterwards their calls raise. The last rank to close removes the file of a file rendezvous. An existing store
        stays unchanged. Rank 0 of an entered job stops serving at once. Further calls do nothing.
        """
        self.on_close()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """A rank's request to join a job."""

    rank: int
    world_size: int
    local_rank: int | None
    job: str
    secret: bytes = dataclasses.field(repr=False)
    deadline: Deadline

    def member(self, store: Store, host: str, on_close: Callable[[], None], secret: bytes) -> Membership:
        """Return the rank's membership."""
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
