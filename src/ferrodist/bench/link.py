"""The limit of two hosts: what iperf3 moves over the cable between them, one way or both ways at once."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Any

from ferrodist.bench.adapters import NotOfferedError
from ferrodist.bench.cases import Operation
from ferrodist.bench.hosts import NUM_HOSTS
from ferrodist.bench.peers import Peer
from ferrodist.bench.rank_group import PeerFailedError

if TYPE_CHECKING:
    from typing_extensions import Self

    from ferrodist.bench.cases import Case
    from ferrodist.bench.hosts import EmulatedHosts

_PORT = 29_600
_SMALLEST = 64 * 1024  # below, a rate says nothing
_BATCH_BYTES = 64 << 20
_LIMIT = 30  # seconds, for one run


class LinkContestant:
    """iperf3 on two hosts; a context that ends its server. See `Contestant`.

    Args:
        hosts: Between which; not owned.

    Raises:
        PeerFailedError: It is not installed, or can't serve.
    """

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
        command = [*self._hosts.prefix(1), "iperf3", "--server", "--port", str(_PORT)]
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

    def open_runner(self, case: Case) -> LinkRunner:
        """See `Contestant.open_runner`."""
        if case.size_bytes < _SMALLEST:
            raise NotOfferedError("a rate says nothing of small messages")
        if case.num_ranks != NUM_HOSTS:
            raise NotOfferedError("it has one process a host")
        runner = LinkRunner(self._hosts, case)
        runner.run()
        return runner

    def release(self) -> None:
        """See `Contestant.release`."""


class LinkRunner:
    """Transfers whose time is scaled to the case's bytes; see `Runner`."""

    def __init__(self, hosts: EmulatedHosts, case: Case) -> None:
        self.num_calls = max(1, _BATCH_BYTES // case.size_bytes)
        self.values: list[float] = []
        self.parts: dict[str, list[float]] = {}
        self._case = case
        # An allreduce over two hosts sends as many bytes as it has, and receives as many at the same time.
        both_ways = ["--bidir"] if case.operation is Operation.ALLREDUCE else []
        self._command = [
            *hosts.prefix(0),
            *("iperf3", "--client", hosts.addresses[1], "--port", str(_PORT), "--json"),
            *("--bytes", str(self.num_calls * case.size_bytes), *both_ways),
        ]

    def measure(self) -> None:
        """See `Runner.measure`."""
        self.values.append(self.run())

    def run(self) -> float:
        """One transfer; returns the time of the case's bytes."""
        try:
            done = subprocess.run(  # noqa: S603 - a fixed command
                self._command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            raise PeerFailedError(f"iperf3 took more than {_LIMIT} s") from None
        return self._case.size_bytes / read_rate(done.stdout)


def read_rate(text: str) -> float:
    """Bytes a second that arrived, of iperf3's JSON; of two directions, the slower one's.

    Raises:
        PeerFailedError: It says that it failed, or says nothing.
    """
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
