"""The file store between processes: kills, permissions, damage."""

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ferrodist.errors import DistributedTimeoutError, ProtocolError, RendezvousError
from ferrodist.rendezvous import FileStore, file_store

_OPEN = """
import os, pathlib, signal, sys
from ferrodist.rendezvous import FileStore
store = FileStore(sys.argv[1])
"""
_COUNT = _OPEN + "while True:\n    n = store.add('n', 1)\n    store.set(f'k{n % 7}', b'%d' % n * 1000)\n"
_DIE_BEFORE_RENAME = _OPEN + (
    "pathlib.Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\nstore.set('k', b'half')\n"
)


def start(code, path):
    return subprocess.Popen([sys.executable, "-c", code, str(path)])


def test_files_are_private(tmp_path):
    """Everything the store creates can be read by its owner only."""
    store = FileStore(tmp_path / "s")
    store.set("k", b"v")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"s": 0o600, "s.lock": 0o600}
    store.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_killed_before_its_rename_leaves_the_old_map(tmp_path):
    """A process killed between writing and renaming changes nothing and blocks nobody."""
    store = FileStore(tmp_path / "s", timeout=10)
    store.set("k", b"whole")
    with start(_DIE_BEFORE_RENAME, store.path) as process:
        assert process.wait(30) == -signal.SIGKILL
    assert (tmp_path / "s.tmp").exists()
    assert store.get("k") == b"whole"
    store.set("k", b"next")
    assert FileStore(store.path).get("k") == b"next"
    assert not (tmp_path / "s.tmp").exists()


def test_writers_killed_at_any_moment(tmp_path, until):
    """However often writers are killed, the map stays whole, the count never falls, and the lock is free."""
    store = FileStore(tmp_path / "s", timeout=20)
    store.set("n", b"0")
    for kill in range(4):
        before = int(store.get("n"))
        with start(_COUNT, store.path) as first, start(_COUNT, store.path) as second:
            until(lambda before=before, kill=kill: int(store.get("n")) > before + 20 + 3 * kill, 30)
            first.send_signal(signal.SIGKILL)
            first.wait(30)
            middle = store.add("n", 1)
            until(lambda middle=middle: int(store.get("n")) > middle + 5, 30)
            second.send_signal(signal.SIGKILL)
        assert store.add("n", 0) > middle


def test_processes_and_threads_count_together(tmp_path, in_threads):
    """Increments of several processes, each with threads, all count."""
    code = _OPEN + (
        "import threading\n"
        "work = lambda: [store.add('n', 1) for _ in range(25)]\n"
        "threads = [threading.Thread(target=work) for _ in range(2)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    store = FileStore(tmp_path / "s")
    with start(code, store.path) as one, start(code, store.path) as two:
        in_threads(*[lambda: [store.add("n", 1) for _ in range(25)]] * 2)
        assert (one.wait(60), two.wait(60)) == (0, 0)
    assert store.get("n") == b"150"


def test_a_lock_that_is_held_ends_in_a_timeout(tmp_path):
    """A writer waits for the lock of another process until its deadline, and a reader does not wait."""
    store = FileStore(tmp_path / "s")
    store.set("k", b"v")
    code = _OPEN + "with store._locked(5):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    command = [sys.executable, "-c", code, str(store.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(DistributedTimeoutError, match=r"held its lock"):
            store.set("k", b"w", timeout=0.05)
        assert store.get("k", timeout=0) == b"v"
    store.set("k", b"w")


@pytest.mark.parametrize("holder", ["process", "thread"])
def test_closing_ends_a_wait_for_the_lock(tmp_path, in_threads, holder):
    """A call that waits for the lock, of another process or thread, raises once its store is closed."""
    store, other = FileStore(tmp_path / "s"), FileStore(tmp_path / "s")
    waiting = threading.Event()
    genuine = store._check_open

    def check_open():
        if waiting.is_set():
            store.close()  # the second look: the call waits
        waiting.set()
        genuine()

    store._check_open = check_open
    code = _OPEN + "with store._locked(5):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    with contextlib.ExitStack() as stack:
        if holder == "process":
            command = [sys.executable, "-c", code, str(store.path)]
            process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert process.stdout.readline() == b"held\n"
        else:
            stack.enter_context(other._locked(5))
        error = in_threads(lambda: store.set("k", b"v", timeout=5))[0]
    assert type(error) is RendezvousError
    assert "was closed" in error.message


def test_mutexes_of_unused_paths_are_removed(tmp_path):
    """The process's own locks do not accumulate with the paths it has used."""
    before = len(file_store._MUTEXES)
    for index in range(20):
        FileStore(tmp_path / f"s{index}").set("k", b"v")
    assert len(file_store._MUTEXES) == before


@pytest.mark.parametrize("name", ["s", "s.lock"])
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(tmp_path, name, mode):
    """The store trusts no file that other users can change."""
    store = FileStore(tmp_path / "s")
    store.set("k", b"v")
    (tmp_path / name).chmod(mode)
    with pytest.raises(RendezvousError, match=r"written by other users"):
        store.set("k", b"w")


def test_a_file_of_another_user_is_refused(tmp_path, monkeypatch):
    """The store trusts no file that another user owns."""
    store = FileStore(tmp_path / "s")
    store.set("k", b"v")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(RendezvousError, match=r"belongs to user"):
        store.get("k")


def test_links_and_folders_are_refused(tmp_path):
    """Symbolic links are not followed, and folders are refused."""
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(RendezvousError, match=r"cannot be used"):
        FileStore(tmp_path / "link").get("k", timeout=0)
    (tmp_path / "folder").mkdir()
    with pytest.raises(RendezvousError, match=r"not a regular file|cannot be used"):
        FileStore(tmp_path / "folder").get("k", timeout=0)
    with pytest.raises(RendezvousError, match=r"folder"):
        FileStore(tmp_path / "none" / "s")


def test_a_file_replaced_on_another_host_while_it_is_read(tmp_path, monkeypatch):
    """A network file system's stale handle is no error: the new file is read. No descriptor is lost."""
    store = FileStore(tmp_path / "s")
    store.set("k", b"v")
    genuine, failures = os.fstat, [OSError(errno.ESTALE, "stale")]
    monkeypatch.setattr(file_store.os, "fstat", lambda fd: _raise(failures.pop()) if failures else genuine(fd))
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert store.get("k", timeout=0) == b"v"
    failures.append(OSError(errno.EIO, "broken"))
    with pytest.raises(RendezvousError, match=r"cannot be used: .*broken"):
        store.get("k", timeout=0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"ferro", "something else"),
        (b"import os\n" * 10, "something else"),
        (b"ferrodist store 9\n" + bytes(8) + b"\x80", "another version"),
        (b"ferrodist store 1\n" + bytes(7) + b"\x01" + b"\xc1\xc1", "damaged"),
    ],
)
def test_a_file_of_something_else(tmp_path, content, message):
    """A file of another kind or version, or a damaged one, is an error, not an empty store."""
    (tmp_path / "s").write_bytes(content)
    (tmp_path / "s").chmod(0o600)
    with pytest.raises(ProtocolError, match=message):
        FileStore(tmp_path / "s").get("k", timeout=0)


def test_an_empty_file_is_an_empty_store(tmp_path):
    """A file that the caller made, as tempfile does, is a store without keys."""
    (tmp_path / "s").touch(mode=0o600)
    store = FileStore(tmp_path / "s")
    assert store.compare_set("k", b"", b"v") == b"v"
    assert store.get("k") == b"v"


def test_a_file_removed_and_made_anew_is_read_again(tmp_path):
    """A store that has cached one file sees the keys of the next file under the same name."""
    first, second = FileStore(tmp_path / "s"), FileStore(tmp_path / "s")
    first.set("k", b"old")
    assert second.get("k") == b"old"
    first.remove()
    with pytest.raises(DistributedTimeoutError):
        second.get("k", timeout=0)
    first.set("k", b"new")
    assert second.get("k") == b"new"


def test_removal_races_with_writers(tmp_path, in_threads):
    """A writer that waited for a removed lock file locks the new one, so no write is lost to a dead file."""
    stores = [FileStore(tmp_path / "s") for _ in range(3)]
    gate = threading.Barrier(3)

    def work(store):
        gate.wait()
        for _ in range(30):
            store.remove()
            store.set("k", b"v")
            store.add("n", 1)

    assert in_threads(*[lambda s=s: work(s) for s in stores]) == [None] * 3
    stores[0].set("last", b"1")
    assert stores[1].get("last") == b"1"
