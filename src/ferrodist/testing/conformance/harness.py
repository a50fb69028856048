"""The harness of the three suites: running checks, running a check on the ranks of a backend, and assertions.

A check of a backend runs a small program on every rank of a fresh group. Ranks may be threads or forked processes, so
programs share nothing but the group and what is created in shared memory before the run: events, semaphores, floats. No
check relies on sleeping.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError
from ferrodist.testing.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.sharedctypes import Synchronized
    from multiprocessing.synchronize import Event, Semaphore
    from types import ModuleType

    from ferrodist.backends.base import Backend
    from ferrodist.testing.ranks import BackendFactory

    BackendUnderTest: TypeAlias = BackendFactory | "RankRunner"
    BackendCheck: TypeAlias = Callable[..., None]


TIMEOUT = 10.0  # seconds for calls that a correct backend ends at once

SLACK_SECONDS = 0.5  # seconds past its deadline at which a call may return, on a busy machine

LARGE = 8 << 20  # bytes of a message that no transport sends at once

_RUN_SECONDS = 60.0
_ERROR = TypeVar("_ERROR", bound=BaseException)


class RankRunner(Protocol):
    """A runner of programs on a fresh group, for backends whose ranks are not threads of this process."""

    def run(self, world_size: int, fn: Callable[[Backend], Any]) -> list[Any]:
        """Run ``fn(group)`` on each of ``world_size`` ranks, forked from this process, and return the results by rank.

        The groups are closed when the last rank is done, as `run_ranks` does.
        """


def as_runner(backend: BackendUnderTest) -> RankRunner:
    """A runner for ``backend``: itself if it has ``run``, else `run_ranks` with it as the factory."""
    if hasattr(backend, "run"):
        return backend
    run = functools.partial(run_ranks, backend=backend, timeout=_RUN_SECONDS)
    return SimpleNamespace(run=lambda world_size, fn: run(fn, world_size))


def rank_check(
    *shared: Callable[[], object], min_ranks: int = 2, cases: Callable[[int], Iterable[Iterable[Any]]] | None = None
) -> Callable[[Callable[..., None]], BackendCheck]:
    """Decorate a program of a rank as a check: it runs on every rank of a group, of a fresh one for each case.

    The program takes the group, the shared objects and the values of a case. The check takes a factory or a runner, and
    a world size.

    Args:
        shared: Functions that make an object each, which all ranks of a group share.
        min_ranks: The smallest world size; a smaller one is raised to it.
        cases: ``cases(world_size)`` returns the values of each case. None is one case without values.
    """

    def decorate(program: Callable[..., None]) -> BackendCheck:
        @functools.wraps(program)
        def check(backend: BackendUnderTest, world_size: int = 3) -> None:
            runner, size = as_runner(backend), max(world_size, min_ranks)
            for case in [()] if cases is None else cases(size):
                made = [make() for make in shared]
                runner.run(size, lambda group: program(group, *made, *case))  # noqa: B023 - called at once

        return check

    return decorate


def public_functions(module: ModuleType) -> tuple[Callable[..., None], ...]:
    """The public functions that a module defines, in order: in modules of checks, the checks."""
    return tuple(
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    )


def run_checks(suite: str, checks: Iterable[tuple[str, Callable[..., object], Callable[[], object]]]) -> None:
    """Make checks, each a name, a function whose docstring is the rule, and a call; AssertionError lists the failed."""
    failures: list[tuple[str, Exception]] = []
    num_checks = 0
    for name, check, call in checks:
        num_checks += 1
        try:
            call()
        except Exception as error:  # noqa: BLE001 - what is under test may raise anything
            rule = (inspect.getdoc(check) or "").partition("\n")[0]
            reason = str(error).partition("\n")[0]
            failures.append((f"{name}: {rule}\n    {type(error).__name__}: {reason}", error))
    if failures:
        listed = "\n".join(f"  {text}" for text, _ in failures)
        raise AssertionError(f"{suite}: {len(failures)} of {num_checks} checks failed\n{listed}") from failures[0][1]


def make_event() -> Event:
    """An event that one rank sets and others wait for, be they threads or processes forked later."""
    return multiprocessing.get_context("fork").Event()


def make_semaphore() -> Semaphore:
    """A semaphore that starts at 0, for threads or processes forked later."""
    return multiprocessing.get_context("fork").Semaphore(0)


def make_shared_float() -> Synchronized[float]:
    """A float in shared memory that starts at 0, for threads or processes forked later."""
    return multiprocessing.get_context("fork").Value("d", 0.0)


def await_ranks(ready: Semaphore, num_ranks: int) -> None:
    """Wait for as many ranks: an abort before all have opened their group would fail the opening."""
    for _ in range(num_ranks):
        assert ready.acquire(timeout=TIMEOUT), "a rank is missing"


def in_recv(group: Backend, peer: int) -> None:
    """Wait in a receive."""
    group.recv(bytearray(1), peer, timeout=TIMEOUT)


def _in_send(group: Backend, peer: int) -> None:
    """Wait in a send, or in a receive after it where a backend takes any message over."""
    group.send(bytes(LARGE), peer, timeout=TIMEOUT)
    in_recv(group, peer)


WAITS: dict[str, Callable[[Backend, int], object]] = {
    "recv": in_recv,
    "recv_of_any": lambda group, _: group.recv(bytearray(1), ANY_SOURCE, timeout=TIMEOUT),
    "wait": lambda group, peer: group.irecv(bytearray(1), peer).wait(TIMEOUT),
    "send": _in_send,
    "barrier": lambda group, _: group.barrier(timeout=TIMEOUT),
}
"""Calls that wait for a peer, by name."""


def pattern(size: int, seed: int = 0) -> bytes:
    """``size`` bytes that depend on ``seed``, without a repetition within 64 KiB."""
    block = bytes((seed * 37 + i * 101 + (i >> 8) * 17) & 0xFF for i in range(min(size, 65_521)))
    return (block * (size // max(1, len(block)) + 1))[:size]


def receive(group: Backend, src: int, size: int, *, tag: int = 0) -> bytes:
    """Receive a message of ``size`` bytes and return it; the sender must be ``src``."""
    buffer = bytearray(b"\xee" * size)
    sender = group.recv(buffer, src, tag=tag, timeout=TIMEOUT)
    assert sender == src, f"recv from rank {src} returned {sender}"
    return bytes(buffer)


def check_bytes(got: bytes | bytearray, expected: bytes, what: str) -> None:
    """Assert equality without printing megabytes."""
    if got == expected:
        return
    assert len(got) == len(expected), f"{what}: {len(got)} bytes in place of {len(expected)}"
    first = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
    raise AssertionError(f"{what}: byte {first} of {len(expected)} is {got[first]}, sent was {expected[first]}")


def error_of(kind: type[_ERROR] | tuple[type[_ERROR], ...], call: Callable[[], object], what: str) -> _ERROR:
    """Return the error that ``call()`` raises, which must be of ``kind``."""
    names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
    try:
        result = call()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{what} must raise {names}; it raised {type(error).__name__}: {error}") from error
    raise AssertionError(f"{what} must raise {names}; it returned {result!r}")


def error_key(error: DistributedError) -> tuple[str, str, tuple[int, ...]]:
    """The fields that are equal when two ranks raise the same error."""
    return type(error).__name__, error.message, error.ranks


@contextmanager
def check_deadline(timeout: float, what: str) -> Iterator[None]:
    """Assert that the block takes at least ``timeout`` seconds and not much more."""
    clock = Deadline(timeout)
    yield
    elapsed = clock.elapsed()
    slack = 0.01  # two clocks may be compared, with different resolutions
    assert elapsed >= timeout - slack, f"{what} with timeout={timeout:g} gave up after {elapsed:.3f} s"
    limit = timeout + SLACK_SECONDS
    assert elapsed <= limit, f"{what} with timeout={timeout:g} took {elapsed:.3f} s"


def let_others_block(group: Backend, peer: int) -> None:
    """Give other ranks a moment to get from announcing a call into it.

    No check relies on it: where the others come late the check passes too, it only tests less.
    """
    unused_tag = 2**55
    recv = functools.partial(group.recv, bytearray(1), peer, tag=unused_tag, timeout=0.1)
    error_of(DistributedTimeoutError, recv, "a recv of nothing")
