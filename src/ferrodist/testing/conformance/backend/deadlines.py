"""Checks of deadlines, and of the barrier, where ranks notice that one of them is late."""

from __future__ import annotations

import time
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.errors import DistributedError, DistributedTimeoutError
from ferrodist.testing.conformance import harness
from ferrodist.testing.conformance.harness import (
    LARGE,
    TIMEOUT,
    as_runner,
    check_bytes,
    check_deadline,
    error_key,
    error_of,
    make_event,
    make_semaphore,
    make_shared_float,
    pattern,
    rank_check,
    receive,
)

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized
    from multiprocessing.synchronize import Event, Semaphore

    from ferrodist.backends.base import Backend
    from ferrodist.testing.conformance.harness import BackendUnderTest

_REPORT_SECONDS = 0.5  # seconds past its deadline that a rank may wait for the names of the stragglers


@rank_check()
def a_receive_keeps_its_deadline(group: Backend) -> None:
    """`recv` without a message raises at its deadline, neither before nor much later, and names the awaited rank."""
    peer = (group.rank + 1) % group.world_size
    for timeout in (0.0, 0.1, 0.3):
        for src in (peer, ANY_SOURCE):
            with check_deadline(timeout, "recv"):
                recv = partial(group.recv, bytearray(1), src, timeout=timeout)
                error = error_of(DistributedTimeoutError, recv, "a recv of nothing")
            expected = (peer,) if src == peer else ()
            assert error.ranks == expected, f"recv from {src} timed out and named ranks {error.ranks}"


@rank_check()
def a_receive_in_vain_leaves_the_group_good(group: Backend) -> None:
    """After a `recv` that timed out, the same `recv` receives the message that is sent later."""
    for size in (5, LARGE):
        if group.rank == 1:
            receive(group, 0, 2, tag=1)
            group.send(pattern(size), 0, timeout=TIMEOUT)
        elif group.rank == 0:
            recv = partial(group.recv, bytearray(size), 1, timeout=0.05)
            error_of(DistributedTimeoutError, recv, "a recv of nothing")
            assert group.failure is None, f"a recv in vain has failed the group: {group.failure}"
            group.send(b"go", 1, tag=1, timeout=TIMEOUT)
            check_bytes(receive(group, 1, size), pattern(size), "the message after a recv in vain")
    group.barrier(timeout=TIMEOUT)


@rank_check()
def a_send_in_vain_is_not_received(group: Backend) -> None:
    """A `send` that times out does so at its deadline, and its message is never delivered; one that returned is."""
    attempts = 3
    if group.rank == 0:
        taken = []
        for seed in range(attempts):
            start = time.monotonic()
            try:
                group.send(pattern(LARGE, seed=seed), 1, timeout=0.2)
            except DistributedTimeoutError as error:
                late = error.ranks
            else:
                late = (1,)
                taken.append(seed)
            assert late == (1,), f"a send to rank 1 timed out and named ranks {late}"
            elapsed = time.monotonic() - start
            assert elapsed < 0.2 + harness.SLACK_SECONDS, f"send with timeout=0.2 took {elapsed:.2f} s"
        assert group.failure is None, f"a send in vain has failed the group: {group.failure}"
        group.send(bytes(taken).ljust(attempts, b"\xff"), 1, tag=1, timeout=TIMEOUT)
        group.send(pattern(LARGE, seed=attempts), 1, timeout=TIMEOUT)
    elif group.rank == 1:
        taken = [seed for seed in receive(group, 0, attempts, tag=1) if seed != 0xFF]
        for seed in (*taken, attempts):
            what = "what is received after a send in vain"
            check_bytes(receive(group, 0, LARGE), pattern(LARGE, seed=seed), what)


@rank_check(make_event, make_semaphore, cases=lambda world_size: product(range(world_size)))
def nobody_leaves_a_barrier_early(group: Backend, left: Event, arrived: Semaphore, last: int) -> None:
    """No rank leaves `barrier` before the last has entered it."""
    if group.rank == last:
        for _ in range(group.world_size - 1):
            assert arrived.acquire(timeout=TIMEOUT), "a rank did not come to the barrier"
        # A barrier that lets ranks through sets the signal at once; a good one never does.
        assert not left.wait(0.1), f"a rank left the barrier before rank {last} called it"
    else:
        arrived.release()
    group.barrier(timeout=TIMEOUT)
    left.set()


@rank_check(make_shared_float)
def barriers_follow_each_other(group: Backend, entered: Synchronized[float]) -> None:
    """In each of many consecutive barriers, a rank leaves only when all have entered."""
    for i in range(50):
        with entered.get_lock():
            entered.value += 1
        group.barrier(timeout=TIMEOUT)
        count, needed = entered.value, group.world_size * (i + 1)
        assert count >= needed, f"out of barrier {i} when {count:g} of {needed} were in"


def a_late_rank_is_named_by_all(backend: BackendUnderTest, world_size: int = 3) -> None:
    """When a rank does not enter a barrier, the errors of all ranks name it, whichever deadline expires first.

    The late rank gets the same error when it comes.
    """
    world_size = max(world_size, 3)
    for late in sorted({0, 1, world_size - 1}):
        others = [rank for rank in range(world_size) if rank != late]
        for hasty in (others[0], others[-1]):
            program = partial(_barrier_with_one_late, make_semaphore(), late, hasty)
            errors = as_runner(backend).run(world_size, program)
            for rank, error in enumerate(errors):
                assert error.ranks == (late,), f"rank {late} was late, rank {rank} names {error.ranks}: {error}"
                assert error_key(error) == error_key(errors[hasty]), f"rank {rank} differs from rank {hasty}: {error!r}"


def _barrier_with_one_late(given_up: Semaphore, late: int, hasty: int, group: Backend) -> DistributedError:
    """A barrier in which ``hasty`` has the shortest timeout; ``late`` enters it when all others have given up."""
    if group.rank == late:
        for _ in range(group.world_size - 1):
            assert given_up.acquire(timeout=TIMEOUT), "a rank still waits in the barrier"
        return error_of(DistributedTimeoutError, lambda: group.barrier(timeout=TIMEOUT), "the late rank's barrier")
    timeout, start = 0.2, time.monotonic()
    barrier = partial(group.barrier, timeout=timeout if group.rank == hasty else TIMEOUT)
    try:
        error = error_of(DistributedTimeoutError, barrier, "a barrier without all ranks")
    finally:
        given_up.release()
    elapsed = time.monotonic() - start
    limit = timeout + _REPORT_SECONDS + harness.SLACK_SECONDS
    assert elapsed < limit, f"rank {hasty} gave up, this one took {elapsed:.1f} s"
    assert group.failure is not None, "a barrier that failed fails the group"
    return error


@rank_check(min_ranks=3)
def several_late_ranks_are_all_named(group: Backend) -> None:
    """When only rank 0 enters a barrier, its error names all the others."""
    if group.rank == 0:
        error = error_of(DistributedTimeoutError, lambda: group.barrier(timeout=0.1), "a barrier alone")
        assert error.ranks == tuple(range(1, group.world_size)), f"late ranks as named by rank 0: {error.ranks}"
