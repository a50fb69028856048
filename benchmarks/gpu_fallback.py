"""The rate of allreduces of GPU tensors through the host's memory, beside the rates of their parts.

    python benchmarks/gpu_fallback.py [--mebibytes 256] [--ranks 2] [--rounds 7]

Ranks are processes of one host, which share its GPUs: rank r has GPU r, modulo their number. Measured in the same
processes, by all ranks at once: copies from pinned memory to the GPU and back, each alone and both at once; the
CPU engine's allreduce of as many bytes, of plain tensors and of symmetric ones; and the fallback's of tensors on the
GPU. A rate is a tensor's bytes by the slower rank's time, the median of the rounds. The result is compared with that of
the CPU, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import TYPE_CHECKING

import torch

import ferrodist as fd
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable


def measure(group: fd.Backend, num_bytes: int, num_rounds: int) -> dict[str, float]:
    """Measure as one rank; gives the seconds of each."""
    torch.set_num_threads(1)
    torch.cuda.set_device(group.rank % torch.cuda.device_count())
    count = num_bytes // 4
    near = torch.arange(count, dtype=torch.float32).remainder_(1009).add_(group.rank)
    far = near.cuda()
    pinned = [torch.empty(count, pin_memory=True) for _ in range(2)]
    other = torch.empty_like(far)
    out, result = torch.empty_like(near), torch.empty_like(far)
    shared, shared_out = (fd.empty_symmetric((count,), group=group) for _ in range(2))
    shared.copy_(near)
    down, up = torch.cuda.Stream(), torch.cuda.Stream()

    def copy(*, goes_down: bool, goes_up: bool) -> None:
        if goes_down:
            with torch.cuda.stream(down):
                pinned[0].copy_(far, non_blocking=True)
        if goes_up:
            with torch.cuda.stream(up):
                other.copy_(pinned[1], non_blocking=True)
        torch.cuda.synchronize()

    def fall_back() -> None:
        fd.allreduce(far, group=group, out=result)
        torch.cuda.synchronize()

    ways: dict[str, Callable[[], object]] = {
        "GPU to host": lambda: copy(goes_down=True, goes_up=False),
        "host to GPU": lambda: copy(goes_down=False, goes_up=True),
        "both at once": lambda: copy(goes_down=True, goes_up=True),
        "on the CPU, ordinary": lambda: fd.allreduce(near, group=group, out=out),
        "on the CPU, symmetric": lambda: fd.allreduce(shared, group=group, out=shared_out),
        "on the GPU": fall_back,
    }
    found = {name: statistics.median(_time(way, group, num_rounds)) for name, way in ways.items()}
    if not torch.equal(result.cpu(), out):
        raise RuntimeError("the fallback's result is not that of the CPU")
    return found


def _time(way: Callable[[], object], group: fd.Backend, num_rounds: int) -> list[float]:
    times = []
    for number in range(num_rounds + 2):
        group.barrier()
        began = time.perf_counter()
        way()
        seconds = fd.allreduce(torch.tensor([time.perf_counter() - began]), fd.ReduceOp.MAX, group=group).item()
        if number > 1:
            times.append(seconds)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    os.environ["FERRODIST_ENABLE_GPU_FALLBACK"] = "1"
    num_bytes = options.mebibytes << 20
    results = run_ranks(measure, options.ranks, num_bytes, options.rounds, backend="native", timeout=300)
    rates = {name: num_bytes / max(result[name] for result in results) / 1e9 for name in results[0]}
    for name, rate in rates.items():
        print(f"{name:24} {rate:7.2f} GB/s")
    for name in ("on the CPU, ordinary", "on the CPU, symmetric"):
        ratio = rates["on the GPU"] / min(rates["both at once"], rates[name])
        print(f"{ratio:.2f} of the slower of copies and allreduce {name}")


if __name__ == "__main__":
    main()
