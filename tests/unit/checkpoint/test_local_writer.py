"""Writing to file systems that promise more than they do, and when the program ends meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from ferrodist.checkpoint import DistCheckpointError, load_distributed, save_distributed
from ferrodist.checkpoint.storage import local_writer
from ferrodist.checkpoint.storage.local_writer import LocalFileWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_STATE = {"a": torch.arange(2_500_000)}


@pytest.fixture
def few_places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As many files past the page cache as other tests have; all are given back."""
    yield local_writer._direct_slots
    for _ in range(2):
        assert local_writer._direct_slots.acquire(blocking=False)
    for _ in range(2):
        local_writer._direct_slots.release()


@pytest.mark.usefixtures("few_places")
def test_a_save_goes_on_when_the_program_ends(tmp_path: Path) -> None:
    """A program that doesn't close its checkpointer ends when the checkpoint is written."""
    program = f"""
        import torch
        from ferrodist.checkpoint import AsyncCheckpointer
        checkpointer = AsyncCheckpointer({str(tmp_path)!r}, queue=1)
        for step in range(2):
            checkpointer.save_async({{"a": torch.full((12_000_000,), float(step))}}, step)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)
    for step in range(2):
        assert load_distributed(tmp_path / f"step-{step:08d}")["a"].eq(step).all()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_files_that_cant_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Files are written without a reservation."""

    def refuse(*_: int) -> None:
        raise OSError(number, "not here")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    save_distributed(_STATE, tmp_path)
    assert load_distributed(tmp_path)["a"].equal(_STATE["a"])


@pytest.mark.usefixtures("few_places")
@pytest.mark.parametrize("after", [0, 1, 3])
def test_direct_writes_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The rest goes through the page cache: from the beginning, or after a short write."""
    write, count = os.pwrite, 0

    def refuse(file: int, data: memoryview, at: int) -> int:
        nonlocal count
        count += 1
        if count > after and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not so")
        return write(file, data[:4096] if count == after else data, at)

    monkeypatch.setattr(os, "pwrite", refuse)
    save_distributed(_STATE, tmp_path)
    monkeypatch.undo()
    assert load_distributed(tmp_path)["a"].equal(_STATE["a"])


@pytest.mark.usefixtures("few_places")
@pytest.mark.parametrize("fails_at", [1, 2, 4])
def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    """The thread's error is the save's, with whichever buffer it comes, and nothing stays."""
    write, count = os.pwrite, 0

    def fill_up(file: int, data: memoryview, at: int) -> int:
        nonlocal count
        count += 1
        if count >= fails_at:
            raise OSError(errno.ENOSPC, "no room")
        return write(file, data, at)

    monkeypatch.setattr(os, "pwrite", fill_up)
    with pytest.raises(DistCheckpointError, match="no room"):
        save_distributed(_STATE, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.usefixtures("few_places")
def test_a_thread_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends a write in its thread, the file doesn't count as written."""
    monkeypatch.setattr(local_writer, "_write_all", mock.Mock(side_effect=MemoryError))
    thread = local_writer._WriteThread(0, memoryview(b""), 0)
    with pytest.raises(MemoryError):
        thread.finish()


def test_any_size_in_any_steps(tmp_path: Path) -> None:
    """The file has what was written: around the sizes of blocks and buffers, in small and in large writes."""
    draw = random.Random(0)
    for size in (1 << 20, (1 << 20) + 1, (4 << 20) - 1, 4 << 20, (4 << 20) + 4096, (8 << 20) + 4097, (9 << 20) + 8):
        data = draw.randbytes(size)
        writer = LocalFileWriter(tmp_path / "file", size)
        left = memoryview(data)
        while left:
            step = draw.choice([1, 7, 4096, 65_537, 1 << 20, 5 << 20])
            writer.write(left[:step])
            left = left[step:]
        writer.close()
        assert (tmp_path / "file").read_bytes() == data
