"""`GracefulShutdown`: how agents agree that no call is under way.

[Note: quiescence]
A rank that has called `drain` still serves calls, and their functions may make more. So rank 0 waits for all ranks, and
then asks each how many calls it has made, how many of these have ended, and how many it serves. If all have ended, none
is served, and in the next round nobody has made another one, then there was a moment between the two rounds at which no
call was under way anywhere; and as only functions that serve calls make calls by then, there will be none. A rank that
is lost makes no calls; those that it has made are reported by the ranks that serve them.

A rank says which process it is, and is released as that one: a process that takes its rank meanwhile drains by itself.
"""

from __future__ import annotations

import secrets
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import override

from ferrodist.errors import DistributedError, DistributedTimeoutError, GroupClosedError, PeerLostError, ranks_text
from ferrodist.rpc.messages import Call
from ferrodist.rpc.peer_manager import PeerListener
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ferrodist.deadline import Deadline
    from ferrodist.rpc.client import RpcClient
    from ferrodist.rpc.peer import IncomingCall
    from ferrodist.rpc.server import RpcServer

DRAIN_READY = "ferrodist.drain.come"
"""(token): a rank drains, as the process of this token."""

DRAIN_STATUS = "ferrodist.drain.look"
"""(): the `_Status` of a rank."""

DRAIN_RELEASE = "ferrodist.drain.leave"
"""(token): no call is under way anywhere; for the process of this token."""

_COORDINATOR = 0
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.001, 0.05
_TOKEN_BITS = 63


class _Status(NamedTuple):
    """The calls of a rank: made, ended (of those), and served."""

    made: int
    ended: int
    served: int


class GracefulShutdown(PeerListener):
    """One agent's part in draining."""

    def __init__(self, rank: int, world_size: int, client: RpcClient, server: RpcServer) -> None:
        self._rank = rank
        self._world_size = world_size
        self._client = client
        self._server = server
        self._changed = threading.Condition()
        self._ready: dict[int, int] = {}  # at the coordinator: tokens of the ranks that drain
        self._lost: set[int] = set()
        self._num_coordinators_lost = 0
        self._token = secrets.randbits(_TOKEN_BITS)
        self._is_released = False
        self._is_closed = False
        for name in (DRAIN_READY, DRAIN_STATUS, DRAIN_RELEASE):
            server.register_internal(name, self._serve)

    def close(self) -> None:
        """Let no thread wait any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def drain(self, deadline: Deadline) -> None:
        """Return when all ranks drain and no call is under way; see `RpcAgent.drain`."""
        if self._rank == _COORDINATOR:
            self._release_all(self._await_quiescence(deadline), deadline)
            return
        if self._take_release():  # of a drain that this rank has given up before
            return
        num_lost_before = self._num_coordinators_lost  # it may be there again before this thread looks
        self._client.call_internal(_COORDINATOR, Call(DRAIN_READY, (self._token,), {}), deadline.remaining()).result()
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_released or self._is_closed or self._num_coordinators_lost != num_lost_before,
                deadline.remaining(),
            )
            if self._take_release():
                return
            self._check_open()
            if self._num_coordinators_lost != num_lost_before:
                raise PeerLostError(
                    f"rank {_COORDINATOR}, which coordinates draining, is gone; calls may go on: close the agent",
                    ranks=(_COORDINATOR,),
                )
        raise DistributedTimeoutError(
            f"rank {_COORDINATOR} did not say within {deadline.timeout:g} s that nothing is under way: some rank has"
            " not come to its end, or has calls without a result; its own error says which",
            ranks=(_COORDINATOR,),
        )

    def _serve(self, incoming: IncomingCall, call: Call) -> None:
        response = None
        rank = incoming.peer.rank
        with self._changed:
            match call.name, call.arguments:
                case str(name), _ if name == DRAIN_STATUS:
                    response = list(self._status())
                case str(name), (int(token),) if name == DRAIN_READY:
                    self._ready[rank] = token
                case str(name), (int(token),) if (
                    name == DRAIN_RELEASE and rank == _COORDINATOR and token == self._token
                ):
                    self._is_released = True
            self._changed.notify_all()
        self._server.respond(incoming, response)

    @override
    def on_joined(self, rank: int, incarnation: int) -> None:
        with self._changed:
            self._lost.discard(rank)

    @override
    def on_lost(self, rank: int, error: PeerLostError) -> None:
        with self._changed:
            self._lost.add(rank)
            self._num_coordinators_lost += rank == _COORDINATOR
            self._ready.pop(rank, None)
            self._changed.notify_all()

    def _take_release(self) -> bool:
        """Return True if this rank was released, once: another drain may follow."""
        with self._changed:
            is_released, self._is_released = self._is_released, False
            return is_released

    def _check_open(self) -> None:
        if self._is_closed:
            raise GroupClosedError("the agent was closed")

    def _status(self) -> _Status:
        calls = self._client.pending_calls
        return _Status(calls.num_made, calls.num_ended, len(self._server.serving))

    # At the coordinator.

    def _missing(self) -> list[int]:
        return sorted({*range(self._world_size)} - {_COORDINATOR} - self._lost - self._ready.keys())

    def _await_all(self, deadline: Deadline) -> list[int]:
        """The ranks that drain, once all do that are there."""
        with self._changed:
            has_ended = self._changed.wait_for(lambda: self._is_closed or not self._missing(), deadline.remaining())
            self._check_open()
            if has_ended:
                return sorted(self._ready)
            missing = self._missing()
        raise DistributedTimeoutError(
            f"{ranks_text(missing)} did not come to the end within {deadline.timeout:g} s", ranks=tuple(missing)
        )

    def _await_quiescence(self, deadline: Deadline) -> dict[int, int]:
        """The tokens of the ranks to be released, once no call is under way."""
        before: dict[int, _Status] = {}
        pause = _MIN_PAUSE_SECONDS
        while True:
            ready = self._await_all(deadline)  # a rank may have joined since the last round
            own = self._status()
            answers, silent = self._ask({rank: Call(DRAIN_STATUS, (), {}) for rank in ready}, deadline)
            statuses = {_COORDINATOR: own, **{rank: _Status(*answer) for rank, answer in answers.items()}}
            is_quiet = not silent and all(made == ended and not served for made, ended, served in statuses.values())
            if is_quiet and statuses == before:
                with self._changed:
                    if not self._missing():  # a released rank may drain again at once
                        tokens, self._ready = self._ready, {}
                        return tokens
            if deadline.expired:
                raise _busy_error(statuses, silent, deadline)
            before = statuses
            if not is_quiet:
                with self._changed:
                    self._changed.wait(min(pause, deadline.remaining()))
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _release_all(self, tokens: Mapping[int, int], deadline: Deadline) -> None:
        _, silent = self._ask({rank: Call(DRAIN_RELEASE, (token,), {}) for rank, token in tokens.items()}, deadline)
        if silent:
            raise DistributedTimeoutError(
                f"nothing is under way, but {ranks_text(silent)} did not say within {deadline.timeout:g} s that this"
                " was heard",
                ranks=tuple(silent),
            )

    def _ask(self, calls: Mapping[int, Call], deadline: Deadline) -> tuple[dict[int, Any], dict[int, DistributedError]]:
        """The answers of ranks that are there, and the errors of others."""
        futures = {rank: self._client.call_internal(rank, call, deadline.remaining()) for rank, call in calls.items()}
        answers: dict[int, Any] = {}
        silent: dict[int, DistributedError] = {}
        for rank, future in futures.items():
            error = future.exception()
            if error is None:
                answers[rank] = future.result()
            elif isinstance(error, DistributedError) and not isinstance(error, (PeerLostError, GroupClosedError)):
                silent[rank] = error
            elif not isinstance(error, PeerLostError):
                raise error
        return answers, silent


def _busy_error(
    statuses: Mapping[int, _Status], silent: Mapping[int, DistributedError], deadline: Deadline
) -> DistributedTimeoutError:
    in_flight = {rank: status.made - status.ended for rank, status in statuses.items() if status.made != status.ended}
    serving = {rank: status.served for rank, status in statuses.items() if status.served}
    texts = [f"rank {rank} has {counted(count, 'call')} without a result" for rank, count in in_flight.items()]
    texts += [f"rank {rank} serves {counted(count, 'call')}" for rank, count in serving.items()]
    texts += [f"rank {rank} does not say what it is at: {error}" for rank, error in silent.items()]
    return DistributedTimeoutError(
        f"calls are under way after {deadline.timeout:g} s: {'; '.join(texts) or 'new ones are made'}",
        ranks=tuple(sorted({*in_flight, *serving, *silent})),
    )
