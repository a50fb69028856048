"""What does a step of FSDP cost beside the same step without communication, and beside torch's own over gloo?

    python benchmarks/fsdp_step.py [--ranks 2] [--optimizer sgd|adam] [--rounds 15] [--no-torch]

Ranks are processes of one thread each: an MLP of four 2048x2048 layers, each a unit, 16 rows a rank. In each round all
ranks step alone, on the whole model, then with FSDP over the native backend, then with torch's `fully_shard` over gloo,
on the same new inputs. Times are of the slowest rank, medians over rounds. It fails unless all have the same weights in
the end: ranks get the same inputs, so that a mean over them is what each has alone.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ferrodist as fd
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, NUM_LAYERS, ROWS = 2048, 4, 16
NUM_WARMUPS = 3


class Contestant:
    """A model, its optimizer, and how its weights are read: every rank calls that."""

    def __init__(self, model: torch.nn.Module, kind: str, weights: Callable[[], dict[str, torch.Tensor]]) -> None:
        self.model = model
        parameters = model.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, lr=1e-3) if kind == "sgd" else torch.optim.Adam(parameters, lr=1e-4)
        )
        self.weights = weights
        self.seconds: list[float] = []

    def step(self, inputs: torch.Tensor) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()


def build() -> torch.nn.Module:
    """The model, the same on each rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def contestants(group: Any, options: argparse.Namespace, store: str) -> dict[str, Contestant]:
    """Who steps."""
    alone = build()
    sharded = fd.FSDP(build(), group, wrap=torch.nn.Linear)
    found = {
        "alone": Contestant(alone, options.optimizer, lambda: copy.deepcopy(alone.state_dict())),
        "ferrodist": Contestant(sharded, options.optimizer, sharded.full_state_dict),
    }
    if options.torch:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=group.rank, world_size=group.world_size)
        theirs = build()
        for layer in theirs:  # type: ignore[attr-defined]
            fully_shard(layer)
        fully_shard(theirs)
        found["torch"] = Contestant(
            theirs,
            options.optimizer,
            lambda: {name: value.full_tensor() for name, value in theirs.state_dict().items()},
        )
    return found


def timed(group: Any, step: Callable[[torch.Tensor], None], inputs: torch.Tensor) -> float:
    """Seconds of the slowest rank."""
    group.barrier()
    start = time.perf_counter()
    step(inputs)
    mine = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    return float(fd.allreduce(mine, fd.ReduceOp.MAX, group=group))


def program(group: Any, options: argparse.Namespace, store: str) -> dict[str, list[float]]:
    """What a rank does."""
    torch.set_num_threads(1)
    found = contestants(group, options, store)
    generator = torch.Generator().manual_seed(1)
    for number in range(options.rounds + NUM_WARMUPS):
        inputs = torch.randn(ROWS, WIDTH, generator=generator)
        for contestant in found.values():
            seconds = timed(group, contestant.step, inputs)
            if number >= NUM_WARMUPS:
                contestant.seconds.append(seconds)
    expected = found["alone"].weights()
    for contestant in found.values():
        for name, value in contestant.weights().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
    if options.torch:
        dist.destroy_process_group()
    return {name: contestant.seconds for name, contestant in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        times = run_ranks(program, options.ranks, options, store, backend="native", timeout=500)[0]
    alone = statistics.median(times["alone"])
    for name, seconds in times.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        print(
            f"{name:9} median {middle * 1000:6.1f} ms, half of them {low * 1000:.1f} to {high * 1000:.1f};"
            f" {middle / alone:.2f} of a step alone"
        )


if __name__ == "__main__":
    main()
