"""Bench targets: how the driver measures one peer in one case.

A batch is some calls timed together; its value is the slowest rank's time for one call. Fast operations get as many
calls as make a batch long enough to hide the clock's resolution and the ranks' unequal starts.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

from ferrodist.bench.adapters.base import UnsupportedError
from ferrodist.bench.cases import GROUP_CREATIONS, Operation, Peer
from ferrodist.bench.environments import NUM_HOSTS, PeerFailedError, run_command
from ferrodist.bench.report import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from ferrodist.bench.cases import Case, DataType
    from ferrodist.bench.environments import EmulatedHosts
    from ferrodist.bench.processes import RankGroup

_BATCH_SECONDS = 1e-3
_TRIAL_SECONDS = 10e-3  # of the trial that determines how many calls a batch has
_FIRST_CALLS = 3  # after one more: they touch the memory, open connections, and show how long a call takes
_WARM_UP_SECONDS = 0.3
_SLOW_SECONDS = 0.1  # a call that takes longer needs no further trial
_OVERLAP_TRIALS = 4  # of how much computation takes as long as an allreduce
_REQUEST_TIMEOUT_SECONDS = 180.0
_IPERF3_PORT = 29_600
_IPERF3_MIN_BYTES = 64 * 1024  # below, a rate says nothing
_IPERF3_BATCH_BYTES = 64 << 20
_IPERF3_TIMEOUT_SECONDS = 30


class Runner:
    """One peer in one case: the calls of a batch, the batches' values, and their components by name, in seconds.

    ``run(num_calls)`` runs a batch and returns its value; PeerFailedError: the peer has ended, or its result is wrong.
    """

    def __init__(self, run: Callable[[int], float], num_calls: int = 1) -> None:
        self.run, self.num_calls = run, num_calls
        self.values: list[float] = []
        self.parts: dict[str, list[float]] = {}


class RankTarget:
    """The ranks of a library, which it does not own, as a peer that is measured, alternating with others.

    A call that takes longer than ``max_seconds`` is not repeated, and larger sizes are not tried.
    """

    def __init__(self, group: RankGroup, max_seconds: float) -> None:
        self.peer = group.peer
        self._group, self._max_seconds = group, max_seconds
        self._is_fresh = True
        self._too_slow: dict[tuple[Operation, DataType], tuple[int, str]] = {}  # size and reason

    def open_runner(self, case: Case) -> Runner:
        """Prepare a case, and run the batches that don't count, which determine the calls of a batch.

        UnsupportedError: the peer has no such operation, or takes too long for it; for other errors see `Runner.run`.
        """
        if not self._group.is_alive:
            raise UnsupportedError("it failed in an earlier case")
        size_bytes, reason = self._too_slow.get((case.operation, case.dtype), (case.size_bytes, ""))
        if size_bytes < case.size_bytes:
            raise UnsupportedError(f"{reason} for {format_bytes(size_bytes)}")
        answers = self._group.request({"do": "prepare", "case": case.as_plain()}, _REQUEST_TIMEOUT_SECONDS)
        for answer in answers:
            if "not_offered" in answer:
                raise UnsupportedError(answer["not_offered"])
        max_calls = min(answer["max_calls"] for answer in answers)
        kind = OverlapRunner if case.operation is Operation.OVERLAP else CallRunner
        runner = kind(self._group, case, max_calls)
        try:
            runner.calibrate(self._max_seconds, is_fresh=self._is_fresh)
        except UnsupportedError as error:
            self._too_slow[case.operation, case.dtype] = case.size_bytes, str(error)
            raise
        self._is_fresh = self._is_fresh and runner.num_calls == 1  # slow operations run too few calls to warm up
        return runner

    def release(self) -> None:
        """Free the memory of the case. Raises PeerFailedError when the peer has ended."""
        if self._group.is_alive:
            self._group.request({"do": "release"}, _REQUEST_TIMEOUT_SECONDS)


class CallRunner(Runner):
    """Calls that are timed together, or each alone and added up; or the creation of one group."""

    most_calls = 1000

    def __init__(self, group: RankGroup, case: Case, max_calls: int) -> None:
        super().__init__(self.run_batch)
        self._group, self._case, self._max_calls = group, case, min(max_calls, self.most_calls)
        self._num_batches = 0

    def calibrate(self, max_seconds: float, *, is_fresh: bool) -> None:
        """Determine how many calls a batch has; ``is_fresh``: the ranks have not yet run side by side for a while."""
        seconds = self.run(1)
        if self._case.operation in GROUP_CREATIONS:  # a group a batch
            return
        is_slow = seconds > _SLOW_SECONDS
        seconds = self.run(1 if is_slow else min(_FIRST_CALLS, self._max_calls))
        if seconds > max_seconds:
            raise UnsupportedError(f"a call took {format_seconds(seconds)}")
        if is_slow:
            return
        begin = time.monotonic()
        while is_fresh and time.monotonic() - begin < _WARM_UP_SECONDS:
            self.run(min(_FIRST_CALLS, self._max_calls))
        # The first calls are slow, and ranks that share processors start unequally: few calls would measure that.
        # So measure again, with ever more of them.
        trial = 0
        while trial < self._max_calls and 2 * trial * seconds < _TRIAL_SECONDS:
            trial = min(max(2 * trial, self._calls_in(_TRIAL_SECONDS, seconds)), self._max_calls)
            seconds = min(seconds, self.run(trial))
        self.num_calls = self._calls_in(_BATCH_SECONDS, seconds)

    def run_batch(self, num_calls: int) -> float:
        """Run a batch; returns the seconds of a call, those of the slowest rank."""
        operation, more = self._case.operation, {}
        if operation is Operation.INIT:
            with socket.socket() as probe:  # a port that was free just now
                probe.bind(("127.0.0.1", 0))
                more["address"] = f"127.0.0.1:{probe.getsockname()[1]}"
        answers = self._request(num_calls, **more)
        # Groups: from the first rank's call to the last one's return. Copies, too, as they don't wait for each other:
        # ranks that share a processor may copy one after the other.
        as_one = operation in GROUP_CREATIONS or self._group.peer is Peer.LIMIT
        seconds = max(map(_span, [answers] if as_one else [[answer] for answer in answers]))
        return seconds / num_calls / (2 if operation is Operation.SEND_RECV else 1)  # of a round trip

    def _calls_in(self, duration: float, seconds: float) -> int:
        """The number of calls of ``seconds`` each that fit into a duration."""
        return max(1, min(self._max_calls, round(duration / max(seconds, 1e-9))))

    def _request(self, num_calls: int, **more: Any) -> list[dict[str, Any]]:
        self._num_batches += 1
        message = {"do": "batch", "num_calls": num_calls, "batch": self._num_batches, **more}
        answers = self._group.request(message, _REQUEST_TIMEOUT_SECONDS)
        for answer in answers:
            if answer["wrong"]:
                raise PeerFailedError(f"wrong result: {answer['wrong']}")
        return answers


class OverlapRunner(CallRunner):
    """An allreduce beside matrix products that take equally long; the value is the time of both over the longer one."""

    most_calls = 100_000

    def calibrate(self, max_seconds: float, *, is_fresh: bool) -> None:  # noqa: ARG002 - its batches are long
        """Determine the number of products; see `CallRunner.calibrate`."""
        for _ in range(_OVERLAP_TRIALS):
            self.run(self.num_calls)
            alone, computing = (self.parts[name][-1] for name in ("alone", "computing"))
            if alone > max_seconds:
                raise UnsupportedError(f"a call took {format_seconds(alone)}")
            self.num_calls = max(1, min(self._max_calls, round(self.num_calls * alone / computing)))
        self.parts.clear()

    def run_batch(self, num_calls: int) -> float:
        """Run a batch; returns the ratio."""
        answers = self._request(num_calls)
        times = {name: max(answer[name] for answer in answers) / 1e9 for name in ("alone", "computing", "together")}
        for name, seconds in times.items():
            self.parts.setdefault(name, []).append(seconds)
        return float(times["together"] / max(times["alone"], times["computing"]))


def _span(answers: Sequence[dict[str, Any]]) -> float:
    """Seconds from the first rank's begin to the last one's end."""
    return float(max(answer["end"] for answer in answers) - min(answer["begin"] for answer in answers)) / 1e9


class Iperf3Target:
    """The limit of two hosts: iperf3, its time scaled to the case's bytes; a context that ends its server."""

    peer = Peer.IPERF3

    def __init__(self, hosts: EmulatedHosts) -> None:
        if shutil.which("iperf3") is None:
            raise PeerFailedError("iperf3 is not installed (apt-get install iperf3)")
        self._hosts = hosts
        version = subprocess.run(["iperf3", "--version"], capture_output=True, text=True, check=False).stdout  # noqa: S607
        self.versions = {"iperf": version.split()[1] if len(version.split()) > 1 else "unknown"}
        self.command = ["iperf3", "--client", hosts.addresses[1], "--bytes", "64M"]  # --bidir comes and goes

    def __enter__(self) -> Self:
        command = [*self._hosts.command_prefix(1), "iperf3", "--server", "--port", str(_IPERF3_PORT)]
        null = subprocess.DEVNULL
        self._server = subprocess.Popen(  # noqa: S603 - a fixed command, in a session without the driver's Ctrl-C
            command, stdin=null, stdout=null, stderr=null, start_new_session=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._server.wait()

    def open_runner(self, case: Case) -> Runner:
        """Prepare a case, and run a transfer that does not count; UnsupportedError: it says nothing of the case."""
        if case.size_bytes < _IPERF3_MIN_BYTES:
            raise UnsupportedError("a rate says nothing of small messages")
        if case.num_ranks != NUM_HOSTS:
            raise UnsupportedError("it has one process a host")
        num_calls = max(1, _IPERF3_BATCH_BYTES // case.size_bytes)
        command = self.client_command(case, num_calls * case.size_bytes)

        def transfer(_num_calls: int) -> float:
            done = run_command(command, title="iperf3", timeout=_IPERF3_TIMEOUT_SECONDS, check=False)
            return case.size_bytes / parse_iperf3_rate(done)

        transfer(num_calls)
        return Runner(transfer, num_calls)

    def client_command(self, case: Case, size_bytes: int) -> list[str]:
        """The command of a transfer; an allreduce sends as many bytes as it has, and receives as many meanwhile."""
        client = ["iperf3", "--client", self._hosts.addresses[1], "--port", str(_IPERF3_PORT), "--json"]
        directions = ["--bidir"] if case.operation is Operation.ALLREDUCE else []
        return [*self._hosts.command_prefix(0), *client, "--bytes", str(size_bytes), *directions]

    def release(self) -> None:
        """Free nothing."""


def parse_iperf3_rate(text: str) -> float:
    """The bytes per second that arrived, from iperf3's JSON; of two directions, the slower one's."""
    try:
        report: dict[str, Any] = json.loads(text)
        if "error" in report:
            raise PeerFailedError(report["error"])
        sums = [report["end"][name] for name in ("sum_received", "sum_received_bidir_reverse") if name in report["end"]]
        rate = min(float(one["bytes"]) / float(one["seconds"]) for one in sums)
    except (ValueError, KeyError, ZeroDivisionError) as error:
        raise PeerFailedError(f"iperf3's report can't be read: {error!r}") from None
    if rate <= 0:
        raise PeerFailedError("iperf3 moved nothing")
    return rate
