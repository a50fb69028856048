"""Checkpoints that keep_last must not remove, and the leftovers of an interrupted removal."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ferrodist.checkpoint import (
    checkpoint_folder,
    find_latest,
    list_checkpoints,
    load_distributed,
    reshard,
    save_distributed,
)
from ferrodist.checkpoint.storage.local import LocalStorage
from ferrodist.errors import DistCheckpointError
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline


def _save(path: Path, **options: Any) -> None:
    save_distributed({"a": torch.ones(3)}, path, **options)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_link_does_not_count_as_a_checkpoint(tmp_path: Path) -> None:
    """The target of a link called "latest" is not removed as one more old checkpoint."""
    _save(tmp_path / "step-1")
    (tmp_path / "latest").symlink_to(tmp_path / "step-1")
    _save(tmp_path / "step-1", keep_last=1)
    assert list_checkpoints(tmp_path) == [str(tmp_path / "step-1")]
    assert load_distributed(tmp_path / "latest")["a"].tolist() == [1.0] * 3


@pytest.mark.parametrize("keep_last", [1, 2])
def test_the_new_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_last: int) -> None:
    """Also if the clock is behind that of the host that saved the others."""
    for step in (1, 2):
        _save(tmp_path / f"step-{step}")
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() - 10**12)
    _save(tmp_path / "step-3", keep_last=keep_last)
    assert _names(tmp_path) == ["step-2", "step-3"][2 - keep_last :]


def test_a_folder_that_cant_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint is saved, on all ranks: what is wrong with the others is logged."""

    def refuse(storage: LocalStorage) -> list[str]:
        raise PermissionError(13, "not yours", storage.url)

    monkeypatch.setattr(LocalStorage, "list_folders", refuse)

    def program(group: Backend) -> None:
        _save(tmp_path / "step-1", group=group, keep_last=1)

    with caplog.at_level(logging.WARNING, logger="ferrodist"):
        run_ranks(program, 2)
    assert "not yours" in caplog.text


def test_an_interrupted_removal_is_saved_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without a manifest, left where the process died, don't keep the next save from the folder."""
    _save(tmp_path / "step-1")
    remove = LocalStorage.remove

    def die(storage: LocalStorage, names: Collection[str]) -> None:
        if any(name.endswith(".safetensors") for name in names) and storage.url.endswith("step-1"):
            raise KeyboardInterrupt
        remove(storage, names)

    monkeypatch.setattr(LocalStorage, "remove", die)
    with pytest.raises(KeyboardInterrupt):
        _save(tmp_path / "step-2", keep_last=1)
    monkeypatch.undo()
    assert "metadata.json" not in _names(tmp_path / "step-1")
    _save(tmp_path / "step-1")
    assert find_latest(tmp_path) == str(tmp_path / "step-1")


def test_files_and_missing_folders_in_place_of_a_folder(tmp_path: Path) -> None:
    """A file in place of a folder is an error; a missing folder has no checkpoints."""
    (tmp_path / "file").write_text("")
    for find in (find_latest, list_checkpoints):
        with pytest.raises(DistCheckpointError, match="can't be searched"):
            find(tmp_path / "file")
    assert find_latest(tmp_path / "nothing") is None


@pytest.mark.parametrize("time_ns", [-5, 0, 32_503_680_000 * 10**9, (1 << 63) - 1, 1 << 63])
def test_clocks_that_were_never_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time_ns: int) -> None:
    """A checkpoint saved with a clock wrong by centuries can be loaded, and is the newest until the next save."""
    with monkeypatch.context() as patch:
        for step, clock in enumerate((None, lambda: time_ns, None), 1):
            patch.undo() if clock is None else patch.setattr(time, "time_ns", clock)
            save_distributed({"a": torch.ones(1)}, f"{tmp_path}/step-{step}", keep_last=2)
            assert find_latest(tmp_path) == f"{tmp_path}/step-{step}"
    assert list_checkpoints(tmp_path) == [f"{tmp_path}/step-2", f"{tmp_path}/step-3"]


@pytest.mark.parametrize("scheme", ["", "memory://the-order-of-"])
@pytest.mark.parametrize("drift_seconds", [-86400, -1, 86400])
def test_the_order_of_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, drift_seconds: int) -> None:
    """The last checkpoint saved is the newest, and stays, though a clock was set back, or two jobs' clocks differ."""
    folder = f"{scheme}{drift_seconds}" if scheme else str(tmp_path)
    now = time.time_ns
    for step in range(1, 6):
        drift = drift_seconds * 10**9 * (step % 2)  # every other save is another job's
        monkeypatch.setattr(time, "time_ns", lambda drift=drift: now() + drift)
        save_distributed({"a": torch.ones(1)}, f"{folder}/step-{step}")
        assert find_latest(folder) == f"{folder}/step-{step}"
    assert list_checkpoints(folder) == [f"{folder}/step-{step}" for step in range(1, 6)]
    monkeypatch.setattr(time, "time_ns", lambda: now() - 2 * 86400 * 10**9)
    save_distributed({"a": torch.ones(1)}, f"{folder}/step-2", keep_last=2)  # once more
    assert list_checkpoints(folder) == [f"{folder}/step-5", f"{folder}/step-2"]
    reshard(f"{folder}/step-5", f"{folder}/other", num_ranks=2)
    assert find_latest(folder) == f"{folder}/other"


def test_invalid_commit_times(tmp_path: Path) -> None:
    """A damaged manifest beside, or one with the last valid time, doesn't spoil a save."""
    _save(tmp_path / "one")
    for number, time_ns in enumerate((1 << 63, (1 << 63) - 1, 10**19, 0)):
        _save(tmp_path / f"damaged {number}")
        file = tmp_path / f"damaged {number}" / "metadata.json"
        file.write_bytes(re.sub(rb'"created_ns":\d+', b'"created_ns":%d' % time_ns, file.read_bytes()))
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "empty" / "metadata.json")
    _save(tmp_path / "two")
    assert list_checkpoints(tmp_path) == [str(tmp_path / "one"), str(tmp_path / "two")]


def test_a_checkpoint_that_was_saved_again_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that another job has meanwhile saved to an old one's folder is not removed as old."""
    for step in (1, 2):
        _save(tmp_path / f"step-{step}")
    remove = checkpoint_folder._remove

    def save_and_remove(found: Any) -> None:
        monkeypatch.setattr(checkpoint_folder, "_remove", remove)
        save_distributed({"a": torch.zeros(3)}, found.path)
        remove(found)

    monkeypatch.setattr(checkpoint_folder, "_remove", save_and_remove)
    _save(tmp_path / "step-3", keep_last=2)
    assert load_distributed(tmp_path / "step-1")["a"].tolist() == [0.0] * 3


@pytest.mark.parametrize("moment", ["before", "within", "while"])
def test_two_jobs_remove_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    """A job logs nothing if another job has removed an old checkpoint, or is removing it."""
    _save(tmp_path / "one")
    exclusive = LocalStorage.exclusive

    @contextlib.contextmanager
    def late(storage: LocalStorage, deadline: Deadline) -> Iterator[None]:
        if storage.path.name != "one":
            with exclusive(storage, deadline):
                yield
            return
        with contextlib.ExitStack() as locks:
            if moment == "while":
                locks.enter_context(exclusive(LocalStorage(storage.path), deadline))
            if moment == "within":
                locks.enter_context(exclusive(storage, deadline))
            shutil.rmtree(storage.path) if moment == "before" else (storage.path / "metadata.json").unlink()
            if moment != "within":
                locks.enter_context(exclusive(storage, deadline))
            yield

    monkeypatch.setattr(LocalStorage, "exclusive", late)
    save_distributed({"a": torch.ones(1)}, tmp_path / "two", keep_last=1)
    assert list_checkpoints(tmp_path) == [str(tmp_path / "two")]
    assert not caplog.records
