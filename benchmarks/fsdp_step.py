"""What does a step of FSDP cost beside the same step of one process, and how much memory does a rank keep?

    python benchmarks/fsdp_step.py [--ranks 2] [--optimizer sgd|adam] [--rounds 15]

Ranks are processes of one thread each, over the native backend: an MLP of four 2048x2048 layers, each a unit, 16 rows a
rank. In each round every rank first steps alone, on the whole model, while the others do the same, and then all step
with FSDP, on other inputs; times are medians over rounds, of the slowest rank. Both end with the same weights, or it
fails.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time

os.environ["OMP_NUM_THREADS"] = "1"

import torch

import ferrodist as fd
from ferrodist.testing import run_ranks

WIDTH, NUM_LAYERS, ROWS = 2048, 4, 16
MIB = 1 << 20


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def make_optimizer(name, parameters):
    return torch.optim.SGD(parameters, lr=1e-3) if name == "sgd" else torch.optim.Adam(parameters, lr=1e-4)


def resident():
    """MiB of this process's own memory, and of memory that it shares."""
    fields = dict(line.split(":", 1) for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    kib = {name: int(value.split()[0]) for name, value in fields.items() if value.strip().endswith("kB")}
    return (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024, kib["Pss"] / 1024


def step(model, optimizer, inputs):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def timed(group, fn):
    group.barrier()
    start = time.perf_counter()
    fn()
    mine = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    return float(fd.allreduce(mine, fd.ReduceOp.MAX, group=group))


def program(group, options):
    torch.set_num_threads(1)
    base = build()
    alone = copy.deepcopy(base)
    alone_optimizer = make_optimizer(options.optimizer, alone.parameters())
    before = resident()
    fsdp = fd.FSDP(base, group, wrap=torch.nn.Linear)
    optimizer = make_optimizer(options.optimizer, fsdp.parameters())
    times = {"alone": [], "fsdp": []}
    generator = torch.Generator().manual_seed(group.rank)
    for number in range(options.rounds + 3):
        inputs = torch.randn(ROWS, WIDTH, generator=generator)
        first = timed(group, lambda: step(alone, alone_optimizer, inputs))
        second = timed(group, lambda: step(fsdp, optimizer, inputs))
        if number >= 3:
            times["alone"].append(first)
            times["fsdp"].append(second)
    del alone, alone_optimizer
    optimizer.zero_grad()
    fsdp.full_state_dict(rank0_only=True)
    return times, before, resident()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    options = parser.parse_args()
    results = run_ranks(program, options.ranks, options, backend="native", timeout=500)
    times = results[0][0]
    medians = {name: statistics.median(values) * 1000 for name, values in times.items()}
    for name, values in times.items():
        spread = " ".join(f"{value * 1000:.1f}" for value in sorted(values))
        print(f"{name}: median {medians[name]:.1f} ms ({spread})")
    print(f"ratio {medians['fsdp'] / medians['alone']:.2f}")


if __name__ == "__main__":
    main()
