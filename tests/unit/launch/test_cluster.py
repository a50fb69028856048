"""The place of a host in a job, from the variables of clusters, and of torchrun's options in variables."""

from __future__ import annotations

import os

import pytest

from ferrodist.cli.main import build_parser, main
from ferrodist.launch import dry_run
from ferrodist.launch.cluster import find_hosts, lone_host_warning
from ferrodist.launch.options import spec_from_arguments
from ferrodist.launch.rank_logs import LogOptions

STEP = {
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "node[08-09,20]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "1",
}


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    """These tests may themselves run in a job of a cluster."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PET_", "JOB_COMPLETION")):
            monkeypatch.delenv(name)


def parse(*arguments: str):
    return spec_from_arguments(build_parser().parse_args(["run", *arguments]))


def set_all(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_step_on_several_hosts(monkeypatch):
    """`srun ferrodist run` needs no more than the number of ranks and the secret."""
    set_all(monkeypatch, {**STEP, "FERRODIST_SECRET": "s"})
    spec = parse("--nproc-per-node", "2", __file__)
    assert (spec.nnodes, spec.node_rank, spec.master_addr) == (3, 2, "node08")
    assert (spec.run_id, spec.world_size, spec.global_rank(0)) == ("slurm-4711-1", 6, 4)
    others = [find_hosts({**STEP, "SLURM_NODEID": str(host)}) for host in range(3)]
    assert {other.port for other in others if other is not None} == {spec.master_port}
    another = find_hosts({**STEP, "SLURM_STEP_ID": "2"})
    assert another is not None
    assert another.port != spec.master_port
    assert 20_000 <= another.port < 30_000


def test_options_come_before_what_the_cluster_says(monkeypatch):
    """Whoever names the hosts, names all of them."""
    set_all(monkeypatch, {**STEP, "FERRODIST_SECRET": "s"})
    assert parse("--nnodes", "1", __file__).nnodes == 1
    assert parse("--standalone", __file__).nnodes == 1
    assert parse("--master-port", "7", __file__).master_port == 7
    assert (parse("--node-rank", "0", __file__).nnodes, parse("--node-rank", "0", __file__).node_rank) == (3, 0)
    assert parse("--rdzv-endpoint", "h:9", __file__).master_addr == "h"
    assert parse("--rdzv-id", "x", __file__).run_id == "x"
    monkeypatch.delenv("FERRODIST_SECRET")
    with pytest.raises(ValueError, match="3 hosts need one secret: set FERRODIST_SECRET"):
        parse(__file__)


def test_no_step_on_several_hosts():
    """Then the job has one host, unless options say otherwise."""
    alone = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    assert find_hosts({}) is None
    assert find_hosts({**STEP, **alone, "SLURM_NODEID": "0"}) is None


@pytest.mark.parametrize(
    "variables",
    [{"SLURM_STEP_NODELIST": "rack1node[1-2]-ib[0-3]"}, {"SLURM_PROCID": ""}, {"SLURM_STEP_TASKS_PER_NODE": "1"}],
)
def test_a_step_that_is_not_understood(variables):
    """Each host would start a job of its own otherwise, without a word."""
    with pytest.raises(ValueError, match="Slurm step on 3 hosts whose variables don't tell this one's place"):
        find_hosts({**STEP, **variables})


def test_several_tasks_on_a_host():
    """Each would start all ranks of its host."""
    with pytest.raises(ValueError, match=r"srun has started 6 tasks on 3 hosts.*use srun --ntasks-per-node 1"):
        find_hosts({**STEP, "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "3,2,1"})


def test_one_host_of_a_job_warns():
    """In a batch script the launcher runs on the first host alone."""
    assert "this Slurm job has 4 hosts" in lone_host_warning({"SLURM_JOB_NUM_NODES": "4"})
    assert lone_host_warning(STEP) == lone_host_warning({}) == lone_host_warning({"SLURM_JOB_NUM_NODES": "1"}) == ""


def test_the_index_of_a_pod_is_its_host(monkeypatch):
    """An indexed job of Kubernetes gives each pod a number."""
    set_all(monkeypatch, {"JOB_COMPLETION_INDEX": "1", "FERRODIST_SECRET": "s"})
    hosts = ("--nnodes", "2", "--master-addr", "job-0.job", "--master-port", "29500")
    assert parse(*hosts, __file__).node_rank == 1
    assert parse(*hosts, "--node-rank", "0", __file__).node_rank == 0
    assert parse(__file__).node_rank is None


def test_options_in_torchruns_variables(monkeypatch):
    """PET_ and an option's name, as operators of Kubernetes set them; the command line comes first."""
    set_all(
        monkeypatch,
        {
            "PET_NNODES": "2:2",
            "PET_NODE_RANK": "1",
            "PET_NPROC_PER_NODE": "3",
            "PET_RDZV_ENDPOINT": "host:1234",
            "PET_MAX_RESTARTS": "2",
            "PET_MODULE": "1",
            "PET_NO_PYTHON": "0",
            "PET_TEE": "3",
            "PET_SHUTDOWN_TIMEOUT": "9",
            "FERRODIST_SECRET": "s",
        },
    )
    spec = parse("--nproc-per-node", "1", "json")
    assert (spec.nnodes, spec.node_rank, spec.nproc_per_node) == (2, 1, 1)
    assert (spec.master_addr, spec.master_port, spec.max_restarts) == ("host", 1234, 2)
    assert spec.command()[1:] == ("-m", "json")
    assert not spec.logs.tee.is_empty
    assert spec.timeout_before_kill == 9
    assert parse("--max-restarts", "0", "--node-rank", "0", "json").max_restarts == 0
    assert parse("--node-rank", "0", "json").node_rank == 0
    assert parse("--master-addr", "x", "--master-port", "1", "json").master_addr == "x"
    assert parse("--no-python", "sh").command() == ("sh",)
    with pytest.raises(ValueError, match="2 hosts need --master-port"):
        parse("--master-addr", "x", "json")
    set_all(monkeypatch, {"PET_MASTER_ADDR": "y", "PET_MASTER_PORT": "2"})
    assert parse("json").master_addr == "host"
    spec = parse("--master-addr", "x", "json")
    assert (spec.master_addr, spec.master_port) == ("x", 2)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE='many': invalid value"),
        ({"PET_TEE": "9"}, "PET_TEE='9': must be 1 "),
        ({"PET_MODULE": "true"}, "PET_MODULE must be 1 or 0, not 'true'"),
        ({"PET_RDZV_CONF": "timeout=9"}, "PET_RDZV_CONF is a variable of torchrun's: --timeout S is ours"),
    ],
)
def test_variables_that_are_wrong(variables, message, monkeypatch):
    """The message names the variable."""
    set_all(monkeypatch, variables)
    with pytest.raises(ValueError, match=message):
        parse("-m", "json") if "PET_MODULE" not in variables else parse(__file__)


def test_empty_variables_and_values_are_not_given(monkeypatch):
    """As torchrun has it; options that it does not have are not taken from variables."""
    names = ("NNODES", "RDZV_ENDPOINT", "TEE", "LOG_DIR", "LOCAL_RANKS_FILTER", "MODULE", "RDZV_CONF")
    set_all(monkeypatch, {f"PET_{name}": "" for name in names})
    set_all(monkeypatch, {"PET_BIND": "core", "PET_MPI": "x", "PET_TIMEOUT": "9", "PET_RUN_ID": "x"})
    options = ["--log-dir", "", "--local-ranks-filter", "", "--log-line-prefix-template", "", "--role", ""]
    assert parse(*options, __file__) == parse(__file__)
    assert parse(__file__).logs == LogOptions()
    assert parse(__file__).timeout is None


def test_a_dry_run_starts_nothing(capsys, monkeypatch, tmp_path):
    """It prints the job, the command and the ranks' variables, and no secret."""
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit('started')")
    set_all(monkeypatch, {**STEP, "FERRODIST_SECRET": "hidden", "OMP_NUM_THREADS": ""})
    assert main(["run", "--dry-run", "--nproc-per-node", "2", "--tee", "1", str(program), "an argument"]) == 0
    shown = capsys.readouterr().out
    assert "job: 6 ranks on 3 hosts, of which this is number 2, which Slurm told\n" in shown
    assert "ranks here: 4 to 5\n" in shown
    assert "rank 0 listens at node08, " in shown
    assert f"{program} 'an argument'\n" in shown
    assert "variables of rank 5: RANK=5 LOCAL_RANK=1 ROLE_RANK=5\n" in shown
    assert "hidden" not in shown
    assert "WORLD_SIZE=6 " in shown
    monkeypatch.setenv("WORLD_SIZE", "6")  # as an outer launcher may have it
    assert main(["run", "--dry-run", "--nproc-per-node", "2", str(program)]) == 0
    assert "WORLD_SIZE=6 " in capsys.readouterr().out


def test_a_dry_run_of_mpiexec(capsys, monkeypatch):
    """The command is mpiexec's, which gives the ranks their variables."""
    monkeypatch.setattr(dry_run, "find_mpiexec", lambda: "/opt/mpiexec")
    monkeypatch.setattr(dry_run, "is_open_mpi", lambda _path: False)
    assert main(["run", "--dry-run", "--mpi", "mpiexec", "--nproc-per-node", "3", __file__]) == 0
    shown = capsys.readouterr().out
    assert "command: /opt/mpiexec -n 3 " in shown
    assert "RANK" not in shown
