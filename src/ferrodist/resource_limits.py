"""The system's resource limits, for errors: open files, threads, memory."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.errors import DistributedError, RendezvousError

if TYPE_CHECKING:
    from collections.abc import Iterator


def limit_text(error: BaseException) -> str | None:
    """Return a description of the limit that an error hit, and the remedy; None for other errors."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"this process has as many files open as it may, {limit}: raise that limit (ulimit -n)"
    if isinstance(error, OSError) and error.errno == errno.ENFILE:
        return "this host has as many files open as it may: raise that limit (sysctl fs.file-max)"
    if isinstance(error, OSError) and error.errno in (errno.ENOBUFS, errno.ENOMEM):
        return "the system has no memory left for another connection"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        limit_name = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
        return (
            f"this process can start no more threads: raise the limit of processes and threads (ulimit -u, {limit_name}"
            " here, or pids.max of the container), or give it more memory"
        )
    return None


def check_descriptors(number: int) -> None:
    """Check that this process may open ``number`` more files; OSError as for the first that fails."""
    opened: list[int] = []
    try:
        with Path(os.devnull).open("rb") as file:
            for _ in range(number):
                opened.append(os.dup(file.fileno()))  # noqa: PERF401 - descriptors before a failure must be closed
    finally:
        for descriptor in opened:
            os.close(descriptor)


@contextmanager
def naming_limits(
    what_failed: str, ranks: tuple[int, ...] = (), *, kind: type[DistributedError] = RendezvousError
) -> Iterator[None]:
    """Convert errors of the block that hit a limit of the system to ones with the limit's name and these ranks."""
    try:
        yield
    except DistributedError:
        raise
    except (OSError, RuntimeError) as error:
        text = limit_text(error)
        if text is None:
            raise
        raise kind(f"{what_failed}: {text}", ranks=ranks) from error
