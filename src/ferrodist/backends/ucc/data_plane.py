"""The data plane of UCC: collectives of bytes, started, then polled until they end or the deadline passes.

All data is of type uint8 in host memory, so no element type can come out wrong. All but broadcast is `ucc_alltoallv`,
which sends each rank its block at once: `ucc_allgatherv` of UCC 1.8.0 ends the process in a context without an
out-of-band exchange (see `Team`), and `ucc_gatherv` and `ucc_scatterv` send the same. A UCC collective can't be taken
back: the team keeps an abandoned one with its buffers for good, and its group has failed.

[Note: who makes progress]
UCC moves data only while it is called. A collective may have ended on a rank that has some of its data still in a
buffer, because a socket was full; so a thread goes on calling it, ever less often, for as long as the group is open. It
also ends UCC: giving the last bytes to the network takes as long as others let it, and `close` has a time limit.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from itertools import accumulate
from typing import TYPE_CHECKING

from typing_extensions import override

from ferrodist.backends.interfaces import Block, DataPlane
from ferrodist.backends.polling import Backoff, wait_until
from ferrodist.backends.sequencer import Sequencer
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.backends.ucc.bindings import IN_PROGRESS, UccError
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, GroupClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request
    from ferrodist.backends.ucc.team import Team, Transfer


_UNWATCHED_SECONDS = 0.05  # how long a wait goes on before it watches for ranks that have left

_MIN_POLL_INTERVAL_SECONDS, _MAX_POLL_INTERVAL_SECONDS = 0.5e-3, 10e-3
"""The interval at which the thread calls UCC grows from the first to the second while no collective is waited for."""

_REASON_SECONDS = 2.0  # how long the control group has to find the reason why UCC failed
_DEPARTURE_TAG = channel_tag(Channel.DATA, (1 << 56) - 1)
_DEPARTURE = struct.Struct("<q")  # number of collectives that the rank has ended

_NOTHING = memoryview(b"")


class UccDataPlane(DataPlane):
    """UCC's collectives on one team, which all ranks start in the same order, from sequence number ``first``."""

    def __init__(self, team: Team, control: Backend, first: int) -> None:
        self._team = team
        self._control = control
        self._ucc_lock = threading.Lock()
        self._num_waiting, self._num_waiting_lock = 0, threading.Lock()
        self._departures: dict[int, int] = {}
        self._is_leaving = False
        self._is_stopped = threading.Event()
        self.sequencer = Sequencer(self._has_failed, first)
        name = f"ferrodist-ucc-{control.name}-{control.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # Starting.

    @override
    def all_gather(self, out: memoryview, sizes: Sequence[int]) -> list[Transfer]:
        rank = self._control.rank
        blocks = _blocks(sizes)
        incoming, outgoing = list(blocks), [blocks[rank]] * len(blocks)
        incoming[rank] = outgoing[rank] = (0, 0)
        return self.all_to_all(out, incoming, out, outgoing)

    @override
    def all_to_all(
        self, out: memoryview, incoming: Sequence[Block], source: memoryview, outgoing: Sequence[Block]
    ) -> list[Transfer]:
        return self._start(lambda: self._team.all_to_all(out, incoming, source, outgoing))

    @override
    def broadcast(self, data: memoryview, root: int) -> list[Transfer]:
        return self._start(lambda: self._team.broadcast(data, root))

    @override
    def gather(self, data: memoryview, sizes: Sequence[int], root: int) -> list[Transfer]:
        return self._with_root(data, sizes, root, is_read=self._control.rank != root)

    @override
    def scatter(self, data: memoryview, sizes: Sequence[int], root: int) -> list[Transfer]:
        return self._with_root(data, sizes, root, is_read=self._control.rank == root)

    def _with_root(self, data: memoryview, sizes: Sequence[int], root: int, *, is_read: bool) -> list[Transfer]:
        """Send or receive ``data``: the root a block for each other rank, the others all of it."""
        none = [(0, 0)] * len(sizes)
        if self._control.rank == root:
            blocks = _blocks(sizes)
            blocks[root] = (0, 0)
        else:
            blocks = [(0, len(data) if rank == root else 0) for rank in range(len(sizes))]
        if is_read:
            return self.all_to_all(_NOTHING, none, data, blocks)
        return self.all_to_all(data, blocks, _NOTHING, none)

    def _start(self, start: Callable[[], Transfer]) -> list[Transfer]:
        try:
            with self._ucc_lock:
                if self._control.failure is not None:
                    raise self._control.failure.fresh()
                if self._is_leaving:
                    raise GroupClosedError(f"group {self._control.name!r} is being closed on this rank")
                return [start()]
        except UccError as error:
            watch = self._departure_watch()
            self._abort_for(error, watch)
            watch.close()
            raise (self._control.failure or DistributedError(error.message)).fresh() from None

    # Waiting.

    @override
    def wait_for(self, requests: list[Transfer], deadline: Deadline) -> bool:
        pending = list(requests)
        is_done = False
        watch = self._departure_watch()

        def is_over() -> bool:
            watch.check()
            return self._has_failed()

        self._count_waiting(1)
        try:
            is_done = wait_until(lambda: self._poll(pending), Deadline(min(_UNWATCHED_SECONDS, deadline.remaining())))
            if not is_done and not deadline.expired:
                watch.open()
                is_done = wait_until(lambda: self._poll(pending), deadline, is_over)
        except UccError as error:
            self._abort_for(error, watch)
        except DistributedError as error:
            self._control.abort(error)
        finally:
            self._count_waiting(-1)
            watch.close()
        return is_done

    def _count_waiting(self, change: int) -> None:
        with self._num_waiting_lock:
            self._num_waiting += change

    def _departure_watch(self) -> _DepartureWatch:
        return _DepartureWatch(self._control, self._departures, self.sequencer.position)

    def _abort_for(self, error: UccError, watch: _DepartureWatch) -> None:
        """Abort the group for an error of UCC's, or for the loss behind it: UCC may notice a lost rank first."""

        def check() -> bool:
            watch.check()
            return False

        try:
            watch.open()
            wait_until(self._has_failed, Deadline(_REASON_SECONDS), check)
        except DistributedError as reason:
            self._control.abort(reason)
        else:
            self._control.abort(DistributedError(error.message))

    @override
    def abandon(self, requests: list[Transfer]) -> None:
        pass  # the team keeps them

    def _poll(self, pending: list[Transfer]) -> bool:
        """Call UCC and remove the transfers that have ended; whether none is left."""
        with self._ucc_lock:
            if pending:
                self._team.progress()
            while pending and pending[-1].status != IN_PROGRESS:
                transfer = pending[-1]
                if transfer.status < 0:
                    raise self._team.library.error("a collective", transfer.status)
                self._team.finish(transfer)
                pending.pop()
        return not pending

    def _has_failed(self) -> bool:
        return self._control.failure is not None

    # The thread: see [Note: who makes progress].

    def _run(self) -> None:
        seconds = _MIN_POLL_INTERVAL_SECONDS
        while not self._is_stopped.wait(seconds) and self._control.failure is None:
            seconds = min(2 * seconds, _MAX_POLL_INTERVAL_SECONDS)
            if self._num_waiting:  # waiting threads call UCC
                seconds = _MIN_POLL_INTERVAL_SECONDS
            else:
                try:
                    with self._ucc_lock:
                        self._team.progress()
                except UccError as error:
                    self._abort_for(error, self._departure_watch())
        if self._is_leaving:
            self._destroy()

    def _destroy(self) -> None:
        backoff = Backoff()
        with contextlib.suppress(UccError):  # the team stays
            while not self._team.destroy_team():
                self._team.progress()
                backoff.pause(_MAX_POLL_INTERVAL_SECONDS)
            self._team.destroy_context()

    def leave(self, timeout: float) -> None:
        """Destroy the team, for at most ``timeout`` seconds, and send the others the number of collectives ended here.

        A team that has failed, or has pending transfers, is left as it is.
        """
        with self._ucc_lock:
            position = self.sequencer.position  # before refused collectives, which release their numbers too
            self._is_leaving = not self._team.is_busy and self._control.failure is None
        if self._is_leaving:
            self._is_stopped.set()
            self._thread.join(timeout)
        control = self._control
        departure = _DEPARTURE.pack(position)
        for rank in range(control.world_size):
            if rank != control.rank and control.failure is None:
                with contextlib.suppress(DistributedError):  # it has left too
                    control.isend(departure, rank, tag=_DEPARTURE_TAG)

    def stop(self) -> None:
        """Stop calling UCC."""
        self._is_stopped.set()


def _blocks(sizes: Sequence[int]) -> list[Block]:
    """Adjacent blocks."""
    return [(end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)]


class _DepartureWatch:
    """Finds ranks that have left before taking part in a collective that this rank waits for.

    The control group reports departures only to those who wait for the rank, so this waits for departures, and keeps
    ``departures`` up to date: by rank, how many collectives it had ended when it left.
    """

    def __init__(self, control: Backend, departures: dict[int, int], position: int) -> None:
        self._control = control
        self._departures = departures
        self._position = position
        self._receives: dict[int, tuple[Request, bytearray]] = {}

    def open(self) -> None:
        """Begin to receive departures."""
        if self._receives:
            return
        for rank in range(self._control.world_size):
            if rank != self._control.rank and self._departures.get(rank, -1) <= self._position:
                self._post(rank)

    def _post(self, rank: int) -> None:
        buffer = bytearray(_DEPARTURE.size)
        self._receives[rank] = self._control.irecv(buffer, rank, tag=_DEPARTURE_TAG), buffer

    def check(self) -> None:
        """Raise PeerLostError when a rank has left before it had ended the collective."""
        for rank, (receive, buffer) in list(self._receives.items()):
            if receive.done():
                del self._receives[rank]
                receive.wait(0)
                (self._departures[rank],) = _DEPARTURE.unpack(buffer)
                if self._departures[rank] <= self._position:
                    self._post(rank)  # which fails with the error of its departure

    def close(self) -> None:
        """Stop receiving departures."""
        for rank, (receive, buffer) in self._receives.items():
            if not receive.cancel() and self._control.failure is None:
                with contextlib.suppress(DistributedError):
                    receive.wait(0)
                    (self._departures[rank],) = _DEPARTURE.unpack(buffer)
