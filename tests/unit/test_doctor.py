"""What ``ferrodist doctor`` tells."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from nccl_fakes import FakeNccl

import ferrodist as fd
from ferrodist import doctor
from ferrodist.backends.mpi import library as mpi_library
from ferrodist.backends.native import library as native_library
from ferrodist.backends.nccl import library
from ferrodist.cli import main

if TYPE_CHECKING:
    import pytest


def _found() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.findings()}


def test_every_backend_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The command succeeds and has a line for each backend, with a version or a reason."""
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(doctor.PROBES)
    for word in ("tcp", "native", "nccl", "hybrid", "mpi", "ucc", "torch", "GPUs"):
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
    monkeypatch.setattr(library, "why_no_gpu", lambda: "no GPU in this test")
    monkeypatch.delenv("FERRODIST_ENABLE_GPU_FALLBACK", raising=False)
    monkeypatch.setenv("FERRODIST_UCC_LIBRARY", "/nowhere/libucc.so.1")
    found = _found()
    assert found["torch"].detail == torch.__version__
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
    monkeypatch.setattr(library, "why_no_gpu", lambda: None)
    monkeypatch.setattr(library, "_found", library._Found())
    library.why_no_nccl(FakeNccl)
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
    assert not found["native"].is_there
    assert "BackendUnavailable: this installation has no native engine" in found["native"].detail
    assert found["torch"].is_there
