"""How the driver measures one peer in one case: what it asks of the ranks, and what their answers come to.

A batch is some calls timed together; its value is the slowest rank's time for one call. Small operations get as many
calls as make a batch long enough for the clock and for the ranks' unequal starts not to show.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.bench.adapters import NotOfferedError
from ferrodist.bench.cases import Operation
from ferrodist.bench.peers import Peer
from ferrodist.bench.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from ferrodist.bench.cases import Case, DataType
    from ferrodist.bench.rank_group import RankGroup

_BATCH_SECONDS = 1e-3
_TRIAL_SECONDS = 10e-3  # of the calls that say how many a batch has
_MAX_CALLS = 1000
_FIRST_CALLS = 3  # and one before: they touch the memory first, open connections, and say how long a call takes
_WARM_UP_SECONDS = 0.3
_SLOW_SECONDS = 0.1  # a call that takes longer says so alone
_OVERLAP_TRIALS = 4  # of how much computation takes as long as an allreduce
_ANSWER_SECONDS = 180.0


class WrongResultError(Exception):
    """A result is not what it must be; the message says where."""


class TooSlowError(NotOfferedError):
    """A call takes longer than a case may."""


class Runner(Protocol):
    """One peer in one case, which it has tried."""

    num_calls: int
    """Calls that a batch has."""
    values: list[float]
    """Each batch's, in order."""
    parts: dict[str, list[float]]
    """By name: what went into the values, in seconds."""

    def measure(self) -> None:
        """Run a batch that counts.

        Raises:
            PeerFailedError: The peer has ended.
            WrongResultError: Its result is wrong.
        """


class Contestant(Protocol):
    """Who can be measured, in turn with others."""

    peer: Peer

    def open_runner(self, case: Case) -> Runner:
        """Prepare a case, and run batches that do not count, from which it takes how many calls a batch has.

        Raises:
            NotOfferedError: The peer has no such operation, or takes too long for it.
            PeerFailedError: It has ended.
            WrongResultError: Its result is wrong.
        """

    def release(self) -> None:
        """Free what the case has taken. Raises PeerFailedError when the peer has ended."""


class PeerContestant:
    """The ranks of a library as a contestant.

    Args:
        group: The ranks; not owned.
        max_seconds: A call that takes longer is not repeated, and larger ones are not tried.
    """

    def __init__(self, group: RankGroup, max_seconds: float) -> None:
        self.peer = group.peer
        self._group, self._max_seconds = group, max_seconds
        self._is_fresh = True
        self._too_slow: dict[tuple[Operation, DataType], tuple[int, str]] = {}  # the size, and what it took

    def open_runner(self, case: Case) -> Runner:
        """See `Contestant.open_runner`."""
        if not self._group.is_alive:
            raise NotOfferedError("it failed in an earlier case")
        size_bytes, reason = self._too_slow.get((case.operation, case.dtype), (case.size_bytes, ""))
        if size_bytes < case.size_bytes:
            raise NotOfferedError(f"{reason} for {format_bytes(size_bytes)}")
        message = {
            "do": "prepare",
            "operation": case.operation.value,
            "dtype": case.dtype.value,
            "size_bytes": case.size_bytes,
            "num_hosts": case.num_hosts,
        }
        answers = self._group.ask(message, _ANSWER_SECONDS)
        refusals = [answer["not_offered"] for answer in answers if "not_offered" in answer]
        if refusals:
            raise NotOfferedError(refusals[0])
        max_calls = min(answer["max_calls"] for answer in answers)
        kind = OverlapRunner if case.operation is Operation.OVERLAP else CallRunner
        runner = (GroupRunner if case.operation.makes_groups else kind)(self._group, case, max_calls)
        try:
            runner.calibrate(self._max_seconds, is_fresh=self._is_fresh)
            self._is_fresh = self._is_fresh and runner.num_calls == 1  # slow ones are not called often enough
        except TooSlowError as error:
            self._too_slow[case.operation, case.dtype] = case.size_bytes, str(error)
            raise
        return runner

    def release(self) -> None:
        """See `Contestant.release`."""
        if self._group.is_alive:
            self._group.ask({"do": "release"}, _ANSWER_SECONDS)


class CallRunner:
    """Calls that are timed together, or each alone and added up; see `Runner`."""

    def __init__(self, group: RankGroup, case: Case, max_calls: int) -> None:
        self.num_calls = 1
        self.values: list[float] = []
        self.parts: dict[str, list[float]] = {}
        self._group, self._case, self._max_calls = group, case, max_calls
        self._num_batches = 0

    def calibrate(self, max_seconds: float, *, is_fresh: bool) -> None:
        """Decide how many calls a batch has.

        Args:
            max_seconds: What a call may take.
            is_fresh: Whether the ranks have not shared the processors for a while yet.

        Raises:
            TooSlowError: A call takes longer.
        """
        seconds = self._run(1)
        is_slow = seconds > _SLOW_SECONDS
        seconds = self._run(1 if is_slow else min(_FIRST_CALLS, self._max_calls))
        if seconds > max_seconds:
            raise TooSlowError(f"a call took {format_seconds(seconds)}")
        if is_slow:
            return
        begin = time.monotonic()
        while is_fresh and time.monotonic() - begin < _WARM_UP_SECONDS:
            self._run(min(_FIRST_CALLS, self._max_calls))
        # The first calls are slow ones, and ranks that share processors start unequally: few calls would measure that.
        # So look again, at ever more of them.
        trial = 0
        while trial < min(_MAX_CALLS, self._max_calls) and 2 * trial * seconds < _TRIAL_SECONDS:
            trial = max(2 * trial, self._calls_in(_TRIAL_SECONDS, seconds))
            trial = min(trial, _MAX_CALLS, self._max_calls)
            seconds = min(seconds, self._run(trial))
        self.num_calls = self._calls_in(_BATCH_SECONDS, seconds)

    def _calls_in(self, duration: float, seconds: float) -> int:
        """How many calls that take ``seconds`` each fit."""
        return max(1, min(_MAX_CALLS, self._max_calls, round(duration / max(seconds, 1e-9))))

    def measure(self) -> None:
        """See `Runner.measure`."""
        self.values.append(self._run(self.num_calls))

    def _run(self, num_calls: int) -> float:
        """One batch; returns the time of a call."""
        answers = self._ask(num_calls)
        # Copies don't wait for each other: ranks that share a processor may copy one after the other.
        seconds = _span(answers) if self._group.peer is Peer.LIMIT else _longest(answers)
        ways = 2 if self._case.operation is Operation.SEND_RECV else 1  # there and back
        return seconds / num_calls / ways

    def _ask(self, num_calls: int, **more: Any) -> list[dict[str, Any]]:
        self._num_batches += 1
        message = {"do": "batch", "num_calls": num_calls, "batch": self._num_batches, **more}
        answers = self._group.ask(message, _ANSWER_SECONDS)
        wrong = [answer["wrong"] for answer in answers if answer["wrong"]]
        if wrong:
            raise WrongResultError(f"wrong result: {wrong[0]}")
        return answers


class GroupRunner(CallRunner):
    """Groups that are made, one a batch, from the first rank's call to the last one's return."""

    def calibrate(self, max_seconds: float, *, is_fresh: bool) -> None:  # noqa: ARG002 - nothing is repeated in a batch
        """Make one that does not count."""
        self._run(1)

    def _run(self, num_calls: int) -> float:
        return _span(self._ask(num_calls, address=f"127.0.0.1:{_free_port()}"))


class OverlapRunner(CallRunner):
    """An allreduce beside so many products as take equally long; the value is what both take over the longer one."""

    def calibrate(self, max_seconds: float, *, is_fresh: bool) -> None:  # noqa: ARG002 - its batches are long
        """Find the number of products; see `CallRunner.calibrate`."""
        for _ in range(_OVERLAP_TRIALS):
            self._run(self.num_calls)
            alone, computing = (self.parts[name][-1] for name in ("alone", "computing"))
            if alone > max_seconds:
                raise TooSlowError(f"a call took {format_seconds(alone)}")
            self.num_calls = max(1, min(self._max_calls, round(self.num_calls * alone / computing)))
        self.parts.clear()

    def _run(self, num_calls: int) -> float:
        answers = self._ask(num_calls)
        times = {name: max(answer[name] for answer in answers) / 1e9 for name in ("alone", "computing", "together")}
        for name, seconds in times.items():
            self.parts.setdefault(name, []).append(seconds)
        return float(times["together"] / max(times["alone"], times["computing"]))


def _longest(answers: list[dict[str, Any]]) -> float:
    return float(max(answer["end"] - answer["begin"] for answer in answers)) / 1e9


def _span(answers: list[dict[str, Any]]) -> float:
    return float(max(answer["end"] for answer in answers) - min(answer["begin"] for answer in answers)) / 1e9


def _free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
