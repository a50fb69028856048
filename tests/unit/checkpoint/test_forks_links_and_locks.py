"""Saves beside forked children, links, other saves, and file systems that refuse direct writes."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

from ferrodist import DeviceMesh, DTensor, Partial, SizeMismatchError
from ferrodist.checkpoint import (
    AsyncCheckpointer,
    DistCheckpointError,
    commit,
    load_distributed,
    save_distributed,
    verify,
)
from ferrodist.checkpoint.format.manifest import INDEX_NAME, MANIFEST_NAME
from ferrodist.checkpoint.storage import LocalStorage, RemoteStorage, local, local_writer, open_storage
from ferrodist.checkpoint.storage.local_writer import LocalFileWriter
from ferrodist.deadline import Deadline
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from ferrodist.backends.base import Backend


def test_a_forked_child_has_buffers_of_its_own(tmp_path: Path) -> None:
    """A child's buffers never get into its parent's files, nor the parent's into the child's."""
    size = 3 << 20
    first = LocalFileWriter(tmp_path / "first", size)
    first.write(memoryview(bytes(size)))
    first.close()
    parent = LocalFileWriter(tmp_path / "parent", size)
    parent.write(memoryview(b"p" * (size - 1)))
    child = os.fork()
    if not child:
        writer = LocalFileWriter(tmp_path / "child", size)
        writer.write(memoryview(b"c" * size))
        parent.write(memoryview(b"c"))  # in its own copy of the buffer
        os._exit(0)
    os.waitpid(child, 0)
    parent.write(memoryview(b"p"))
    parent.close()
    assert (tmp_path / "parent").read_bytes() == b"p" * size


def test_rotation_through_a_link(tmp_path: Path) -> None:
    """A checkpoint saved through a link to its folder is the newest, and stays."""
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
    writer = LocalFileWriter(tmp_path / "file", len(data))
    if not writer._is_direct:
        writer.discard()
        pytest.skip("this file system has no direct writes, so that there is one thread")
    writer.write(memoryview(data))
    writer.close()
    assert (tmp_path / "file").read_bytes() == data


def test_a_lock_is_released_though_a_child_has_the_folder_open(tmp_path: Path) -> None:
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


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    """A file in place of the folder of checkpoints raises on all ranks at construction."""
    (tmp_path / "file").write_text("")

    def program(group: Backend) -> None:
        with pytest.raises(DistCheckpointError, match="could not list a folder"):
            AsyncCheckpointer(tmp_path / "file", group=group)

    run_ranks(program, 2)


def test_a_distributed_error_in_a_state_reaches_all_ranks(tmp_path: Path) -> None:
    """An error raised by one rank's object reaches the others, though its class is that of errors between ranks."""

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


def test_partial_sums_are_reduced_after_all_ranks_have_collected(tmp_path: Path) -> None:
    """A rank that can't collect its state doesn't leave the others in a collective: the group continues."""

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
    """The save whose manifest wins has its files, though the other save cleans up after that."""
    url, put, others = "memory://two-saves/both", RemoteStorage.put, ["to come"]

    def put_and_let_another_save(storage: RemoteStorage, name: str, data: bytes) -> None:
        put(storage, name, data)
        if name == MANIFEST_NAME and others:
            others.clear()
            save_distributed({"a": torch.ones(2)}, url)

    seen: list[set[str]] = []
    stale_files = commit.stale_files
    # The first save sees the files of the other one before that is committed.
    monkeypatch.setattr(RemoteStorage, "put", put_and_let_another_save)
    monkeypatch.setattr(commit, "stale_files", lambda storage: seen.append(stale_files(storage)) or seen[-1])
    save_distributed({"a": torch.zeros(2)}, url)
    assert len(seen) == 2
    assert load_distributed(url)["a"].tolist() == [1.0, 1.0]
    index = open_storage(url).get(INDEX_NAME).decode()
    assert all(name in index for name in open_storage(url).list_names() if name.endswith(".safetensors"))


def _begin_and_end(path: Path, save_id: str) -> None:
    """Begin a save in a process that ends."""
    child = os.fork()
    if not child:
        storage = LocalStorage(path)
        storage.begin(save_id)
        storage.create(save_id, f"model-{save_id}-00001-of-00001.safetensors", 10).write(memoryview(b"x" * 10))
        os._exit(0)
    os.waitpid(child, 0)


def test_a_living_save_is_left_alone(tmp_path: Path) -> None:
    """Another save to the folder removes files of ended processes only; a live save continues and completes."""
    path = tmp_path / "saved"
    living = LocalStorage(path)
    living.begin("0" * 12)
    _begin_and_end(path, "1" * 12)
    assert sorted(each.name for each in path.iterdir()) == [".saving-000000000000", ".saving-111111111111"]
    save_distributed({"a": torch.ones(2)}, path)
    assert [each.name for each in path.glob(".saving-*")] == [".saving-000000000000"]
    writer = living.create("0" * 12, "file", 1)
    writer.write(memoryview(b"x"))
    writer.close()
    living.discard("0" * 12)
    assert not list(path.glob(".saving-*"))


@pytest.mark.parametrize("step", ["open", "flock", "fstat"])
def test_a_process_that_ends_as_its_save_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Nothing of it stays, however far it was."""
    child = os.fork()
    if not child:
        storage = LocalStorage(tmp_path)
        monkeypatch.setattr(local.fcntl if step == "flock" else local.os, step, lambda *_: os._exit(7))
        storage.begin("0" * 12)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert [each.name for each in tmp_path.iterdir()] == [".saving-000000000000"]
    LocalStorage(tmp_path).remove_leftovers()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("num_removed", range(4))
def test_a_process_that_ends_as_it_removes_a_dead_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_removed: int
) -> None:
    """The next one removes the rest, however far it was."""
    _begin_and_end(tmp_path, "0" * 12)
    (place,) = tmp_path.iterdir()
    for number in range(3):
        (place / f"{number}.safetensors").write_bytes(b"x")
    child = os.fork()
    if not child:
        unlink, removed = os.unlink, []

        def remove(path: str | Path, *, dir_fd: int | None = None) -> None:
            if len(removed) == num_removed:
                os._exit(7)
            removed.append(path)
            unlink(path, dir_fd=dir_fd)

        monkeypatch.setattr(os, "unlink", remove)
        LocalStorage(tmp_path).remove_leftovers()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    LocalStorage(tmp_path).remove_leftovers()
    assert not list(tmp_path.iterdir())


def test_a_save_whose_storage_is_gone_is_dead(tmp_path: Path) -> None:
    """A garbage-collected storage releases its lock, as an ending process does."""
    storage = LocalStorage(tmp_path)
    storage.begin("0" * 12)
    del storage
    gc.collect()
    LocalStorage(tmp_path).remove_leftovers()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("why", ["another system", "no locks"])
def test_saves_without_a_working_lock_count_as_alive_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Without a working lock a save's folder stays, and is removed after a day without changes."""
    if why == "no locks":

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(local.fcntl, "flock", refuse)
    _begin_and_end(tmp_path, "0" * 12)
    (place,) = tmp_path.iterdir()
    if why == "another system":
        (lock,) = place.glob("lock-*")
        lock.rename(place / "lock-another")
    save_distributed({"a": torch.ones(2)}, tmp_path)
    assert place.is_dir()
    now = tmp_path.stat().st_mtime
    for each in (*place.iterdir(), place):
        os.utime(each, (now - 86_500, now - 86_500))
    save_distributed({"a": torch.ones(2)}, tmp_path)
    assert not list(tmp_path.glob(".saving-*"))
    assert load_distributed(tmp_path)["a"].tolist() == [1.0] * 2


def test_folders_of_saves_that_are_made_and_removed_at_once(tmp_path: Path) -> None:
    """Saves begin while another thread removes what dead ones left: none loses its folder."""
    ends = threading.Event()

    def remove() -> None:
        storage = LocalStorage(tmp_path)
        while not ends.is_set():
            storage.remove_leftovers()

    removers = [threading.Thread(target=remove) for _ in range(2)]
    for each in removers:
        each.start()
    try:
        for number in range(200):
            storage = LocalStorage(tmp_path)
            storage.begin(f"{number:012d}")
            storage.create(f"{number:012d}", "file", 0).close()
            storage.discard(f"{number:012d}")
    finally:
        ends.set()
        for each in removers:
            each.join()
    assert not list(tmp_path.iterdir())


def test_two_jobs_that_save_to_one_folder(tmp_path: Path) -> None:
    """All their saves succeed, what is loaded meanwhile is whole, and nothing else is left in the end."""
    path, num_saves, failures = tmp_path / "saved", 12, []
    save_distributed({"a": torch.zeros(50_000)}, path)

    def save(job: int) -> None:
        try:
            for number in range(num_saves):
                save_distributed({"a": torch.full((50_000,), float(job * 1000 + number))}, path, max_file_bytes=1000)
        except Exception as error:
            failures.append(error)

    jobs = [threading.Thread(target=save, args=(job,)) for job in (1, 2)]
    for job in jobs:
        job.start()
    loads = 0
    while any(job.is_alive() for job in jobs):
        try:
            found = load_distributed(path)["a"]
        except DistCheckpointError as error:
            if "is missing" not in str(error):  # its file was replaced after the manifest was read
                failures.append(error)
        else:
            assert (found == found[0]).all()
            loads += 1
    for job in jobs:
        job.join()
    assert failures == []
    assert loads
    assert verify(path).is_sound
    assert len(list(path.iterdir())) == 3
