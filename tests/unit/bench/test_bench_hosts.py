"""The emulated hosts of ferrodist bench, and the link between them as iperf3 measures it."""

import json
import os
import subprocess

import pytest

pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")
pytest.importorskip("rich", reason="the extra 'bench' is not installed")

from ferrodist.bench import environments
from ferrodist.bench.adapters.base import UnsupportedError
from ferrodist.bench.cases import Case, Operation
from ferrodist.bench.environments import EmulatedHosts, PeerFailedError, host_index
from ferrodist.bench.targets import Iperf3, parse_iperf3_rate


@pytest.fixture
def named():
    """Hosts without network namespaces."""
    hosts = EmulatedHosts.__new__(EmulatedHosts)
    hosts._names, hosts.addresses = ["a", "b"], ["10.0.0.1", "10.0.0.2"]
    return hosts


def test_the_first_ranks_are_on_the_first_host():
    """Of an odd number of ranks, the first host has one more."""
    assert [host_index(rank, 4, 2) for rank in range(4)] == [0, 0, 1, 1]
    assert [host_index(rank, 3, 2) for rank in range(3)] == [0, 0, 1]
    assert [host_index(rank, 8, 4) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(("user", "program", "reason"), [(1, "/sbin/ip", "need root"), (0, None, "the program ip")])
def test_unavailable_hosts_raise_the_reason(monkeypatch, user, program, reason):
    """The reason says what is missing."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(environments.shutil, "which", lambda name: program)
    with pytest.raises(PeerFailedError, match=reason):
        EmulatedHosts()


def test_hosts_are_removed_when_their_creation_fails(monkeypatch):
    """The reason is the output of ip, and nothing stays behind."""
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, int("link" in command), "", "no such device type")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(environments.shutil, "which", lambda name: "/sbin/ip")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(PeerFailedError, match="ip link add: no such device type"), EmulatedHosts():
        pass
    assert [command[1:3] for command in commands[-2:]] == [["netns", "delete"]] * 2


def test_more_than_two_hosts_share_a_switch(monkeypatch):
    """Each has a cable to it, and an address; the switch goes with them."""
    commands = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(environments.shutil, "which", lambda name: "/sbin/ip")
    monkeypatch.setattr(environments, "run_command", lambda command, **_: commands.append(" ".join(command)))
    with EmulatedHosts(3) as hosts:
        assert hosts.addresses == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
        made, names = list(commands), [hosts.command_prefix(host)[3] for host in range(3)]
    switch = f"ferrodist-{os.getpid()}-switch"
    assert [command for command in made if "bridge" in command] == [f"ip -n {switch} link add switch type bridge"]
    for host, name in enumerate(names):
        assert f"ip link add cable netns {name} type veth peer port-{host} netns {switch}" in made
        assert f"ip -n {switch} link set port-{host} master switch up" in made
        assert f"ip -n {name} address add 10.77.0.{host + 1}/24 dev cable" in made
    assert commands[len(made) :] == [f"ip netns delete {name}" for name in (*names, switch)]


def test_the_remote_shell_runs_a_command_on_the_host_of_an_address(monkeypatch, tmp_path, named):
    """As ssh would: options are skipped, and the words of the command are joined for a shell."""
    monkeypatch.setattr(EmulatedHosts, "command_prefix", lambda self, host: ["env", f"HOST={host}"])
    agent = tmp_path / "agent"
    named.write_remote_shell(agent)
    agent.write_text(agent.read_text().replace('unshare --uts sh -c "hostname', 'sh -c ": hostname'))

    def run(*arguments):
        return subprocess.run([agent, *arguments], capture_output=True, text=True, check=False)

    assert run("-x", "10.0.0.2", "A=1; echo", "$HOST $A 'b  c'").stdout == "1 1 b  c\n"
    assert "there is no host 10.0.0.3" in run("10.0.0.3", "true").stderr


def received(seconds, size=10**9):
    return {"bytes": size, "seconds": seconds}


def test_the_iperf3_rate_is_that_of_the_slower_direction():
    """Received bytes count, not sent ones."""
    assert parse_iperf3_rate(json.dumps({"end": {"sum_received": received(2)}})) == 5e8
    both = {"sum_received": received(2), "sum_received_bidir_reverse": received(4)}
    assert parse_iperf3_rate(json.dumps({"end": both})) == 2.5e8


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (json.dumps({"error": "unable to connect"}), "unable to connect"),
        ("", "can't be read"),
        (json.dumps({"end": {}}), "can't be read"),
        (json.dumps({"end": {"sum_received": received(1, 0)}}), "moved nothing"),
    ],
)
def test_iperf3_reports_without_a_rate_fail_the_peer(text, reason):
    """The reason is in the error."""
    with pytest.raises(PeerFailedError, match=reason):
        parse_iperf3_rate(text)


def test_iperf3_transfers_in_the_directions_of_the_operation(monkeypatch, named):
    """An allreduce sends and receives at once, a message goes one way; small sizes are unsupported."""
    monkeypatch.setattr("ferrodist.bench.targets.shutil.which", lambda name: None)
    with pytest.raises(PeerFailedError, match="apt-get install iperf3"):
        Iperf3(named)
    size = 1 << 20
    target = Iperf3.__new__(Iperf3)
    target._hosts = named
    both, one = (
        target.client_command(Case(operation=operation, num_ranks=2, num_hosts=2, size_bytes=size), 64 << 20)
        for operation in (Operation.ALLREDUCE, Operation.SEND_RECV)
    )
    assert ("--bidir" in both, "--bidir" in one) == (True, False)
    assert one[one.index("--bytes") + 1] == str(64 << 20)
    for case in (
        Case(operation=Operation.ALLREDUCE, num_ranks=ranks, size_bytes=n) for ranks, n in [(2, 8), (4, size)]
    ):
        with pytest.raises(UnsupportedError):
            target.open_runner(case)
