"""Checks of the end of a group: aborted by one rank for all, or closed by each for itself."""

from __future__ import annotations

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.errors import (
    CollectiveMismatchError,
    DistributedError,
    DistributedTimeoutError,
    GroupAbortedError,
    GroupClosedError,
    InvalidRankError,
    PeerLostError,
    SelfSendError,
    SizeMismatchError,
)
from ferrodist.testing.conformance import harness
from ferrodist.testing.conformance.harness import (
    LARGE,
    TIMEOUT,
    WAITS,
    await_ranks,
    check_bytes,
    error_key,
    error_of,
    in_recv,
    let_others_block,
    make_event,
    make_semaphore,
    make_shared_float,
    pattern,
    rank_check,
    receive,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.sharedctypes import Synchronized
    from multiprocessing.synchronize import Event, Semaphore

    from ferrodist.backends.base import Backend

_DETECTION_SECONDS = 0.5  # seconds within which a rank must detect that another has left, on an idle machine

_CLOSE_SECONDS = 0.5  # the timeout of a close while other ranks stay: rank 0 of a star goes on serving them that long


@rank_check(make_semaphore, cases=lambda world_size: product((0, world_size - 1), WAITS))
def an_abort_wakes_every_rank(group: Backend, ready: Semaphore, aborter: int, call: str) -> None:
    """`abort` makes every rank that waits in a call raise `GroupAbortedError` with the aborting rank and the reason."""
    if group.rank == aborter:
        await_ranks(ready, group.world_size - 1)
        peer, what = (aborter + 1) % group.world_size, "a call after abort"
        let_others_block(group, peer)
        group.abort("the reason given")
    else:
        ready.release()
        peer, what = aborter, f"{call}, when rank {aborter} aborts,"
    error = error_of(GroupAbortedError, lambda: WAITS[call](group, peer), what)
    assert error.ranks == (aborter,), f"rank {aborter} aborted, rank {group.rank} names {error.ranks}"
    assert "the reason given" in str(error), f"rank {group.rank} does not say why the group was aborted: {error}"


@rank_check(make_semaphore, make_event)
def a_failed_group_stays_failed(group: Backend, ready: Semaphore, aborted: Event) -> None:
    """After an abort every call raises the same error on every rank; the first abort is the one that counts."""
    ready.release()
    if group.rank == 1:
        await_ranks(ready, group.world_size)
        group.abort("the first reason")
        aborted.set()
    else:
        assert aborted.wait(TIMEOUT), "the abort did not return"
    peer = (group.rank + 1) % group.world_size
    first = error_of(GroupAbortedError, lambda: in_recv(group, peer), "recv after abort")
    assert "the first reason" in str(first), f"rank {group.rank} says: {first}"
    group.abort("the second reason")
    group.abort(PeerLostError("a third reason", ranks=(0,)))
    errors = _errors_of_all_calls(group, peer, GroupAbortedError)
    assert group.failure is not None, "an aborted group has no failure"
    for error in (*errors, group.failure):
        assert error_key(error) == error_key(first), f"rank {group.rank} raised {first!r}, then {error!r}"


@rank_check(make_semaphore)
def an_abort_with_an_error_raises_it(group: Backend, ready: Semaphore) -> None:
    """`abort(error)` makes every rank raise an error of that class with the same message and ranks."""
    given = CollectiveMismatchError("the ranks disagree", ranks=(1,))
    ready.release()
    if group.rank == group.world_size - 1:
        await_ranks(ready, group.world_size)
        group.abort(given)
    recv = partial(in_recv, group, (group.rank + 1) % group.world_size)
    error = error_of(CollectiveMismatchError, recv, "recv after abort")
    assert error_key(error) == error_key(given), f"rank {group.rank} raised {error!r} in place of {given!r}"


@rank_check(cases=lambda _: product((False, True)))
def a_closed_group_says_so(group: Backend, after_failure: bool) -> None:  # noqa: FBT001 - one of the check's cases
    """`close` may be called twice, also after a failure; every later call raises `GroupClosedError`."""
    # A rank that is through may have ended the group.
    with suppress(DistributedError) if after_failure else nullcontext():
        group.barrier(timeout=TIMEOUT)
    if after_failure:
        group.abort("so that it is closed after a failure")
    group.close()
    group.close()
    if not after_failure:
        _errors_of_all_calls(group, (group.rank + 1) % group.world_size, GroupClosedError)


@rank_check(
    make_semaphore,
    make_shared_float,
    cases=lambda world_size: product((0, world_size - 1), ("recv", "wait", "send", "barrier")),
)
def a_rank_that_left_is_named(
    group: Backend, ready: Semaphore, left_at: Synchronized[float], leaver: int, call: str
) -> None:
    """A rank that waits for one that closes the group gets `PeerLostError` with its rank within a second."""
    if group.rank == leaver:
        await_ranks(ready, group.world_size - 1)
        let_others_block(group, (leaver + 1) % group.world_size)
        left_at.value = time.monotonic()
        group.close(timeout=_CLOSE_SECONDS)
        return
    ready.release()
    what = f"{call}, when rank {leaver} leaves,"
    error = error_of(PeerLostError, lambda: WAITS[call](group, leaver), what)
    elapsed = time.monotonic() - left_at.value
    assert elapsed < _DETECTION_SECONDS + harness.SLACK_SECONDS, f"{what} took {elapsed:.2f} s to see it"
    assert error.ranks == (leaver,), f"{what} names {error.ranks}: {error}"
    again = error_of(PeerLostError, lambda: WAITS[call](group, leaver), f"a second {what}")
    assert again.ranks == (leaver,), f"a second {what} names {again.ranks}: {again}"


@rank_check(make_event)
def what_was_sent_before_close_arrives(group: Backend, closed: Event) -> None:
    """Messages whose `send` had returned are received after the sender closed the group; then comes `PeerLostError`."""
    if group.rank == 0:
        for dst in range(1, group.world_size):
            for i in range(10):
                group.send(pattern(1000, seed=i), dst, tag=i % 2, timeout=TIMEOUT)
        for dst in range(1, group.world_size):
            group.send(pattern(LARGE, seed=dst), dst, tag=2, timeout=TIMEOUT)
        group.close(timeout=_CLOSE_SECONDS)
        closed.set()
        return
    # The send of the large one may last until it is received, so it can't wait for the close.
    check_bytes(receive(group, 0, LARGE, tag=2), pattern(LARGE, seed=group.rank), "a large message before close")
    assert closed.wait(TIMEOUT), "close did not return"
    for i in range(10):
        check_bytes(receive(group, 0, 1000, tag=i % 2), pattern(1000, seed=i), f"message {i}, sent before close,")
    error = error_of(PeerLostError, lambda: in_recv(group, 0), "recv of more than was sent before close")
    assert error.ranks == (0,), f"rank 0 left, the error names {error.ranks}"


@rank_check(make_event, min_ranks=3)
def the_others_go_on_after_a_close(group: Backend, closed: Event) -> None:
    """Ranks that don't wait for a rank that closed the group can go on exchanging messages."""
    last = group.world_size - 1
    if group.rank == last:
        group.close(timeout=_CLOSE_SECONDS)
        closed.set()
    elif group.rank == 0:
        assert closed.wait(TIMEOUT), "close did not return"
        group.send(pattern(LARGE), 1, timeout=TIMEOUT)
    elif group.rank == 1:
        check_bytes(receive(group, 0, LARGE), pattern(LARGE), f"between ranks 0 and 1, when rank {last} had left")


@rank_check()
def a_close_wakes_the_own_threads(group: Backend) -> None:
    """A thread, or a request, that waits in a group which another thread of its rank closes gets `GroupClosedError`."""
    if group.rank != 0:
        return  # and stays in the group until the run ends
    request = group.irecv(bytearray(1), 1, tag=1)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(group.recv, bytearray(1), 1, timeout=TIMEOUT)
        let_others_block(group, 1)
        group.close(timeout=_CLOSE_SECONDS)
        error_of(GroupClosedError, receiving.result, "recv in a group that another thread closes")
    error_of(GroupClosedError, lambda: request.wait(TIMEOUT), "a request in a group that is closed")


@rank_check()
def close_callbacks_run_last(group: Backend) -> None:
    """Callbacks of `on_close` run once, when the group is closed and nothing waits in it any more."""
    if group.rank != 0:
        return  # and stays in the group until the run ends
    request = group.irecv(bytearray(1), 1)
    errors: list[DistributedError] = []

    def callback() -> None:
        errors.append(error_of(GroupClosedError, lambda: request.wait(TIMEOUT), "a request in on_close"))
        errors.append(error_of(GroupClosedError, lambda: in_recv(group, 1), "recv in on_close"))

    group.on_close(callback)
    group.close(timeout=_CLOSE_SECONDS)
    group.close(timeout=_CLOSE_SECONDS)
    assert len(errors) == 2, f"a close callback ran {len(errors) // 2} times"


@rank_check(make_semaphore)
def errors_pickle(group: Backend, through: Semaphore) -> None:
    """Errors go through pickle with class, message and ranks."""
    dst, src = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    sent = group.isend(b"12", dst)
    in_vain = partial(group.recv, bytearray(1), dst, tag=1, timeout=0)
    too_short = partial(group.recv, bytearray(1), src, timeout=TIMEOUT)
    errors: list[DistributedError] = [
        error_of(InvalidRankError, lambda: group.send(b"", group.world_size), "send"),
        error_of(SelfSendError, lambda: group.send(b"", group.rank), "send"),
        error_of(DistributedTimeoutError, in_vain, "recv"),
        error_of(SizeMismatchError, too_short, "recv"),
    ]
    receive(group, src, 2)
    sent.wait(TIMEOUT)
    through.release()
    if group.rank == 0:
        await_ranks(through, group.world_size)
        group.abort("to see its error")
    errors.append(error_of(GroupAbortedError, lambda: in_recv(group, dst), "recv after abort"))
    group.close()
    errors.append(error_of(GroupClosedError, lambda: in_recv(group, dst), "recv after close"))
    for error in errors:
        copy = pickle.loads(pickle.dumps(error))
        assert error_key(copy) == error_key(error), f"{error!r} came out of pickle as {copy!r}"
        assert str(error), f"{type(error).__name__} has no message"


def _errors_of_all_calls(group: Backend, peer: int, kind: type[DistributedError]) -> list[DistributedError]:
    calls: dict[str, Callable[[], object]] = {
        "send": partial(group.send, b"", peer, timeout=TIMEOUT),
        "a large send": partial(group.send, bytes(LARGE), peer, timeout=TIMEOUT),
        "recv": partial(group.recv, bytearray(1), peer, timeout=TIMEOUT),
        "recv of any": partial(group.recv, bytearray(1), ANY_SOURCE, timeout=TIMEOUT),
        "barrier": partial(group.barrier, timeout=TIMEOUT),
        "isend": lambda: group.isend(b"x", peer).wait(TIMEOUT),
        "irecv": lambda: group.irecv(bytearray(1), peer).wait(TIMEOUT),
    }
    what = f"on a group that has failed with {kind.__name__}"
    return [error_of(kind, call, f"{name} {what}") for name, call in calls.items()]
