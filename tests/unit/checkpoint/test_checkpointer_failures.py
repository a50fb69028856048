"""Ranks that know different things of saves under way, saves to one path, and queues that are not full."""

from __future__ import annotations

import gc
import importlib
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

import ferrodist as fd
from ferrodist.checkpoint import AsyncCheckpointer, DistCheckpointError, load_distributed
from ferrodist.checkpoint.async_checkpointer import StagingBuffer
from ferrodist.checkpoint.storage.local import LocalStorage
from ferrodist.checkpoint.storage.local_writer import LocalFileWriter
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ferrodist.backends.base import Backend
    from ferrodist.checkpoint.save_plan import Span


def _fail_steps(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    put = LocalStorage.put

    def fail(storage: LocalStorage, name: str, data: bytes) -> None:
        if storage.path.name in [f"step-{step:08d}" for step in steps]:
            raise OSError(28, "no room")
        put(storage, name, data)

    monkeypatch.setattr(LocalStorage, "put", fail)


def test_a_failure_that_only_one_rank_has_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save raises on all ranks: those that know of it don't begin one alone."""
    _fail_steps(monkeypatch, 1)

    def program(group: Backend) -> None:
        with AsyncCheckpointer(tmp_path, group=group, timeout=20) as checkpointer:
            future = checkpointer.save_async({"a": torch.ones(3)}, 1)
            if group.rank == 0:
                with pytest.raises(DistCheckpointError, match="no room"):
                    future.wait()
            else:
                future.settle()
            fd.barrier(group=group)
            with pytest.raises(DistCheckpointError, match=r"step-00000001, failed: .*no room"):
                checkpointer.save_async({"a": torch.ones(3)}, 2)
            checkpointer.save_async({"a": torch.ones(3)}, 3).wait()

    run_ranks(program, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_no_memory_for_the_copy_on_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise at once, and the next save goes well."""
    fill = StagingBuffer.fill
    poor: set[int] = set()

    def fail(buffer: StagingBuffer, views: Mapping[Span, torch.Tensor]) -> Callable[[Span], torch.Tensor]:
        if threading.get_ident() in poor:
            poor.clear()
            raise MemoryError("not so much")
        return fill(buffer, views)

    monkeypatch.setattr(StagingBuffer, "fill", fail)

    def program(group: Backend) -> None:
        with AsyncCheckpointer(tmp_path, group=group, timeout=20) as checkpointer:
            if group.rank == 1:
                poor.add(threading.get_ident())
            fd.barrier(group=group)
            with pytest.raises(DistCheckpointError, match=r"rank 1 could not copy .*not so much"):
                checkpointer.save_async({"a": torch.ones(3)}, 1)
            checkpointer.save_async({"a": torch.ones(3)}, 1).wait()

    run_ranks(program, 2)


def test_two_saves_of_one_step(tmp_path: Path) -> None:
    """The second waits for the first, also where the queue has room, and replaces it."""

    def program(group: Backend) -> None:
        with AsyncCheckpointer(tmp_path, group=group, queue=2) as checkpointer:
            futures = [checkpointer.save_async({"a": torch.full((300_000,), float(value))}, 1) for value in range(3)]
            assert futures[0].done()
            for future in futures:
                future.wait()
        assert load_distributed(futures[0].path, group=group)["a"][0] == 2.0

    run_ranks(program, 2)


def test_two_failures_are_reported_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second failure is still reported after the first was raised."""
    _fail_steps(monkeypatch, 1, 2)
    checkpointer = AsyncCheckpointer(tmp_path, queue=5)
    gate = threading.Event()
    close = LocalFileWriter.close

    def close_late(writer: LocalFileWriter) -> None:
        assert gate.wait(30)
        close(writer)

    monkeypatch.setattr(LocalFileWriter, "close", close_late)
    for step in (1, 2, 3):
        checkpointer.save_async({"a": torch.ones(3)}, step)
    gate.set()
    for step in (1, 2):
        with pytest.raises(DistCheckpointError, match=f"step-0000000{step}, failed"):
            checkpointer.wait()
    checkpointer.close()


def test_a_queue_that_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No save waits for another as long as fewer are under way than may be."""
    gate = threading.Event()
    close = LocalFileWriter.close

    def close_late(writer: LocalFileWriter) -> None:
        assert gate.wait(30)
        close(writer)

    monkeypatch.setattr(LocalFileWriter, "close", close_late)
    with AsyncCheckpointer(tmp_path, queue=5) as checkpointer:
        futures = [checkpointer.save_async({"a": torch.ones(3)}, step) for step in range(6)]
        assert not any(future.done() for future in futures)
        with pytest.raises(TimeoutError, match="goes on"):
            futures[0].wait(0.001)
        gate.set()


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_a_failed_save_releases_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_waited_for: bool
) -> None:
    """An unreferenced checkpointer is collected with its copies; an unreported failure is logged then."""

    def fail(*_: object) -> None:
        raise OSError(28, "no room")

    saving = importlib.import_module("ferrodist.checkpoint.save_distributed")  # not the function
    monkeypatch.setattr(saving, "write_safetensors", fail)
    saves = AsyncCheckpointer(tmp_path)
    memory = weakref.ref(saves._free[0])
    future = saves.save_async({"a": torch.zeros(1000)}, 1)
    future.settle()
    if is_waited_for:
        with pytest.raises(DistCheckpointError, match="no room"):
            future.wait()
    gone = weakref.ref(saves)
    assert caplog.text == ""
    assert saves._thread is not None
    saves._thread.submit(int).result()  # the thread lets go of a save a moment after the future is done
    del saves
    gc.collect()
    assert gone() is None
    assert memory() is None
    assert ("no room" in caplog.text) != is_waited_for
