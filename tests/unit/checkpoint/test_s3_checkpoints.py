"""Checkpoints in an object store, and what is left of them when it fails in the middle."""

import functools
import itertools
import os
import signal
import subprocess
import sys

import fsspec
import pytest
import s3_server
import torch
from divided_tensors import bits_of, divide, part_of, random_bits

from ferrodist import DeviceMesh, Replicate, Shard
from ferrodist.checkpoint import (
    AsyncCheckpointer,
    find_latest,
    list_checkpoints,
    load_distributed,
    reshard,
    save_distributed,
    verify,
)
from ferrodist.checkpoint.storage import remote
from ferrodist.checkpoint.storage.remote import RemoteFileWriter, RemoteStorage
from ferrodist.errors import DistCheckpointError, PeerLostError, RankFailedError
from ferrodist.testing import run_ranks

NUM_RANKS = 3
SHAPE = (300, 100)
LARGE = (4500, 1000)
"""6 MB for each rank, which are two parts."""

_folders = itertools.count()


@pytest.fixture(scope="module")
def server():
    with s3_server.serve() as server:
        yield server


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(remote, "_PART_BYTES", 5 << 20)  # the least that S3 takes


@pytest.fixture
def folder():
    return f"run-{next(_folders)}/step"


@pytest.fixture
def url(folder):
    return f"s3://{s3_server.BUCKET}/{folder}"


@functools.lru_cache
def whole(seed, shape=SHAPE):
    return random_bits(shape, torch.float32, seed)


def save(server, url, seed, *, world_size=NUM_RANKS, shape=SHAPE, options=None, backend="simulated"):
    """Save a tensor by several ranks; what each has raised."""

    def program(group):
        weight = divide(whole(seed, shape), DeviceMesh(group, (group.world_size,)), [Shard(0)])
        try:
            save_distributed({"weight": weight, "seed": seed}, url, storage_options=options or server.options)
        except DistCheckpointError as error:
            return error
        return None

    return run_ranks(program, world_size, backend=backend)


def check_seed(server, url, seed, *, world_size=2, dim=1, shape=SHAPE, backend="simulated"):
    """Load on other ranks and another placement; it is what was saved with the seed."""

    def program(group):
        mesh = DeviceMesh(group, (group.world_size,))
        weight = divide(torch.zeros(shape), mesh, [Replicate()] if dim is None else [Shard(dim)])
        loaded = load_distributed(url, {"weight": weight, "seed": None}, storage_options=server.options)
        expected = part_of(whole(seed, shape), mesh, weight.placements)
        return loaded["seed"] == seed and bits_of(weight.to_local()) == bits_of(expected)

    assert run_ranks(program, world_size, backend=backend) == [True] * world_size


def check_failed(errors, *texts):
    """All ranks have raised the same, and it says all of the texts."""
    assert all(isinstance(error, DistCheckpointError) for error in errors), errors
    assert len({error.message for error in errors}) == 1, errors
    for text in texts:
        assert text in errors[0].message


def is_manifest_put(request):
    return request.method == "PUT" and request.is_manifest


def is_of_rank_1(request):
    return "-00002-of-00003." in request.path


@pytest.mark.parametrize("backend", ["simulated", "tcp"])
def test_ranks_save_and_others_load(server, url, folder, backend):
    """Threads, and processes, each with connections of its own; in parts, and reading parts."""
    assert save(server, url, 1, backend=backend) == [None] * NUM_RANKS
    names = server.objects(folder)
    assert [name for name in names if "safetensors" not in name] == ["metadata.json"]
    assert len(names) == 1 + NUM_RANKS
    for world_size, dim in ((1, None), (2, 1), (4, 0)):
        check_seed(server, url, 1, world_size=world_size, dim=dim, backend=backend)


def test_a_save_replaces_the_one_before(server, url, folder):
    """Only its objects are there afterwards; also an unsharded checkpoint's index for other tools."""
    save(server, url, 1)
    before = set(server.objects(folder))
    save(server, url, 2, world_size=1, shape=(10,))
    after = set(server.objects(folder))
    assert before & after == {"metadata.json"}
    assert len(after) == 3
    assert "model.safetensors.index.json" in after
    check_seed(server, url, 2, shape=(10,), dim=0)
    save(server, url, 3)
    assert len(server.objects(folder)) == 1 + NUM_RANKS
    check_seed(server, url, 3)


def test_only_what_is_needed_is_read(server, url):
    """A rank reads its third of 12 MB."""
    shape = (3000, 1000)
    save(server, url, 1, world_size=1, shape=shape)
    with server.watching(lambda request: request.method == "GET" and request.is_of_tensors) as reads:
        check_seed(server, url, 1, world_size=3, dim=0, shape=shape)
    # Each rank reads the header and the blocks of 4 MiB that its third has to do with.
    assert len(reads) == 3 + 1 + 2 + 2


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("code", ["AccessDenied", "InternalError"])
def test_an_upload_that_is_refused_half_way(server, url, folder, is_first, code):
    """All ranks raise, no part and no object stays, and what was there before is."""
    if not is_first:
        save(server, url, 1)
    before = server.objects(folder)
    is_late = s3_server.number(1)
    with server.refusing(lambda request: request.is_part and is_of_rank_1(request) and is_late(), code) as refused:
        errors = save(server, url, 2, shape=LARGE)
    assert refused
    check_failed(errors, f"rank 1 could not write a checkpoint at {url}", "the server was told to refuse", "00002-of")
    assert server.objects(folder) == before
    assert server.uploads(folder) == []
    if is_first:
        with pytest.raises(DistCheckpointError, match="nothing in it"):
            load_distributed(url, storage_options=server.options)
    else:
        check_seed(server, url, 1)
    assert save(server, url, 3, shape=LARGE) == [None] * NUM_RANKS
    check_seed(server, url, 3, shape=LARGE)


@pytest.mark.parametrize("query", ["uploads", "uploadId"])
def test_uploads_that_cannot_begin_or_end(server, url, folder, query):
    """The first request of an upload, and the last."""
    save(server, url, 1)
    before = server.objects(folder)
    with server.refusing(lambda request: request.method == "POST" and query in request.query and is_of_rank_1(request)):
        errors = save(server, url, 2, shape=LARGE)
    check_failed(errors, "rank 1 could not write a checkpoint", "the server was told to refuse")
    assert server.objects(folder) == before
    assert server.uploads(folder) == []
    check_seed(server, url, 1)


def test_a_refused_manifest_commits_nothing(server, url, folder):
    """The last request of a save; the files of all ranks go."""
    save(server, url, 1)
    before = server.objects(folder)
    with server.refusing(is_manifest_put):
        errors = save(server, url, 2)
    check_failed(errors, f"rank 0 could not commit a checkpoint at {url}", "PermissionError", "metadata.json")
    assert server.objects(folder) == before
    check_seed(server, url, 1)


def test_a_manifest_that_may_have_arrived_keeps_its_files(server, url, folder):
    """Nobody answers: the server may have it yet. The old checkpoint loads, and the next save removes what stays."""
    save(server, url, 1)
    before = server.objects(folder)
    with server.cutting(is_manifest_put):
        errors = save(server, url, 2)
    check_failed(errors, f"rank 0 could not commit a checkpoint at {url}")
    assert set(server.objects(folder)) > set(before)
    assert len(server.objects(folder)) == len(before) + NUM_RANKS
    check_seed(server, url, 1)
    save(server, url, 3)
    assert len(server.objects(folder)) == len(before)
    check_seed(server, url, 3)


def test_a_manifest_that_has_arrived_is_a_success(server, url):
    """Only the answer was lost."""
    save(server, url, 1)
    with server.losing_answers(is_manifest_put) as lost:
        assert save(server, url, 2) == [None] * NUM_RANKS
    assert lost
    check_seed(server, url, 2)


def test_failures_after_the_commit_are_warnings(server, url, folder, caplog):
    """The checkpoint is saved; remaining files of the previous one are removed next time."""
    save(server, url, 1)
    with server.refusing(lambda request: request.method == "DELETE"):
        assert save(server, url, 2) == [None] * NUM_RANKS
    assert [record.message for record in caplog.records if url in record.message]
    check_seed(server, url, 2)
    save(server, url, 3)
    assert len(server.objects(folder)) == 1 + NUM_RANKS


@pytest.mark.parametrize("change", [{"key": "another"}, {"endpoint_url": "http://127.0.0.1:9"}])
def test_credentials_that_are_refused(server, url, folder, change):
    """Wrong credentials, and a missing server, are errors on all ranks, in saves and loads."""
    save(server, url, 1)
    before = server.objects(folder)
    options = {**server.options, **change}
    text = "PermissionError" if "key" in change else "127.0.0.1:9"
    check_failed(save(server, url, 2, options=options), f"rank 0 could not plan a checkpoint at {url}", text)

    def program(group):
        with pytest.raises(DistCheckpointError) as caught:
            load_distributed(url, storage_options=options)
        return caught.value

    text = "Forbidden" if "key" in change else "127.0.0.1:9"
    check_failed(run_ranks(program, NUM_RANKS), f"{url}/metadata.json can't be read", text)
    assert server.objects(folder) == before
    check_seed(server, url, 1)


def test_no_bucket(server):
    """A missing bucket is not created, and is an error on all ranks."""
    url = "s3://chekpoints/run"
    check_failed(save(server, url, 1), "could not plan a checkpoint", "no bucket 'chekpoints': make it first")

    def program(group):
        with pytest.raises(DistCheckpointError) as caught:
            load_distributed(url, storage_options=server.options)
        return caught.value

    check_failed(run_ranks(program, 2), f"{url} has nothing in it, or is not there")


def test_the_server_goes_away_while_ranks_load(server, url):
    """All raise, and name a file and a tensor; from another server of the same store they load."""
    save(server, url, 1, shape=(3000, 1000))
    other = s3_server.S3Server()
    is_late = s3_server.number(3)

    def program(group):
        target = torch.zeros(3000, 1000)
        with pytest.raises(DistCheckpointError) as caught:
            load_distributed(url, {"weight": target}, storage_options=other.options)
        return caught.value

    try:
        with other.cutting(lambda request: request.is_of_tensors and request.method == "GET" and is_late()) as cut:
            errors = run_ranks(program, NUM_RANKS)
    finally:
        other.stop()
    assert cut
    for error in errors:
        assert "safetensors, which has a part of tensor 'weight', can't be read" in error.message
    check_seed(server, url, 1, shape=(3000, 1000))


def test_a_stopped_server_is_an_error_of_all_ranks(server, url):
    """Nobody listens any more when they ask for the manifest."""
    save(server, url, 1)
    other = s3_server.S3Server()
    other.stop()

    def program(group):
        with pytest.raises(DistCheckpointError) as caught:
            load_distributed(url, storage_options=other.options)
        return caught.value

    check_failed(run_ranks(program, 2), f"{url}/metadata.json can't be read", "Could not connect")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_an_upload(server, url, folder, victim):
    """Survivors raise. Rank 0 removes what is of the save; if it is the victim, the others remove its parts."""
    save(server, url, 1)
    before = server.objects(folder)

    def program(group):
        if group.rank == victim:
            kill_after(11 << 19)
        weight = divide(whole(2, LARGE), DeviceMesh(group, (group.world_size,)), [Shard(0)])
        save_distributed({"weight": weight, "seed": 2}, url, storage_options=server.options)

    with pytest.raises(RankFailedError) as caught:
        run_ranks(program, NUM_RANKS, backend="tcp")
    assert PeerLostError.__name__ in str(caught.value)
    assert server.uploads(folder) == []
    assert server.objects(folder) == before
    check_seed(server, url, 1)
    save(server, url, 3)
    assert server.uploads(folder) == []
    assert len(server.objects(folder)) == len(before)
    check_seed(server, url, 3)


@pytest.mark.parametrize("method", ["begin", "put"])
@pytest.mark.parametrize("is_after", [False, True])
def test_rank_0_is_killed_at_a_request(server, url, folder, method, is_after):
    """Files stay only from the commit on, when the manifest may still appear; the next save removes them."""
    save(server, url, 1)
    before = server.objects(folder)
    original = getattr(RemoteStorage, method)

    def strike(*args):
        if is_after:
            original(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    def program(group):
        if group.rank == 0:
            setattr(RemoteStorage, method, strike)
        weight = divide(whole(2, SHAPE), DeviceMesh(group, (group.world_size,)), [Shard(0)])
        save_distributed({"weight": weight, "seed": 2}, url, storage_options=server.options)

    with pytest.raises(RankFailedError) as caught:
        run_ranks(program, NUM_RANKS, backend="tcp")
    is_committed = method == "put" and is_after
    assert ("What was written of the checkpoint may be left" in str(caught.value)) == (method == "put")
    if method == "begin":
        assert server.objects(folder) == before
    check_seed(server, url, 2 if is_committed else 1)
    save(server, url, 3)
    assert len(server.objects(folder)) == len(before)
    check_seed(server, url, 3)


def kill_after(num_bytes):
    """Have this process end when it has written so much."""
    write, sent = RemoteFileWriter.write, []

    def write_and_die(writer, data):
        write(writer, data)
        sent.append(len(data))
        if sum(sent) > num_bytes:
            os.kill(os.getpid(), signal.SIGKILL)

    RemoteFileWriter.write = write_and_die


def test_checkpoints_beside_each_other(server):
    """Saved while the program goes on; old ones are removed, and the newest is found."""
    parent = f"s3://{s3_server.BUCKET}/rotated"

    def program(group):
        with AsyncCheckpointer(parent, group=group, keep_last=2, storage_options=server.options) as checkpointer:
            for step in range(4):
                weight = divide(whole(step, (10, 10)), DeviceMesh(group, (group.world_size,)), [Shard(0)])
                checkpointer.save_async({"weight": weight, "seed": step}, step).wait()

    run_ranks(program, 2)
    assert list_checkpoints(parent, storage_options=server.options) == [f"{parent}/step-0000000{n}" for n in (2, 3)]
    assert find_latest(parent, storage_options=server.options) == f"{parent}/step-00000003"
    assert len(server.objects("rotated")) == 6
    check_seed(server, f"{parent}/step-00000003", 3, shape=(10, 10))


_ENDS_BEFORE_ITS_SAVES = """
import sys
import time

import torch

from ferrodist.checkpoint import AsyncCheckpointer
from ferrodist.checkpoint.save_distributed import Save

write_and_commit = Save.write_and_commit


def write_late(save, *args):
    time.sleep(1.0)
    if save.storage.url.endswith("3"):
        raise ZeroDivisionError
    write_and_commit(save, *args)


checkpointer = AsyncCheckpointer(sys.argv[1], keep_last=1, max_file_bytes=100, storage_options=eval(sys.argv[2]))
state = {str(number): torch.ones(30) for number in range(20)}
checkpointer.save_async(state, 1).wait()
Save.write_and_commit = write_late
checkpointer.save_async(state, 2)
checkpointer.save_async(state, 3)
"""


def test_a_program_that_ends_before_its_saves(server):
    """The saves are committed and rotated all the same; a failure is logged to standard error."""
    parent = f"s3://{s3_server.BUCKET}/ended"
    options = server.options | {"config_kwargs": dict(server.options["config_kwargs"])}
    command = [sys.executable, "-c", _ENDS_BEFORE_ITS_SAVES, parent, repr(options)]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert list_checkpoints(parent, storage_options=server.options) == [f"{parent}/step-00000002"]
    assert len(server.objects("ended/step-00000001")) == 0
    assert "step-00000003, failed: ZeroDivisionError" in done.stderr


def test_damage_in_the_store_is_found(server, url, folder):
    """An object that is gone, shorter, or changed: the file and the tensor are named."""
    save(server, url, 1)
    name = server.objects(folder)[-1]
    fs, path = fsspec.filesystem("s3", **server.options), f"{s3_server.BUCKET}/{folder}/{name}"
    data = fs.cat_file(path)
    damages = {
        "damaged": lambda: fs.pipe_file(path, data[:-1] + bytes([data[-1] ^ 1])),
        "bytes where": lambda: fs.pipe_file(path, data[:-1]),
        "is missing": lambda: fs.rm_file(path),
    }
    for text, damage in damages.items():
        damage()
        with pytest.raises(DistCheckpointError, match=text) as caught:
            load_distributed(url, storage_options=server.options)
        assert name in caught.value.message
        assert "'weight'" in caught.value.message
        assert verify(url, storage_options=server.options).problems
    fs.pipe_file(path, data)
    assert not verify(url, storage_options=server.options).problems


def test_resharding_from_store_to_store(server, url, folder, tmp_path):
    """To a folder, and back to the store; one that fails half-way leaves the old one, and no parts."""
    save(server, url, 1, shape=LARGE)
    reshard(url, tmp_path / "here", num_ranks=1, storage_options=server.options)
    save(server, url, 2)
    before = server.objects(folder)
    with (
        server.refusing(lambda request: request.is_part and "partNumber=2" in request.query) as refused,
        pytest.raises(DistCheckpointError, match="the server was told to refuse"),
    ):
        reshard(tmp_path / "here", url, num_ranks=2, new_storage_options=server.options)
    assert refused
    assert server.objects(folder) == before
    assert server.uploads(folder) == []
    check_seed(server, url, 2)
    reshard(tmp_path / "here", url, num_ranks=2, new_storage_options=server.options)
    assert len(server.objects(folder)) == 3
    check_seed(server, url, 1, shape=LARGE)
