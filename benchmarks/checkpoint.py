"""Save and load rates of checkpoints, beside torch's DCP and a plain sequential write.

    python benchmarks/checkpoint.py [--mib 512] [--rounds 5] [--folder /path/on/the/disk] [--plot checkpoint.png]

Two ranks on one host each hold half of the rows of 16 equal float32 matrices, which are distributed tensors of
ferrodist and of torch over the same memory. Systems alternate in the same processes. A rate is the checkpoint's size
by the slower rank's time, the median of the rounds.

"raw" is the rate of the disk: each rank writes its half to a file of its own, 4 MiB at a time, and syncs it; through
the page cache, or past it (O_DIRECT). Files are new each time. Loads are "warm" (the files are in the page cache) or
"cold" (the cache was told to drop them). Loaded tensors are compared, bit for bit, or the benchmark fails. "blocked"
is the time for which `save_async` blocks the program, beside a copy of the rank's half to memory that was used
before.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed
import torch.distributed.checkpoint as dcp
from figures import BLUE, GRAY, draw_bars, print_machine, run_with_meeting, slowest, torch_world
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard as TorchShard

import ferrodist as fd
from ferrodist.checkpoint import AsyncCheckpointer, load_distributed, save_distributed

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_TENSORS, WIDTH = 16, 2048
STEP_BYTES = 4 << 20
SAVES = ("raw, past the page cache", "raw, through the page cache", "ferrodist", "torch DCP")


class Rank:
    """One rank: what it measures with.

    Args:
        group: The ranks.
        mib: Size of the whole checkpoint.
        folder: On the disk.
    """

    def __init__(self, group: fd.Backend, mib: int, folder: Path) -> None:
        self.group = group
        self.folder = folder
        rows = (mib << 20) // (NUM_TENSORS * WIDTH * 4) // group.world_size
        generator = torch.Generator().manual_seed(group.rank)
        self.parts = [torch.randn(rows, WIDTH, generator=generator) for _ in range(NUM_TENSORS)]
        self.expected = [part.clone() for part in self.parts]
        mesh = fd.DeviceMesh(group, (group.world_size,), ("ranks",))
        torch_mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (group.world_size,))
        self.state = {f"w{n}": fd.DTensor.from_local(part, mesh, fd.Shard(0)) for n, part in enumerate(self.parts)}
        self.torch_state = {
            f"w{n}": TorchDTensor.from_local(part, torch_mesh, [TorchShard(0)]) for n, part in enumerate(self.parts)
        }
        self.aligned = mmap.mmap(-1, STEP_BYTES)
        self.aligned[:] = os.urandom(STEP_BYTES)

    def timed(self, action: Callable[[], object]) -> float:
        """Seconds until all ranks are done."""
        self.group.barrier()
        began = time.perf_counter()
        action()
        self.group.barrier()
        return time.perf_counter() - began

    def write_raw(self, path: Path, *, is_direct: bool) -> None:
        """As many bytes as this rank has, and no thought."""
        path.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if is_direct else 0)
        file = os.open(path / f"raw{self.group.rank}", flags)
        left = sum(part.numel() * part.itemsize for part in self.parts)
        while left:
            left -= os.write(file, memoryview(self.aligned)[:left])
        os.fsync(file)
        os.close(file)

    def save(self, system: str, path: Path) -> float:
        """Seconds for a save."""
        actions = {
            "raw, past the page cache": lambda: self.write_raw(path, is_direct=True),
            "raw, through the page cache": lambda: self.write_raw(path, is_direct=False),
            "ferrodist": lambda: save_distributed(self.state, path, group=self.group),
            "torch DCP": lambda: dcp.save(self.torch_state, checkpoint_id=path),
        }
        return self.timed(actions[system])

    def load(self, system: str, path: Path) -> float:
        """Seconds for a load, which is checked."""
        for part in self.parts:
            part.zero_()
        actions = {
            "ferrodist": lambda: load_distributed(path, self.state, group=self.group),
            "ferrodist, unverified": lambda: load_distributed(path, self.state, group=self.group, verify=False),
            "torch DCP": lambda: dcp.load(self.torch_state, checkpoint_id=path),
        }
        taken = self.timed(actions[system])
        if not all(torch.equal(part, own) for part, own in zip(self.parts, self.expected, strict=True)):
            raise RuntimeError(f"{system} loaded something else than was saved")
        return taken

    def drop_cache(self, path: Path) -> None:
        """Have the page cache forget the files."""
        self.group.barrier()
        for name in sorted(path.rglob("*")) if self.group.rank == 0 else ():
            if name.is_file():
                file = os.open(name, os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)
        self.group.barrier()

    def remove(self, path: Path) -> None:
        """Delete what was saved."""
        self.group.barrier()
        if self.group.rank == 0:
            shutil.rmtree(path)
            os.sync()  # what is removed keeps the disk busy, and is nobody's time
        self.group.barrier()


def measure(
    group: fd.Backend, mib: int, num_rounds: int, folder: str, meeting_file: str
) -> dict[tuple[str, str], list[float]]:
    """Measure as one rank: seconds of each round, by kind and system."""
    with torch_world(group, meeting_file):
        rank = Rank(group, mib, Path(folder))
        seconds: dict[tuple[str, str], list[float]] = {}
        for number in range(num_rounds + 1):
            found = measure_round(rank, number) | measure_blocking(rank, number)
            for key, taken in found.items() if number else ():  # the first one warms up
                seconds.setdefault(key, []).append(taken)
            if group.rank == 0:
                print(f"round {number} of {num_rounds}", flush=True)
    return seconds


def measure_round(rank: Rank, number: int) -> dict[tuple[str, str], float]:
    """Rates of saves and loads of all systems."""
    seconds = {}
    first = number % len(SAVES)
    for system in SAVES[first:] + SAVES[:first]:  # whoever writes first may find the disk rested
        path = rank.folder / f"{system.split(',')[0].replace(' ', '-')}-{number}"
        seconds["save", system] = rank.save(system, path)
        loads = {"ferrodist": ("ferrodist", "ferrodist, unverified"), "torch DCP": ("torch DCP",)}.get(system, ())
        for loader in loads:
            rank.drop_cache(path)
            seconds["load, cold", loader] = rank.load(loader, path)
            seconds["load, warm", loader] = rank.load(loader, path)
        rank.remove(path)
    return seconds


def measure_blocking(rank: Rank, number: int) -> dict[tuple[str, str], float]:
    """The time for which an asynchronous save blocks the program, from the second save on."""
    copies = [part.clone() for part in rank.parts]
    path = rank.folder / f"async-{number}"

    def copy() -> None:
        for copied, part in zip(copies, rank.parts, strict=True):
            copied.copy_(part)

    seconds = {}
    with AsyncCheckpointer(path, group=rank.group) as checkpointer:
        checkpointer.save_async(rank.state, 0).wait()
        seconds["blocked", "a copy in memory"] = rank.timed(copy)
        seconds["blocked", "ferrodist"] = rank.timed(lambda: checkpointer.save_async(rank.state, 1))
    rank.remove(path)
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write; the system's folder for temporary files by default")
    parser.add_argument("--plot", help="a PNG file for the rates")
    options = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        seconds = slowest(run_with_meeting(measure, 2, options.mib, options.rounds, folder))
    print(f"{options.mib} MiB, {options.rounds} rounds")
    print(f"{'':44} {'GiB/s':>8} {'least':>8} {'most':>8} {'ms':>9}")
    rates = {}
    for (kind, system), own in sorted(seconds.items(), key=lambda item: item[0][0]):
        rate = [options.mib / 1024 / taken for taken in own]
        rates[kind, system] = statistics.median(rate)
        label, middle = f"{kind}: {system}", 1e3 * statistics.median(own)
        print(f"{label:44} {statistics.median(rate):8.2f} {min(rate):8.2f} {max(rate):8.2f} {middle:9.1f}")
    if options.plot:
        bars = {f"{kind}: {system}": rate for (kind, system), rate in rates.items() if kind != "blocked"}
        title = f"Saving and loading {options.mib} MiB with two ranks"
        draw_bars(options.plot, {title: bars}, "GiB/s", color_of=lambda label: BLUE if ": ferrodist" in label else GRAY)


if __name__ == "__main__":
    main()
