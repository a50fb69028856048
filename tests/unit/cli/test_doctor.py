"""What ``ferrodist doctor`` tells."""

from __future__ import annotations

import _ctypes
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nccl_fakes import FakeNccl

import ferrodist as fd
from ferrodist.backends.mpi import runtime as mpi_library
from ferrodist.backends.native import binding as native_library
from ferrodist.backends.nccl import communicator
from ferrodist.backends.ucc import bindings as ucc_library
from ferrodist.cli import doctor
from ferrodist.cli.main import main
from ferrodist.torch_private.versions import describe_version


def _found() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.findings()}


def test_every_backend_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The command succeeds and has a line for each backend, with a version or a reason."""
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(doctor.PROBES)
    for word in ("NUMA", "tcp", "native", "nccl", "hybrid", "mpi", "ucc", "torch", "GPUs"):
        assert any(word in line for line in lines), word
    assert all(line.startswith(("yes  ", "no   ")) for line in lines)


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json what is printed is data."""
    assert main(["doctor", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in read] == [finding.name for finding in doctor.findings()]
    assert all(entry["detail"] for entry in read)


def test_versions_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not there is told with the reason; what is there with its version."""
    monkeypatch.setattr(communicator, "why_no_gpu", lambda: "no GPU in this test")
    monkeypatch.delenv("FERRODIST_ENABLE_GPU_FALLBACK", raising=False)
    monkeypatch.setenv("FERRODIST_UCC_LIBRARY", "/nowhere/libucc.so.1")
    found = _found()
    assert found["torch"].detail == f"{torch.__version__}, which {describe_version(torch.__version__)}"
    for name in ("GPUs", "nccl, hybrid backends"):
        assert not found[name].is_there
        assert found[name].detail == "no GPU in this test"
    assert not found["GPU fallback"].is_there
    assert found["native backend"].is_there is fd.is_native_available()
    assert not found["ucc backend"].is_there
    assert "/nowhere/libucc.so.1" in found["ucc backend"].detail
    assert "hybrid" not in found["chosen"].detail


def test_mpi_is_told_with_its_version_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an MPI loads its name and version are shown, else why none does."""
    monkeypatch.setattr(mpi_library, "_module", SimpleNamespace(get_vendor=lambda: ("Some MPI", (1, 2))))
    assert _found()["mpi backend"] == doctor.Finding(name="mpi backend", is_there=True, detail="Some MPI 1.2")
    monkeypatch.setattr(mpi_library, "_module", None)
    monkeypatch.setattr(mpi_library, "_reason", "libmpi.so: not there")
    assert not _found()["mpi backend"].is_there
    assert "libmpi.so: not there" in _found()["mpi backend"].detail


def test_nccl_is_told_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is NCCL its version is shown, and what would be chosen."""
    monkeypatch.setattr(communicator, "why_no_gpu", lambda: None)
    monkeypatch.setattr(communicator, "_loaded", None)
    communicator.why_no_nccl(FakeNccl)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU of a test {number}")
    monkeypatch.setenv("FERRODIST_ENABLE_GPU_FALLBACK", "1")
    found = _found()
    assert found["nccl, hybrid backends"].detail == "a fake of NCCL"
    assert "GPU of a test 0" in found["GPUs"].detail
    assert found["GPU fallback"].is_there
    assert "hybrid" in found["chosen"].detail


def test_a_probe_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks a look is told in its line; the others go on."""

    def broken() -> None:
        raise fd.BackendUnavailable("this installation has no native engine")

    monkeypatch.setattr(native_library, "load", broken)
    found = _found()
    assert not found["native backend"].is_there
    assert found["native backend"].detail == "this installation has no native engine"
    assert found["torch"].is_there


@pytest.mark.parametrize("error", [SystemExit("this library ends programs"), OSError("one\ntwo"), ValueError()])
def test_libraries_that_break_when_they_are_loaded(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Whatever loading raises is a line like the others, under the name that it always has."""

    def broken() -> None:
        raise error

    for module, name in ((mpi_library, "why_no_mpi"), (ucc_library, "why_no_ucc"), (communicator, "why_no_nccl")):
        monkeypatch.setattr(module, name, broken)
    found = _found()
    assert list(found) == list(doctor.PROBES)
    for name in ("mpi backend", "ucc backend", "nccl, hybrid backends"):
        assert not found[name].is_there
        assert found[name].detail.startswith(f"the look at it failed: {type(error).__name__}")
        assert "\n" not in found[name].detail


@pytest.mark.parametrize("what", ["folder", "text", "another library"])
def test_a_wrong_ucc_library(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What FERRODIST_UCC_LIBRARY names is loaded and looked at; what is no UCC is told as such."""
    path = tmp_path / "libucc.so.1"
    if what == "folder":
        path.mkdir()
    elif what == "text":
        path.write_text("no library")
    named = _ctypes.__file__ if what == "another library" else str(path)
    monkeypatch.setenv("FERRODIST_UCC_LIBRARY", named)
    found = _found()["ucc backend"]
    assert not found.is_there
    assert "there is no UCC here" in found.detail


def test_a_terminal_gets_lines_of_its_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long reasons go on below where they began."""
    monkeypatch.setattr(doctor, "PROBES", {"something": lambda: (False, "word " * 40), "more": lambda: (True, "1.0")})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 4
    assert all(len(line) <= 60 for line in lines)
    assert lines[0].startswith("no   something  word word")
    assert all(line.startswith(" " * 16 + "word") for line in lines[1:-1])
    assert lines[-1] == "yes  more       1.0"


def test_closed_output_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a standard output the command says so."""
    monkeypatch.setattr(doctor, "PROBES", {"something": lambda: (True, "1.0")})
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["doctor"]) == 1
    assert "standard output is closed" in capsys.readouterr().err


_LOOK = """
import sys
from ferrodist.cli import doctor
from ferrodist.cli.main import main
from ferrodist.torch_private.versions import describe_version
doctor.PROBES = {"mpi backend": doctor.PROBES["mpi backend"]}
code = main(["doctor"])
MPI = sys.modules.get("mpi4py.MPI")
print("started" if MPI is not None and MPI.Is_initialized() else "not started")
sys.exit(code)
"""


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed here")
@pytest.mark.parametrize("name", ["libmpi.so.12", "libmpi.so.40"], ids=["MPICH", "Open MPI"])
def test_no_mpi_is_started(name: str) -> None:
    """A look at an MPI loads it, and neither starts it nor needs what starts ranks."""
    folder = Path(os.environ.get("FERRODIST_TEST_MPI", Path(sys.prefix) / "mpi"))
    communicator = next(iter(folder.glob(f"*/lib/{name}")), None)
    if communicator is None:
        pytest.skip(f"there is no {name} in {folder}, where make installs it")
    variables = {**os.environ, "MPI4PY_LIBMPI": str(communicator)}
    done = subprocess.run(
        [sys.executable, "-c", _LOOK], env=variables, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    found, state = done.stdout.splitlines()
    assert found.startswith("yes  mpi backend")
    assert state == "not started"
