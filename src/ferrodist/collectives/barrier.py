"""barrier and monitored_barrier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.native.binding import compiled
from ferrodist.collectives.arguments import group_and_timeout
from ferrodist.collectives.engines.host import host_engine_of
from ferrodist.collectives.mpi_small_calls import small_mpi_barrier
from ferrodist.collectives.profiling import is_recorded, profiled, record
from ferrodist.collectives.work import CollectiveCall, execute
from ferrodist.torch_private.profiling import is_profiling

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend


def barrier(group: Backend | None = None, *, timeout: float | None = None) -> None:
    """Return when every rank of the group has called it.

    Args:
        group: The group; None is the default group.
        timeout: Seconds; None takes the group's.

    Raises:
        CollectiveMismatchError: On all ranks, when one called something else.
        DistributedTimeoutError: On all ranks, naming all stragglers.
        PeerLostError: On all ranks, when one died.
    """
    if is_profiling() and not is_recorded():
        record(barrier, group, timeout=timeout)
        return
    if timeout is None and compiled.fast_barrier(group):
        return
    if small_mpi_barrier(group, timeout):
        return
    chosen, limit = group_and_timeout(group, timeout)
    op = CollectiveOp(kind=CollectiveKind.BARRIER, timeout=limit)
    execute(CollectiveCall(op=op, group=chosen, engine=host_engine_of(chosen), finish=lambda: None))


@profiled
def monitored_barrier(group: Backend | None = None, *, timeout: float | None = None) -> None:
    """`barrier`, under torch's name: every barrier names all stragglers."""
    barrier(group, timeout=timeout)
