"""Saves beside forked children, links, other saves, and file systems that refuse direct writes."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

from ferrodist import DeviceMesh, DTensor, Partial, SizeMismatchError
from ferrodist.checkpoint import AsyncCheckpointer, DistCheckpointError, commit, load_distributed, save_distributed
from ferrodist.checkpoint.manifest import INDEX_NAME, MANIFEST_NAME
from ferrodist.checkpoint.storage import LocalStorage, RemoteStorage, local_writer, open_storage
from ferrodist.checkpoint.storage.local_writer import LocalWriter
from ferrodist.deadline import Deadline
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from ferrodist.backends.base import Backend


def test_a_forked_child_has_buffers_of_its_own(tmp_path: Path) -> None:
    """What a child fills its buffers with never gets into its parent's files, nor the other way."""
    size = 3 << 20
    first = LocalWriter(tmp_path / "first", size)
    first.write(memoryview(bytes(size)))
    first.close()
    parent = LocalWriter(tmp_path / "parent", size)
    parent.write(memoryview(b"p" * (size - 1)))
    child = os.fork()
    if not child:
        writer = LocalWriter(tmp_path / "child", size)
        writer.write(memoryview(b"c" * size))
        parent.write(memoryview(b"c"))  # in its own copy of the buffer
        os._exit(0)
    os.waitpid(child, 0)
    parent.write(memoryview(b"p"))
    parent.close()
    assert (tmp_path / "parent").read_bytes() == b"p" * size


def test_rotation_through_a_link(tmp_path: Path) -> None:
    """What was saved by a link to it is the newest, and stays."""
    save_distributed({"a": torch.zeros(2)}, tmp_path / "old")
    save_distributed({"a": torch.ones(2)}, tmp_path / "real")
    (tmp_path / "latest").symlink_to("real")
    save_distributed({"a": torch.full((2,), 2.0)}, tmp_path / "latest", keep_last=1)
    assert load_distributed(tmp_path / "real")["a"].tolist() == [2.0, 2.0]
    assert not (tmp_path / "old").exists()


def test_two_writes_that_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both go by the page cache then, whichever has left the direct way first."""
    pwrite, meeting = os.pwrite, threading.Barrier(2)
    refused: set[int] = set()

    def refuse(file: int, data: memoryview, at: int) -> int:
        if threading.get_ident() not in refused:
            refused.add(threading.get_ident())
            meeting.wait(10)
            raise OSError(errno.EINVAL, "no direct writes here")
        return pwrite(file, data, at)

    monkeypatch.setattr(local_writer.os, "pwrite", refuse)
    data = os.urandom(2 * local_writer._BUFFER_BYTES)
    writer = LocalWriter(tmp_path / "file", len(data))
    if not writer._is_direct:
        writer.discard()
        pytest.skip("this file system has no direct writes, so that there is one thread")
    writer.write(memoryview(data))
    writer.close()
    assert (tmp_path / "file").read_bytes() == data


def test_a_lock_ends_though_a_child_has_the_folder_open(tmp_path: Path) -> None:
    """A process that was forked during a commit doesn't hold up the next one."""
    storage = LocalStorage(tmp_path)
    go_on, wait = os.pipe()
    with storage.exclusive(Deadline(10)):
        child = os.fork()
        if not child:
            os.close(wait)
            os.read(go_on, 1)
            os._exit(0)
    try:
        with storage.exclusive(Deadline(1.0)):
            pass
    finally:
        os.close(wait)
        os.close(go_on)
        os.waitpid(child, 0)


def test_a_lock_that_is_held_for_too_long(tmp_path: Path) -> None:
    """A commit that waits for another one ends at its deadline, with the folder as it was."""
    save_distributed({"a": torch.zeros(2)}, tmp_path)
    with LocalStorage(tmp_path).exclusive(Deadline(1.0)):
        with pytest.raises(DistCheckpointError, match="Another save to this folder is being committed"):
            save_distributed({"a": torch.ones(2)}, tmp_path, timeout=0.5)
        assert load_distributed(tmp_path)["a"].tolist() == [0.0, 0.0]
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert not list(tmp_path.glob(".saving-*"))
    save_distributed({"a": torch.ones(2)}, tmp_path, timeout=60)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    """A file in the place of the folder of checkpoints is told to all ranks when the checkpointer is made."""
    (tmp_path / "file").write_text("")

    def program(group: Backend) -> None:
        with pytest.raises(DistCheckpointError, match="look through"):
            AsyncCheckpointer(tmp_path / "file", group=group)

    run_ranks(program, 2)


def test_an_error_of_ours_in_a_state(tmp_path: Path) -> None:
    """What an object of one rank raises is told to the others, though it is an error of ranks elsewhere."""

    class Broken:
        def state_dict(self) -> object:
            raise SizeMismatchError("of another group")

        def load_state_dict(self, state: object) -> None:
            raise NotImplementedError

    def program(group: Backend) -> None:
        state = {"a": Broken() if group.rank else None}
        with pytest.raises((DistCheckpointError, ValueError), match="of another group"):
            save_distributed(state, tmp_path, group=group, timeout=60)

    run_ranks(program, 2)


def test_sums_are_folded_when_all_ranks_have_their_states(tmp_path: Path) -> None:
    """A state that one rank can't give doesn't leave the others in a collective: the group goes on."""

    class Broken:
        def state_dict(self) -> object:
            raise OSError("not now")

        def load_state_dict(self, state: object) -> None:
            raise NotImplementedError

    def program(group: Backend) -> None:
        mesh = DeviceMesh(group, (2,))
        total = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        with pytest.raises(DistCheckpointError, match="not now"):
            save_distributed({"a": Broken() if group.rank else 0, "b": total}, tmp_path, group=group, timeout=60)
        state = {"b": total, "c": Counter("aab"), "d": (total, [total])}
        save_distributed(state, tmp_path, group=group, timeout=60)

    run_ranks(program, 2)
    loaded = load_distributed(tmp_path)
    assert loaded["b"].tolist() == loaded["d"][0].tolist() == loaded["d"][1][0].tolist() == [2.0] * 3
    assert loaded["c"] == Counter("aab")


def test_two_commits_to_a_store_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose manifest is there in the end has its files, though the other save tidies after that."""
    url, put, others = "memory://two-saves/both", RemoteStorage.put, ["to come"]

    def put_and_let_another_save(storage: RemoteStorage, name: str, data: bytes) -> None:
        put(storage, name, data)
        if name == MANIFEST_NAME and others:
            others.clear()
            save_distributed({"a": torch.ones(2)}, url)

    seen: list[set[str]] = []
    find_stale = commit.find_stale
    # The first save sees the files of the other one before that is committed.
    monkeypatch.setattr(RemoteStorage, "put", put_and_let_another_save)
    monkeypatch.setattr(commit, "find_stale", lambda storage: seen.append(find_stale(storage)) or seen[-1])
    save_distributed({"a": torch.zeros(2)}, url)
    assert len(seen) == 2
    assert load_distributed(url)["a"].tolist() == [1.0, 1.0]
    index = open_storage(url).get(INDEX_NAME).decode()
    assert all(name in index for name in open_storage(url).list_names() if name.endswith(".safetensors"))
