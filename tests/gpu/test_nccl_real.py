"""NCCL itself, on a GPU: one rank, and two on one GPU where NCCL can do that. See nccl_program.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ferrodist as fd
from ferrodist.backends.nccl.communicator import load_nccl, why_no_nccl

_PROGRAM = Path(__file__).with_name("nccl_program.py")
_PARTS = ("reductions", "movement", "streams", "graphs", "given_stream", "messages", "subgroups", "training", "sharded")
_RANKS_ON_ONE_GPU = (2, 30, 3)
"""The first NCCL that lets ranks share a GPU, with the variables below."""

_SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
_KILLED = -9
_SECONDS = 100.0

_PROBE = """
import json
from ferrodist.backends.nccl.communicator import load_nccl, why_no_nccl
why = why_no_nccl()
print(json.dumps([why, [] if why else load_nccl().version]))
"""


def _probe() -> tuple[str | None, tuple[int, ...]]:
    """The reason why NCCL can't be used, and its version; asked in another process, so that tests can fork here."""
    if not torch.backends.cuda.is_built():
        return why_no_nccl(), ()
    said = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=True, timeout=60)
    why, version = json.loads(said.stdout.splitlines()[-1])
    return why, tuple(version)


_WHY_NOT, _VERSION = _probe()
pytestmark = [
    pytest.mark.skipif(_WHY_NOT is not None, reason=f"NCCL can't be used here: {_WHY_NOT}"),
    pytest.mark.timeout(150),
]


def _why_not_two() -> str | None:
    if _WHY_NOT is not None or torch.cuda.device_count() > 1:
        return _WHY_NOT
    if _VERSION >= _RANKS_ON_ONE_GPU:
        return None
    return f"there is one GPU, which two ranks can't share with NCCL {'.'.join(map(str, _VERSION))}"


_WHY_NOT_TWO = _why_not_two()
needs_two = pytest.mark.skipif(_WHY_NOT_TWO is not None, reason=str(_WHY_NOT_TWO))


def run(meeting: Path, world_size: int, backend: str, *parts: str, program: Path = _PROGRAM) -> list[int]:
    """Run parts of a program on ranks that are processes; returns their exit codes, and prints their output."""
    environment = {**os.environ, **_SHARED_GPU, "WORLD_SIZE": str(world_size)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), f"file://{meeting}/meet", backend, *parts],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    outputs = []
    try:
        outputs.extend(rank.communicate(timeout=_SECONDS)[0] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    print("\n".join(outputs))
    return [rank.returncode for rank in ranks]


@pytest.mark.parametrize("backend", ["hybrid", "nccl"])
def test_one_rank(backend: str, tmp_path: Path) -> None:
    """All parts pass in a group of one rank."""
    assert run(tmp_path, 1, backend, *_PARTS) == [0]


@needs_two
@pytest.mark.parametrize("backend", ["hybrid", "nccl"])
def test_two_ranks(backend: str, tmp_path: Path) -> None:
    """All parts pass in groups of two ranks, of both kinds."""
    assert run(tmp_path, 2, backend, *_PARTS) == [0, 0]


@needs_two
def test_mismatches_and_late_ranks_are_errors(tmp_path: Path) -> None:
    """Mismatched calls and a late rank raise on both ranks, and the GPU is free again."""
    assert run(tmp_path, 2, "hybrid", "mismatch", "late") == [0, 0]


@needs_two
def test_a_killed_rank_is_reported(tmp_path: Path) -> None:
    """When a rank is killed the other raises PeerLostError, and continues alone."""
    assert run(tmp_path, 2, "hybrid", "killed") == [0, _KILLED]


def test_version_and_unique_ids() -> None:
    """NCCL's version is known, and unique ids differ."""
    assert load_nccl().version > (2, 18, 0)
    assert fd.NcclUniqueId.create() != fd.NcclUniqueId.create()
