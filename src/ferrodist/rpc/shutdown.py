"""How ranks that call each other come to an end together.

[Note: when nothing is under way]
A rank that has come to its end still serves calls, and what serves them may make more. So rank 0 waits for all to come,
and then asks each how many calls it has made, how many of these have ended, and how many it serves. Where all have
ended, none is served, and in another round of questions nobody has made one since, there was a moment between the two
at which no call was under way anywhere; and as only what serves a call makes one by then, there will be none. A rank
that is lost makes no calls; those that it has made are asked of who serves them.

Who comes says which process it is, and is told of the end as that one: a process that takes its rank meanwhile has an
end of its own.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ferrodist.errors import DistributedError, DistributedTimeoutError, GroupClosedError, PeerLostError, ranks_text
from ferrodist.rpc.messages import Call
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ferrodist.deadline import Deadline
    from ferrodist.rpc.future import Future

COME = "ferrodist.drain.come"
"""(token): a rank has come to its end, as the process of this token."""

LOOK = "ferrodist.drain.look"
"""(): the `_Look` of a rank."""

LEAVE = "ferrodist.drain.leave"
"""(token): nothing is under way anywhere; for the process of this token."""

_HUB = 0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
_TOKEN_BITS = 63


class _Look(NamedTuple):
    """What a rank is at.

    Args:
        made: Calls that it has made.
        ended: Those of them that have ended.
        served: Calls that it serves.
    """

    made: int
    ended: int
    served: int

    @property
    def is_quiet(self) -> bool:
        """Whether it is at nothing."""
        return self.made == self.ended and not self.served


class Busy(Protocol):
    """Who makes calls here, or one such call."""

    def num_served(self) -> int:
        """How many functions are called for it, or will be."""


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
        self._callers: weakref.WeakSet[Busy] = weakref.WeakSet()  # lost ones, too, while they are served
        self._have_come: dict[int, int] = {}  # at rank 0: who, as which process
        self._lost: set[int] = set()
        self._num_hubs_lost = 0
        self._token = secrets.randbits(_TOKEN_BITS)
        self._is_over = False
        self._is_closed = False

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def add(self, caller: Busy) -> None:
        """Somebody may make calls here, which are to end before this does; it is kept by who serves them."""
        with self._changed:
            self._callers.add(caller)

    def wait(self, deadline: Deadline) -> None:
        """Come to the end; returns when all ranks have, and nothing is under way.

        Raises:
            DistributedTimeoutError: It does not come to that in time; it says who keeps the others waiting.
            PeerLostError: Rank 0, which sees to this, is gone.
            GroupClosedError: The agent is closed.
        """
        if self._agent.rank == _HUB:
            self._tell_end(self._await_quiet(deadline), deadline)
            return
        if self._leave():  # the end that this rank has given up before
            return
        num_before = self._num_hubs_lost  # it may be there again before this thread looks
        self._agent.start(_HUB, Call(COME, (self._token,), {}), deadline.remaining()).result()
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or self._is_closed or self._num_hubs_lost != num_before, deadline.remaining()
            )
            if self._leave():
                return
            self._check_open()
            if self._num_hubs_lost != num_before:
                raise PeerLostError(f"rank {_HUB} is gone, which sees to the end of all", ranks=(_HUB,))
        raise DistributedTimeoutError(
            f"rank {_HUB} did not say within {deadline.timeout:g} s that nothing is under way: some rank has not come"
            " to its end, or has calls without a result; its own error says which",
            ranks=(_HUB,),
        )

    def serve(self, peer: int, call: Call) -> Any:
        """Answer one of the calls above."""
        with self._changed:
            match call.name, call.arguments:
                case str(name), _ if name == LOOK:
                    return list(self._look())
                case str(name), (int(token),) if name == COME:
                    self._have_come[peer] = token
                case str(name), (int(token),) if name == LEAVE and peer == _HUB and token == self._token:
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
            self._num_hubs_lost += peer == _HUB
            self._have_come.pop(peer, None)
            self._changed.notify_all()

    def _leave(self) -> bool:
        """Whether rank 0 has said that it is over; another end may come after this one."""
        with self._changed:
            is_over, self._is_over = self._is_over, False
            return is_over

    def _check_open(self) -> None:
        if self._is_closed:
            raise GroupClosedError("the agent was closed")

    def _look(self) -> _Look:
        with self._changed:
            return _Look(*self._agent.num_calls(), sum(caller.num_served() for caller in self._callers))

    # At rank 0.

    def _missing(self) -> list[int]:
        return [
            rank
            for rank in range(self._agent.world_size)
            if rank != _HUB and rank not in self._lost and rank not in self._have_come
        ]

    def _await_all(self, deadline: Deadline) -> list[int]:
        """Who has come, when all have that are there."""
        with self._changed:
            has_ended = self._changed.wait_for(lambda: self._is_closed or not self._missing(), deadline.remaining())
            self._check_open()
            if has_ended:
                return sorted(self._have_come)
            missing = self._missing()
        raise DistributedTimeoutError(
            f"{ranks_text(missing)} did not come to the end within {deadline.timeout:g} s", ranks=tuple(missing)
        )

    def _await_quiet(self, deadline: Deadline) -> dict[int, int]:
        """Who is to be told, as which process, when nothing is under way."""
        before: dict[int, _Look] = {}
        pause = _SHORTEST_PAUSE
        while True:
            come = self._await_all(deadline)  # somebody may have joined since the last round
            own = self._look()
            answers, silent = self._ask({rank: Call(LOOK, (), {}) for rank in come}, deadline)
            looks = {_HUB: own, **{rank: _Look(*answer) for rank, answer in answers.items()}}
            is_quiet = not silent and all(look.is_quiet for look in looks.values())
            if is_quiet and looks == before:
                with self._changed:
                    if not self._missing():  # who hears of this may come to another end at once
                        tokens, self._have_come = self._have_come, {}
                        return tokens
            if deadline.expired:
                raise _busy_error(looks, silent, deadline)
            before = looks
            if not is_quiet:
                with self._changed:
                    self._changed.wait(min(pause, deadline.remaining()))
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _tell_end(self, tokens: Mapping[int, int], deadline: Deadline) -> None:
        _, silent = self._ask({rank: Call(LEAVE, (token,), {}) for rank, token in tokens.items()}, deadline)
        if silent:
            raise DistributedTimeoutError(
                f"nothing is under way, but {ranks_text(silent)} did not say within {deadline.timeout:g} s that this"
                " was heard",
                ranks=tuple(silent),
            )

    def _ask(self, calls: Mapping[int, Call], deadline: Deadline) -> tuple[dict[int, Any], dict[int, DistributedError]]:
        """What ranks answer that are there, and why others don't."""
        asked = {rank: self._agent.start(rank, call, deadline.remaining()) for rank, call in calls.items()}
        answers: dict[int, Any] = {}
        silent: dict[int, DistributedError] = {}
        for rank, future in asked.items():
            error = future.exception()
            if error is None:
                answers[rank] = future.result()
            elif isinstance(error, DistributedError) and not isinstance(error, (PeerLostError, GroupClosedError)):
                silent[rank] = error
            elif not isinstance(error, PeerLostError):
                raise error
        return answers, silent


def _busy_error(
    looks: Mapping[int, _Look], silent: Mapping[int, DistributedError], deadline: Deadline
) -> DistributedTimeoutError:
    unended = {rank: look.made - look.ended for rank, look in looks.items() if look.made != look.ended}
    serving = {rank: look.served for rank, look in looks.items() if look.served}
    texts = [f"rank {rank} has {counted(count, 'call')} without a result" for rank, count in unended.items()]
    texts += [f"rank {rank} serves {counted(count, 'call')}" for rank, count in serving.items()]
    texts += [f"rank {rank} does not say what it is at: {error}" for rank, error in silent.items()]
    return DistributedTimeoutError(
        f"calls are under way after {deadline.timeout:g} s: {'; '.join(texts) or 'new ones are made'}",
        ranks=tuple(sorted({*unended, *serving, *silent})),
    )
