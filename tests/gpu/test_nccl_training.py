"""Models train over NCCL as in one process, where two ranks can share a GPU. See nccl_training.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_nccl_real import needs_two, run

pytestmark = pytest.mark.timeout(150)


@needs_two
def test_training(tmp_path: Path) -> None:
    """DDP, FSDP, pipelines, batch norm, LocalSGD and checkpoints pass on both ranks."""
    program = Path(__file__).with_name("nccl_training.py")
    assert run(tmp_path, 2, "hybrid", str(tmp_path / "saved"), program=program) == [0, 0]
