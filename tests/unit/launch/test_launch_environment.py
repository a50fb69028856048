"""The variables that each rank finds."""

from __future__ import annotations

import math
import os
import resource
import socket
import sys
from pathlib import Path

import pytest

from ferrodist.launch import host_limits, launcher
from ferrodist.launch.host_limits import rank_limit, usable_cores
from ferrodist.launch.rank_environment import Attempt, rank_environment, reserved_port, with_stack_dumps
from ferrodist.launch.rank_logs import JobLogs, LogOptions
from ferrodist.launch.spec import LaunchSpec, ProgramKind

ATTEMPT = Attempt(master_addr="10.0.0.1", master_port=1234, run_id="job", secret="s3cret", restart_count=2)


def make_spec(**values) -> LaunchSpec:
    defaults = {"program": "python", "kind": ProgramKind.MODULE, "secret": "s3cret"}
    return LaunchSpec(**{**defaults, **values})


def two_hosts(node_rank: int) -> LaunchSpec:
    return make_spec(
        nproc_per_node=3,
        nnodes=2,
        node_rank=node_rank,
        master_addr="10.0.0.1",
        master_port=1234,
        max_restarts=4,
    )


def test_every_variable_of_a_rank_on_the_second_host():
    """All of torchrun's variables have torchrun's meaning."""
    assert rank_environment(two_hosts(1), ATTEMPT, 2, base={}, cores=8) == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "4",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "PYTHONUNBUFFERED": "1",
        "FERRODIST_SECRET": "s3cret",
        "OMP_NUM_THREADS": "2",
    }


def test_ranks_of_all_hosts_count_through():
    """Over all hosts, every rank number is given once."""
    ranks = [
        int(rank_environment(two_hosts(node), ATTEMPT, local, base={}, cores=1)["RANK"])
        for node in range(2)
        for local in range(3)
    ]
    assert ranks == [0, 1, 2, 3, 4, 5]


def test_the_base_passes_through_and_is_not_changed():
    """Unrelated variables reach the rank, stale ones of an outer launcher do not; the base stays as is."""
    base = {"HOME": "/home/user", "RANK": "77", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    before = dict(base)
    environment = rank_environment(make_spec(), ATTEMPT, 0, base=base, cores=1)
    assert environment["HOME"] == "/home/user"
    assert environment["RANK"] == "0"
    assert environment["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert base == before


@pytest.mark.parametrize(
    ("cores", "ranks", "given", "expected"),
    [(8, 2, None, "4"), (8, 3, None, "2"), (2, 4, None, "1"), (8, 2, "", "4"), (8, 2, "7", "7")],
)
def test_omp_threads_are_shared_unless_set(cores, ranks, given, expected):
    """OMP_NUM_THREADS is an even share of the cores, at least 1, and a user's value wins."""
    base = {} if given is None else {"OMP_NUM_THREADS": given}
    environment = rank_environment(make_spec(nproc_per_node=ranks), ATTEMPT, 0, base=base, cores=cores)
    assert environment["OMP_NUM_THREADS"] == expected


@pytest.mark.parametrize(("num_cpus", "expected"), [(8, "4"), (3, "3"), (1, "1")])
def test_bound_ranks_have_no_more_threads_than_cpus(num_cpus, expected):
    """OMP_NUM_THREADS is an even share of the cores, which may be more than a rank is bound to on uneven nodes."""
    bound = frozenset(range(num_cpus))
    environment = rank_environment(make_spec(nproc_per_node=2), ATTEMPT, 0, base={}, cores=8, cpus=bound)
    assert environment["OMP_NUM_THREADS"] == expected


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this platform has no affinity mask")
@pytest.mark.parametrize(("quota", "expected"), [(math.inf, 3), (4.0, 3), (2.9, 2), (0.5, 1)])
def test_usable_cores_are_those_of_the_affinity_mask_and_the_quota(quota, expected, monkeypatch):
    """A restricted process counts its own cores, not the machine's, and no more than its quota lets it use at once."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 8})
    monkeypatch.setattr(host_limits, "cpu_quota", lambda: quota)
    assert usable_cores() == expected


def test_the_timeout_reaches_the_ranks():
    """``--timeout`` is the variable that groups ask; without it the launcher's own passes through."""
    base = {"FERRODIST_TIMEOUT": "7"}
    for given, expected in ((None, "7"), (600.0, "600"), (math.inf, "inf")):
        found = rank_environment(make_spec(timeout=given), ATTEMPT, 0, base=base, cores=1)
        assert found["FERRODIST_TIMEOUT"] == expected


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port that is bound can't be bound again")
def test_a_port_is_kept_for_rank_0():
    """Nobody takes the port while the ranks start, and rank 0 can listen on it, as torch's stores do, too."""
    with reserved_port() as port:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        for address in ("127.0.0.1", "0.0.0.0"):
            socket.create_server((address, port)).close()  # with SO_REUSEADDR
        socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True).close()
    with socket.socket() as anybody:
        anybody.bind(("127.0.0.1", port))


@pytest.mark.parametrize(("given", "expected"), [(None, []), ("", []), ("a:b", ["a", "b"])])
def test_stack_dumps_stand_before_the_users_path(given, expected):
    """The folder of the hook comes first in PYTHONPATH; where that was empty nothing stands for the working folder."""
    base = {} if given is None else {"PYTHONPATH": given}
    folder, *rest = with_stack_dumps(base)["PYTHONPATH"].split(os.pathsep)
    assert rest == expected
    assert (Path(folder) / "sitecustomize.py").exists()


def test_commands_use_the_launching_interpreter():
    """Scripts and modules run under this interpreter, executables as they are; arguments stay verbatim."""
    arguments = ("--", "-m", "", "a b", "--nproc-per-node=3")
    python = sys.executable
    assert make_spec(program="pkg.mod", arguments=arguments).command() == (
        python,
        "-m",
        "pkg.mod",
        *arguments,
    )
    script = make_spec(program=__file__, kind=ProgramKind.SCRIPT, arguments=arguments)
    assert script.command() == (python, __file__, *arguments)
    executable = make_spec(program="sh", kind=ProgramKind.EXECUTABLE, arguments=arguments)
    assert executable.command() == ("sh", *arguments)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nproc_per_node": 0}, "--nproc-per-node must be 1 or more"),
        ({"nnodes": 0}, "--nnodes must be 1 or more"),
        ({"max_restarts": -1}, "--max-restarts must be 0 or more"),
        ({"timeout_before_kill": -1.0}, "--timeout-before-kill must be 0 or more seconds, not -1"),
        ({"node_rank": 1}, "--node-rank 1 is not one of"),
        ({"master_port": 70000}, "--master-port must be 1 to 65535"),
        ({"nnodes": 2}, "need --node-rank, --master-addr, --master-port"),
        ({"nnodes": 2, "node_rank": 0, "master_addr": "a"}, "need --master-port"),
        (
            {"nnodes": 2, "node_rank": 0, "master_addr": "a", "master_port": 1, "secret": None},
            "set FERRODIST_SECRET",
        ),
        ({"program": ""}, "empty name"),
        (
            {"program": "no/such/script.py", "kind": ProgramKind.SCRIPT},
            "there is no script 'no/such/script.py'",
        ),
        ({"program": "no-such-program", "kind": ProgramKind.EXECUTABLE}, "there is no executable"),
    ],
)
def test_impossible_launches_are_refused(values, message):
    """A wrong value is refused when the spec is constructed, with advice."""
    with pytest.raises(ValueError, match=message):
        make_spec(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "module"}, "kind must be a ProgramKind, not str"),
        ({"arguments": "--x"}, "arguments must be a tuple of texts, not str"),
        ({"arguments": (1,)}, "arguments must be texts, not int"),
        ({"nproc_per_node": "2"}, "nproc_per_node must be an integer, not '2'"),
        ({"max_restarts": 1.5}, "max_restarts must be an integer, not 1.5"),
    ],
)
def test_launches_of_wrong_types_are_refused(values, message):
    """When they are made, not when a rank is started."""
    with pytest.raises(TypeError, match=message):
        make_spec(**values)


@pytest.mark.parametrize(
    ("descriptors", "processes", "user", "expected", "reason"),
    [
        (1024, 4096, 1000, 330, "open files"),
        (1024, 100, 1000, 100, "processes"),
        (1024, 100, 0, 330, "open files"),
        (8, resource.RLIM_INFINITY, 1000, 1, "open files"),
        (resource.RLIM_INFINITY, 50, 1000, 50, "processes"),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1000, math.inf, ""),
    ],
)
def test_the_most_ranks_that_the_limits_allow(monkeypatch, descriptors, processes, user, expected, reason):
    """The narrower limit counts, where the kernel holds this user to it, and one more rank is refused."""
    soft = {resource.RLIMIT_NOFILE: descriptors, resource.RLIMIT_NPROC: processes}
    monkeypatch.setattr(resource, "getrlimit", lambda number: (soft[number], resource.RLIM_INFINITY))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    most, limit = rank_limit()
    assert most == expected
    assert reason in limit
    if expected < math.inf:
        assert make_spec(nproc_per_node=expected).nproc_per_node == expected
        with pytest.raises(ValueError, match=rf"allows: {expected} ranks?, for the limit on {reason}"):
            make_spec(nproc_per_node=expected + 1)


def test_environments_are_made_one_at_a_time(monkeypatch):
    """A rank's environment is built when that rank is started, so many ranks do not fill the memory beforehand."""
    made = []

    class Group:
        def __init__(self, ranks, **_):
            assert next(iter(ranks)).rank == 0
            assert len(made) == 1

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def run(self):
            return "done"

    monkeypatch.setattr(launcher, "rank_environment", lambda *_, **__: made.append({}) or {})
    monkeypatch.setattr(launcher, "WorkerGroup", Group)
    spec, logs = make_spec(nproc_per_node=5), JobLogs(LogOptions(), run_id="job", role="default", ranks=range(5))
    outcome = launcher._run_attempt(spec, ATTEMPT, [frozenset()] * 5, inbox=None, sinks=None, logs=logs)
    assert outcome == "done"


def test_the_secret_comes_from_the_environment_and_is_not_shown(monkeypatch):
    """FERRODIST_SECRET is the default secret, and printing a spec does not reveal it."""
    monkeypatch.setenv("FERRODIST_SECRET", "do-not-show")
    spec = LaunchSpec(program="pkg", kind=ProgramKind.MODULE)
    assert spec.secret == "do-not-show"
    assert "do-not-show" not in repr(spec)


@pytest.mark.parametrize(("given", "expected"), [(None, ["0", "1", "2"]), ("4, 2,7,1", ["4", "2", "7"])])
def test_a_virtual_local_rank_sees_its_own_gpu(given, expected, monkeypatch):
    """As torchrun: LOCAL_RANK is 0, and the device with that index is the rank's."""
    base = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    spec = make_spec(nproc_per_node=3, virtual_local_rank=True, role="trainer")
    found = [rank_environment(spec, ATTEMPT, local_rank, base=base, cores=8) for local_rank in range(3)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == expected
    assert [(each["RANK"], each["LOCAL_RANK"], each["ROLE_NAME"]) for each in found] == [
        (str(rank), "0", "trainer") for rank in range(3)
    ]


def test_amds_variable_of_gpus_comes_first(monkeypatch):
    """As torchrun: both variables name the rank's own."""
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "5,6")
    base = {"HIP_VISIBLE_DEVICES": "5,6", "CUDA_VISIBLE_DEVICES": "0"}
    found = rank_environment(make_spec(nproc_per_node=2, virtual_local_rank=True), ATTEMPT, 1, base=base, cores=8)
    assert (found["HIP_VISIBLE_DEVICES"], found["CUDA_VISIBLE_DEVICES"]) == ("6", "6")


def test_an_outer_launchers_file_of_errors_is_not_the_ranks():
    """Else several ranks would write into one file that is not theirs."""
    found = rank_environment(make_spec(), ATTEMPT, 0, base={"TORCHELASTIC_ERROR_FILE": "/x/0/error.json"}, cores=8)
    assert "TORCHELASTIC_ERROR_FILE" not in found


def test_too_few_gpus_for_virtual_local_ranks(monkeypatch):
    """Two ranks would otherwise share one without a word."""
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(
        ValueError, match="each of the 3 ranks a GPU of its own, and CUDA_VISIBLE_DEVICES='0,1' names 2"
    ):
        make_spec(nproc_per_node=3, virtual_local_rank=True)
