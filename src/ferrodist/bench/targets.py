"""Bench targets: how the driver measures one peer in one case.

A batch is some calls timed together; its value is the slowest rank's time for one call. Fast operations get as many
calls as make a batch long enough to hide the clock's resolution and the ranks' unequal starts.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from ferrodist.bench.adapters import UnsupportedError
from ferrodist.bench.cases import Operation, Peer
from ferrodist.bench.commands import run_command
from ferrodist.bench.netns import NUM_HOSTS
from ferrodist.bench.processes import PeerFailedError
from ferrodist.bench.report import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from ferrodist.bench.cases import Case, DataType
    from ferrodist.bench.netns import EmulatedHosts
    from ferrodist.bench.processes import RankGroup

_BATCH_SECONDS = 1e-3
_TRIAL_SECONDS = 10e-3  # of the trial that determines how many calls a batch has
_MAX_CALLS = 1000
_FIRST_CALLS = 3  # after one more: they touch the memory, open connections, and show how long a call takes
_WARM_UP_SECONDS = 0.3
_SLOW_SECONDS = 0.1  # a call that takes longer needs no further trial
_OVERLAP_TRIALS = 4  # of how much computation takes as long as an allreduce
_REQUEST_TIMEOUT_SECONDS = 180.0
_IPERF3_PORT = 29_600
_IPERF3_MIN_BYTES = 64 * 1024  # below, a rate says nothing
_IPERF3_BATCH_BYTES = 64 << 20
_IPERF3_TIMEOUT_SECONDS = 30


class WrongResultError(Exception):
    """A result is wrong; the message says where."""


class TooSlowError(UnsupportedError):
    """A call takes longer than a case may."""


class BenchTarget(Protocol):
    """A peer that can be measured, alternating with others."""

    peer: Peer

    def open_runner(self, case: Case) -> Runner:
        """Prepare a case, and run the batches that don't count, which determine the calls of a batch.

        UnsupportedError: the peer has no such operation, or takes too long for it; for other errors see
        `Runner.measure`.
        """

    def release(self) -> None:
        """Free the memory of the case. Raises PeerFailedError when the peer has ended."""


class Runner:
    """One peer in one case: the calls of a batch, the batches' values, and their components by name, in seconds."""

    def __init__(self) -> None:
        self.num_calls = 1
        self.values: list[float] = []
        self.parts: dict[str, list[float]] = {}

    def measure(self) -> None:
        """Run a batch that counts; PeerFailedError if the peer has ended, WrongResultError if the result is wrong."""
        self.values.append(self.run(self.num_calls))

    def run(self, num_calls: int) -> float:
        """Run a batch, and return its value."""
        raise NotImplementedError


class RankTarget(BenchTarget):
    """The ranks of a library as a `BenchTarget`, which does not own them.

    A call that takes longer than ``max_seconds`` is not repeated, and larger sizes are not tried.
    """

    def __init__(self, group: RankGroup, max_seconds: float) -> None:
        self.peer = group.peer
        self._group, self._max_seconds = group, max_seconds
        self._is_fresh = True
        self._too_slow: dict[tuple[Operation, DataType], tuple[int, str]] = {}  # size and reason

    @override
    def open_runner(self, case: Case) -> Runner:
        if not self._group.is_alive:
            raise UnsupportedError("it failed in an earlier case")
        size_bytes, reason = self._too_slow.get((case.operation, case.dtype), (case.size_bytes, ""))
        if size_bytes < case.size_bytes:
            raise UnsupportedError(f"{reason} for {format_bytes(size_bytes)}")
        message = {
            "do": "prepare",
            "operation": case.operation.value,
            "dtype": case.dtype.value,
            "size_bytes": case.size_bytes,
            "num_hosts": case.num_hosts,
        }
        answers = self._group.request(message, _REQUEST_TIMEOUT_SECONDS)
        refusals = [answer["not_offered"] for answer in answers if "not_offered" in answer]
        if refusals:
            raise UnsupportedError(refusals[0])
        max_calls = min(answer["max_calls"] for answer in answers)
        runner: CallRunner
        if case.operation is Operation.OVERLAP:
            runner = OverlapRunner(self._group, case, max_calls)
        else:
            kind = GroupRunner if case.operation.makes_groups else CallRunner
            runner = kind(self._group, case, min(max_calls, _MAX_CALLS))
        try:
            runner.calibrate(self._max_seconds, is_fresh=self._is_fresh)
            self._is_fresh = self._is_fresh and runner.num_calls == 1  # slow operations run too few calls to warm up
        except TooSlowError as error:
            self._too_slow[case.operation, case.dtype] = case.size_bytes, str(error)
            raise
        return runner

    @override
    def release(self) -> None:
        if self._group.is_alive:
            self._group.request({"do": "release"}, _REQUEST_TIMEOUT_SECONDS)


class CallRunner(Runner):
    """Calls that are timed together, or each alone and added up."""

    def __init__(self, group: RankGroup, case: Case, max_calls: int) -> None:
        super().__init__()
        self._group, self._case, self._max_calls = group, case, max_calls
        self._num_batches = 0

    def calibrate(self, max_seconds: float, *, is_fresh: bool) -> None:
        """Determine how many calls a batch has; ``is_fresh``: the ranks have not yet run side by side for a while."""
        seconds = self.run(1)
        is_slow = seconds > _SLOW_SECONDS
        seconds = self.run(1 if is_slow else min(_FIRST_CALLS, self._max_calls))
        if seconds > max_seconds:
            raise TooSlowError(f"a call took {format_seconds(seconds)}")
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

    def run(self, num_calls: int) -> float:
        """Run a batch; returns the seconds of a call."""
        answers = self._request(num_calls)
        # Copies don't wait for each other: ranks that share a processor may copy one after the other.
        seconds = _span(answers) if self._group.peer is Peer.LIMIT else _longest(answers)
        return seconds / num_calls / (2 if self._case.operation is Operation.SEND_RECV else 1)  # of a round trip

    def _calls_in(self, duration: float, seconds: float) -> int:
        """The number of calls of ``seconds`` each that fit into a duration."""
        return max(1, min(self._max_calls, round(duration / max(seconds, 1e-9))))

    def _request(self, num_calls: int, **more: Any) -> list[dict[str, Any]]:
        self._num_batches += 1
        message = {"do": "batch", "num_calls": num_calls, "batch": self._num_batches, **more}
        answers = self._group.request(message, _REQUEST_TIMEOUT_SECONDS)
        wrong = [answer["wrong"] for answer in answers if answer["wrong"]]
        if wrong:
            raise WrongResultError(f"wrong result: {wrong[0]}")
        return answers


class GroupRunner(CallRunner):
    """Creation of groups, one a batch, from the first rank's call to the last one's return."""

    def calibrate(self, max_seconds: float, *, is_fresh: bool) -> None:  # noqa: ARG002 - nothing is repeated in a batch
        """Create one group that does not count."""
        self.run(1)

    def run(self, num_calls: int) -> float:
        """Run a batch; returns the seconds of a group."""
        with socket.socket() as probe:  # a port that was free just now
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return _span(self._request(num_calls, address=f"127.0.0.1:{port}"))


class OverlapRunner(CallRunner):
    """An allreduce beside matrix products that take equally long; the value is the time of both over the longer one."""

    def calibrate(self, max_seconds: float, *, is_fresh: bool) -> None:  # noqa: ARG002 - its batches are long
        """Determine the number of products; see `CallRunner.calibrate`."""
        for _ in range(_OVERLAP_TRIALS):
            self.run(self.num_calls)
            alone, computing = (self.parts[name][-1] for name in ("alone", "computing"))
            if alone > max_seconds:
                raise TooSlowError(f"a call took {format_seconds(alone)}")
            self.num_calls = max(1, min(self._max_calls, round(self.num_calls * alone / computing)))
        self.parts.clear()

    def run(self, num_calls: int) -> float:
        """Run a batch; returns the ratio."""
        answers = self._request(num_calls)
        times = {name: max(answer[name] for answer in answers) / 1e9 for name in ("alone", "computing", "together")}
        for name, seconds in times.items():
            self.parts.setdefault(name, []).append(seconds)
        return float(times["together"] / max(times["alone"], times["computing"]))


def _longest(answers: Sequence[dict[str, Any]]) -> float:
    return float(max(answer["end"] - answer["begin"] for answer in answers)) / 1e9


def _span(answers: Sequence[dict[str, Any]]) -> float:
    return float(max(answer["end"] for answer in answers) - min(answer["begin"] for answer in answers)) / 1e9


class Iperf3Target(BenchTarget):
    """The limit of two hosts: iperf3, in one direction or both at once; a context that ends its server."""

    peer = Peer.IPERF3

    def __init__(self, hosts: EmulatedHosts) -> None:
        if shutil.which("iperf3") is None:
            raise PeerFailedError("iperf3 is not installed (apt-get install iperf3)")
        self._hosts = hosts
        version = subprocess.run(["iperf3", "--version"], capture_output=True, text=True, check=False).stdout  # noqa: S607
        self.versions = {"iperf": version.split()[1] if len(version.split()) > 1 else "unknown"}
        self.command = ["iperf3", "--client", hosts.addresses[1], "--bytes", "64M"]  # --bidir comes and goes
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [*self._hosts.command_prefix(1), "iperf3", "--server", "--port", str(_IPERF3_PORT)]
        self._server = subprocess.Popen(  # noqa: S603 - a fixed command
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the driver
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGKILL)
            self._server.wait()

    @override
    def open_runner(self, case: Case) -> Runner:
        if case.size_bytes < _IPERF3_MIN_BYTES:
            raise UnsupportedError("a rate says nothing of small messages")
        if case.num_ranks != NUM_HOSTS:
            raise UnsupportedError("it has one process a host")
        runner = Iperf3Runner(self._hosts, case)
        runner.run(runner.num_calls)
        return runner

    @override
    def release(self) -> None:
        pass


class Iperf3Runner(Runner):
    """Transfers of iperf3, whose time is scaled to the case's bytes."""

    def __init__(self, hosts: EmulatedHosts, case: Case) -> None:
        super().__init__()
        self.num_calls = max(1, _IPERF3_BATCH_BYTES // case.size_bytes)
        self._case = case
        # An allreduce over two hosts sends as many bytes as it has, and receives as many at the same time.
        both_ways = ["--bidir"] if case.operation is Operation.ALLREDUCE else []
        self._command = [
            *hosts.command_prefix(0),
            *("iperf3", "--client", hosts.addresses[1], "--port", str(_IPERF3_PORT), "--json"),
            *("--bytes", str(self.num_calls * case.size_bytes), *both_ways),
        ]

    def run(self, num_calls: int) -> float:  # noqa: ARG002 - the command has it
        """Run a transfer; returns the seconds of the case's bytes."""
        done = run_command(self._command, title="iperf3", timeout=_IPERF3_TIMEOUT_SECONDS, failure=PeerFailedError)
        return self._case.size_bytes / parse_iperf3_rate(done.stdout)


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
