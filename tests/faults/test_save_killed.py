"""Ranks killed at any instant of a save: the last committed checkpoint is whole, and survivors know in time.

``FERRODIST_KILLS=200`` makes more of them than the few that each run of the tests has.
"""

import contextlib
import importlib
import json
import os
import random
import re
import signal
import sys
import threading
import time

import pytest
import torch

from ferrodist import DeviceMesh, DTensor, Shard
from ferrodist.backends.native import is_native_available
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.checkpoint import PerRank, load_distributed, save_distributed
from ferrodist.checkpoint.reader import read_manifest
from ferrodist.checkpoint.storage.local import LocalStorage
from ferrodist.errors import DistCheckpointError, DistributedError, RankFailedError
from ferrodist.testing import run_ranks

NUM_KILLS = int(os.environ.get("FERRODIST_KILLS", "20"))
NUM_RANKS = 3
LIMIT_SECONDS = 5.0
BACKEND = "native" if is_native_available() else "tcp"


def state_of(group, version):
    """A state that has its version in every element."""
    rows = torch.arange(3000.0).reshape(60, 50) + 10_000 * version
    mesh = DeviceMesh(group, (group.world_size,))
    return {
        "version": version,
        "rows": DTensor.from_local(rows.chunk(group.world_size)[group.rank].contiguous(), mesh, [Shard(0)]),
        "copied": {str(number): torch.full((500 + number,), 1.0 * version) for number in range(4)},
        "own": PerRank(torch.full((3,), version + group.rank)),
    }


def save(group, path, version):
    """Save it in several files a rank."""
    save_distributed(state_of(group, version), path, group=group, max_file_bytes=3000)


def version_at(path):
    """The version of the checkpoint in a folder, after a look at every element; None without a checkpoint."""
    alone = SimulatedBackend.create_group(1)[0]
    if not (path / "metadata.json").exists():
        with pytest.raises(DistCheckpointError, match=r"metadata\.json is missing"):
            load_distributed(path, group=alone)
        return None
    into = {"own": PerRank(None, resize=lambda values, *_: values), "version": None, "rows": None, "copied": None}
    loaded = load_distributed(path, into, group=alone)
    version = loaded["version"]
    assert torch.equal(loaded["rows"], torch.arange(3000.0).reshape(60, 50) + 10_000 * version)
    assert all((each == version).all() for each in loaded["copied"].values())
    assert [own.tolist() for own in loaded["own"]] == [[version + rank] * 3 for rank in range(NUM_RANKS)]
    return version


def stray_files(path):
    """Return the files in a folder that are not of its checkpoint."""
    names = {entry.name for entry in path.iterdir()} if path.exists() else set()
    if "metadata.json" in names:
        names -= {"metadata.json", *[file.name for file in read_manifest(LocalStorage(path)).files]}
    return names


@contextlib.contextmanager
def counting(strike=None, number=-1):
    """Count the calls that this thread makes in a block, C functions too; call ``strike`` at one of them."""
    seen = [0]

    def profile(frame, event, argument):
        seen[0] += 1
        if seen[0] == number:
            sys.setprofile(None)
            strike()

    sys.setprofile(profile)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def count_calls(path):
    """Return the number of calls that each rank makes for a save to a folder."""

    def program(group):
        with counting() as seen:
            save(group, path, 0)
        return seen[0]

    return run_ranks(program, NUM_RANKS, backend=BACKEND)


def kill_in_save(path, notes, version, *, trigger, victims, number=-1, delay=None):
    """Save, and have ranks killed in the middle.

    Args:
        path: The checkpoint.
        notes: A folder for the survivors' reports.
        version: The state's version.
        trigger: The rank whose progress decides when.
        victims: The ranks that are killed.
        number: At which call of the trigger.
        delay: Or after how many seconds.

    Returns:
        The errors of survivors, None for those whose save returned.
    """
    pids = notes / "pids"
    pids.mkdir(parents=True)

    def strike():
        (notes / "struck").write_text(str(time.monotonic()))
        for rank in sorted(victims, key=lambda rank: rank == trigger):
            os.kill(int((pids / str(rank)).read_text()), signal.SIGKILL)

    def program(group):
        (pids / str(group.rank)).write_text(str(os.getpid()))
        group.barrier()
        timer = threading.Timer(delay or 0, strike)
        if delay is not None and group.rank == trigger:
            timer.start()
        error = None
        try:
            with counting(strike, number if group.rank == trigger else -1):
                save(group, path, version)
        except DistributedError as raised:
            error = type(raised).__name__
            late = time.monotonic() - float((notes / "struck").read_text())
            assert late < LIMIT_SECONDS, f"rank {group.rank} knew after {late:.1f} s"
        finally:
            timer.cancel()
        (notes / str(group.rank)).write_text(json.dumps(error))

    with contextlib.suppress(RankFailedError):
        run_ranks(program, NUM_RANKS, backend=BACKEND, timeout=30)
    answers = {rank: notes / str(rank) for rank in range(NUM_RANKS)}
    if (notes / "struck").exists():
        assert all(file.exists() for rank, file in answers.items() if rank not in victims), "a survivor failed"
    texts = {rank: file.read_text() for rank, file in answers.items() if file.exists()}
    return {rank: json.loads(text) for rank, text in texts.items() if text}  # a victim may just have made its file


@pytest.mark.timeout(120 + 2 * NUM_KILLS)
@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "over"])
def test_kills_at_any_instant(tmp_path, is_fresh):
    """The checkpoint is the old one or the new one, whole; survivors leave nothing of a dead save; the next works."""
    rng = random.Random(6)
    path = tmp_path / "checkpoint"
    calls = count_calls(tmp_path / "first")
    expected = None
    outcomes = {"old": 0, "new": 0}
    for version in range(1, NUM_KILLS // 2 + 1):
        if is_fresh:
            path, expected = tmp_path / f"checkpoint {version}", None
        elif expected is None:
            run_ranks(save, NUM_RANKS, path, 0, backend=BACKEND)
            expected = 0
        trigger = rng.randrange(NUM_RANKS)
        victims = set(range(NUM_RANKS)) if rng.random() < 0.3 else {trigger}
        # The calls of the end, where it is committed, are few and count most; now and then a clock decides.
        moment = rng.random()
        number = int(calls[trigger] * (1 - moment * moment if rng.random() < 0.7 else moment))
        delay = rng.random() * 0.03 if rng.random() < 0.3 else None
        before = stray_files(path)  # of saves of which nobody was left
        answers = kill_in_save(
            path,
            tmp_path / f"notes {version}",
            version,
            trigger=trigger,
            victims=victims,
            number=-1 if delay is not None else max(1, number),
            delay=delay,
        )
        what = f"kill {version}: {victims} by {trigger} at {number} of {calls[trigger]}, or {delay}: {answers}"
        found = version_at(path)
        assert found in (expected, version), what
        if None in answers.values():
            assert found == version, f"{what}: a rank's save returned"
        if len(victims) < NUM_RANKS and found == expected:
            assert stray_files(path) <= before, what
        outcomes["new" if found == version else "old"] += 1
        if is_fresh or version % 4 == 0:
            run_ranks(save, NUM_RANKS, path, version + 1000, backend=BACKEND)
            found = version_at(path)
            assert found == version + 1000, what
            assert not stray_files(path), what
        expected = found
    assert outcomes["old"], outcomes


own_rank = []
"""In a process of a rank: its rank."""


def save_as_a_rank(group, path, version):
    """Save in a process that knows its rank."""
    own_rank[:] = [group.rank]
    save(group, path, version)


def commits(storage_method, name):
    """Kill rank 0 just before, or just after, an operation of the storage."""
    original = getattr(LocalStorage, storage_method)

    def strike(args):
        if own_rank == [0] and (name is None or args[0] == name):
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, *args):
        strike(args)
        return original(self, *args)

    def after(self, *args):
        result = original(self, *args)
        strike(args)
        return result

    return before, after


@pytest.mark.parametrize("when", [0, 1], ids=["before", "after"])
@pytest.mark.parametrize(
    ("method", "name", "is_new"),
    [
        ("begin", None, (False, False)),
        ("publish", None, (False, False)),
        ("put", "metadata.json", (False, True)),
        ("remove", None, (True, True)),
        ("remove_leftovers", None, (True, True)),
    ],
)
@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "over"])
def test_rank_0_killed_at_each_step(tmp_path, monkeypatch, method, name, is_new, when, is_fresh):
    """Exactly the manifest decides; the others remove what is of no checkpoint, and the next save what is left."""
    path = tmp_path / "checkpoint"
    if not is_fresh:
        run_ranks(save, NUM_RANKS, path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, method, commits(method, name)[when])
        with pytest.raises(RankFailedError, match="SIGKILL") as failure:
            run_ranks(save_as_a_rank, NUM_RANKS, path, 2, backend=BACKEND)
    assert failure.value.ranks == (0,)
    assert version_at(path) == (2 if is_new[when] else None if is_fresh else 1)
    if not is_new[when]:
        assert not stray_files(path)
        assert path.exists() != is_fresh
    else:
        assert not list(path.glob(".saving-*"))
    run_ranks(save, 2, path, 3)
    run_ranks(save, NUM_RANKS, path, 4)
    assert version_at(path) == 4
    assert not stray_files(path)


def test_rank_0_killed_with_half_a_manifest(tmp_path, monkeypatch):
    """The other ranks remove its temporary file."""
    path = tmp_path / "checkpoint"
    run_ranks(save, NUM_RANKS, path, 1)
    with monkeypatch.context() as patched:
        original = LocalStorage.put

        def put(self, name, data):
            patched.setattr(os, "fsync", lambda file: os.kill(os.getpid(), signal.SIGKILL))
            original(self, name, data)

        patched.setattr(LocalStorage, "put", put)
        with pytest.raises(RankFailedError, match="SIGKILL"):
            run_ranks(save, NUM_RANKS, path, 2, backend=BACKEND)
    assert_as_before(path, 1)
    run_ranks(save, NUM_RANKS, path, 3)
    assert_as_before(path, 3)


def assert_as_before(path, version, *, others=()):
    """The old checkpoint is there, and nothing else."""
    assert version_at(path) == version
    assert stray_files(path) <= set(others)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("mine"), MemoryError()])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "over"])
def test_a_rank_that_raises_in_the_middle(tmp_path, monkeypatch, error, rank, is_fresh):
    """All ranks raise DistCheckpointError that names it, the written files are gone, and they can continue."""
    saving = importlib.import_module("ferrodist.checkpoint.save_distributed")  # not the function
    path = tmp_path / "checkpoint"
    if not is_fresh:
        run_ranks(save, NUM_RANKS, path, 1)
    write_safetensors, here = saving.write_safetensors, threading.local()

    def write(*args):
        here.count = getattr(here, "count", 0) + 1
        if getattr(here, "rank", None) == rank and here.count == 2:
            raise error
        return write_safetensors(*args)

    monkeypatch.setattr(saving, "write_safetensors", write)

    def program(group):
        here.rank = group.rank
        with pytest.raises(
            DistCheckpointError, match=f"rank {rank} could not write a checkpoint.*{re.escape(str(error))}"
        ) as failure:
            save(group, path, 2)
        assert failure.value.ranks == (rank,)
        group.barrier()
        if group.rank == 0:
            assert_as_before(path, None if is_fresh else 1)
        group.barrier()
        save(group, path, 3)

    run_ranks(program, NUM_RANKS)
    assert_as_before(path, 3)


@pytest.mark.parametrize("method", ["publish", "put", "size_bytes", "list_names", "begin"])
@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "over"])
def test_a_storage_that_fails(tmp_path, monkeypatch, method, is_fresh):
    """At any step of rank 0's until the manifest is there: the old checkpoint stays, and what was published goes."""
    path = tmp_path / "checkpoint"
    if not is_fresh:
        run_ranks(save, NUM_RANKS, path, 1)
    original = getattr(LocalStorage, method)

    def failing(self, *args):
        if method in ("publish", "begin"):
            original(self, *args)
        raise OSError(5, "Input/output error")

    def program(group):
        with pytest.raises(DistCheckpointError, match=r"rank 0 could not .* checkpoint at .*Input/output error"):
            save(group, path, 2)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, method, failing)
        run_ranks(program, NUM_RANKS)
    if method != "list_names":
        assert_as_before(path, None if is_fresh else 1)
    run_ranks(save, NUM_RANKS, path, 3)
    assert_as_before(path, 3)


def test_what_fails_after_the_commit_is_logged(tmp_path, monkeypatch, caplog):
    """Old files that can't be removed, or an index that can't be written, make no checkpoint fail that is there."""
    path = tmp_path / "checkpoint"
    run_ranks(save, NUM_RANKS, path, 1)
    with monkeypatch.context() as patched:

        def failing(self, names):
            raise OSError(5, "Input/output error")

        patched.setattr(LocalStorage, "remove", failing)
        run_ranks(save, NUM_RANKS, path, 2)
    assert version_at(path) == 2
    assert "Input/output error" in caplog.text
    assert stray_files(path)
    run_ranks(save, NUM_RANKS, path, 3)
    assert_as_before(path, 3)


def test_ctrl_c(tmp_path):
    """An interrupted rank ends, the others raise in time, and nothing is left of the save."""
    path = tmp_path / "checkpoint"
    run_ranks(save, NUM_RANKS, path, 1)
    calls = count_calls(tmp_path / "first")

    def program(group, victim, number):
        def interrupt():
            os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        with counting(interrupt, number if group.rank == victim else -1):
            save(group, path, 2)

    for victim, part in ((0, 0.3), (0, 0.6), (1, 0.5), (2, 0.8)):
        begin = time.monotonic()
        with pytest.raises(RankFailedError, match="KeyboardInterrupt"):
            run_ranks(program, NUM_RANKS, victim, int(calls[victim] * part), backend=BACKEND, timeout=20)
        assert time.monotonic() - begin < LIMIT_SECONDS
        assert_as_before(path, 1)
    run_ranks(save, NUM_RANKS, path, 3)
    assert_as_before(path, 3)


@pytest.fixture
def mounted(tmp_path):
    """A small disk in memory of its own, or a skip where that can't be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.system(f"mount -t tmpfs -o size=256k ferrodist '{place}' 2>/dev/null") != 0:
        pytest.skip("this user can't mount a disk")
    yield place
    assert os.system(f"umount '{place}'") == 0


def test_a_full_disk(mounted):
    """A checkpoint that doesn't fit is refused on all ranks, and leaves the old one and all room there was."""
    path = mounted / "checkpoint"
    run_ranks(save, NUM_RANKS, path, 1)
    free = os.statvfs(mounted).f_bavail

    def program(group):
        large = {"large": torch.ones(100_000), "small": [torch.full((9,), 1.0 * n) for n in range(9)]}
        with pytest.raises(DistCheckpointError, match=r"rank . could not .*No space left on device"):
            save_distributed(large, path)

    run_ranks(program, NUM_RANKS)
    assert_as_before(path, 1)
    assert os.statvfs(mounted).f_bavail == free


def test_a_disk_that_is_full_at_any_byte(mounted):
    """With any amount of space, the save succeeds or leaves the previous checkpoint."""
    path = mounted / "checkpoint"
    run_ranks(save, NUM_RANKS, path, 1)
    free = os.statvfs(mounted)
    version, failures = 1, 0

    def program(group, new):
        try:
            save(group, path, new)
        except DistCheckpointError as error:
            assert "No space left" in error.message  # noqa: PT017
            return False
        return True

    for pages in range(1, free.f_bavail, 3):
        (mounted / "filler").write_bytes(bytes((free.f_bavail - pages) * free.f_bsize))
        answers = run_ranks(program, NUM_RANKS, version + 1)
        assert len(set(answers)) == 1
        version += answers[0]
        failures += not answers[0]
        assert_as_before(path, version)
        (mounted / "filler").unlink()
        if version > 3:
            break
    assert failures
    assert version > 1


def test_a_disk_that_can_not_be_written(mounted):
    """One that is mounted to be read only is an error on all ranks; loads go on."""
    path = mounted / "checkpoint"
    run_ranks(save, NUM_RANKS, path, 1)
    assert os.system(f"mount -o remount,ro '{mounted}'") == 0

    def program(group):
        for place in (path, mounted / "other"):
            with pytest.raises(DistCheckpointError, match=r"rank 0 could not .*Read-only file system"):
                save(group, place, 2)

    run_ranks(program, NUM_RANKS)
    assert_as_before(path, 1)
    assert os.system(f"mount -o remount,rw '{mounted}'") == 0


def test_a_limit_of_file_sizes(tmp_path):
    """Ranks that may write no large files raise, where the signal for it is ignored as Python does."""
    import resource  # noqa: PLC0415

    path = tmp_path / "checkpoint"
    run_ranks(save, NUM_RANKS, path, 1)

    def program(group):
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
        with pytest.raises(DistCheckpointError, match="File too large"):
            save_distributed({"x": torch.ones(10_000)}, path)

    run_ranks(program, NUM_RANKS, backend=BACKEND)
    assert_as_before(path, 1)


def test_places_that_are_no_folders(tmp_path):
    """A file in the place of the folder, or above it, is an error on all ranks that says so, and stays."""
    (tmp_path / "file").write_text("mine")

    def program(group):
        for path in (tmp_path / "file", tmp_path / "file" / "checkpoint"):
            with pytest.raises(DistCheckpointError, match=r"Not a directory|File exists"):
                save(group, path, 1)
            with pytest.raises(DistCheckpointError):
                load_distributed(path)

    run_ranks(program, NUM_RANKS)
    assert (tmp_path / "file").read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_can_not_be_changed(tmp_path):
    """No permission, which root lacks too where files are made immutable."""
    path = tmp_path / "checkpoint"
    run_ranks(save, NUM_RANKS, path, 1)
    if os.system(f"chattr +i '{path}' 2>/dev/null") != 0:
        pytest.skip("folders can't be made immutable here")
    try:

        def program(group):
            with pytest.raises(DistCheckpointError, match=r"rank 0 could not .*(not permitted|denied)"):
                save(group, path, 2)

        run_ranks(program, NUM_RANKS)
    finally:
        assert os.system(f"chattr -i '{path}'") == 0
    assert_as_before(path, 1)
