"""What keep_last must not remove, and what is left of a removal that was interrupted."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ferrodist.checkpoint import find_latest, list_checkpoints, load_distributed, save_distributed
from ferrodist.checkpoint.storage.local import LocalStorage
from ferrodist.errors import DistCheckpointError
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from ferrodist.backends.base import Backend


def _save(path: Path, **options: Any) -> None:
    save_distributed({"a": torch.ones(3)}, path, **options)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_link_is_no_checkpoint_of_its_own(tmp_path: Path) -> None:
    """What a link called "latest" leads to is not removed as one more old checkpoint."""
    _save(tmp_path / "step-1")
    (tmp_path / "latest").symlink_to(tmp_path / "step-1")
    _save(tmp_path / "step-1", keep_last=1)
    assert list_checkpoints(tmp_path) == [str(tmp_path / "step-1")]
    assert load_distributed(tmp_path / "latest")["a"].tolist() == [1.0] * 3


@pytest.mark.parametrize("keep_last", [1, 2])
def test_what_was_just_saved_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_last: int) -> None:
    """Also where the clock is behind that of the host that saved the others."""
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


def test_what_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    """A file where a folder is expected is an error of checkpoints; where nothing is, there are none."""
    (tmp_path / "file").write_text("")
    for find in (find_latest, list_checkpoints):
        with pytest.raises(DistCheckpointError, match="can't be looked through"):
            find(tmp_path / "file")
    assert find_latest(tmp_path / "nothing") is None
