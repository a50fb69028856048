"""Start, first collective and memory of a group of many ranks on one host, of ferrodist and of torch's gloo.

    python benchmarks/many_ranks.py [--ranks 64] [--libraries ferrodist gloo] [--output FILE.json]

`ferrodist run` starts the ranks. Times are the last rank's, from the start of the launcher: the first line of Python,
torch (and ferrodist) imported, the group made; and of the first allreduce of one element alone, from the first rank's
call to the last one's return, and the median of 20 more. ferrodist loads most of its modules when a group is made,
torch.distributed when torch is imported. Memory is each rank's, read while all wait after that: RSS,
and PSS, in which a page that ranks share counts for each by its part, so that the sum is what the ranks take;
the PSS of shared memory, and the address space of shared segments. A rank has one compute thread.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

MIB = 1 << 20
NUM_CALLS = 20
TIMES = ("first line", "imports", "group made", "first allreduce", "allreduce")
TIMEOUT_SECONDS = 900


def run_rank(library: str, output: Path, began: float) -> None:
    """One rank: rank 0 writes the figures of all."""
    stamps = {"first line": time.time() - began}
    import torch  # noqa: PLC0415 - its import is measured

    torch.set_num_threads(1)
    if library == "ferrodist":
        import ferrodist as fd  # noqa: PLC0415

        stamps["imports"] = time.time() - began
        fd.init_process_group()
        rank, barrier = fd.default_group().rank, fd.barrier

        def allreduce(tensor: torch.Tensor) -> object:
            return fd.allreduce(tensor, out=tensor)

        def gather(value: Any) -> list[Any]:
            return list(fd.all_gather_object(value))

        close = fd.destroy_process_group
    else:
        from torch import distributed as dist  # noqa: PLC0415

        stamps["imports"] = time.time() - began
        dist.init_process_group("gloo")
        rank, barrier, allreduce, close = dist.get_rank(), dist.barrier, dist.all_reduce, dist.destroy_process_group

        def gather(value: Any) -> list[Any]:
            values = [None] * dist.get_world_size()
            dist.all_gather_object(values, value)
            return values

    stamps["group made"] = time.time() - began
    if rank == 0:
        print(f"{library}: group made after {stamps['group made']:.1f} s", flush=True)
    begin, tensor = time.time(), torch.ones(1)
    allreduce(tensor)
    end = time.time()
    calls = []
    for _ in range(NUM_CALLS):
        start = time.perf_counter()
        allreduce(tensor.fill_(1.0))
        calls.append(time.perf_counter() - start)
    barrier()  # all ranks have all that they are to have, and none has left
    own = {"stamps": stamps, "begin": begin, "end": end, "calls": calls, "memory": read_memory()}
    everyone = gather(own)
    assert float(tensor) == len(everyone), "the sum is wrong"
    if rank == 0:
        output.write_text(json.dumps(everyone), encoding="utf-8")
    close()


def read_memory() -> dict[str, int]:
    """Bytes of this process: RSS, PSS, PSS of shared memory, and the size of its shared segments as mapped."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    found = {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    segments = 0
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        if "/memfd:" in line:
            first, last = line.split()[0].split("-")
            segments += int(last, 16) - int(first, 16)
    return {"rss": found["Rss"], "pss": found["Pss"], "shared pss": found["Pss_Shmem"], "segments": segments}


def measure(library: str, num_ranks: int) -> dict[str, float]:
    """Start the ranks of a library, and sum up what they say: seconds and bytes by name."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "ranks.json")
        launch = [sys.executable, "-m", "ferrodist", "run", "--nproc-per-node", str(num_ranks), __file__]
        command = [*launch, "--rank-of", library, str(output), repr(time.time())]
        subprocess.run(command, check=True, timeout=TIMEOUT_SECONDS)  # noqa: S603 - a fixed command
        everyone = json.loads(output.read_text(encoding="utf-8"))
    figures = {name: max(one["stamps"][name] for one in everyone) for name in TIMES[:3]}
    figures["first allreduce"] = max(one["end"] for one in everyone) - min(one["begin"] for one in everyone)
    figures["allreduce"] = statistics.median(
        max(calls) for calls in zip(*(one["calls"] for one in everyone), strict=True)
    )
    memory = [one["memory"] for one in everyone]
    figures |= {f"median {name}": statistics.median(one[name] for one in memory) for name in ("rss", "pss")}
    figures |= {f"all {name}": float(sum(one[name] for one in memory)) for name in ("pss", "shared pss")}
    return figures | {"segments": float(max(one["segments"] for one in memory))}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Start, first collective and memory of a group of many ranks.")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--libraries", nargs="+", choices=("ferrodist", "gloo"), default=["ferrodist", "gloo"])
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    parser.add_argument("--rank-of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        library, output, began = options.rank_of
        run_rank(library, Path(output), float(began))
        return
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    load = float(Path("/proc/loadavg").read_text(encoding="ascii").split()[0])
    figures = {library: measure(library, options.ranks) for library in options.libraries}
    for library, values in figures.items():
        for name, value in values.items():
            text = f"{value:.4f} s" if name in TIMES else f"{value / MIB:.1f} MiB"
            print(f"{library}, {options.ranks} ranks, {name}: {text}")
    if options.output:
        report = {"started": started, "load": load, "ranks": options.ranks, "figures": figures}
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
