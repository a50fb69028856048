"""Folders after a save that failed while it was published, or right after."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from ferrodist.checkpoint import (
    DistCheckpointError,
    PerRank,
    collective_steps,
    load_distributed,
    save_distributed,
    verify,
)
from ferrodist.checkpoint.format.manifest import INDEX_NAME, MANIFEST_NAME
from ferrodist.checkpoint.storage import RemoteStorage, local
from ferrodist.checkpoint.storage.local import LocalStorage
from ferrodist.checkpoint.storage.local_writer import LocalFileWriter
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.checkpoint.storage import Storage

_SAVING = importlib.import_module("ferrodist.checkpoint.save_distributed")  # not the function


def _save(path: Path, value: float = 1.0) -> None:
    save_distributed({"a": torch.full((3,), value)}, path)


def _saved(path: Path) -> float:
    return float(load_distributed(path)["a"][0])


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _fail_to_put(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    put = LocalStorage.put

    def fail(storage: LocalStorage, other: str, data: bytes) -> None:
        if other == name:
            raise OSError(28, "no room")
        put(storage, other, data)

    monkeypatch.setattr(LocalStorage, "put", fail)


@pytest.mark.parametrize("is_first", [True, False])
def test_no_room_for_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    """The published files are removed, the previous checkpoint stays, and the next save to the folder succeeds."""
    path = tmp_path / "saved"
    if not is_first:
        _save(path)
    before = _names(path) if path.exists() else None
    _fail_to_put(monkeypatch, MANIFEST_NAME)
    with pytest.raises(DistCheckpointError, match="no room"):
        _save(path, 2.0)
    assert (_names(path) if path.exists() else None) == before
    monkeypatch.undo()
    _save(path, 3.0)
    assert _saved(path) == 3.0


@pytest.mark.parametrize("is_first", [True, False])
def test_no_room_for_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    """On a disk that has no room, or no inode, for the last small file the save fails as a whole."""
    path = tmp_path / "saved"
    if not is_first:
        _save(path)
    before = _names(path) if path.exists() else None
    create = LocalStorage.create

    def fail(storage: LocalStorage, save_id: str, name: str, size_bytes: int) -> LocalFileWriter:
        if name == INDEX_NAME:
            raise OSError(28, "No space left on device")
        return create(storage, save_id, name, size_bytes)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "create", fail)
        with pytest.raises(DistCheckpointError, match="No space left"):
            _save(path, 2.0)
    assert (_names(path) if path.exists() else None) == before
    _save(path, 3.0)
    assert _saved(path) == 3.0


def test_a_disk_without_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many files a disk has room for: the save fails and leaves nothing, or all of the checkpoint is there."""
    open_file, left = os.open, [0]

    def open_or_fail(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_CREAT and not Path(path).exists():
            if not left[0]:
                raise OSError(28, "No space left on device", str(path))
            left[0] -= 1
        return open_file(path, flags, *rest, **named)

    outcomes = []
    for number in range(7):
        left[0] = number
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", open_or_fail)
            try:
                _save(tmp_path / "saved", float(number))
                outcomes.append(True)
            except DistCheckpointError:
                outcomes.append(False)
        if outcomes[-1]:
            assert verify(tmp_path / "saved").is_sound
            assert len(_names(tmp_path / "saved")) == 3
            shutil.rmtree(tmp_path / "saved")
        assert not _names(tmp_path)
    assert outcomes == sorted(outcomes)
    assert len(set(outcomes)) == 2


def test_an_index_that_a_store_refuses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint is there by then: the save has succeeded, and the log says that the index is missing."""
    put = RemoteStorage.put

    def fail(storage: RemoteStorage, name: str, data: bytes) -> None:
        if name == INDEX_NAME:
            raise OSError(28, "no room")
        put(storage, name, data)

    monkeypatch.setattr(RemoteStorage, "put", fail)
    with caplog.at_level(logging.WARNING, logger="ferrodist"):
        save_distributed({"a": torch.ones(3)}, "memory://an-index-that-fails")
    assert "index.json is missing, without which Hugging Face's tools find no tensors: no room" in caplog.text
    assert load_distributed("memory://an-index-that-fails")["a"].tolist() == [1.0] * 3


def test_a_published_manifest_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If only its folder can't be synced, the checkpoint may survive a restart: nothing is removed."""
    _save(tmp_path)
    sync = local._sync_folder

    def fail(path: Path) -> None:
        if path == tmp_path and read_is_new():
            raise OSError(5, "a bad disk")
        sync(path)

    def read_is_new() -> bool:
        return _saved(tmp_path) == 2.0

    monkeypatch.setattr(local, "_sync_folder", fail)
    with pytest.raises(DistCheckpointError, match="a bad disk"):
        _save(tmp_path, 2.0)
    monkeypatch.undo()
    assert _saved(tmp_path) == 2.0


def test_two_first_saves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that comes later is there in the end, whole; no file is written over."""
    path, outcomes = tmp_path / "saved", []
    begin = LocalStorage.begin

    def begin_late(storage: LocalStorage, save_id: str) -> None:
        if not outcomes:
            outcomes.append("the other")
            _save(path, 1.0)  # between the plan of the save below and its writing
        begin(storage, save_id)

    monkeypatch.setattr(LocalStorage, "begin", begin_late)
    _save(path, 2.0)
    assert outcomes
    assert _saved(path) == 2.0


def test_a_damaged_manifest_is_saved_over(tmp_path: Path) -> None:
    """A save replaces it, since it is no checkpoint to lose."""
    _save(tmp_path)
    (tmp_path / MANIFEST_NAME).write_bytes(b"{}")
    _save(tmp_path, 2.0)
    assert _saved(tmp_path) == 2.0


def test_an_unfinished_manifest_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill leaves it under another name, and the next save removes that file."""

    def die(writer: LocalFileWriter) -> None:
        del writer

    with monkeypatch.context() as patch:
        close = LocalFileWriter.close

        def close_or_die(writer: LocalFileWriter) -> None:
            close(writer)
            if MANIFEST_NAME in writer.path.name:
                patch.setattr(LocalFileWriter, "discard", die)
                patch.setattr(LocalStorage, "discard", lambda *_: None)
                raise KeyboardInterrupt

        patch.setattr(LocalFileWriter, "close", close_or_die)
        with pytest.raises(KeyboardInterrupt):
            _save(tmp_path)
    assert len(_names(tmp_path)) > 1
    _save(tmp_path, 2.0)
    assert len(_names(tmp_path)) == 3


def test_disks_that_ranks_dont_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when each host has a folder of this name: the error says so."""
    open_storage = _SAVING.open_storage
    elsewhere: set[int] = set()

    def of_own(path: Path, options: None) -> Storage:
        storage = open_storage(path, options)
        if threading.get_ident() in elsewhere:
            assert isinstance(storage, LocalStorage)
            storage.path = tmp_path / "another host" / "saved"
        return storage

    monkeypatch.setattr(_SAVING, "open_storage", of_own)

    def program(group: Backend) -> None:
        if group.rank == 1:
            elsewhere.add(threading.get_ident())
        with pytest.raises(DistCheckpointError, match="all ranks must see one disk"):
            save_distributed({"own": PerRank(torch.ones(3))}, tmp_path / "saved", group=group)

    run_ranks(program, 2)
    assert not list(tmp_path.iterdir())


def test_files_published_by_a_killed_first_save_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the next save has fewer files: tools that read all files of a folder would read them."""
    tensors = {str(number): torch.ones(3) for number in range(3)}
    with monkeypatch.context() as patch:

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(LocalStorage, "put", die)
        for name in ("remove", "discard"):
            patch.setattr(LocalStorage, name, lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            save_distributed(tensors, tmp_path, max_file_bytes=1)
    assert any(name.endswith("-00003-of-00003.safetensors") for name in _names(tmp_path))
    _save(tmp_path, 2.0)
    assert len(_names(tmp_path)) == 3


def test_programs_without_a_group_that_save_to_one_path(tmp_path: Path) -> None:
    """Each takes itself for the only rank: those that come too late raise, and what is there is whole."""
    for turn in range(10):
        path, outcomes = tmp_path / f"{turn}", []

        def save(value: int, path: Path = path, outcomes: list[str] = outcomes) -> None:
            try:
                save_distributed({"a": torch.full((300_000,), float(value))}, path)
                outcomes.append("saved")
            except DistCheckpointError:
                outcomes.append("refused")

        threads = [threading.Thread(target=save, args=(value,)) for value in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert "saved" in outcomes
        assert len(outcomes) == 3
        load_distributed(path)


def test_a_save_takes_five_object_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two agree on the path and plan through rank 0, one tells that all have written, and two commit."""
    calls: list[tuple[int, str]] = []

    def recording(name: str) -> None:
        collective = getattr(collective_steps, name)

        def record(*arguments: object, group: Backend, timeout: float) -> object:
            calls.append((group.rank, name.removesuffix("_object")))
            return collective(*arguments, group=group, timeout=timeout)

        monkeypatch.setattr(collective_steps, name, record)

    for name in ("all_gather_object", "broadcast_object", "gather_object", "scatter_object"):
        recording(name)
    run_ranks(lambda group: save_distributed({"a": torch.ones(3)}, tmp_path, group=group), 2, backend="simulated")
    expected = ["gather", "scatter", "all_gather", "gather", "scatter"]
    for rank in range(2):
        assert [name for each, name in calls if each == rank] == expected
