"""The competing libraries of a run (its *peers*): the rank processes of each, or iperf3, and how a case is measured.

A batch is some calls timed together; its value is the slowest rank's time for one call. Fast operations get as many
calls as make a batch long enough to hide the clock's resolution and the ranks' unequal starts.

Messages between the driver and a rank are Python's own (`multiprocessing.connection`), over a Unix socket. A rank that
waits for one is blocked in the kernel: while others are measured it takes no processor time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NoReturn

from ferrodist.bench.adapters.base import UnsupportedError
from ferrodist.bench.cases import GROUP_CREATIONS, Operation, Peer
from ferrodist.bench.environments import PeerFailedError, rank_environment, run_command, start_commands
from ferrodist.bench.model import MODELLED
from ferrodist.bench.report import PROCESSOR_TIME, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ferrodist.bench.cases import Case, DataType
    from ferrodist.bench.environments import EmulatedHosts

_POLL_INTERVAL_SECONDS = 0.1
_START_TIMEOUT_SECONDS, _START_TIMEOUT_SECONDS_PER_RANK = 90.0, 5.0
_EXIT_TIMEOUT_SECONDS = 5.0
_REQUEST_TIMEOUT_SECONDS = 180.0
_MAX_LOG_CHARACTERS = 400
_BATCH_SECONDS = 1e-3
# Of a batch, for each of the ranks that share a processor: they begin apart, by as long as all need to have had it. Of
# 16 ranks on 2 processors the last one begins 2 to 7 ms after the first.
_SHARED_BATCH_SECONDS = 10e-3
_MAX_CALLS = 1000  # of a batch
_TRIAL_SECONDS = 10e-3  # of the trial that determines how many calls a batch has
_FIRST_CALLS = 3  # after one more: they touch the memory, open connections, and show how long a call takes
_WARM_UP_SECONDS = 0.3
_SLOW_SECONDS = 0.1  # a call that takes longer needs no further trial
_OVERLAP_TRIALS = 4  # of how much computation takes as long as an allreduce
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


class RankGroup:
    """The ranks of one peer, each a process that serves requests.

    ``folder`` is created, for the peer alone. All ranks must have joined ``timeout`` seconds after they can start (by
    default more for more ranks), else PeerFailedError is raised. A call that takes longer than ``max_seconds`` is not
    repeated, and larger sizes are not tried. ``log`` gets a line for the user before a long step. ``hosts`` None is
    this host.
    """

    def __init__(
        self,
        peer: Peer,
        num_ranks: int,
        *,
        folder: Path,
        max_seconds: float,
        log: Callable[[str], None],
        hosts: EmulatedHosts | None = None,
        timeout: float | None = None,
    ) -> None:
        self.peer, self.num_ranks = peer, num_ranks
        if timeout is None:
            timeout = _START_TIMEOUT_SECONDS + _START_TIMEOUT_SECONDS_PER_RANK * num_ranks
        self.versions: dict[str, str] = {}
        self._max_seconds, self._log_file = max_seconds, folder / "log"
        self.is_alive = True  # the ranks can serve requests
        self._is_fresh = True  # the ranks have not yet run side by side for a while
        self._too_slow: dict[tuple[Operation, DataType], tuple[int, str]] = {}  # size and reason
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pidfds: list[int] = []  # of the ranks: an MPI's launcher has ranks that are not our children
        self._connections: list[Connection] = []
        folder.mkdir()
        commands = start_commands(peer, num_ranks, folder, log, hosts)
        self.command = commands[0]
        environment, null = rank_environment(os.environ, peer, hosts), subprocess.DEVNULL
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, self._log_file.open("ab") as output:
            listener.bind(str(folder / "socket"))
            listener.listen(num_ranks)
            try:
                for command in commands:  # in sessions of their own: Ctrl-C is for the driver
                    process = subprocess.Popen(  # noqa: S603 - a fixed command
                        command, stdin=null, stdout=output, stderr=output, env=environment, start_new_session=True
                    )
                    self._processes.append(process)
                self._accept_ranks(listener, time.monotonic() + timeout)
            except BaseException:
                self.kill()
                raise

    def open_runner(self, case: Case) -> Runner:
        """Prepare a case, and run the batches that don't count, which determine the calls of a batch.

        UnsupportedError: the peer has no such operation, or takes too long for it; for other errors see `Runner`.
        """
        if not self.is_alive:
            raise UnsupportedError("it failed in an earlier case")
        size_bytes, reason = self._too_slow.get((case.operation, case.dtype), (case.size_bytes, ""))
        if size_bytes < case.size_bytes:
            raise UnsupportedError(f"{reason} for {format_bytes(size_bytes)}")
        answers = self.request({"do": "prepare", "case": case})
        if reasons := [answer["not_offered"] for answer in answers if "not_offered" in answer]:
            raise UnsupportedError(reasons[0])
        runner = RankRunner(self, case, min(answer["max_calls"] for answer in answers))
        seconds = runner.calibrate(self._max_seconds, is_fresh=self._is_fresh)
        if seconds > self._max_seconds:
            self._too_slow[case.operation, case.dtype] = case.size_bytes, f"a call took {format_seconds(seconds)}"
            raise UnsupportedError(f"a call took {format_seconds(seconds)}")
        self._is_fresh = self._is_fresh and runner.num_calls == 1  # slow operations run too few calls to warm up
        return runner

    def release(self) -> None:
        """Free the memory of the case. Raises PeerFailedError when the peer has ended."""
        if self.is_alive:
            self.request({"do": "release"})

    def request(self, message: dict[str, Any], timeout: float = _REQUEST_TIMEOUT_SECONDS) -> list[dict[str, Any]]:
        """Send a message to all ranks, and return their answers by rank, all due within ``timeout`` seconds.

        PeerFailedError: one has failed, ended or not answered; none of them can be used any more.
        """
        if not self.is_alive:
            raise PeerFailedError("it has failed before")
        end = time.monotonic() + timeout
        answers: dict[int, dict[str, Any]] = {}
        try:
            for connection in self._connections:
                connection.send(message)
        except OSError:
            self._fail("a rank has ended")
        while missing := [rank for rank in range(self.num_ranks) if rank not in answers]:
            ready = wait([self._connections[rank] for rank in missing], max(0, end - time.monotonic()))
            if not ready:
                self._fail(f"ranks {missing} did not answer to {message['do']!r} within {timeout:g} s")
            for rank, connection in enumerate(self._connections):
                if connection in ready:
                    answers[rank] = self._receive(connection, end)
        return [answers[rank] for rank in range(self.num_ranks)]

    def close(self) -> None:
        """Let the ranks leave their group, and kill those that don't."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended
                connection.send({"do": "end"})
        end = time.monotonic() + _EXIT_TIMEOUT_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill the ranks."""
        self.is_alive = False
        while self._pidfds:  # an interruption below may have this called once more
            pidfd = self._pidfds.pop()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        for process in self._processes:
            process.terminate()  # a launcher ends its ranks then
            try:
                process.wait(_EXIT_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def _accept_ranks(self, listener: socket.socket, end: float) -> None:
        """Wait until every rank has connected and joined its group."""
        listener.settimeout(_POLL_INTERVAL_SECONDS)
        while len(self._connections) < self.num_ranks:
            try:
                self._connections.append(Connection(listener.accept()[0].detach()))
            except TimeoutError:  # noqa: PERF203 - once in a tenth of a second
                if any(process.poll() is not None for process in self._processes):
                    for connection in self._connections:
                        while connection.poll():
                            self._receive(connection, end)  # which raises the reason, if the rank has sent one
                    self._fail("a rank has ended before it joined")
                if time.monotonic() > end:
                    self._fail("the ranks have not started in time")
        for connection in self._connections:
            self._pidfds.append(os.pidfd_open(self._receive(connection, end)["pid"]))
        hellos = [self._receive(connection, end) for connection in self._connections]
        joined = {hello["rank"]: connection for hello, connection in zip(hellos, self._connections, strict=True)}
        if sorted(joined) != list(range(self.num_ranks)):
            self._fail(f"the ranks are {sorted(joined)}, not 0 to {self.num_ranks - 1}")
        self.versions = hellos[-1]["versions"]
        self._connections = [joined[rank] for rank in range(self.num_ranks)]

    def _receive(self, connection: Connection, end: float) -> dict[str, Any]:
        if not connection.poll(max(0, end - time.monotonic())):
            self._fail("a rank did not answer in time")
        try:
            answer: dict[str, Any] = connection.recv()
        except (EOFError, OSError):
            self._fail("a rank has ended" if self.versions else "a rank has ended before it joined")
        if "failed" in answer:
            self._fail(answer["failed"], with_log=False)
        return answer

    def _fail(self, reason: str, *, with_log: bool = True) -> NoReturn:
        """Kill the ranks, and raise an error with the end of their log."""
        self.kill()
        text = self._log_file.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()] if with_log else []
        log = " | ".join(lines[-3:])[-_MAX_LOG_CHARACTERS:]
        raise PeerFailedError(f"{reason}: {log}" if log else reason)


class RankRunner(Runner):
    """Calls that are timed together, or each alone and added up; the creation of one group; or an overlap.

    An overlap is an allreduce beside matrix products that take equally long; a batch has so many ``num_calls`` of
    them, and its value is the time of both over the longer one.
    """

    def __init__(self, group: RankGroup, case: Case, max_calls: int) -> None:
        is_overlap = case.operation is Operation.OVERLAP
        super().__init__(self._run_overlap if is_overlap else self._run_calls)
        self._group, self._case, self._num_batches = group, case, 0
        self._max_calls = max_calls if is_overlap else min(max_calls, _MAX_CALLS)

    def calibrate(self, max_seconds: float, *, is_fresh: bool) -> float:
        """Determine the calls of a batch; returns the seconds of a call, more than ``max_seconds`` if it gave up."""
        if self._case.operation is Operation.OVERLAP:
            return self._calibrate_overlap(max_seconds)
        seconds = self.run(1)
        if self._case.operation in GROUP_CREATIONS:  # a group a batch
            return 0.0
        first_calls = min(_FIRST_CALLS, self._max_calls)
        is_slow = seconds > _SLOW_SECONDS
        seconds = self.run(1 if is_slow else first_calls)
        if seconds > (_SLOW_SECONDS if is_slow else max_seconds):  # a first call may be slow where the next are not
            return seconds
        begin = time.monotonic()
        while is_fresh and time.monotonic() - begin < _WARM_UP_SECONDS:
            self.run(first_calls)
        # The first calls are slow, and ranks that share processors start unequally: few calls would measure that.
        # So measure again, with ever more of them.
        shared_by = self._group.num_ranks / len(os.sched_getaffinity(0))
        trial, trial_seconds = 0, _TRIAL_SECONDS if shared_by <= 1 else 2 * _SHARED_BATCH_SECONDS * shared_by
        while trial < self._max_calls and 2 * trial * seconds < trial_seconds:
            trial = min(max(2 * trial, self._calls_in(trial_seconds, seconds)), self._max_calls)
            seconds = min(seconds, self.run(trial))
        duration = _BATCH_SECONDS if shared_by <= 1 else _SHARED_BATCH_SECONDS * shared_by
        self.num_calls = self._calls_in(duration, seconds)
        self.parts.clear()
        return seconds

    def _calibrate_overlap(self, max_seconds: float) -> float:
        for _ in range(_OVERLAP_TRIALS):
            self.run(self.num_calls)
            alone, computing = (self.parts[name][-1] for name in ("alone", "computing"))
            if alone > max_seconds:
                break
            self.num_calls = self._calls_in(alone, computing / self.num_calls)
        self.parts.clear()
        return alone

    def _run_calls(self, num_calls: int) -> float:
        """Run a batch; returns the seconds of a call, those of the slowest rank."""
        operation, init_method = self._case.operation, ""
        if operation is Operation.INIT:
            with socket.socket() as probe:  # a port that was free just now
                probe.bind(("127.0.0.1", 0))
                init_method = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        answers = self._request_batch(num_calls, init_method)
        # Groups: from the first rank's call to the last one's return. Copies, too, as they don't wait for each other:
        # ranks that share a processor may copy one after the other.
        as_one = operation in GROUP_CREATIONS or self._group.peer is Peer.LIMIT
        spans: list[int] = [
            max(answer["end"] for answer in some) - min(answer["begin"] for answer in some)
            for some in ([answers] if as_one else zip(answers, strict=True))
        ]
        processors = len(os.sched_getaffinity(0))
        if operation in MODELLED and self._group.num_ranks > processors:
            used = sum(answer["used"] for answer in answers) / 1e9 / num_calls / processors
            self.parts.setdefault(PROCESSOR_TIME, []).append(used)
        return max(spans) / 1e9 / num_calls / (2 if operation is Operation.SEND_RECV else 1)  # of a round trip

    def _run_overlap(self, num_products: int) -> float:
        """Run a batch; returns the ratio."""
        answers = self._request_batch(num_products)
        times = {name: max(answer[name] for answer in answers) / 1e9 for name in ("alone", "computing", "together")}
        for name, seconds in times.items():
            self.parts.setdefault(name, []).append(seconds)
        return float(times["together"] / max(times["alone"], times["computing"]))

    def _request_batch(self, num_calls: int, init_method: str = "") -> list[dict[str, Any]]:
        self._num_batches += 1
        message = {"do": "batch", "num_calls": num_calls, "batch": self._num_batches, "init_method": init_method}
        answers = self._group.request(message)
        for answer in answers:
            if answer["wrong"]:
                raise PeerFailedError(f"wrong result: {answer['wrong']}")
        return answers

    def _calls_in(self, duration: float, seconds: float) -> int:
        """The number of calls of ``seconds`` each that fit into a duration."""
        return max(1, min(self._max_calls, round(duration / max(seconds, 1e-9))))


class Iperf3:
    """The limit of two hosts: iperf3, its time scaled to the case's bytes."""

    peer = Peer.IPERF3

    def __init__(self, hosts: EmulatedHosts) -> None:
        if shutil.which("iperf3") is None:
            raise PeerFailedError("iperf3 is not installed (apt-get install iperf3)")
        self._hosts = hosts
        words = run_command(["iperf3", "--version"], timeout=_IPERF3_TIMEOUT_SECONDS, check=False).split()
        self.versions = {"iperf": words[1] if len(words) > 1 else "unknown"}
        self.command = ["iperf3", "--client", hosts.addresses[1], "--bytes", "64M"]  # --bidir comes and goes
        command, null = ["iperf3", "--server", "--port", str(_IPERF3_PORT)], subprocess.DEVNULL
        self._server = subprocess.Popen(  # noqa: S603 - a fixed command, in a session without the driver's Ctrl-C
            [*hosts.command_prefix(1), *command], stdin=null, stdout=null, stderr=null, start_new_session=True
        )

    def close(self) -> None:
        """End the server."""
        self._server.kill()
        self._server.wait()

    def open_runner(self, case: Case) -> Runner:
        """Prepare a case, and run a transfer that does not count; UnsupportedError: it says nothing of the case."""
        if case.size_bytes < _IPERF3_MIN_BYTES:
            raise UnsupportedError("a rate says nothing of small messages")
        if case.num_ranks != self._hosts.num_hosts:
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


Target = RankGroup | Iperf3


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
