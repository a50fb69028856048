"""How ranks that call each other come to an end together.

[Note: when nothing is under way]
A rank that has come to its end still serves calls, and what serves them may make more. So rank 0 waits for all to come,
and then asks each how many calls it has made, and how many of these have ended. Where these are equal for all, and in
another round of questions nobody has made one since, there was a moment between the two at which no call was under way
anywhere; and as only what serves a call makes one by then, there will be none. A rank that is lost makes no calls.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.errors import DistributedError, DistributedTimeoutError, PeerLostError, ranks_text
from ferrodist.rpc.messages import Call

if TYPE_CHECKING:
    from ferrodist.deadline import Deadline
    from ferrodist.rpc.futures import Future

__all__ = ["COME", "LEAVE", "LOOK", "Drainer", "Draining"]

COME = "ferrodist.drain.come"
"""(): a rank has come to its end."""

LOOK = "ferrodist.drain.look"
"""(): how many calls has a rank made, and how many have ended?"""

LEAVE = "ferrodist.drain.leave"
"""(): nothing is under way anywhere."""

_HUB = 0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


class Drainer(Protocol):
    """What an agent does for its end."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def start(self, to: int, call: Call, seconds: float) -> Future:
        """Call a function of the agents' own."""

    def num_calls(self) -> tuple[int, int]:
        """How many calls this rank has made, and how many of these have ended."""


class Draining:
    """One agent's part of the end.

    Args:
        agent: It.
    """

    def __init__(self, agent: Drainer) -> None:
        self._agent = agent
        self._changed = threading.Condition()
        self._have_come: set[int] = set()  # at rank 0
        self._lost: set[int] = set()
        self._is_over = False

    def wait(self, deadline: Deadline) -> None:
        """Come to the end; returns when all ranks have, and nothing is under way.

        Raises:
            DistributedTimeoutError: It does not come to that in time; it says who keeps the others waiting.
            PeerLostError: Rank 0, which sees to this, is gone.
        """
        if self._agent.rank == _HUB:
            self._await_all(deadline)
            self._await_quiet(deadline)
            with self._changed:
                self._have_come.clear()  # who hears of this may come to another end at once
            self._ask_all(LEAVE, deadline)
            return
        if self._leave():  # the end that this rank has given up before
            return
        self._agent.start(_HUB, Call(COME, (), {}), deadline.remaining()).result()
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or _HUB in self._lost, deadline.remaining())
            if self._leave():
                return
            if _HUB in self._lost:
                raise PeerLostError(f"rank {_HUB} is gone, which sees to the end of all", ranks=(_HUB,))
        raise DistributedTimeoutError(
            f"rank {_HUB} did not say within {deadline.timeout:g} s that nothing is under way: some rank has not come"
            " to its end, or has calls without a result; its own error says which",
            ranks=(_HUB,),
        )

    def serve(self, peer: int, call: Call) -> Any:
        """Answer one of the calls above."""
        if call.name == LOOK:
            return list(self._agent.num_calls())
        with self._changed:
            if call.name == COME:
                self._have_come.add(peer)
            else:
                self._is_over = True
            self._changed.notify_all()
        return None

    def joined(self, peer: int) -> None:
        """A rank is there, perhaps again."""
        with self._changed:
            self._lost.discard(peer)

    def lost(self, peer: int) -> None:
        """A rank is gone."""
        with self._changed:
            self._lost.add(peer)
            self._have_come.discard(peer)
            self._changed.notify_all()

    def _leave(self) -> bool:
        """Whether rank 0 has said that it is over; another end may come after this one."""
        with self._changed:
            is_over, self._is_over = self._is_over, False
            return is_over

    def _others(self) -> list[int]:
        return [rank for rank in range(self._agent.world_size) if rank != _HUB and rank not in self._lost]

    def _await_all(self, deadline: Deadline) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._have_come.issuperset(self._others()), deadline.remaining()):
                return
            missing = sorted(set(self._others()) - self._have_come)
        raise DistributedTimeoutError(
            f"{ranks_text(missing)} did not come to the end within {deadline.timeout:g} s", ranks=tuple(missing)
        )

    def _await_quiet(self, deadline: Deadline) -> None:
        before: dict[int, tuple[int, int]] = {}
        pause = _SHORTEST_PAUSE
        while True:
            own = self._agent.num_calls()
            counts = {_HUB: own, **{rank: (made, ended) for rank, [made, ended] in self._ask_all(LOOK, deadline)}}
            busy = {rank: made - ended for rank, (made, ended) in counts.items() if made != ended}
            if not busy and counts == before:
                return
            if deadline.expired:
                texts = [f"rank {rank} has {count} calls without a result" for rank, count in busy.items()]
                raise DistributedTimeoutError(
                    f"calls are under way after {deadline.timeout:g} s: {'; '.join(texts) or 'new ones are made'}",
                    ranks=tuple(busy),
                )
            before = counts
            if busy:
                with self._changed:
                    self._changed.wait(min(pause, deadline.remaining()))
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _ask_all(self, name: str, deadline: Deadline) -> list[tuple[int, Any]]:
        """What those say that are there; a rank that does not answer in time says nothing."""
        asked = [(rank, self._agent.start(rank, Call(name, (), {}), deadline.remaining())) for rank in self._others()]
        return [(rank, future.result()) for rank, future in asked if not _has_failed(future)]


def _has_failed(future: Future) -> bool:
    error = future.exception()
    if error is not None and not isinstance(error, DistributedError):
        raise error
    return error is not None
