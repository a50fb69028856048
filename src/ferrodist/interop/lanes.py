"""How collectives of torch's groups go: at once or in a thread, in an order for each depth of callbacks."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from ferrodist.backends.sub import SubBackend
from ferrodist.collectives.devices import engine_of
from ferrodist.collectives.host_engine import collectives_of
from ferrodist.collectives.operation import Operation, run_later, run_now
from ferrodist.errors import DistributedError, describe_error
from ferrodist.interop.completion import Line, Threads, here
from ferrodist.interop.works import CollectiveWork, seconds_of

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.collectives.engine import TensorCollectives
    from ferrodist.collectives.pending import PendingCollective
    from ferrodist.interop.calls import Collective

__all__ = ["Lane", "Lanes"]


class Lane:
    """Collectives that have an order among each other.

    Args:
        group: What they are called in.
        threads: Who complete their futures.
    """

    __slots__ = ("_line", "_threads", "group")

    def __init__(self, group: Backend, threads: Threads) -> None:
        self.group = group
        self._threads = threads
        self._line = Line()  # of their ends

    def work_of(self, started: PendingCollective[Any], results: list[Any]) -> CollectiveWork:
        """What torch waits for, of a collective that was started here."""
        return CollectiveWork(started, results, self._threads, self._line)

    def run_all(self, calls: list[Collective], opts: Any) -> CollectiveWork | None:
        """Do calls that are one for the user, whose error and results are the last one's; see `run`."""
        for call in calls:
            if call.device is not None:
                engine_of(self.group, call.device)  # which may refuse, before anything is sent
        if opts.asyncOp:
            return [self.run(call, opts) for call in calls][-1]
        # All of them, as ranks that don't wait do: each takes a place in the group.
        errors = [error for call in calls if (error := self._error_of(call, opts)) is not None]
        if errors:
            raise errors[0]
        return None

    def _error_of(self, call: Collective, opts: Any) -> DistributedError | None:
        try:
            self.run(call, opts)
        except DistributedError as error:
            return error
        return None

    def run(self, call: Collective, opts: Any) -> CollectiveWork | None:
        """Do what was checked: now, which gives None, or by a thread, as the options of torch's say."""
        group = self.group
        engine = collectives_of(group) if call.device is None else engine_of(group, call.device)
        limit = seconds_of(opts.timeout)
        seconds = group.timeout if limit is None else limit
        operation: Operation[None] = Operation(
            name=call.name,
            group=group,
            engine=engine,
            device=call.device,
            timeout=seconds,
            run=partial(self._run_at, call, engine, seconds),
            finish=call.finish,
        )
        if opts.asyncOp:
            return self.work_of(run_later(operation), call.results)
        run_now(operation)
        return None

    def _run_at(self, call: Collective, engine: TensorCollectives, seconds: float, place: int) -> None:
        try:
            call.run(engine, seconds, place)
        except DistributedError:
            raise
        except BaseException as error:
            # Others wait for what may not have been called at all: no memory for a copy, an interruption before.
            self.group.abort(f"{call.name} failed with {describe_error(error)}")
            raise


class Lanes:
    """Those of a group, by the depth of the callbacks that call in them: [Note: callbacks] in `completion`.

    Args:
        group: It.
        threads: Its.
    """

    def __init__(self, group: Backend, threads: Threads) -> None:
        self._group = group
        self._threads = threads
        self._lanes = [Lane(group, threads)]
        self._lock = threading.Lock()

    def here(self) -> Lane:
        """Where this thread's collectives go."""
        depth = here.line.depth
        return self._lanes[depth] if depth < len(self._lanes) else self._made(depth)

    @property
    def groups(self) -> list[Backend]:
        """What they are called in, the group itself first."""
        return [lane.group for lane in self._lanes]

    def _made(self, depth: int) -> Lane:
        with self._lock:
            for missing in range(len(self._lanes), depth + 1):
                label = f"callbacks of depth {missing}"
                name = f"{self._group.name}, {label}"
                ranks = range(self._group.world_size)
                beside = SubBackend(self._group, ranks, name=name, label=label, ends_with_parent=True)
                self._lanes.append(Lane(beside, self._threads))
        return self._lanes[depth]
