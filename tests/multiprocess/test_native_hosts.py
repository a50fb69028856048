"""Groups over two hosts, which network namespaces and a virtual cable emulate."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from host_worker import results_of, work
from typing_extensions import Self

from ferrodist.backends.native import is_native_available
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

_PORT = 29_500  # in a network of the test's own


def _why_not() -> str:
    if not is_native_available():
        return "this installation was built without the native engine"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (iproute2)"
    probe = subprocess.run(
        ["ip", "netns", "add", f"ferro-probe-{os.getpid()}"], capture_output=True, text=True, check=False
    )
    if probe.returncode != 0:
        return f"this machine makes no network namespaces: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", f"ferro-probe-{os.getpid()}"], check=True)
    return ""


_REASON = _why_not()
pytestmark = pytest.mark.skipif(bool(_REASON), reason=_REASON)


class TwoHosts:
    """Two network namespaces with a cable between them."""

    def __init__(self) -> None:
        self.names = [f"ferro-{side}-{os.getpid()}" for side in "ab"]
        self.processes: list[BaseProcess] = []
        self.sayings: list[Connection] = []
        """What the ranks say."""

    def __enter__(self) -> Self:
        for name in self.names:
            _run("ip", "netns", "add", name)
        first, second = self.names
        _run("ip", "link", "add", "cable0", "netns", first, "type", "veth", "peer", "name", "cable1", "netns", second)
        for number, name in enumerate(self.names):
            self.on(number, "ip", "address", "add", f"10.77.0.{number + 1}/24", "dev", f"cable{number}")
            self.on(number, "ip", "address", "add", f"fd77::{number + 1}/64", "dev", f"cable{number}", "nodad")
            for device in ("lo", f"cable{number}"):
                _run("ip", "-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for process, saying in zip(self.processes, self.sayings, strict=True):
            process.kill()
            process.join()
            process.close()
            saying.close()
        for name in self.names:
            _run("ip", "netns", "delete", name)

    def on(self, host: int, *command: str) -> None:
        """Run a command on a host."""
        _run("ip", "netns", "exec", self.names[host], *command)

    def start(self, task: str, hosts: list[int], address: str) -> None:
        """Start a rank on each of ``hosts``."""
        context = multiprocessing.get_context("fork")  # one that has torch already
        for rank, host in enumerate(hosts):
            saying, said = context.Pipe(duplex=False)
            arguments = (self.names[host], task, rank, len(hosts), f"{address}:{_PORT}", said.send)
            process = context.Process(target=work, args=arguments)
            process.start()
            said.close()
            self.processes.append(process)
            self.sayings.append(saying)

    def heard(self) -> list[Any]:
        """What each rank says next."""
        found = []
        for rank, saying in enumerate(self.sayings):
            assert saying.poll(80), f"rank {rank} says nothing"
            found.append(saying.recv())
        return found

    def answers(self) -> list[dict[str, Any]]:
        """What the ranks say last, when they have ended well."""
        found = self.heard()
        for rank, process in enumerate(self.processes):
            process.join(80)
            assert process.exitcode == 0, f"rank {rank} has ended with {process.exitcode}"
        return found


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _has_netem(hosts: TwoHosts) -> str:
    """Why the cable can't be made a bad one, or nothing."""
    if shutil.which("tc") is None:
        return "a bad cable needs the program tc (iproute2)"
    done = subprocess.run(
        ["ip", "netns", "exec", hosts.names[0], "tc", "qdisc", "add", "dev", "cable0", "root", "netem", "delay", "2ms"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"a bad cable needs the kernel's netem: {done.stderr.strip()}" if done.returncode else ""


@pytest.mark.parametrize(
    ("hosts", "address"),
    [([0, 1], "[fd77::1]"), ([0, 1, 0, 1], "10.77.0.1")],
    ids=["a-rank-a-host-ipv6", "hosts-in-turn-ipv4"],
)
def test_two_hosts_give_the_bits_of_one(hosts: list[int], address: str) -> None:
    """Collectives over shared memory and TCP in one group give what the simulated backend gives, bit for bit."""
    expected = run_ranks(results_of, len(hosts))
    with TwoHosts() as network:
        network.start("compare", hosts, address)
        answers = network.answers()
    assert [answer["digest"] for answer in answers] == expected
    assert {answer["hosts"] for answer in answers} == {2}
    assert [answer["pair"] for answer in answers] == [2.0, *[0.0] * (len(hosts) - 2), 2.0]


def test_messages_of_two_hosts() -> None:
    """Messages through shared memory and over the cable meet their receives in one group, and in a sub-group."""
    with TwoHosts() as network:
        network.start("exchange", [0, 1, 0, 1], "10.77.0.1")
        assert [answer["received"] for answer in network.answers()] == [2 * (6 * 3 + 3 + 1)] * 4


@pytest.mark.parametrize(
    ("hosts", "address"), [([0, 1], "[fd77::1]"), ([0, 1, 0, 1], "10.77.0.1")], ids=["ipv6", "ipv4"]
)
def test_torch_s_backend_over_two_hosts(hosts: list[int], address: str) -> None:
    """Ranks that meet in torch's TCPStore train what one process does, and their messages go around."""
    with TwoHosts() as network:
        network.start("torch_backend", hosts, address)
        assert network.answers() == [{"ddp": True, "fsdp": True, "message": True, "hosts": 2}] * len(hosts)


def test_a_bad_cable() -> None:
    """Latency and loss change nothing but the time."""
    expected = run_ranks(results_of, 2)
    with TwoHosts() as network:
        reason = _has_netem(network)
        if reason:
            pytest.skip(reason)
        network.on(1, "tc", "qdisc", "add", "dev", "cable1", "root", "netem", "delay", "2ms", "1ms", "loss", "1%")
        network.start("compare", [0, 1], "10.77.0.1")
        assert [answer["digest"] for answer in network.answers()] == expected


@pytest.mark.parametrize(("task", "hosts"), [("until_cut", [0, 1, 0, 1]), ("receive_until_cut", [0, 1])])
def test_a_cut_cable(task: str, hosts: list[int]) -> None:
    """Ranks that lose each other raise soon after the deadline of the call; each host names ranks of the other one."""
    tries = [_cut_cable(task, hosts)]
    # Ranks of the own host are named when they are slow to answer that they wait themselves, on a busy machine.
    while not _all_name_the_other_host(tries[-1]) and len(tries) < 4:
        tries.append(_cut_cable(task, hosts))
    assert _all_name_the_other_host(tries[-1]), tries


def _cut_cable(task: str, hosts: list[int]) -> list[Any]:
    """What the ranks raise when the cable between the hosts is cut, rank r's of host r % 2."""
    with TwoHosts() as network:
        network.start(task, hosts, "10.77.0.1")
        assert set(network.heard()) == {"running"}
        _run("ip", "-n", network.names[1], "link", "set", "cable1", "down")
        answers = network.answers()
    for answer in answers:
        assert answer["error"] in ("DistributedTimeoutError", "PeerLostError"), answer
        assert answer["ranks"], answer
        assert answer["seconds"] < 2.0 + 3.0, answer
    return answers


def _all_name_the_other_host(answers: list[Any]) -> bool:
    return all(
        any(other % 2 != host for rank, answer in enumerate(answers) if rank % 2 == host for other in answer["ranks"])
        for host in (0, 1)
    )
