"""Agreement by the control group's messages, in turns: UCC's collectives start in the same order on all ranks.

The bytes of a group's collectives, by UCC's: started, then looked after until they end or the deadline passes.

Everything is of type uint8 in host memory, so no element type can come out wrong. All but broadcast is `ucc_alltoallv`,
which sends each rank its block at once: `ucc_allgatherv` of UCC 1.8.0 ends the process in a context without an
out-of-band exchange (see `Team`), `ucc_gatherv` and `ucc_scatterv` send the same. A collective of UCC's can't be taken
back: the team keeps one that is given up with its buffers for good, and its group has failed.

[Note: who makes progress]
UCC moves data only while somebody asks it to. A collective may have ended on a rank that has some of its data still in
a buffer, because a socket was full; so a thread goes on asking, ever less often, for as long as the group is open. It
also ends UCC: giving the last bytes to the network takes as long as others let it, and `close` has a limit.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from itertools import accumulate
from typing import TYPE_CHECKING

from typing_extensions import override

from ferrodist.backends.polling import Backoff, wait_until
from ferrodist.backends.sequencer import Sequencer
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.backends.ucc.bindings import UccError
from ferrodist.backends.verification import CollectiveVerifier
from ferrodist.deadline import Deadline, Elapsed
from ferrodist.errors import DistributedError, DistributedTimeoutError, GroupClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request
    from ferrodist.backends.signature import CollectiveSignature
    from ferrodist.backends.ucc.bindings import Team, Transfer


class UccVerifier(CollectiveVerifier):
    """The collectives of a UCC group, counted, ordered and compared.

    Args:
        group: The group.
        sequencer: Its data plane's.
    """

    def __init__(self, group: Backend, sequencer: Sequencer) -> None:
        super().__init__(group)
        self._sequencer = sequencer

    @override
    def reserve(self) -> int:
        return self._sequencer.reserve()

    def verify(self, call: CollectiveSignature, timeout: float, sequence: int | None = None) -> list[bytes]:
        """Block until every rank has made the same call; see `CollectiveVerifier.verify`."""
        group = self._group
        sequence = self.reserve() if sequence is None else sequence
        deadline = Deadline(timeout)
        with self._sequencer.hold(sequence, timeout) as has_turn:
            if not has_turn and group.failure is None:
                error = DistributedTimeoutError(
                    f"{call} on group {group.name!r}, operation {sequence}: the operations before it on rank"
                    f" {group.rank} had not ended after {Elapsed.of(deadline)}. Collectives of a group run one after"
                    " the other: wait for those that were started, or pass a larger timeout.",
                    ranks=(group.rank,),
                )
                group.abort(error)
                raise (group.failure or error).fresh()
            return super().verify(call, timeout, sequence)


if TYPE_CHECKING:
    Block = tuple[int, int]


_IN_PROGRESS = 1

_UNWATCHED_SECONDS = 0.05
"""How long a wait goes on before it is looked whether a rank has left."""

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.5e-3, 10e-3
"""Between two looks at UCC while no collective is under way."""

_REASON_SECONDS = 2.0
"""How long the control group has to tell why UCC failed."""

_FAREWELL_TAG = channel_tag(Channel.DATA, (1 << 56) - 1)
_FAREWELL = struct.Struct("<q")

_NOTHING = memoryview(b"")


class UccDataPlane:
    """UCC's collectives on one team, which all ranks start in the same order.

    Args:
        team: The ranks in UCC.
        control: The group whose failure is the end.
        first: Position of the group's first collective.
    """

    def __init__(self, team: Team, control: Backend, first: int) -> None:
        self._team = team
        self._control = control
        self._using = threading.Lock()  # UCC
        self._num_waiting = 0
        self._farewells: dict[int, int] = {}
        self._error: UccError | None = None
        self._is_leaving = False
        self._is_called = threading.Event()
        self.sequencer = Sequencer(self._is_in_vain, first)
        name = f"ferrodist-ucc-{control.name}-{control.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # Starting; see `Mover` in collectives/moved.py.

    def all_gather(self, out: memoryview, sizes: Sequence[int]) -> list[Transfer]:
        """Fill ``out`` with every rank's part; this rank's is in its place already."""
        rank = self._control.rank
        parts = _places(sizes)
        incoming, outgoing = list(parts), [parts[rank]] * len(parts)
        incoming[rank] = outgoing[rank] = (0, 0)
        return self.all_to_all(out, incoming, out, outgoing)

    def all_to_all(
        self, out: memoryview, incoming: Sequence[Block], source: memoryview, outgoing: Sequence[Block]
    ) -> list[Transfer]:
        """Send block r of ``source`` to rank r, and take rank r's into block r of ``out``.

        A block is where it begins and its size.
        """
        return self._start(lambda: self._team.all_to_all(out, incoming, source, outgoing))

    def broadcast(self, data: memoryview, root: int) -> list[Transfer]:
        """Copy the root's ``data`` to all."""
        return self._start(lambda: self._team.broadcast(data, root))

    def gather(self, data: memoryview, sizes: Sequence[int], root: int) -> list[Transfer]:
        """Fill the root's ``data`` with every other rank's, whose size is its own; the root's part is in its place."""
        blocks = self._blocks_at(data, sizes, root)
        if self._control.rank == root:
            return self.all_to_all(data, blocks, _NOTHING, [(0, 0)] * len(sizes))
        return self.all_to_all(_NOTHING, [(0, 0)] * len(sizes), data, blocks)

    def scatter(self, data: memoryview, sizes: Sequence[int], root: int) -> list[Transfer]:
        """Copy part r of the root's ``data`` into rank r's, whose size it has; the root's own part stays."""
        blocks = self._blocks_at(data, sizes, root)
        if self._control.rank == root:
            return self.all_to_all(_NOTHING, [(0, 0)] * len(sizes), data, blocks)
        return self.all_to_all(data, blocks, _NOTHING, [(0, 0)] * len(sizes))

    def _blocks_at(self, data: memoryview, sizes: Sequence[int], root: int) -> list[Block]:
        """What of ``data`` is moved, by the rank on the other side: at the root a part for each, elsewhere all."""
        if self._control.rank != root:
            return [(0, len(data) if rank == root else 0) for rank in range(len(sizes))]
        blocks = _places(sizes)
        blocks[root] = (0, 0)
        return blocks

    def _start(self, start: Callable[[], Transfer]) -> list[Transfer]:
        try:
            with self._using:
                if self._control.failure is not None:
                    raise self._control.failure.fresh()
                if self._is_leaving:
                    raise GroupClosedError(f"group {self._control.name!r} is being closed on this rank")
                return [start()]
        except UccError as error:
            watch = self._watch()
            self._end_for(error, watch)
            watch.end()
            raise (self._control.failure or DistributedError(error.message)).fresh() from None

    # Waiting.

    def wait_for(self, requests: list[Transfer], deadline: Deadline) -> bool:
        """Wait until all have ended; False when they have not in time, or the group has."""
        pending = list(requests)
        is_done = False
        watch = self._watch()

        def is_over() -> bool:
            watch.look()
            return self._is_in_vain()

        self._num_waiting += 1
        try:
            is_done = wait_until(lambda: self._look(pending), Deadline(min(_UNWATCHED_SECONDS, deadline.remaining())))
            if not is_done and not deadline.expired:
                watch.begin()
                is_done = wait_until(lambda: self._look(pending), deadline, is_over)
        except UccError as error:
            self._end_for(error, watch)
        except DistributedError as error:
            self._control.abort(error)
        finally:
            self._num_waiting -= 1
            watch.end()
        return is_done

    def _watch(self) -> _DepartureWatch:
        return _DepartureWatch(self._control, self._farewells, self.sequencer.position)

    def _end_for(self, error: UccError, watch: _DepartureWatch) -> None:
        """End the group for an error of UCC's, or for its reason: UCC may be the first to find that a rank is gone."""

        def look() -> bool:
            watch.look()
            return False

        try:
            watch.begin()
            wait_until(self._is_in_vain, Deadline(_REASON_SECONDS), look)
        except DistributedError as reason:
            self._control.abort(reason)
        else:
            self._control.abort(DistributedError(error.message))

    def abandon(self, requests: list[Transfer]) -> None:
        """Nobody will wait for these: the team has them."""

    def _look(self, pending: list[Transfer]) -> bool:
        """Move what can be moved; whether nothing is pending any more."""
        with self._using:
            if pending:
                self._team.progress()
            while pending and pending[-1].status != _IN_PROGRESS:
                transfer = pending[-1]
                if transfer.status < 0:
                    raise self._team.library.error("a collective", transfer.status)
                self._team.finish(transfer)
                pending.pop()
        return not pending

    def _is_in_vain(self) -> bool:
        return self._control.failure is not None

    # The thread: see [Note: who makes progress].

    def _run(self) -> None:
        seconds = _SHORTEST_SECONDS
        while not self._is_called.wait(seconds) and self._control.failure is None:
            seconds = min(2 * seconds, _LONGEST_SECONDS)
            if self._num_waiting:  # they do the work
                seconds = _SHORTEST_SECONDS
            else:
                with self._using:
                    self._progress()
                if self._error is not None:
                    self._end_for(self._error, self._watch())
        if self._is_leaving:
            self._end()

    def _progress(self) -> None:
        try:
            self._team.progress()
        except UccError as error:
            self._error = error

    def _end(self) -> None:
        pace = Backoff()
        with contextlib.suppress(UccError):  # then it stays
            while not self._team.destroy_team():
                self._team.progress()
                pace.rest(_LONGEST_SECONDS)
            self._team.destroy_context()

    def leave(self, timeout: float) -> None:
        """End UCC here, for at most so many seconds, and tell the others what this rank has taken part in.

        What has failed, or has something under way, is left as it is.
        """
        with self._using:
            position = self.sequencer.position  # before a collective is refused here, whose turn ends without it
            self._is_leaving = not self._team.is_busy and self._control.failure is None
        if self._is_leaving:
            self._is_called.set()
            self._thread.join(timeout)
        control = self._control
        farewell = _FAREWELL.pack(position)
        for rank in range(control.world_size):
            if rank != control.rank and control.failure is None:
                with contextlib.suppress(DistributedError):  # it has left too
                    control.isend(farewell, rank, tag=_FAREWELL_TAG)

    def stop(self) -> None:
        """Stop looking after UCC."""
        self._is_called.set()


def _places(sizes: Sequence[int]) -> list[Block]:
    """Parts that lie one after the other."""
    return [(end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)]


class _DepartureWatch:
    """Whether a rank has left without its part while data of all is waited for.

    The control group tells of that only those who wait for the rank. So farewells are waited for.

    Args:
        control: The group.
        farewells: What ranks said when they left, by rank: how many collectives they had ended. Kept up to date.
        position: Of the collective that is waited for.
    """

    def __init__(self, control: Backend, farewells: dict[int, int], position: int) -> None:
        self._control = control
        self._farewells = farewells
        self._position = position
        self._receives: dict[int, tuple[Request, bytearray]] = {}

    def begin(self) -> None:
        """Watch from now on."""
        if self._receives:
            return
        for rank in range(self._control.world_size):
            if rank != self._control.rank and self._farewells.get(rank, -1) <= self._position:
                self._post(rank)

    def _post(self, rank: int) -> None:
        buffer = bytearray(_FAREWELL.size)
        self._receives[rank] = self._control.irecv(buffer, rank, tag=_FAREWELL_TAG), buffer

    def look(self) -> None:
        """Raise PeerLostError when a rank has left, and has not ended this collective before."""
        for rank, (receive, buffer) in list(self._receives.items()):
            if receive.done():
                del self._receives[rank]
                receive.wait(0)
                (self._farewells[rank],) = _FAREWELL.unpack(buffer)
                if self._farewells[rank] <= self._position:
                    self._post(rank)  # which ends with the error of its end

    def end(self) -> None:
        """Watch no more."""
        for rank, (receive, buffer) in self._receives.items():
            if not receive.cancel() and self._control.failure is None:
                with contextlib.suppress(DistributedError):
                    receive.wait(0)
                    (self._farewells[rank],) = _FAREWELL.unpack(buffer)
