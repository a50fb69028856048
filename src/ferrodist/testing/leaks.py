"""Leak checks: threads, processes, descriptors, shared memory."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterator

_SETTLE_TIMEOUT_SECONDS = 1.0
_POLL_INTERVAL_SECONDS = 0.01
_SHARED_MEMORY = Path("/dev/shm")
_ENGINE_THREAD_PREFIX = "ferro"  # threads of the native engine carry names that start with this

# Started once, on first use, by the interpreter or torch, and meant to live as long as the process.
_LASTING_PROCESSES = (
    "multiprocessing.resource_tracker",  # unlinks shared memory that a crashed process left
    "multiprocessing.forkserver",  # forks workers of the "forkserver" start method
    "torch_shm_manager",  # torch's own tracker of tensors in shared memory
)
_LASTING_DESCRIPTORS = (
    "/dev/null",  # opened by subprocess and logging set-ups and kept for later
    "/dev/urandom",  # kept open by OpenSSL and libraries that draw random numbers
    "/dev/nvidia",  # the CUDA driver opens its devices at the first call
)
_FOREIGN_SEGMENTS = ("mpich_shm_", "ucx_shm_", "sm_segment", "vader_segment")
"""Segments of MPIs, whose ranks leave theirs behind when they are killed: other programs may add some at any time."""
_LASTING_THREADS = ("tqdm_monitor",)  # of progress bars, started with the first one


@contextmanager
def check_leaks() -> Iterator[None]:
    """Raise AssertionError, with a list, when the block leaves something behind that was not there before.

    The check covers Python threads and threads of the native engine, child processes (zombies too), open descriptors
    (sockets, pipes, files, memfd, eventfd, epoll), mappings of shared memory, and files in ``/dev/shm``. Whatever is
    just ending has a second for it. Objects that the interpreter and torch create once and keep are exempt; each is
    listed in this module with its reason. An exception of the block itself passes through unchanged.

    All but threads is read from ``/proc``: systems other than Linux check threads only.

    Raises:
        AssertionError: Something was left behind.
    """
    gc.collect()
    before = _take_snapshot()
    yield
    gc.collect()
    deadline = Deadline(_SETTLE_TIMEOUT_SECONDS)
    while leaks := _take_snapshot() - before:
        if deadline.expired:
            lines = [
                f"  {kind} {name}" + (f" ({count} more)" if count > 1 and kind != "mapping" else "")
                for (kind, name), count in leaks.items()
            ]
            raise AssertionError("\n".join(["the block left behind:", *lines]))
        time.sleep(_POLL_INTERVAL_SECONDS)


def _take_snapshot() -> Counter[tuple[str, str]]:
    """Count the resources of this process at this moment, each under its kind and a unique name."""
    found = {"thread": _threads()}
    if sys.platform == "linux":
        processes = _child_processes()
        found["process"] = Counter(processes.values())
        found["descriptor"], found["mapping"] = _descriptors(), _mappings()
        found["file"] = _segments({os.getpid(), *processes})
    return Counter({(kind, name): count for kind, names in found.items() for name, count in names.items()})


def _threads() -> Counter[str]:
    # A dummy stands for a native thread that once called into Python, as the workers of torch's autograd pool do: it
    # stays listed for as long as the pool. Those of the native engine are found by their own name below.
    threads = [
        thread
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)  # noqa: SLF001
    ]
    found = Counter(
        f"{thread.name!r} (ident {thread.ident}{', daemon' if thread.daemon else ''})"
        for thread in threads
        if thread.name not in _LASTING_THREADS
    )
    known = {thread.native_id for thread in threads}
    for task in Path("/proc/self/task").glob("*"):
        # Other native threads are pools (OpenMP, BLAS) that grow at the first large operation and are kept.
        with suppress(OSError):  # it ended
            name = (task / "comm").read_text().strip()
            if name.startswith(_ENGINE_THREAD_PREFIX) and int(task.name) not in known:
                found[f"{name!r} of the native engine (id {task.name})"] += 1
    return found


def _child_processes() -> dict[int, str]:
    children: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) != os.getpid():
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if any(name in command for name in _LASTING_PROCESSES):
                continue
            ended = ", ended but not waited for" if state == "Z" else ""
            children[int(entry.name)] = f"{entry.name}{ended}: {command[:100]}".removesuffix(": ")
    return children


def _descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    # The pipe on which the resource tracker notices this process's end; created with the tracker.
    tracker_pipe = getattr(resource_tracker._resource_tracker, "_fd", None)  # noqa: SLF001 - no public name for it
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a Path for each would open more descriptors to look at
        with suppress(OSError):  # the listing's own descriptor
            target = os.readlink(f"/proc/self/fd/{entry}")  # noqa: PTH115
            if int(entry) != tracker_pipe and not target.startswith((*_LASTING_DESCRIPTORS, "/proc/")):
                # Sockets and pipes have their inode in the name; event descriptors only their kind, so they are
                # counted.
                found[target] += 1
    return found


def _mappings() -> Counter[str]:
    """Mapped bytes of each shared-memory object (not the number of mappings: the kernel merges neighbours)."""
    found: Counter[str] = Counter()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(("/dev/shm/", "/memfd:", "/dev/zero", "/SYSV")):
            start, end = (int(address, 16) for address in fields[0].split("-"))
            found[f"of {fields[5]} (inode {fields[4]})"] += end - start
    return found


def _segments(own: set[int]) -> Counter[str]:
    """Files in /dev/shm, except MPIs' and those that another running program has open."""
    if not _SHARED_MEMORY.is_dir():
        return Counter()
    names = {str(path) for path in _SHARED_MEMORY.iterdir() if not path.name.startswith(_FOREIGN_SEGMENTS)}
    for entry in Path("/proc").glob("[0-9]*") if names else ():
        if int(entry.name) not in own:
            with suppress(OSError):  # it ended, or belongs to another user
                maps = (entry / "maps").read_text().splitlines()
                names.difference_update(line.split(maxsplit=5)[-1] for line in maps if "/dev/shm/" in line)
                names.difference_update(os.readlink(link) for link in (entry / "fd").iterdir())  # noqa: PTH115
    return Counter(names)
