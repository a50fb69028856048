"""The two hosts of ferrodist bench, and what iperf3 says of the link between them."""

import json
import os
import subprocess

import pytest

from ferrodist.bench import hosts as hosts_module
from ferrodist.bench.adapters import NotOfferedError
from ferrodist.bench.cases import Case, Operation
from ferrodist.bench.hosts import EmulatedHosts, HostsUnavailableError, host_of
from ferrodist.bench.link import LinkContestant, LinkRunner, read_rate
from ferrodist.bench.rank_group import PeerFailedError


@pytest.fixture
def named():
    """Hosts that are names only."""
    hosts = EmulatedHosts.__new__(EmulatedHosts)
    hosts._names, hosts.addresses = ["a", "b"], ["10.0.0.1", "10.0.0.2"]
    return hosts


def test_the_first_ranks_are_on_the_first_host():
    """Also where their number is odd."""
    assert [host_of(rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    assert [host_of(rank, 3) for rank in range(3)] == [0, 0, 1]


@pytest.mark.parametrize(("user", "program", "reason"), [(1, "/sbin/ip", "need root"), (0, None, "the program ip")])
def test_hosts_that_can_not_be_had(monkeypatch, user, program, reason):
    """The reason says what is missing."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(hosts_module.shutil, "which", lambda name: program)
    with pytest.raises(HostsUnavailableError, match=reason):
        EmulatedHosts()


def test_hosts_are_removed_when_they_can_not_be_made(monkeypatch):
    """What ip says is the reason, and nothing is left."""
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, int("link" in command), "", "no such device type")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts_module.shutil, "which", lambda name: "/sbin/ip")
    monkeypatch.setattr(hosts_module.subprocess, "run", run)
    with pytest.raises(HostsUnavailableError, match="ip link add: no such device type"), EmulatedHosts():
        pass
    assert [command[1:3] for command in commands[-2:]] == [["netns", "delete"]] * 2


def test_the_agent_starts_a_command_on_the_host_of_an_address(monkeypatch, tmp_path, named):
    """As ssh would: options are skipped, and the words of the command are joined for a shell."""
    monkeypatch.setattr(EmulatedHosts, "prefix", lambda self, host: ["env", f"HOST={host}"])
    agent = tmp_path / "agent"
    named.write_agent(agent)
    agent.write_text(agent.read_text().replace('unshare --uts sh -c "hostname', 'sh -c ": hostname'))

    def run(*arguments):
        return subprocess.run([agent, *arguments], capture_output=True, text=True, check=False)

    assert run("-x", "10.0.0.2", "A=1; echo", "$HOST $A 'b  c'").stdout == "1 1 b  c\n"
    assert "there is no host 10.0.0.3" in run("10.0.0.3", "true").stderr


def received(seconds, size=10**9):
    return {"bytes": size, "seconds": seconds}


def test_rates():
    """What arrived counts; of two directions the slower one."""
    assert read_rate(json.dumps({"end": {"sum_received": received(2)}})) == 5e8
    both = {"sum_received": received(2), "sum_received_bidir_reverse": received(4)}
    assert read_rate(json.dumps({"end": both})) == 2.5e8


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (json.dumps({"error": "unable to connect"}), "unable to connect"),
        ("", "can't be read"),
        (json.dumps({"end": {}}), "can't be read"),
        (json.dumps({"end": {"sum_received": received(1, 0)}}), "moved nothing"),
    ],
)
def test_reports_without_a_rate(text, reason):
    """They fail the peer, with the reason."""
    with pytest.raises(PeerFailedError, match=reason):
        read_rate(text)


def test_the_link_is_asked_as_the_operation_uses_it(monkeypatch, named):
    """An allreduce sends and receives at once, a message goes one way; a rate is not asked for a few bytes."""
    monkeypatch.setattr("ferrodist.bench.link.shutil.which", lambda name: None)
    with pytest.raises(PeerFailedError, match="apt-get install iperf3"):
        LinkContestant(named)
    size = 1 << 20
    both, one = (
        LinkRunner(named, Case(operation=operation, num_ranks=2, num_hosts=2, size_bytes=size))
        for operation in (Operation.ALLREDUCE, Operation.SEND_RECV)
    )
    assert ("--bidir" in both._command, "--bidir" in one._command) == (True, False)
    assert one._command[one._command.index("--bytes") + 1] == str(64 << 20)
    contestant = LinkContestant.__new__(LinkContestant)
    for case in (
        Case(operation=Operation.ALLREDUCE, num_ranks=ranks, size_bytes=n) for ranks, n in [(2, 8), (4, size)]
    ):
        with pytest.raises(NotOfferedError):
            contestant.open_runner(case)
