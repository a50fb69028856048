"""The CPUs that ranks are bound to, on emulated topologies."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ferrodist.launch.cpu_binding import (
    BindPolicy,
    bind_ranks,
    describe_binding,
    format_cpus,
    plan_binding,
    read_topology,
)
from ferrodist.launch.spec import LaunchSpec, MpiLauncher, ProgramKind

if TYPE_CHECKING:
    from collections.abc import Mapping

NUMA, CORE = BindPolicy.NUMA, BindPolicy.CORE
ALL = frozenset(range(64))


def cpus(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


@pytest.fixture
def sysfs(tmp_path):
    """Return how to write a system's nodes and their CPUs, and the threads of its cores; numbers as in sysfs."""

    def write(nodes: Mapping[int, str], cores: Mapping[int, str]):
        for node, text in nodes.items():
            folder = tmp_path / f"devices/system/node/node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{text}\n")
        for cpu, text in cores.items():
            folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{text}\n")
        (tmp_path / "devices/system/node/online").write_text("0-1\n")
        return tmp_path

    return write


@pytest.fixture
def two_nodes(sysfs):
    """Two nodes of four cores, each of two threads: CPUs n and n + 8."""
    return sysfs({0: "0-3,8-11", 1: "4-7,12-15"}, {cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)})


def test_nodes_and_cores_are_read(two_nodes):
    """Each node has its cores, and each core its threads."""
    assert read_topology(ALL, two_nodes) == {
        0: [cpus(0, 8), cpus(1, 9), cpus(2, 10), cpus(3, 11)],
        1: [cpus(4, 12), cpus(5, 13), cpus(6, 14), cpus(7, 15)],
    }


def test_only_the_launchers_cpus_count(two_nodes):
    """A mask may exclude a node, cores, and some threads of a core."""
    assert read_topology(cpus(5, 12, 13, 15), two_nodes) == {1: [cpus(5, 13), cpus(12), cpus(15)]}
    topology = read_topology(cpus(0, 1, 2, 3, 4), two_nodes)
    assert plan_binding(topology, 5, CORE) == [cpus(each) for each in range(5)]


def test_nodes_without_cpus_and_offline_cpus_are_left_out(sysfs):
    """A node may be memory alone. The mask may name CPUs that are offline: no node lists them."""
    root = sysfs({0: "0,2", 1: "", 2: "4-5", 10: "6"}, {0: "0", 2: "2", 4: "4-5", 5: "4-5", 6: "6"})
    assert read_topology(frozenset(range(8)), root) == {0: [cpus(0), cpus(2)], 2: [cpus(4, 5)], 10: [cpus(6)]}


def test_a_system_that_shows_nothing_is_one_node(tmp_path):
    """Without sysfs all CPUs are in one node, each a core."""
    assert read_topology(cpus(3, 1), tmp_path) == {0: [cpus(1), cpus(3)]}


FIRST, SECOND = cpus(0, 1, 2, 3, 8, 9, 10, 11), cpus(4, 5, 6, 7, 12, 13, 14, 15)


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, [FIRST | SECOND]),
        (2, [FIRST, SECOND]),
        (3, [FIRST, SECOND, SECOND]),
        (4, [FIRST, FIRST, SECOND, SECOND]),
        (20, [FIRST] * 10 + [SECOND] * 10),
    ],
)
def test_ranks_of_a_node_share_its_cpus(two_nodes, num_ranks, expected):
    """With numa neighbours share a node, also where ranks outnumber cores; one rank has both nodes."""
    assert plan_binding(read_topology(ALL, two_nodes), num_ranks, NUMA) == expected


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, [FIRST | SECOND]),
        (2, [FIRST, SECOND]),
        (3, [FIRST, cpus(4, 12, 5, 13), cpus(6, 14, 7, 15)]),
        (6, [cpus(0, 8), cpus(1, 9), cpus(2, 10, 3, 11), cpus(4, 12), cpus(5, 13), cpus(6, 14, 7, 15)]),
        (8, [cpus(each, each + 8) for each in range(8)]),
    ],
)
def test_ranks_have_whole_cores_of_one_node(two_nodes, num_ranks, expected):
    """With core no two ranks share a core, and none has cores of two nodes unless it has both nodes."""
    assert plan_binding(read_topology(ALL, two_nodes), num_ranks, CORE) == expected


def test_too_few_cores_are_an_error(two_nodes):
    """It says what to do."""
    with pytest.raises(
        ValueError, match=r"9 ranks are more than 8 cores; give --nproc-per-node 8 or less, or --bind numa"
    ):
        plan_binding(read_topology(ALL, two_nodes), 9, CORE)


def test_fewer_ranks_than_nodes_have_whole_nodes():
    """No node is idle, and each has one rank."""
    nodes = {node: [cpus(2 * node), cpus(2 * node + 1)] for node in range(4)}
    for policy in (NUMA, CORE):
        assert plan_binding(nodes, 2, policy) == [cpus(0, 1, 2, 3), cpus(4, 5, 6, 7)]
        assert plan_binding(nodes, 3, policy) == [cpus(0, 1), cpus(2, 3), cpus(4, 5, 6, 7)]


@pytest.mark.parametrize("sizes", [(6, 2), (1, 7), (3, 3, 1), (14, 2), (5, 1, 1, 1)], ids=str)
def test_uneven_nodes_have_ranks_in_proportion(sizes):
    """No number of ranks crowds a node, or shares a core, while there are cores enough."""
    numbers = iter(range(100))
    nodes = {node: [cpus(next(numbers)) for _ in range(size)] for node, size in enumerate(sizes)}
    for num_ranks in range(1, sum(sizes) + 1):
        bound = plan_binding(nodes, num_ranks, CORE)
        assert all(bound)
        assert len(frozenset().union(*bound)) == sum(len(each) for each in bound)
        assert bound == sorted(bound, key=min)
        wider = plan_binding(nodes, num_ranks, NUMA)
        assert all(own <= other for own, other in zip(bound, wider, strict=True))
        assert all(wider.count(each) <= len(each) for each in wider)
    assert plan_binding(nodes, sum(sizes), CORE) == [core for cores in nodes.values() for core in cores]


def test_bindings_in_words():
    """Ranks with the same CPUs are together, and lists are as the system's."""
    assert format_cpus(cpus(9, 0, 1, 2, 4, 8)) == "0-2,4,8-9"
    assert describe_binding([cpus(0, 1), cpus(0, 1), cpus(3)], 4) == "ranks 4-5 on CPUs 0-1; rank 6 on CPU 3"


def spec(**values) -> LaunchSpec:
    return LaunchSpec(**{"program": "python", "kind": ProgramKind.MODULE, "secret": "s3cret", **values})


def test_the_launchers_mask_is_what_it_binds_within(monkeypatch):
    """Ranks get CPUs of the mask alone; nothing is bound by default."""
    usable = os.sched_getaffinity(0)
    one = cpus(min(usable))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(one))
    assert bind_ranks(NUMA, 3) == [one] * 3
    assert bind_ranks(BindPolicy.NONE, 2) == [frozenset()] * 2
    with pytest.raises(ValueError, match="2 ranks are more than 1 core; give --nproc-per-node 1 or less"):
        spec(bind=CORE, nproc_per_node=2)


def test_what_cannot_be_bound_is_refused(monkeypatch):
    """Before any rank starts: without the system's call, and where another program starts the ranks."""
    with pytest.raises(ValueError, match="--bind goes with --mpi pmi: mpiexec binds the ranks that it starts"):
        spec(bind=NUMA, mpi=MpiLauncher.MPIEXEC)
    with pytest.raises(TypeError, match="bind must be a BindPolicy"):
        spec(bind="numa")
    monkeypatch.delattr(os, "sched_setaffinity")
    assert spec().bind is BindPolicy.NONE
    with pytest.raises(ValueError, match="--bind numa needs Linux"):
        spec(bind=NUMA)
