"""Prepared collectives and plain calls of 8 bytes for each rank, beside the engine's own time without Python.

    make native; python benchmarks/prepared.py [--rounds 9] [--calls 20000]

Two ranks on one host, float32. The engine's time is that of the native program ``collective_times``, whose ranks are
two threads. A figure is the slower rank's microseconds for a call, the median of the rounds; in each round all three
are measured, in turns. The results are checked, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from figures import print_machine, print_table

import ferrodist as fd
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

ENGINE = Path(__file__).resolve().parents[1] / "build" / "native" / "native" / "tests" / "collective_times"
NUM_RANKS = 2
NAMES = ("allreduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


def calls_of(name: str) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor], list[float]]:
    """A prepared call, the plain call into memory that is there, and what both return."""
    rank = fd.default_group().rank
    is_whole = name == "reduce_scatter"
    tensor = torch.tensor([1.0, 3.0, 5.0, 7.0] if is_whole else [1.0, 3.0]) + rank
    out = torch.empty(4 if name == "all_gather" else 2)
    results = {
        "allreduce": [3.0, 7.0],
        "broadcast": [1.0, 3.0],
        "all_gather": [1.0, 3.0, 2.0, 4.0],
        "reduce_scatter": [[3.0, 7.0], [11.0, 15.0]][rank],
        "all_to_all": [[1.0, 2.0], [3.0, 4.0]][rank],
    }
    plain = getattr(fd, name)
    return getattr(fd, f"prepare_{name}")(tensor), lambda: plain(tensor, out=out), results[name]


def micros(call: Callable[[], object], num_calls: int) -> float:
    """The microseconds of a call."""
    fd.barrier()
    began = time.perf_counter()
    for _ in range(num_calls):
        call()
    return 1e6 * (time.perf_counter() - began) / num_calls


def measure(group: fd.Backend, num_rounds: int, num_calls: int) -> dict[str, list[list[float]]]:
    """The microseconds of the engine, the prepared and the plain call, by name and round."""
    torch.set_num_threads(1)
    calls = {name: calls_of(name) for name in NAMES}
    found: dict[str, list[list[float]]] = {name: [] for name in NAMES}
    for _ in range(num_rounds):
        engine: dict[str, float] | None = None
        if group.rank == 0:
            lines = subprocess.run([ENGINE, str(num_calls)], check=True, capture_output=True, text=True)  # noqa: S603
            engine = {name: float(time) for name, time in (line.split() for line in lines.stdout.splitlines())}
        engine = fd.broadcast_object(engine)
        for name, (prepared, plain, result) in calls.items():
            for call in (prepared, plain):
                if call().tolist() != result:
                    raise RuntimeError(f"{name} returned {call().tolist()} instead of {result}")
            found[name].append([engine[name], micros(prepared, num_calls), micros(plain, num_calls)])
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=20000)
    options = parser.parse_args()
    if not ENGINE.exists():
        parser.error(f"{ENGINE} is not there: run `make native` first")
    print_machine()
    ranks: list[dict[str, Any]] = run_ranks(
        measure, NUM_RANKS, options.rounds, options.calls, backend="native", timeout=3600
    )
    rows = {}
    for name in NAMES:
        slower = [
            [max(both) for both in zip(*round_, strict=True)]
            for round_ in zip(*(one[name] for one in ranks), strict=True)
        ]
        engine, prepared, plain = (statistics.median(column) for column in zip(*slower, strict=True))
        over = statistics.median(row[1] - row[0] for row in slower)
        rows[name] = [f"{engine:.2f}", f"{prepared:.2f}", f"{plain:.2f}", f"{over:.2f}"]
    print_table("8 bytes, us", ["engine", "prepared", "plain, out=", "prepared over engine"], rows)


if __name__ == "__main__":
    main()
