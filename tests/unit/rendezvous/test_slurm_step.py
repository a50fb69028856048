"""The place of a process in a step of Slurm, from its variables."""

from __future__ import annotations

import pytest

from ferrodist.rendezvous.environment import read_environment
from ferrodist.rendezvous.slurm import SlurmStep, first_of_hosts

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "node[08-09,20]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def test_a_task_of_a_step_is_a_rank():
    """`srun python program.py` needs no launcher."""
    found = read_environment(STEP)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 5, 1, 2)
    assert (found.group_rank, found.master_addr, found.run_id) == (1, "node08", "slurm-4711-3")
    assert found.master_port is not None
    assert 20_000 <= found.master_port < 30_000
    assert not found.single_host
    assert read_environment({**STEP, "MASTER_PORT": "7", "MASTER_ADDR": "x"}).master_addr == "x"


def test_a_step_on_one_host_meets_at_the_loopback():
    """Its ranks know that they are alone there."""
    one = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    found = read_environment({**STEP, **one, "SLURM_NODEID": "0", "SLURM_PROCID": "1"})
    assert (found.master_addr, found.single_host) == ("127.0.0.1", True)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_launchers_variables_come_first(name):
    """Ranks that a launcher has started inside of a step are the launcher's."""
    found = read_environment({**STEP, name: "1"})
    assert (found.rank, found.world_size) == ((1, None) if name == "RANK" else (None, 1))
    assert found.local_rank is None


@pytest.mark.parametrize("name", STEP)
@pytest.mark.parametrize("value", ["", "x", "-1", "[]"])
def test_variables_that_are_not_srun_s(name, value):
    """A batch script has some of them, and nothing else tells that it is no task."""
    if name == "SLURM_STEP_NODELIST" and value in ("x", "-1"):
        return  # names of hosts
    assert SlurmStep.find({**STEP, name: value}) is None
    assert read_environment({**STEP, name: value}).rank is None


def test_counts_that_do_not_fit():
    """The tasks of the hosts must be all tasks."""
    assert SlurmStep.find({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}) is None
    assert SlurmStep.find({**STEP, "SLURM_NODEID": "3"}) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("alone", "alone"),
        ("a,b", "a"),
        ("n[3,5]", "n3"),
        ("node[008-011,020],gpu1", "node008"),
        ("rack1-[7-9]-ib.site.org,x", "rack1-7-ib.site.org"),
        ("127.0.0.[11-12]", "127.0.0.11"),
        ("", None),
        ("[]", None),
    ],
)
def test_lists_of_hosts(hosts, first):
    """Slurm writes numbers in brackets, with the zeros in front of them."""
    assert first_of_hosts(hosts) == first
