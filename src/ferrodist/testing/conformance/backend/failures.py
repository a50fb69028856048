"""Checks of the end of a group: aborted by one rank for all, or closed by each for itself."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
from ferrodist.testing.conformance.backend.harness import (
    LARGE,
    TIMEOUT,
    RankRunner,
    await_ranks,
    backend_check,
    check_bytes,
    error_key,
    error_of,
    in_barrier,
    in_recv,
    in_recv_of_any,
    in_send,
    in_wait,
    let_others_block,
    make_counter,
    make_signal,
    pattern,
    rank_check,
    receive,
    transfer_error,
)
from ferrodist.testing.conformance.runner import public_functions

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend
    from ferrodist.testing.conformance.backend.harness import BackendCheck

_DETECTION_SECONDS = 1.0  # seconds within which a rank must detect that another has left

_CLOSE_SECONDS = 0.5  # the timeout of a close while other ranks stay: rank 0 of a star goes on serving them that long


@backend_check()
def an_abort_wakes_every_rank(runner: RankRunner, world_size: int) -> None:
    """`abort` makes every rank that waits in a call raise `GroupAbortedError` with the aborting rank and the reason."""
    for aborter in (0, world_size - 1):
        for wait in (in_recv, in_recv_of_any, in_wait, in_send, in_barrier):
            _one_abort(runner, world_size, aborter, wait)


def _one_abort(runner: RankRunner, world_size: int, aborter: int, wait: Callable[[Backend, int], None]) -> None:
    where = wait.__name__.removeprefix("in_")
    ready = make_counter()

    def program(group: Backend) -> DistributedError:
        if group.rank != aborter:
            ready.release()
            return error_of(GroupAbortedError, lambda: wait(group, aborter), f"{where}, when rank {aborter} aborts,")
        await_ranks(ready, world_size - 1)
        let_others_block(group, (aborter + 1) % world_size)
        group.abort("the reason given")
        return error_of(GroupAbortedError, lambda: wait(group, (aborter + 1) % world_size), "a call after abort")

    for rank, error in enumerate(runner.run(world_size, program)):
        assert error.ranks == (aborter,), f"rank {aborter} aborted, rank {rank} names {error.ranks}"
        assert "the reason given" in str(error), f"rank {rank} does not say why the group was aborted: {error}"


@backend_check()
def a_failed_group_stays_failed(runner: RankRunner, world_size: int) -> None:
    """After an abort every call raises the same error on every rank; the first abort is the one that counts."""
    ready, aborted = make_counter(), make_signal()

    def program(group: Backend) -> list[DistributedError]:
        ready.release()
        if group.rank == 1:
            await_ranks(ready, world_size)
            group.abort("the first reason")
            aborted.set()
        else:
            assert aborted.wait(TIMEOUT), "the abort did not return"
        peer = (group.rank + 1) % world_size
        first = error_of(GroupAbortedError, lambda: in_recv(group, peer), "recv after abort")
        group.abort("the second reason")
        group.abort(PeerLostError("a third reason", ranks=(0,)))
        errors = [first, *_errors_of_all_calls(group, peer, GroupAbortedError)]
        assert group.failure is not None, "an aborted group has no failure"
        return [*errors, group.failure]

    for rank, errors in enumerate(runner.run(world_size, program)):
        assert "the first reason" in str(errors[0]), f"rank {rank} says: {errors[0]}"
        for error in errors:
            assert error_key(error) == error_key(errors[0]), f"rank {rank} raised {errors[0]!r}, then {error!r}"


@backend_check()
def an_abort_with_an_error_raises_it(runner: RankRunner, world_size: int) -> None:
    """`abort(error)` makes every rank raise an error of that class with the same message and ranks."""
    given = CollectiveMismatchError("the ranks disagree", ranks=(1,))
    ready = make_counter()

    def program(group: Backend) -> DistributedError:
        ready.release()
        if group.rank == world_size - 1:
            await_ranks(ready, world_size)
            group.abort(given)
        return error_of(
            CollectiveMismatchError, lambda: in_recv(group, (group.rank + 1) % world_size), "recv after abort"
        )

    for rank, error in enumerate(runner.run(world_size, program)):
        assert error_key(error) == error_key(given), f"rank {rank} raised {error!r} in place of {given!r}"


@backend_check()
def a_closed_group_says_so(runner: RankRunner, world_size: int) -> None:
    """`close` may be called twice, also after a failure; every later call raises `GroupClosedError`."""

    def program(group: Backend) -> None:
        group.barrier(timeout=TIMEOUT)
        group.close()
        group.close()
        _errors_of_all_calls(group, (group.rank + 1) % world_size, GroupClosedError)

    def failed_program(group: Backend) -> None:
        with suppress(DistributedError):  # a rank that is through may have ended the group
            group.barrier(timeout=TIMEOUT)
        group.abort("so that it is closed after a failure")
        group.close()
        group.close()

    runner.run(world_size, program)
    runner.run(world_size, failed_program)


@backend_check()
def a_rank_that_left_is_named(runner: RankRunner, world_size: int) -> None:
    """A rank that waits for one that closes the group gets `PeerLostError` with its rank within a second."""
    for leaver in (0, world_size - 1):
        for wait in (in_recv, in_wait, in_send, in_barrier):
            _one_departure(runner, world_size, leaver, wait)


def _one_departure(runner: RankRunner, world_size: int, leaver: int, wait: Callable[[Backend, int], None]) -> None:
    where = wait.__name__.removeprefix("in_")
    ready = make_counter()
    left_at = multiprocessing.get_context("fork").Value("d", 0.0)

    def program(group: Backend) -> None:
        if group.rank == leaver:
            await_ranks(ready, world_size - 1)
            let_others_block(group, (leaver + 1) % world_size)
            left_at.value = time.monotonic()
            group.close(timeout=_CLOSE_SECONDS)
            return
        ready.release()
        what = f"{where}, when rank {leaver} leaves,"
        error = error_of(PeerLostError, lambda: wait(group, leaver), what)
        elapsed = time.monotonic() - left_at.value
        assert elapsed < _DETECTION_SECONDS, f"{what} took {elapsed:.2f} s to see it"
        assert error.ranks == (leaver,), f"{what} names {error.ranks}: {error}"
        again = error_of(PeerLostError, lambda: wait(group, leaver), f"a second {what}")
        assert again.ranks == (leaver,), f"a second {what} names {again.ranks}: {again}"

    runner.run(world_size, program)


@backend_check()
def what_was_sent_before_close_arrives(runner: RankRunner, world_size: int) -> None:
    """Messages whose `send` had returned are received after the sender closed the group; then comes `PeerLostError`."""
    closed = make_signal()

    def program(group: Backend) -> None:
        if group.rank == 0:
            for dst in range(1, world_size):
                for i in range(10):
                    group.send(pattern(1000, seed=i), dst, tag=i % 2, timeout=TIMEOUT)
            for dst in range(1, world_size):
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

    runner.run(world_size, program)


@backend_check(min_ranks=3)
def the_others_go_on_after_a_close(runner: RankRunner, world_size: int) -> None:
    """Ranks that don't wait for a rank that closed the group can go on exchanging messages."""
    closed = make_signal()

    def program(group: Backend) -> None:
        last = world_size - 1
        if group.rank == last:
            group.close(timeout=_CLOSE_SECONDS)
            closed.set()
        elif group.rank == 0:
            assert closed.wait(TIMEOUT), "close did not return"
            group.send(pattern(LARGE), 1, timeout=TIMEOUT)
        elif group.rank == 1:
            check_bytes(receive(group, 0, LARGE), pattern(LARGE), f"between ranks 0 and 1, when rank {last} had left")

    runner.run(world_size, program)


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


@backend_check()
def errors_pickle(runner: RankRunner, world_size: int) -> None:
    """Errors go through pickle with class, message and ranks."""
    through = make_counter()

    def program(group: Backend) -> None:
        peer = (group.rank + 1) % world_size
        sent = group.isend(b"12", peer)
        errors: list[DistributedError] = [
            error_of(InvalidRankError, lambda: group.send(b"", world_size), "send"),
            error_of(SelfSendError, lambda: group.send(b"", group.rank), "send"),
            error_of(DistributedTimeoutError, lambda: group.recv(bytearray(1), peer, tag=1, timeout=0), "recv"),
            error_of(
                SizeMismatchError,
                lambda: group.recv(bytearray(1), (group.rank - 1) % world_size, timeout=TIMEOUT),
                "recv",
            ),
        ]
        receive(group, (group.rank - 1) % world_size, 2)
        sent.wait(TIMEOUT)
        through.release()
        if group.rank == 0:
            await_ranks(through, world_size)
            group.abort("to see its error")
        errors.append(error_of(GroupAbortedError, lambda: in_recv(group, peer), "recv after abort"))
        group.close()
        errors.append(error_of(GroupClosedError, lambda: in_recv(group, peer), "recv after close"))
        for error in errors:
            copy = pickle.loads(pickle.dumps(error))
            assert error_key(copy) == error_key(error), f"{error!r} came out of pickle as {copy!r}"
            assert str(error), f"{type(error).__name__} has no message"

    runner.run(world_size, program)


def _errors_of_all_calls(group: Backend, peer: int, kind: type[DistributedError]) -> list[DistributedError]:
    what = f"on a group that has failed with {kind.__name__}"
    return [
        error_of(kind, lambda: group.send(b"", peer, timeout=TIMEOUT), f"send {what}"),
        error_of(kind, lambda: group.send(bytes(LARGE), peer, timeout=TIMEOUT), f"a large send {what}"),
        error_of(kind, lambda: group.recv(bytearray(1), peer, timeout=TIMEOUT), f"recv {what}"),
        error_of(kind, lambda: group.recv(bytearray(1), ANY_SOURCE, timeout=TIMEOUT), f"recv of any {what}"),
        error_of(kind, lambda: group.barrier(timeout=TIMEOUT), f"barrier {what}"),
        transfer_error(kind, lambda: group.isend(b"x", peer), f"isend {what}"),
        transfer_error(kind, lambda: group.irecv(bytearray(1), peer), f"irecv {what}"),
    ]


CHECKS: tuple[BackendCheck, ...] = public_functions(__name__)
