"""Saving while the program goes on."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrodist as fd
from ferrodist.checkpoint import (
    AsyncCheckpointer,
    DistCheckpointError,
    find_latest,
    list_checkpoints,
    load_distributed,
)
from ferrodist.checkpoint.storage.local_writer import LocalFileWriter
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from ferrodist.backends.base import Backend


class _Gate:
    """Holds back all writing until it is opened, or makes it fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.error: OSError | None = None
        self.started = threading.Semaphore(0)
        original = LocalFileWriter.close

        def close(writer: LocalFileWriter) -> None:
            self.started.release()
            assert self.is_open.wait(30)
            if self.error is not None and "safetensors" in writer.path.name:
                raise self.error
            original(writer)

        monkeypatch.setattr(LocalFileWriter, "close", close)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> _Gate:
    return _Gate(monkeypatch)


def test_the_state_may_change_after_save_async_returns(tmp_path: Path, gate: _Gate) -> None:
    """The checkpoint has the state at the return of save_async, and collectives may come before it is written."""

    def program(group: Backend) -> float:
        values = torch.full((4, 1000), float(group.rank))
        state = {"own": fd.DTensor.from_local(values, fd.DeviceMesh(group, (2,)), fd.Shard(0)), "step": 7}
        with AsyncCheckpointer(tmp_path, group=group) as checkpointer:
            future = checkpointer.save_async(state, 7)
            assert not future.done()
            values.fill_(-1.0)
            total = float(fd.allreduce(torch.ones(1), group=group))
            fd.barrier(group=group)
            gate.is_open.set()
            path = future.wait()
        loaded = load_distributed(path, group=group)
        assert loaded["step"] == 7
        assert loaded["own"].tolist() == [[0.0] * 1000] * 4 + [[1.0] * 1000] * 4
        assert future.done()
        assert future.exception() is None
        return total

    assert run_ranks(program, 2) == [2.0, 2.0]


def test_a_failure_is_raised_by_the_future_and_not_again(tmp_path: Path, gate: _Gate) -> None:
    """wait() raises on all ranks what went wrong on one; the next save goes well, and the failed one left nothing."""
    gate.is_open.set()

    def program(group: Backend) -> None:
        with AsyncCheckpointer(tmp_path, group=group) as checkpointer:
            good = checkpointer.save_async({"a": torch.ones(3)}, 1).wait()
            fd.barrier(group=group)
            gate.error = OSError(28, "no room")
            future = checkpointer.save_async({"a": torch.zeros(3)}, 2)
            with pytest.raises(DistCheckpointError, match="no room"):
                future.wait()
            fd.barrier(group=group)
            gate.error = None
            checkpointer.save_async({"a": torch.full((3,), 3.0)}, 3).wait()
        assert load_distributed(good, group=group)["a"].tolist() == [1.0] * 3

    run_ranks(program, 2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000001", "step-00000003"]


def test_an_unreported_failure_is_raised_by_the_next_save(tmp_path: Path, gate: _Gate) -> None:
    """Also by close(), without a next save; the save after that is not refused."""
    gate.is_open.set()

    def program(group: Backend) -> None:
        checkpointer = AsyncCheckpointer(tmp_path, group=group)
        gate.error = OSError(5, "a bad disk")
        fd.barrier(group=group)
        checkpointer.save_async({"a": torch.ones(3)}, 1)
        with pytest.raises(DistCheckpointError, match=r"step-00000001, failed: .*a bad disk"):
            checkpointer.save_async({"a": torch.ones(3)}, 2)
        checkpointer.save_async({"a": torch.ones(3)}, 3)
        with pytest.raises(DistCheckpointError, match=r"step-00000003, failed: .*a bad disk"):
            checkpointer.close()
        checkpointer.close()
        with pytest.raises(RuntimeError, match="closed"):
            checkpointer.save_async({"a": torch.ones(3)}, 4)

    run_ranks(program, 2)


def test_memory_is_allocated_once(tmp_path: Path) -> None:
    """The same buffer holds each state, unless one is larger."""

    def program(group: Backend) -> list[int]:
        places = []
        with AsyncCheckpointer(tmp_path, group=group) as checkpointer:
            for step in range(3):
                checkpointer.save_async({"a": torch.full((5000,), float(step))}, step).wait()
                places.append(checkpointer._free[0]._memory.data_ptr())
                assert len(checkpointer._free) == 1
        return places

    (places,) = run_ranks(program, 1)
    assert len(set(places)) == 1


@pytest.mark.parametrize("queue", [0, 2])
def test_how_many_saves_may_wait(tmp_path: Path, gate: _Gate, queue: int) -> None:
    """With queue=0 a save waits for the one before; with queue=n there are n more that need not."""

    def program(group: Backend) -> list[int]:
        with AsyncCheckpointer(tmp_path, group=group, queue=queue) as checkpointer:
            futures = [checkpointer.save_async({"a": torch.full((3,), float(step))}, step) for step in range(queue + 1)]
            assert not any(future.done() for future in futures)
            opener = threading.Timer(0.05, gate.is_open.set)
            opener.start()
            futures.append(checkpointer.save_async({"a": torch.ones(3)}, queue + 1))
            opener.join()
            assert futures[0].done()
            return [int(load_distributed(future.wait(), group=group)["a"][0]) for future in futures[:-1]]

    assert run_ranks(program, 1) == [list(range(queue + 1))]


def test_old_checkpoints_are_removed(tmp_path: Path) -> None:
    """keep_last keeps the newest loadable ones; a damaged one neither counts nor is removed."""

    def program(group: Backend) -> list[str]:
        with AsyncCheckpointer(tmp_path, group=group, keep_last=2) as checkpointer:
            for step in (1, 2):
                checkpointer.save_async({"a": torch.ones(9)}, step).wait()
            fd.barrier(group=group)
            if group.rank == 0:
                next((tmp_path / "step-00000002").glob("*.safetensors")).write_bytes(b"cut")
            fd.barrier(group=group)
            for step in (3, 4, 5):
                checkpointer.save_async({"a": torch.ones(9)}, step).wait()
        return [path.rpartition("-")[2] for path in list_checkpoints(tmp_path)]

    assert run_ranks(program, 2)[0] == ["00000004", "00000005"]
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["2", "4", "5"]
    assert str(find_latest(tmp_path)).endswith("step-00000005")
    assert find_latest(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"queue": -1}, ValueError, "queue"),
        ({"queue": True}, TypeError, "queue"),
        ({"keep_last": 0}, ValueError, "keep_last"),
        ({"keep_last": "2"}, TypeError, "keep_last"),
    ],
)
def test_wrong_arguments(tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Each is named, before the folder is looked at together with other ranks."""
    with pytest.raises(error, match=message):
        AsyncCheckpointer(tmp_path, **options)
    with pytest.raises(error, match=message):
        AsyncCheckpointer(5, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (True, TypeError), ("1", TypeError)])
def test_a_wrong_step(tmp_path: Path, step: Any, error: type[Exception]) -> None:
    """A step is a number from 0."""
    with AsyncCheckpointer(tmp_path) as checkpointer, pytest.raises(error, match="step must be"):
        checkpointer.save_async({}, step)
    with pytest.raises(error, match="step must be"):
        checkpointer.path_of(step)


def test_how_long_to_wait(tmp_path: Path, gate: _Gate) -> None:
    """Timeouts are those of all other calls: infinity waits, and what is no time is refused."""
    with AsyncCheckpointer(tmp_path) as checkpointer:
        future = checkpointer.save_async({"a": torch.ones(9)}, 1)
        with pytest.raises(TimeoutError, match="is not written after 0 s, and goes on"):
            future.wait(0)
        for timeout, error in ((-1, ValueError), ("1", TypeError)):
            with pytest.raises(error, match="timeout must be"):
                future.wait(timeout)  # type: ignore[arg-type]
        threading.Timer(0.1, gate.is_open.set).start()
        assert future.wait(math.inf) == checkpointer.path_of(1)


def test_leftovers_of_a_killed_job_are_removed(tmp_path: Path) -> None:
    """When the next job begins: files of saves without a manifest, and their folders; nothing else is removed."""
    with AsyncCheckpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save_async({"a": torch.ones(3)}, step).wait()
    (tmp_path / "step-00000002" / "metadata.json").unlink()
    (tmp_path / "step-00000002" / "model.safetensors.index.json").unlink()
    (tmp_path / "step-00000003" / "metadata.json").unlink()
    (tmp_path / "step-00000003" / "notes.txt").write_text("kept")
    (tmp_path / "step-00000004" / ".saving-0123456789ab").mkdir(parents=True)
    (tmp_path / "other" / ".saving-0123456789ab").mkdir(parents=True)
    AsyncCheckpointer(tmp_path).close()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert [name for name in left if "step-00000001" not in name] == [
        "other",
        "other/.saving-0123456789ab",
        "step-00000003",
        "step-00000003/model.safetensors.index.json",
        "step-00000003/notes.txt",
    ]
    assert len(list_checkpoints(tmp_path)) == 1


def test_the_last_one_is_the_newest_whatever_clocks_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that goes on where the clock is behind saves what find_latest finds."""
    for now, steps in ((10**18, (1, 2)), (10**17, (3, 4))):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        with AsyncCheckpointer(tmp_path) as checkpointer:
            for step in steps:
                checkpointer.save_async({"a": torch.ones(3)}, step)
    assert [path[-1] for path in list_checkpoints(tmp_path)] == ["1", "2", "3", "4"]
