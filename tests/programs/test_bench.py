"""ferrodist bench as a user runs it: real processes of ferrodist, gloo and the limit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_mpi import environment, needs_mpi

import ferrodist
from ferrodist.backends.native import is_native_available
from ferrodist.bench.environments import EmulatedHosts, PeerFailedError

pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")
pytest.importorskip("rich", reason="the extra 'bench' is not installed")

SEARCHED = os.pathsep.join([str(Path(ferrodist.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
LIMIT = 100  # seconds; it takes about 10 where nothing else runs
try:
    with EmulatedHosts():
        NO_HOSTS = ""
except PeerFailedError as error:
    NO_HOSTS = str(error)
OURS = "native" if is_native_available() else "tcp"


def run(tmp_path, *options, variables=None):
    """Run the command; returns what it printed, and the paths and content of its report."""
    done = subprocess.run(
        [sys.executable, "-m", "ferrodist", "bench", *options, "--output", str(tmp_path / "out")],
        cwd=tmp_path,
        env={**os.environ, **(variables or {}), "PYTHONPATH": SEARCHED, "PYTHONWARNINGS": "error"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    (path,) = (tmp_path / "out").glob("bench-*.json")
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["is_complete"]
    return done.stdout, path, report


def test_peers_are_measured_and_checked(tmp_path):
    """Every peer has figures for every case that it offers, from right results, in all suites of one host."""
    suites = ["--suites", "collectives,messages,submit,overlap,groups", "--ranks", "2"]
    output, path, report = run(tmp_path, *suites, "--peers", f"{OURS},gloo,limit", "--sizes", "8,48K", "--rounds", "2")
    names = ["allreduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
    assert [(case["operation"], case["size_bytes"]) for case in report["cases"]] == [
        *((name, size) for name in names for size in (8, 48 * 1024)),
        ("barrier", 0),
        *((name, size) for name in ("send_recv", "submit", "overlap") for size in (8, 48 * 1024)),
        *(("init_process_group", 0), ("new_group", 0)),
    ]
    for case in report["cases"]:
        peers = [measured["peer"] for measured in case["measurements"]]
        limit = ["limit"] if case["operation"] in (*names, "send_recv") else []
        assert peers == [OURS, "gloo", *limit], case
        assert all(0 < one["p10"] <= one["median"] <= one["p99"] < 100 for one in case["measurements"])
        assert all(len(one["batches"]) == 2 for one in case["measurements"])
        assert case["failures"] == {}
    assert output.count("memcpy (limit) ") == 1 + 2 * (len(names) + 1) + 1
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS)
def test_two_hosts_are_measured_and_removed(tmp_path):
    """Each rank is on a host of its own; the link has figures where iperf3 is there, and a reason where it is not."""
    output, _, report = run(
        tmp_path, "--suites", "hosts", "--peers", f"{OURS},iperf3", "--sizes", "8,1M", "--rounds", "1"
    )
    sizes = [(case["operation"], case["size_bytes"], case["num_hosts"]) for case in report["cases"]]
    assert sizes == [(name, size, 2) for name in ("allreduce", "send_recv") for size in (8, 1 << 20)]
    link = ["iperf3"] if shutil.which("iperf3") else []
    for case in report["cases"]:
        assert [one["peer"] for one in case["measurements"]] == [OURS, *(link if case["size_bytes"] > 8 else [])], case
    assert link or "iperf3 is not installed" in output
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    command = next(peer["command"] for peer in report["peers"] if peer["peer"] == OURS)
    assert command.split()[3].startswith("ferrodist-")
    assert command.split()[3] not in names


@pytest.mark.skipif(not is_native_available(), reason="the model is the native engine's")
def test_growth_is_compared_with_the_model(tmp_path):
    """On one host and, where they can be had, on four: with constants of this machine, and two more pictures."""
    hosts, sizes = ("1" if NO_HOSTS else "1,4"), "8,64K"
    options = ["--suites", "growth", "--ranks", "2,4", "--hosts", hosts, "--operations", "allreduce", "--sizes", sizes]
    output, path, report = run(tmp_path, *options, "--peers", "native", "--rounds", "1")
    stages = [(case["num_hosts"], case["num_ranks"]) for case in report["cases"]]
    assert stages == [stage for stage in ((1, 2), (1, 4), *([] if NO_HOSTS else [(4, 4)])) for _ in range(2)]
    assert output.count("model of ferrodist") == len(stages)
    assert "ferrodist's work grew over the ranks" in output
    constants = report["constants"]
    assert min(constants.pop("handovers")) > 0
    assert all(value > 0 for name, value in constants.items() if not NO_HOSTS or name not in {"message", "sent_byte"})
    for name in ("ranks", "bytes"):
        assert path.with_name(f"{path.stem}-{name}.png").read_bytes().startswith(b"\x89PNG")


@needs_mpi
def test_the_mpi_of_this_machine_is_measured(tmp_path):
    """With --backend mpi, ferrodist over the MPI that mpi4py loads is measured beside the native engine and mpi4py."""
    found = environment("openmpi")
    chosen = {name: found[name] for name in ("MPI4PY_LIBMPI", "PATH")}
    operations = "allreduce,all_gather,send_recv,new_group"
    _, _, report = run(
        tmp_path,
        *("--backend", "mpi", "--suites", "collectives,messages,groups", "--operations", operations, "--ranks", "2"),
        *("--sizes", "48K", "--rounds", "1"),
        variables=chosen,
    )
    native = ["native"] if is_native_available() else []
    assert [case["operation"] for case in report["cases"]] == operations.split(",")
    for case in report["cases"]:
        assert [measured["peer"] for measured in case["measurements"]] == ["mpi", *native, "mpi4py"], case
        assert case["failures"] == {}
    libraries = {peer["peer"]: peer["versions"].get("library", "") for peer in report["peers"]}
    assert libraries["mpi"].startswith("Open MPI 5")
    assert libraries["mpi4py"].startswith("Open MPI v5")
