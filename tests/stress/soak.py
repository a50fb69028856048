"""Groups that are made and closed for minutes, beside tensors of some MB: how much memory their ranks have.

    python tests/stress/soak.py --minutes 10

Ranks that are threads of this process make sub-groups, run collectives of several sizes in them, start some, send
tensors, refer to what a function failed to make, save what can't be saved, and close the groups. Resident memory is
printed every few seconds, with what the heap has given out of it: what is above that is the heap's own. Ends with
status 1 when what the heap has given out, or the number of objects, is not the same after a quarter of the time and at
the end.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

import ferrodist as fd
from ferrodist.checkpoint import AsyncCheckpointer, DistCheckpointError
from ferrodist.rpc import RpcContext
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Sample", "growth", "run_soak"]

_MEGABYTE = 1 << 20
_MOST_OBJECTS = 2_000
_MOST_MEGABYTES = 40.0  # tensors of the round that is under way


class Sample(NamedTuple):
    """What was seen at a time.

    Args:
        seconds: Since the start.
        rounds: That were done.
        resident: MB of this process.
        used: MB that the heap has given out.
        objects: That the garbage collector knows.
    """

    seconds: float
    rounds: int
    resident: float
    used: float
    objects: int


class _HeapFigures(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def _used_megabytes() -> float:
    """What the heap has given out; -1 where the C library does not say."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return -1.0
    libc.mallinfo2.restype = _HeapFigures
    figures = libc.mallinfo2()
    return float(figures.uordblks + figures.hblkhd) / _MEGABYTE


def _resident_megabytes() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - as short as that
        return int(file.read().split()[1]) * 4096 / _MEGABYTE


def _fail(*_: object) -> None:
    raise ValueError("what a function says that makes nothing")


def _fail_to_refer(group: fd.Backend) -> None:
    """Have another rank make what it can't, and ask for it; one reference is never asked for."""
    with RpcContext(group, {"fail": _fail}) as agent:
        after = (group.rank + 1) % group.world_size
        agent.remote(after, "fail", torch.ones(100_000))
        with suppress(fd.RpcError):
            agent.remote(after, "fail", torch.ones(100_000)).to_here()
            raise AssertionError("the function gave something")


def _fail_to_save(group: fd.Backend, folder: Path) -> None:
    """Save to where a file is in the way."""
    saves = AsyncCheckpointer(folder, group=group)
    with suppress(DistCheckpointError):
        saves.save_async({"x": torch.ones(300_000)}, 1).wait()
        raise AssertionError("a file became a folder")


def _round(group: fd.Backend, number: int, folder: Path) -> None:
    """Make a group, use it, and close it."""
    sub = fd.new_group(range(group.world_size))
    assert isinstance(sub, fd.Backend)
    for count in (10, 100_000, 700_000 + number % 7 * 100_000):
        total = fd.allreduce(torch.ones(count), group=sub)
        assert total[0].item() == group.world_size
    pending = [fd.async_allreduce(torch.ones(300_000), group=sub) for _ in range(2)]
    fd.all_gather_object("x" * 1000, group=sub)
    for handle in pending:
        handle.wait()
    after, before = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    fd.sendrecv(torch.ones(200_000), after, None, before, group=sub)
    _fail_to_refer(sub)
    _fail_to_save(sub, folder)
    sub.close()


def run_soak(
    seconds: float,
    *,
    backend: str = "simulated",
    world_size: int = 3,
    every: float = 5.0,
    on_sample: Callable[[Sample], None] | None = None,
) -> list[Sample]:
    """Make and close groups for so many seconds, and return a sample of each ``every`` seconds."""
    samples: list[Sample] = []
    started = time.monotonic()
    lock = threading.Lock()

    def look(rounds: int) -> None:
        with lock:
            if samples and time.monotonic() - started - samples[-1].seconds < every:
                return
            gc.collect()
            objects = len(gc.get_objects())
            samples.append(
                Sample(time.monotonic() - started, rounds, _resident_megabytes(), _used_megabytes(), objects)
            )
            if on_sample is not None:
                on_sample(samples[-1])

    def program(group: fd.Backend, folder: Path) -> None:
        rounds = 0
        while fd.broadcast_object(time.monotonic() - started < seconds, 0):
            _round(group, rounds, folder)
            rounds += 1
            fd.barrier()  # nothing of a round is under way while rank 0 looks
            if group.rank == 0:
                look(rounds)

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "step-00000001").touch()
        run_ranks(program, world_size, Path(folder), backend=backend, timeout=seconds + 120.0)
    return samples


def growth(samples: list[Sample]) -> str:
    """What there is more of at the end than after a quarter of the time; "" where nothing is."""
    later = samples[len(samples) // 4 :]
    objects, used = later[-1].objects - later[0].objects, later[-1].used - later[0].used
    found = [f"{objects} objects"] * (objects > _MOST_OBJECTS) + [f"{used:.0f} MB given out"] * (used > _MOST_MEGABYTES)
    return " and ".join(found)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--backend", default="native-threads", help="of run_ranks, whose ranks are threads")
    parser.add_argument("--ranks", type=int, default=3)
    options = parser.parse_args()
    every = max(1.0, options.minutes * 60 / 40)
    print(" seconds  rounds  resident MB  given out MB  objects")
    samples = run_soak(
        options.minutes * 60,
        backend=options.backend,
        world_size=options.ranks,
        every=every,
        on_sample=lambda sample: print("{:8.0f} {:7d} {:12.0f} {:13.0f} {:8d}".format(*sample), flush=True),
    )
    found = growth(samples)
    print(f"more than after a quarter of the time: {found or 'nothing'}")
    sys.exit(bool(found))


if __name__ == "__main__":
    _main()
