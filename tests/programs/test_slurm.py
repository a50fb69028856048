"""Jobs of a real Slurm: two nodes that are emulated on this machine, each with an address of the loopback."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import ferrodist

SOURCE = Path(ferrodist.__file__).parents[1]
NODES = ("127.0.0.11", "127.0.0.12")
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "sinfo")
PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
LIMIT = 100

CONFIGURATION = """
ClusterName=ferrodist
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName={nodes[0]} NodeHostname={host} NodeAddr={nodes[0]} Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr={nodes[1]} Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

PROGRAM = """
import os, sys
import torch
import ferrodist as fd

group = fd.init_process_group()
if "fail" in sys.argv and group.rank == 3:
    raise KeyError("of the program")
total = fd.allreduce(torch.tensor([1.0, group.rank]))
mesh = fd.DeviceMesh.of_hosts() if "mesh" in sys.argv else None
print(os.environ["SLURMD_NODENAME"], group.rank, total.tolist(), mesh and tuple(mesh.shape), flush=True)
fd.destroy_process_group()
"""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The environment of commands of a cluster with two idle nodes."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        pytest.skip(f"Slurm is not installed ({', '.join(missing)}): `make slurm` does it on Debian, as root")
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("slurmd starts tasks as root alone")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(host=host, ports=free_ports(3), user=getpass.getuser(), folder=folder, nodes=NODES)
    (folder / "slurm.conf").write_text(text)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FERRODIST_", "SLURM_"))}
    environment = {
        **kept,
        "PATH": PATH,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PYTHONPATH": str(SOURCE),
        "FERRODIST_SECRET": "of the cluster",
        "OMP_NUM_THREADS": "1",
    }
    daemons = []
    try:
        for number, command in enumerate((["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES))):
            with (folder / f"daemon-{number}.out").open("wb") as output:
                daemons.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        end = time.monotonic() + 60
        while run(environment, "sinfo", "-h", "-o", "%T %D").stdout.split() != ["idle", "2"]:
            assert all(daemon.poll() is None for daemon in daemons), (folder / "slurmctld.log").read_text()[-2000:]
            assert time.monotonic() < end, "the nodes did not become idle"
            time.sleep(0.2)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def run(environment: dict[str, str], *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**environment, **variables}, capture_output=True, text=True, timeout=LIMIT, check=False
    )


@pytest.fixture
def program(tmp_path):
    """The program of the ranks."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return str(path)


def places(text: str) -> dict[int, str]:
    """The node of each rank, from the lines that the ranks print."""
    return {int(rank): node for node, rank in re.findall(r"(127\.0\.0\.\d+) (\d+) \[", text)}


def test_srun_starts_a_launcher_on_each_host(cluster, program):
    """It gets neither hosts nor address nor port."""
    command = [sys.executable, "-m", "ferrodist", "run", "--nproc-per-node", "2", program, "mesh"]
    done = run(cluster, "srun", "-N2", "--ntasks-per-node", "1", *command)
    assert done.returncode == 0, done.stderr
    assert places(done.stdout) == dict(enumerate([NODES[0], NODES[0], NODES[1], NODES[1]]))
    assert done.stdout.count("[4.0, 6.0] (2, 2)") == 4


def test_a_failure_on_the_second_host_ends_the_job(cluster, program):
    """The launcher of its host reports it, and srun returns its exit code."""
    command = [sys.executable, "-m", "ferrodist", "run", "--nproc-per-node", "2", program, "fail"]
    done = run(cluster, "srun", "-N2", "--ntasks-per-node", "1", *command)
    assert done.returncode == 1
    assert "rank 3 failed first: exit code 1" in done.stderr
    assert "KeyError: 'of the program'" in done.stderr


def test_srun_starts_the_ranks_themselves(cluster, program):
    """Three tasks on two hosts are three ranks, without a launcher."""
    done = run(cluster, "srun", "-N2", "-n3", sys.executable, program)
    assert done.returncode == 0, done.stderr
    assert sorted(places(done.stdout)) == [0, 1, 2]
    assert set(places(done.stdout).values()) == set(NODES)
    assert done.stdout.count("[3.0, 3.0]") == 3


def test_ranks_of_one_host_need_no_secret(cluster, program):
    """They are one user's, who is recognised."""
    done = run(cluster, "srun", "-N1", "-n2", sys.executable, program, FERRODIST_SECRET="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[2.0, 1.0]") == 2


def test_a_batch_script_without_srun(cluster, program, tmp_path):
    """The launcher starts the ranks of its host, and says so; a program alone has no place in a job."""
    script, output = tmp_path / "job.sh", tmp_path / "output"
    script.write_text(
        f"#!/bin/sh\n{sys.executable} -m ferrodist run --nproc-per-node 2 {program}\n{sys.executable} {program}\n"
    )
    done = run(cluster, "sbatch", "--wait", "-N2", "-o", str(output), str(script))
    shown = output.read_text()
    assert done.returncode == 1, done.stderr
    assert "this Slurm job has 2 hosts, and the ranks start on this one alone" in shown
    assert shown.count("[2.0, 1.0]") == 2
    assert "the environment does not say RANK and WORLD_SIZE: start the program with torchrun," in shown


def test_several_launchers_on_a_host_are_refused(cluster, program):
    """Each would start all ranks of its host."""
    done = run(cluster, "srun", "-N2", "-n4", sys.executable, "-m", "ferrodist", "run", program)
    assert done.returncode == 2
    assert "srun has started 4 tasks on 2 hosts" in done.stderr
