"""`run_ranks`: a function as every rank of a group, within one test; and ranks that are threads of this process."""

from __future__ import annotations

import inspect
import queue
import secrets
import socket
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from typing_extensions import override

from ferrodist.deadline import Deadline, check_timeout, default_timeout
from ferrodist.errors import InvalidWorldSizeError, RankFailedError
from ferrodist.testing.backend_names import RANKS_BACKENDS
from ferrodist.testing.supervisor import RankProgram, RankSet, is_own_frame, supervise
from ferrodist.torch_private.operators import create_operators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.testing.backend_names import BackendName
    from ferrodist.testing.supervisor import Event

    BackendFactory: TypeAlias = Callable[[int], Sequence[Backend]]


_GROUP_TIMEOUT_SHARE = 0.75
"""Share of the run's timeout for a call in the group: its error, which names the straggler, must come first."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: BackendName | BackendFactory = "simulated",
    timeout: float = 60.0,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(group, *args, **kwargs)`` on every rank of a fresh group and return the results by rank.

    While ``fn`` runs, ``group`` is also the default group of its rank. ``fn`` may be a closure or a lambda. When one
    rank fails, the group is aborted, and ranks that do not end by themselves within a few seconds are stopped:
    processes by SIGKILL; threads, which can't be stopped, stay behind as daemons. The groups are closed, all at the
    same time, when the last ``fn`` has ended; a rank that fails closes its own at once.

    Ranks that are threads share the state of the process, torch's default random generator included:
    ``torch.manual_seed`` in one rank affects all, and each number goes to one rank only. Ranks that need their own
    numbers create a ``torch.Generator``, or are processes (``backend="tcp"``). A run that has set the seed on threads
    gives a warning, once in a process.

    Ranks that are forked processes compute with one thread. One that calls ``torch.set_num_threads`` for more waits
    for ever in its next large operator if this process has computed with several threads before: OpenMP's pool of
    threads does not survive a fork. Call ``torch.set_num_threads(1)`` first of all in the program that forks.

    Args:
        fn: The program of a rank.
        world_size: Number of ranks.
        args: Passed to ``fn``. Ranks that are threads share the objects; ranks that are processes each have a copy.
        backend: ``"simulated"``: ranks are threads that exchange bytes in memory. ``"tcp-threads"``: threads, over
            loopback TCP. ``"tcp"``: processes forked from this one, over loopback TCP; what ``fn`` returns or raises
            must pickle. ``"native-threads"`` and ``"native"``: the same two with the native engine;
            ``"gloo-threads"`` and ``"gloo"``: with it over TCP alone. Or a function that takes the world size and
            returns the handle of each rank, for ranks that are threads.
        timeout: Seconds for the whole run. The groups get three quarters of it as their own, at most the usual default.
        kwargs: Passed to ``fn``.

    Raises:
        RankFailedError: A rank raised, died, or was not done in time. ``ranks`` are those with a failure of their own,
            the first failure first. The message has their tracebacks whole (the stack, for a rank that was stuck),
            and a line for each rank that failed as a consequence. ``__cause__`` is the first exception.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise InvalidWorldSizeError(f"run_ranks needs a world size of at least 1, not {world_size!r}")
    if not callable(backend) and backend not in RANKS_BACKENDS:
        raise ValueError(f"backend must be a function or one of {', '.join(RANKS_BACKENDS)}, not {backend!r}")
    if inspect.iscoroutinefunction(fn):
        raise TypeError(
            "run_ranks takes a plain function, which each rank calls: call asyncio.run in one for what is async"
        )
    check_timeout(timeout)

    def body(group: Backend) -> Any:
        return fn(group, *args, **kwargs)

    seed = _default_seed()
    try:
        results = supervise(_start(body, world_size, backend, timeout), world_size, timeout)
    except RankFailedError:
        with suppress(Warning):  # the failure matters more
            _warn_of_shared_generator(seed, world_size)
        raise
    _warn_of_shared_generator(seed, world_size)
    return results


def _default_seed() -> int | None:
    """The seed of torch's default generator; forked processes have copies of it."""
    torch = sys.modules.get("torch")
    return None if torch is None else torch.initial_seed()


_has_warned_of_shared_generator = False


def _warn_of_shared_generator(seed: int | None, world_size: int) -> None:
    global _has_warned_of_shared_generator  # noqa: PLW0603 - one warning per process
    if _has_warned_of_shared_generator or seed is None or world_size == 1 or _default_seed() == seed:
        return
    _has_warned_of_shared_generator = True
    warnings.warn(
        "torch.manual_seed was called by ranks that are threads, which share torch's random generator: each number goes"
        " to one rank only, and another rank's seed is everybody's. Draw from a torch.Generator of the rank's own, seed"
        " before run_ranks what all may share, or run the ranks as processes (backend='tcp').",
        stacklevel=3,
    )


def _start(
    body: Callable[[Backend], Any], world_size: int, backend: BackendName | BackendFactory, timeout: float
) -> RankSet:
    # Imported where they are used, and before a fork, which then brings them to every rank.
    import ferrodist.backends.process_group  # noqa: PLC0415, F401 - RankProgram uses it

    group_timeout = min(timeout * _GROUP_TIMEOUT_SHARE, default_timeout())
    if callable(backend):
        open_group = _from_groups(backend(world_size), world_size)
    elif backend == "simulated":
        from ferrodist.backends.simulated import SimulatedBackend  # noqa: PLC0415

        open_group = _from_groups(SimulatedBackend.create_group(world_size, timeout=group_timeout), world_size)
    else:
        listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, world_size))
        open_group = _open_over_tcp(listener, world_size, group_timeout, backend=backend)
        if not backend.endswith("-threads"):
            from ferrodist.testing.process_ranks import ProcessRanks  # noqa: PLC0415

            with listener:  # the forked rank 0 has a copy
                return ProcessRanks(RankProgram(open_group=open_group, body=body), world_size)
    return ThreadRanks(RankProgram(open_group=open_group, body=body), world_size)


def _from_groups(groups: Sequence[Backend], world_size: int) -> Callable[[int], Backend]:
    ranks = [getattr(group, "rank", None) for group in groups] if isinstance(groups, (list, tuple)) else None
    if ranks != list(range(world_size)):
        raise ValueError(
            f"the backend factory must return a list of the groups of ranks 0 to {world_size - 1} in order, not"
            f" {groups!r}"
        )
    return groups.__getitem__


def _open_over_tcp(
    listener: socket.socket, world_size: int, timeout: float, *, backend: BackendName
) -> Callable[[int], Backend]:
    """A function that opens a rank's group over loopback TCP, or the native group that is bootstrapped over it."""
    from ferrodist.backends.native import GlooBackend, NativeBackend  # noqa: PLC0415
    from ferrodist.backends.tcp import TcpBackend  # noqa: PLC0415

    kinds: dict[str, Callable[..., Backend]] = {"tcp": TcpBackend, "native": NativeBackend, "gloo": GlooBackend}
    kind = kinds[backend.removesuffix("-threads")]
    address = "{}:{}".format(*listener.getsockname())
    secret = secrets.token_bytes(32)

    def open_group(rank: int) -> Backend:
        if rank == 0:
            return kind(rank, world_size, address, secret=secret, timeout=timeout, listener=listener)
        if not backend.endswith("-threads"):  # where the listening socket is one for all ranks
            listener.close()
        return kind(rank, world_size, address, secret=secret, timeout=timeout)

    return open_group


_JOIN_TIMEOUT_SECONDS = 1.0


class ThreadRanks(RankSet):
    """One thread for each rank; a `RankSet`.

    Python can't stop a thread. One that is stuck outside the group stays behind: as a daemon it does not keep the
    process alive, and the error names its rank.
    """

    def __init__(self, program: RankProgram, world_size: int) -> None:
        self._groups: dict[int, Backend] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._may_close = threading.Event()

        def open_group(rank: int) -> Backend:
            group = self._groups[rank] = program.open_group(rank)
            return group

        def run(rank: int) -> None:
            replace(program, open_group=open_group).run(rank, self._events.put, self._may_close.wait)

        create_operators()  # before threads would
        self._threads = [
            threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)
        ]
        for thread in self._threads:
            thread.start()

    @override
    def next_event(self, timeout: float) -> Event | None:
        with suppress(queue.Empty):
            return self._events.get(timeout=timeout)
        return None

    @override
    def stack(self, rank: int) -> str:
        frame = sys._current_frames().get(self._threads[rank].ident or 0)  # noqa: SLF001 - the documented way
        if frame is None:
            return "  (the thread has just ended)"
        entries = traceback.extract_stack(frame)
        while len(entries) > 1 and (entries[0].filename == threading.__file__ or is_own_frame(entries[0].filename)):
            del entries[0]
        return "".join(traceback.format_list(entries)).rstrip()

    @override
    def stop(self, ranks: Iterable[int]) -> None:
        # A thread ends when its group wakes it.
        for rank in ranks:
            _abort(self._groups.get(rank))

    @override
    def release(self) -> None:
        self._may_close.set()

    @override
    def dispose(self) -> None:
        if not self._may_close.is_set():  # the caller was interrupted
            for group in list(self._groups.values()):
                _abort(group)
            self._may_close.set()
        deadline = Deadline(_JOIN_TIMEOUT_SECONDS)
        for thread in self._threads:
            thread.join(deadline.remaining())


def _abort(group: Backend | None) -> None:
    # A backend under test may do anything here; the error that is being reported matters more.
    with suppress(Exception):
        if group is not None:
            group.abort("run_ranks stopped this rank: it was not done in time")
