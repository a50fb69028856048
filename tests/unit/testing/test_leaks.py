"""`check_leaks` finds each kind of leak, and nothing else."""

import contextlib
import gc
import mmap
import multiprocessing
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest

from ferrodist.testing import check_leaks, leaks, run_ranks


@contextlib.contextmanager
def leak_expected(match):
    """The block leaves something behind that the message names; it does not go by itself, however long one waits."""
    with pytest.raises(AssertionError, match=f"(?s)the block left behind:.*{match}"), _impatient_check():
        yield


@contextlib.contextmanager
def _impatient_check():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaks, "_SETTLE_TIMEOUT_SECONDS", 0.05)
        with check_leaks():
            yield


def test_an_empty_block_is_clean():
    """A block that does nothing leaves nothing."""
    with check_leaks():
        pass


def test_resources_that_the_block_frees_are_no_leak():
    """Threads, processes, descriptors and shared memory that are gone at the end are not reported."""
    with check_leaks():
        thread = threading.Thread(target=lambda: None)
        thread.start()
        subprocess.run([sys.executable, "-c", ""], check=True)
        for end in socket.socketpair():
            end.close()
        with mmap.mmap(-1, 4096) as shared:
            shared[0] = 1


def test_resources_that_are_just_ending_are_waited_for():
    """A thread that ends soon after the block has a second for it."""
    done = threading.Event()
    timer = threading.Timer(0.1, done.set)
    with check_leaks():
        timer.start()
    assert done.is_set()
    timer.join()


def test_earlier_resources_are_no_leak():
    """Only what is new after the block counts."""
    left, right = socket.socketpair()
    with left, right, check_leaks():
        pass


def test_a_thread_is_found():
    """A thread that still runs is named."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="the forgotten thread", daemon=True)
    with leak_expected("thread 'the forgotten thread'"):
        thread.start()
    done.set()
    thread.join()


def test_a_process_is_found():
    """A child that still runs is named with its command."""
    processes = []
    with leak_expected(r"process \d+: .*import sys; sys.stdin.read()"):
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE))
    processes[0].communicate()


def test_a_zombie_is_found():
    """A child that has ended and was not waited for is named as such."""
    pids = []
    with leak_expected(r"process \d+, ended but not waited for"):
        pids.append(os.fork())
        if pids[0] == 0:
            os._exit(0)
        os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
    os.waitpid(pids[0], 0)


def open_descriptors():
    """The numbers of this process's descriptors."""
    numbers = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    return {number for number in numbers if Path(f"/proc/self/fd/{number}").is_symlink()}  # not the listing's own


def copy_of(opened):
    """A descriptor of the file of ``opened`` that nothing will close."""
    return os.dup(opened.fileno())


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("socket:", lambda: socket.socket().detach()),
        ("pipe:", os.pipe),
        ("eventfd", lambda: os.eventfd(0)),
        ("eventpoll", lambda: copy_of(select.epoll())),
        ("/memfd:forgotten", lambda: os.memfd_create("forgotten")),
        ("/forgotten.txt", lambda: os.open("forgotten.txt", os.O_CREAT)),
    ],
    ids=["socket", "pipe", "eventfd", "epoll", "memfd", "file"],
)
def test_a_descriptor_is_found(kind, make, tmp_path, monkeypatch):
    """An open descriptor of every kind is named by what it is."""
    monkeypatch.chdir(tmp_path)
    before = open_descriptors()
    with leak_expected(f"descriptor .*{kind}"):
        make()
        gc.collect()
    for descriptor in open_descriptors() - before:
        os.close(descriptor)


def test_a_copy_of_a_descriptor_is_found():
    """A second descriptor for something that was open before is one more."""
    left, right = socket.socketpair()
    copies = []
    with left, right:
        with leak_expected("descriptor socket:"):
            copies.append(os.dup(left.fileno()))
        os.close(copies[0])


def test_a_mapping_is_found():
    """Shared memory that is still mapped is named, though no descriptor of it is open."""
    mappings = []
    with leak_expected("mapping of /memfd:forgotten"):
        descriptor = os.memfd_create("forgotten")
        os.ftruncate(descriptor, 4096)
        mappings.append(mmap.mmap(descriptor, 4096))
        os.close(descriptor)
    mappings[0].close()


def test_a_segment_is_found():
    """A file in /dev/shm that nobody removed is named."""
    path = Path(f"/dev/shm/ferrodist-forgotten-{secrets.token_hex(8)}")
    with leak_expected(f"file {path}"):
        path.write_bytes(b"forgotten")
    path.unlink()


def test_segments_of_other_programs_are_ignored():
    """A file in /dev/shm that a program outside this one's children holds is that program's."""
    path = Path(f"/dev/shm/another-program-{secrets.token_hex(8)}")
    hold = (
        "import os, sys\n"
        "sys.stdin.readline()\n"
        "file = open(sys.argv[1], 'w')\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    # The shell starts the holder and ends, so that the holder is nobody's child here.
    detach = ["sh", "-c", 'exec 3<&0; "$@" <&3 &', "sh", sys.executable, "-c", hold, path]
    with subprocess.Popen(detach, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        shell.wait()
        with check_leaks():
            shell.stdin.write(b"go\n")
            shell.stdin.flush()
            assert shell.stdout.readline() == b"held\n"
        assert path.exists()
    path.unlink()


@pytest.mark.parametrize("name", ["mpich_shm_0", "ucx_shm_posix_1"])
def test_segments_of_mpis_are_ignored(name):
    """Ranks of an MPI that were killed leave theirs behind, whoever looks meanwhile."""
    path = Path(f"/dev/shm/{name}{secrets.token_hex(8)}")
    try:
        with _impatient_check():
            path.write_bytes(b"x")
    finally:
        path.unlink()


def test_the_resource_tracker_is_no_leak():
    """Python's own helper, which shared memory starts once, is left out with its pipe."""
    resource_tracker._resource_tracker._stop()
    with check_leaks():
        segment = shared_memory.SharedMemory(create=True, size=16)
        segment.close()
        segment.unlink()


def test_an_error_of_the_block_goes_through():
    """The block's own exception matters more than what it left."""
    ends = []

    def fail():
        with check_leaks():
            ends.extend(socket.socketpair())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    for end in ends:
        end.close()


def test_semaphores_and_process_ranks_leave_nothing():
    """A run with processes that share a semaphore is clean."""

    def share_a_semaphore():
        ready = multiprocessing.get_context("fork").Semaphore(0)
        run_ranks(lambda group: ready.release(), 2, backend="tcp")
        assert ready.acquire(timeout=5)

    with check_leaks():
        share_a_semaphore()
