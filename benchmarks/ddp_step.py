"""What data parallelism adds to a training step: python benchmarks/ddp_step.py [--rounds 12] [--steps 5] [--no-torch].

Two ranks, one computing thread each, train four linear layers of 2048 x 2048 (64 MiB of gradients) on batches of 16
with SGD. Both ranks step at once, in every variant. A round runs all variants one after the other, so that a
disturbance meets all; a figure is the slower rank's time for one step, the median of the rounds. The ratio is the
median of each round's own.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed

import ferrodist as fd
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, BATCH, NUM_LAYERS = 2048, 16, 4
WARM_UP = 5


def step_of(model: torch.nn.Module, synchronise: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """A function that does one training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        synchronise()
        optimizer.step()

    return step


def measure(group: fd.Backend, options: argparse.Namespace, meeting_file: str) -> dict[str, list[float]]:
    """Seconds for a step of each variant in each round, on this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)])
    steps = {"alone": step_of(copy.deepcopy(start)), "ferrodist": step_of(fd.DDP(copy.deepcopy(start), group))}
    explicit = fd.DDP(copy.deepcopy(start), group, overlap_comm=False)
    steps["ferrodist, explicit"] = step_of(explicit, explicit.overlapped_sync_gradients)
    if options.torch:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting_file}", rank=group.rank, world_size=group.world_size
        )
        theirs = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(start), gradient_as_bucket_view=True)
        steps["torch over gloo"] = step_of(theirs)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(1 + options.rounds):
        for name, step in steps.items():
            group.barrier()
            began = time.perf_counter()
            for _ in range(options.steps if number else WARM_UP):
                step()
            if number:
                times[name].append((time.perf_counter() - began) / options.steps)
    if options.torch:
        torch.distributed.destroy_process_group()
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(measure, 2, options, f"{folder}/meeting", backend="native", timeout=600)
    slower = {name: [max(pair) for pair in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}
    print(f"{'':22} {'ms a step':>10} {'best':>8} {'to alone':>9}")
    for name, times in slower.items():
        ratio = statistics.median(own / alone for own, alone in zip(times, slower["alone"], strict=True))
        print(f"{name:22} {1e3 * statistics.median(times):10.1f} {1e3 * min(times):8.1f} {ratio:9.2f}")


if __name__ == "__main__":
    main()
