"""The conformance suite of `Storage`, on every storage."""

import errno
import itertools
import os
import threading
import time
import uuid
from pathlib import Path

import fsspec
import pytest
import s3_server
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from ferrodist.checkpoint import load_distributed, save_distributed, verify
from ferrodist.checkpoint.commit import remove_uncommitted, stale_files
from ferrodist.checkpoint.storage import LocalStorage, RemoteStorage, local_writer, open_storage, remote
from ferrodist.checkpoint.storage.base import describe_process
from ferrodist.checkpoint.storage.local_writer import LocalFileWriter
from ferrodist.errors import DistCheckpointError

SAVE = "0123456789ab"
OTHER = "ba9876543210"
_folders = itertools.count()


def name_of(save_id, number=1):
    return f"model-{save_id}-{number:05d}-of-00003.safetensors"


@pytest.fixture(scope="module")
def server():
    with s3_server.serve() as server:
        yield server


@pytest.fixture(params=["local", "memory", "s3", "folders"])
def reopen(request, tmp_path):
    """Opens the same folder again and again, as ranks do."""
    if request.param == "local":
        yield lambda: LocalStorage(tmp_path / "run" / "step[1]")
    elif request.param == "folders":  # of a file system with folders, as SFTP and HDFS are
        yield lambda: RemoteStorage(
            LocalFileSystem(skip_instance_cache=True), str(tmp_path / "run" / "step[1]"), "sftp://host/run/step[1]"
        )
    elif request.param == "memory":
        url = f"memory://conformance/{uuid.uuid4()}"
        yield lambda: open_storage(url)
        fsspec.filesystem("memory").rm(url, recursive=True) if fsspec.filesystem("memory").exists(url) else None
    else:
        server = request.getfixturevalue("server")
        url = f"s3://{s3_server.BUCKET}/run {next(_folders)}/step[1]"
        yield lambda: open_storage(url, server.options)


@pytest.fixture
def storage(reopen):
    storage = reopen()
    yield storage
    storage.close()


def inside(storage, name):
    """A folder of the storage's folder."""
    if isinstance(storage, LocalStorage):
        return LocalStorage(storage.path / name)
    return RemoteStorage(storage._fs, f"{storage._folder}/{name}", f"{storage.url}/{name}")


def write(storage, data, save_id=SAVE, number=1, step=1000):
    writer = storage.create(save_id, name_of(save_id, number), len(data))
    for start in range(0, len(data), step):
        writer.write(memoryview(data)[start : start + step])
    writer.close()


def read(storage, name, start, size):
    into = bytearray(size)
    storage.read(name, start, memoryview(into))
    return bytes(into)


def test_a_folder_that_is_not_there_is_empty(storage):
    """Nothing is made by looking."""
    assert storage.list_names() == []
    assert not storage.has_leftovers()
    for function in (storage.get, storage.size_bytes, lambda name: read(storage, name, 0, 1)):
        with pytest.raises(FileNotFoundError):
            function("metadata.json")
    storage.remove(["metadata.json"])
    storage.remove_leftovers()
    storage.discard(SAVE)
    assert storage.list_names() == []


def test_published_files_are_as_they_were_written(reopen):
    """By several ranks, each with a storage of its own; what is looked at is never older than what is there."""
    first, second = reopen(), reopen()
    assert second.list_names() == []
    first.begin(SAVE)
    data = os.urandom(12_345)
    write(first, data)
    write(second, b"", number=2)
    names = [name_of(SAVE, number) for number in (1, 2)]
    first.publish(SAVE, names)
    for storage in (first, second):
        assert storage.list_names() == names
        assert [storage.size_bytes(name) for name in names] == [12_345, 0]
        assert storage.get(names[0]) == data
        assert read(storage, names[0], 300, 12_000) == data[300:12_300]
        assert read(storage, names[1], 0, 0) == b""
    second.remove(names)
    assert first.list_names() == []
    with pytest.raises(FileNotFoundError):
        first.size_bytes(names[0])
    for storage in (first, second):
        storage.close()


def test_written_memory_may_change_afterwards(storage):
    """`write` has copied the bytes when it returns."""
    storage.begin(SAVE)
    memory = bytearray(b"before")
    writer = storage.create(SAVE, name_of(SAVE), len(memory))
    writer.write(memoryview(memory))
    memory[:] = b"after!"
    writer.close()
    storage.publish(SAVE, [name_of(SAVE)])
    assert storage.get(name_of(SAVE)) == b"before"


def test_reading_past_the_end_is_an_error_of_its_own(storage):
    """At the end, over it, and far behind it."""
    storage.begin(SAVE)
    write(storage, bytes(range(100)))
    storage.publish(SAVE, [name_of(SAVE)])
    assert read(storage, name_of(SAVE), 90, 10) == bytes(range(90, 100))
    for start, size in ((90, 11), (100, 1), (5000, 1), (0, 101)):
        with pytest.raises(EOFError, match="too early"):
            read(storage, name_of(SAVE), start, size)


def test_put_replaces_a_file_whole(reopen):
    """Also what another storage has looked at before."""
    first, second = reopen(), reopen()
    first.begin(SAVE)
    for data in (b"one", b"", b"a longer one" * 1000):
        first.put("metadata.json", data)
        assert second.get("metadata.json") == data
        assert second.size_bytes("metadata.json") == len(data)
        assert second.list_names() == ["metadata.json"]


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 10, 3 << 20])
def test_a_discarded_file_leaves_nothing(storage, num_bytes, is_closed):
    """Neither on the way nor when it is closed."""
    storage.begin(SAVE)
    writer = storage.create(SAVE, name_of(SAVE), num_bytes)
    writer.write(memoryview(bytes(num_bytes)))
    if is_closed:
        writer.close()
    writer.discard()
    writer.discard()
    assert storage.list_names() == []
    storage.discard(SAVE)
    storage.remove_leftovers()
    assert not storage.has_leftovers()


def test_a_discarded_save_leaves_what_was_there(reopen):
    """The files of all ranks are gone; other files, and other saves, stay."""
    first, second = reopen(), reopen()
    first.begin(OTHER)
    write(first, b"old", save_id=OTHER)
    first.publish(OTHER, [name_of(OTHER)])
    first.put("metadata.json", b"of the old one")
    before = first.list_names()
    again = reopen()
    again.begin(SAVE)
    write(again, b"new 1", number=1)
    write(second, b"new 2", number=2)
    again.discard(SAVE)
    again.remove_leftovers()
    for storage in (first, second, again):
        assert storage.list_names() == before
        assert storage.get(name_of(OTHER)) == b"old"
        storage.close()


def test_nothing_that_is_committed_is_discarded(reopen):
    """Whichever rank discards, knowingly or not: a rank may see the group fail after the commit."""
    first, second = reopen(), reopen()
    first.begin(SAVE)
    write(second, b"elements")
    first.publish(SAVE, [name_of(SAVE)])
    second.discard(SAVE)
    first.put("metadata.json", b"names the file")
    first.discard(SAVE)
    second.discard(SAVE)
    second.remove_leftovers()
    reopen().remove_leftovers()
    assert reopen().list_names() == ["metadata.json", name_of(SAVE)]


def test_folders_in_the_folder_are_told_apart(reopen, storage):
    """Folders of checkpoints beside each other; a folder that is not empty is not removed."""
    assert storage.list_folders() == []
    storage.begin(SAVE)
    storage.put("metadata.json", b"{}")
    for name in ("step-1", "step-2"):
        inner = inside(storage, name)
        assert inner.list_names() == []
        inner.begin(SAVE)
        inner.put("metadata.json", b"{}")
        inner.discard(SAVE)
    assert reopen().list_folders() == storage.list_folders() == ["step-1", "step-2"]
    assert storage.list_names() == ["metadata.json"]
    with pytest.raises(OSError):
        storage.get("step-1")
    storage.remove_folder()
    inner.remove(["metadata.json"])
    inner.remove_folder()
    assert storage.list_folders() == ["step-1"]


def test_the_folder_of_a_discarded_save_goes_if_it_was_made_for_it(reopen, storage):
    """On storages with folders; an existing folder stays."""
    storage.begin(SAVE)
    inner = inside(storage, "step-1")
    inner.begin(SAVE)
    inner.discard(SAVE)
    assert storage.list_folders() == []


def test_threads_may_share_a_storage(storage):
    """Eight write and read at once."""
    storage.begin(SAVE)
    contents = {number: os.urandom(50_000 + number) for number in range(8)}
    failures = []

    def run(number):
        try:
            write(storage, contents[number], number=number, step=7000)
        except BaseException as error:
            failures.append(error)

    def check(number):
        try:
            assert read(storage, name_of(SAVE, number), 5, 40_000) == contents[number][5:40_005]
        except BaseException as error:
            failures.append(error)

    for body in (run, check):
        threads = [threading.Thread(target=body, args=(number,)) for number in contents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if body is run:
            storage.publish(SAVE, [name_of(SAVE, number) for number in contents])
    assert failures == []


@pytest.mark.parametrize("path", ["", 3, None, b"bytes"])
def test_invalid_paths_are_refused(path):
    """With Python's error for such paths."""
    with pytest.raises((TypeError, ValueError), match="path"):
        open_storage(path)


def test_local_urls_are_local_folders(tmp_path):
    """Local URLs are handled as local folders: renames and syncs."""
    storage = open_storage(f"file://{tmp_path}/here")
    assert isinstance(storage, LocalStorage)
    assert storage.url == f"{tmp_path}/here"
    for path in (tmp_path, f"file://{tmp_path}"):
        with pytest.raises(ValueError, match="storage_options are for URLs"):
            open_storage(path, {"key": "x"})


@pytest.mark.parametrize(
    ("url", "kind", "text"),
    [
        ("nonsense://host/folder", ValueError, "no protocol 'nonsense'"),
        ("simplecache::s3://bucket/folder", ValueError, "chain"),
        ("s3://", ValueError, "names no folder"),
        ("memory://", ValueError, "names no folder"),
        ("file://", ValueError, "names no folder"),
        ("s3:/bucket/folder", ValueError, "drops a slash"),
        (Path("s3://bucket/folder"), ValueError, "drops a slash"),
        ("absent://host/folder", DistCheckpointError, "not installed .*pip install nowhere_to_be_found"),
    ],
)
def test_urls_that_cannot_be_opened_say_why(monkeypatch, url, kind, text):
    """And what to do; of packages that are not installed fsspec knows the names."""
    absent = {"class": "nowhere_to_be_found.FileSystem", "err": "Run pip install nowhere_to_be_found"}
    monkeypatch.setitem(known_implementations, "absent", absent)
    with pytest.raises(kind, match=text):
        open_storage(url)


def test_wrong_options_and_unreachable_hosts_are_errors():
    """Some file systems connect when they are created; others report wrong options only later."""

    class Connecting(fsspec.get_filesystem_class("memory")):
        protocol = "connecting"

        def __init__(self, host=None, **options):
            raise options["error"]

    fsspec.register_implementation("connecting", Connecting, clobber=True)
    url = "connecting://host/folder"
    with pytest.raises(DistCheckpointError, match=r"can't be opened: ConnectionRefusedError: nobody there"):
        open_storage(url, {"error": ConnectionRefusedError("nobody there")})
    for error in (TypeError("no such option"), KeyError("supply one of them")):
        with pytest.raises(ValueError, match="with these storage_options"):
            open_storage(url, {"error": error})


def test_a_url_that_was_made_a_path_is_refused(tmp_path):
    """A Path has dropped a slash; a folder named "s3:" would be made."""
    with pytest.raises(ValueError, match="give it as text"):
        open_storage(tmp_path.__class__("s3://bucket/folder"))


def test_passwords_in_urls_are_refused():
    """The URL is in every message, and it is not in this one."""
    with pytest.raises(ValueError, match="password in it") as caught:
        open_storage("sftp://me:secret@host/folder")
    assert "secret" not in str(caught.value)


def test_listings_caches_of_others_are_not_used(server):
    """fsspec's shared instances cache listings; a checkpoint's storage never answers from them."""
    others = fsspec.filesystem("s3", **server.options)
    folder = f"{s3_server.BUCKET}/listed"
    storage = open_storage(f"s3://{folder}", server.options)
    others.pipe_file(f"{folder}/one", b"1")
    assert [entry["name"] for entry in others.ls(folder, detail=True)] == [f"{folder}/one"]
    storage.begin(SAVE)
    write(storage, b"12345")
    assert storage.list_names() == [name_of(SAVE), "one"]
    others.pipe_file(f"{folder}/one", b"123")
    assert storage.size_bytes("one") == 3


def test_large_files_are_sent_in_parts(server):
    """With memory for a part or two; a discarded one leaves no part."""
    storage = open_storage(f"s3://{s3_server.BUCKET}/large", server.options)
    storage.begin(SAVE)
    data = os.urandom(40_000_003)
    write(storage, data, step=1 << 20)
    into = bytearray(39_000_000)
    with server.watching(lambda request: "checkpoints/large" in request.path and request.method == "GET") as reads:
        storage.read(name_of(SAVE), 1_000_001, memoryview(into))
    assert into == data[1_000_001:40_000_001]
    assert len(reads) == 5  # of 8 MiB, at once
    writer = storage.create(SAVE, name_of(SAVE, 2), 0)
    for _ in range(17):
        writer.write(memoryview(data)[: 1 << 20])
    assert server.uploads("large") == [f"large/{name_of(SAVE, 2)}"]
    writer.discard()
    assert server.uploads("large") == []
    assert server.objects("large") == [f".saving-{SAVE}", name_of(SAVE)]


def test_uploads_of_killed_saves_are_aborted_by_the_next(server):
    """Nobody else sees their parts, or pays for them. Those of other programs stay."""
    storage = open_storage(f"s3://{s3_server.BUCKET}/killed", server.options)
    fs = storage._fs
    for name in (name_of(OTHER), name_of(SAVE), "video.mp4", f"inner/{name_of(SAVE)}"):
        fs.call_s3("create_multipart_upload", Bucket=s3_server.BUCKET, Key=f"killed/{name}")
    assert storage.has_leftovers()
    storage.begin(SAVE)
    storage.discard(SAVE)
    assert server.uploads("killed") == sorted(
        f"killed/{n}" for n in (name_of(OTHER), "video.mp4", f"inner/{name_of(SAVE)}")
    )
    storage.remove_leftovers()
    assert server.uploads("killed") == sorted(f"killed/{n}" for n in ("video.mp4", f"inner/{name_of(SAVE)}"))
    assert not storage.has_leftovers()
    with server.refusing(lambda request: "uploads" in request.query):
        assert not storage.has_leftovers()
        storage.remove_leftovers()  # not everybody may list them


def test_a_put_whose_response_is_lost_is_checked(server):
    """The object exists, so the put has succeeded; if that can't be checked, nothing is removed any more."""
    storage = open_storage(f"s3://{s3_server.BUCKET}/lost", server.options)

    def is_put(request):
        return request.method == "PUT" and request.is_manifest

    storage.begin(SAVE)
    write(storage, b"elements")
    with server.losing_answers(is_put):
        storage.put("metadata.json", b"first")
    assert storage.get("metadata.json") == b"first"
    storage.begin(SAVE)
    with (
        server.cutting(lambda request: request.is_manifest),
        pytest.raises(OSError, match="whether it was written is not known"),
    ):
        storage.put("metadata.json", b"second")
    storage.discard(SAVE)  # the server might still be at it
    assert storage.list_names() == ["metadata.json", name_of(SAVE)]
    storage.begin(SAVE)
    with server.refusing(is_put), pytest.raises(PermissionError):
        storage.put("metadata.json", b"third")
    storage.discard(SAVE)
    assert storage.list_names() == ["metadata.json"]


REFUSALS = {"AccessDenied": PermissionError, "SlowDown": OSError, "InternalError": OSError, "NobodyKnows": OSError}


@pytest.mark.parametrize("code", REFUSALS)
def test_refusals_are_os_errors(server, code):
    """For every answer of the server and every operation; the errors name the file."""
    storage = open_storage(f"s3://{s3_server.BUCKET}/refused", server.options)
    storage.begin(SAVE)
    write(storage, b"elements")
    calls = {
        "create": lambda: write(storage, b"more", number=2),
        "put": lambda: storage.put("metadata.json", b""),
        "get": lambda: storage.get(name_of(SAVE)),
        "size": lambda: storage.size_bytes(name_of(SAVE)),
        "read": lambda: read(storage, name_of(SAVE), 0, 3),
        "remove": lambda: storage.remove([name_of(SAVE)]),
        "list": storage.list_names,
    }
    with server.refusing(lambda request: True, code):
        for what, call in calls.items():
            with pytest.raises(REFUSALS[code]) as caught:
                call()
            assert "refused" in caught.value.filename, what
    storage.discard(SAVE)


@pytest.mark.parametrize("is_severed", [True, False])
def test_connections_that_break_are_os_errors(server, is_severed):
    """fsspec lets errors of botocore through that share nothing with Python's."""
    options = server.options if is_severed else {**server.options, "endpoint_url": "http://127.0.0.1:9"}
    storage = open_storage(f"s3://{s3_server.BUCKET}/broken", options)
    with server.cutting(lambda request: True):
        for call in (lambda: storage.get("x"), storage.list_names, lambda: read(storage, "x", 0, 1)):
            with pytest.raises(OSError, match=r"[Cc]onn"):
                call()


def test_missing_credentials_are_an_os_error(server, monkeypatch, tmp_path):
    """Credentials are looked up at the first request."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    storage = open_storage(f"s3://{s3_server.BUCKET}/folder", {"endpoint_url": server.url})
    with pytest.raises(OSError, match="credentials"):
        storage.list_names()


def test_missing_buckets_are_not_created(server):
    """A typo does not create a bucket."""
    storage = open_storage("s3://chekpoints/folder", server.options)
    assert storage.list_names() == []
    with pytest.raises(FileNotFoundError, match="no bucket 'chekpoints': make it first"):
        storage.begin(SAVE)
    with pytest.raises(FileNotFoundError):
        open_storage("s3://chekpoints", server.options).get("metadata.json")


def test_short_answers_are_asked_for_again():
    """And answers that are too long are not taken."""

    class Stingy(fsspec.get_filesystem_class("memory")):
        protocol = "stingy"
        extra = -2

        def cat_file(self, path, start=None, end=None, **kwargs):
            return super().cat_file(path, start, max(start + 1, end + self.extra) if end else None)

    fs = Stingy(skip_instance_cache=True)
    fs.pipe_file("/stingy/x", bytes(range(20)))
    storage = RemoteStorage(fs, "/stingy", "stingy://x")
    assert read(storage, "x", 3, 10) == bytes(range(3, 13))
    fs.extra = 1
    with pytest.raises(OSError, match="11 bytes came where 10"):
        read(storage, "x", 3, 10)
    fs.rm_file("/stingy/x")


def test_buffers_of_failed_writes_are_not_shared(tmp_path, monkeypatch):
    """One file's buffers never get into another file, whatever happened before."""
    data = memoryview(bytes(5 * local_writer._BUFFER_BYTES))
    original = local_writer._write_all

    def fail(file, data, at):
        raise OSError(errno.EIO, "a bad disk")

    for number in range(3):
        monkeypatch.setattr(local_writer, "_write_all", fail)
        writer = LocalFileWriter(tmp_path / f"bad{number}", len(data))
        with pytest.raises(OSError, match="a bad disk"):
            writer.write(data)
        writer.discard()
        monkeypatch.setattr(local_writer, "_write_all", original)
        writer = LocalFileWriter(tmp_path / f"good{number}", len(data))
        writer.write(data)
        writer.close()
        assert len({id(buffer) for buffer in local_writer._spare_buffers}) == len(local_writer._spare_buffers)
    writers = [LocalFileWriter(tmp_path / f"file{number}", len(data)) for number in range(2)]
    for number, writer in enumerate(writers):
        writer.write(memoryview(bytes([number + 1])))
    for number, writer in enumerate(writers):
        writer.write(memoryview(bytes([number + 1]) * (len(data) - 1)))
        writer.close()
        assert (tmp_path / f"file{number}").read_bytes() == bytes([number + 1]) * len(data)


def test_a_living_save_keeps_its_files(reopen):
    """Other saves never remove files of a live save; after its end no marker is left."""
    living, other = reopen(), reopen()
    living.begin(SAVE)
    write(living, b"elements")
    other.begin(OTHER)
    assert other.has_leftovers(SAVE)
    other.remove_leftovers()
    assert not stale_files(other) & {name_of(SAVE)}
    remove_uncommitted(other)
    living.publish(SAVE, [name_of(SAVE)])
    assert living.get(name_of(SAVE)) == b"elements"
    living.put("metadata.json", b"{}")
    living.discard(SAVE)
    other.discard(OTHER)
    assert not other.has_leftovers()
    assert reopen().list_names() == ["metadata.json", name_of(SAVE)]


@pytest.mark.parametrize(
    ("mark", "is_alive"),
    [
        (lambda: b"another-host pid:[1] 1 1", True),
        (lambda: b"nonsense", True),
        (lambda: describe_process().replace(b" " + str(os.getpid()).encode() + b" ", b" 4194305 "), False),
        (lambda: describe_process()[:-1] + b"x", False),
        (describe_process, False),
    ],
    ids=[
        "of another host",
        "of nobody",
        "of no process",
        "of a process that had the number",
        "of a save that has ended",
    ],
)
def test_saves_of_other_processes_in_a_store(mark, is_alive):
    """Their markers tell whether they are alive, and count for a day."""
    storage = open_storage("memory://other-processes")
    storage.begin(SAVE)
    write(storage, b"elements")
    storage._fs.pipe_file(f"{storage._folder}/.saving-{SAVE}", mark())
    remote._own_saves.pop(SAVE)
    other = open_storage("memory://other-processes")
    assert (name_of(SAVE) in stale_files(other)) != is_alive
    other.remove_leftovers()
    assert other.has_leftovers() == is_alive
    storage._fs.rm(storage._folder, recursive=True)


def test_a_save_of_another_host_that_is_old(monkeypatch):
    """The save counts as dead once its marker is older than a day."""
    storage = open_storage("memory://an-old-one")
    storage.begin(SAVE)
    storage._fs.pipe_file(f"{storage._folder}/.saving-{SAVE}", b"another-host pid:[1] 1 1")
    remote._own_saves.pop(SAVE)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 86_500)
    other = open_storage("memory://an-old-one")
    other.remove_leftovers()
    assert not other.has_leftovers()


def test_two_jobs_that_save_to_one_store():
    """All their saves succeed, and what is there in the end is whole and all there is, after one more save."""
    url, failures = "memory://two-jobs", []
    state = {str(number): torch.ones(3) for number in range(4)}

    def save(job):
        try:
            for _ in range(10):
                save_distributed(state, url, max_file_bytes=1)
        except Exception as error:
            failures.append((job, error))

    jobs = [threading.Thread(target=save, args=(job,)) for job in (1, 2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert failures == []
    assert verify(url, contents=True).num_tensors == 4
    assert load_distributed(url).keys() == state.keys()
    save_distributed(state, url, max_file_bytes=1)
    assert verify(url).is_sound
    assert len(open_storage(url).list_names()) == 4 + 2
