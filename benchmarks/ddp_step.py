"""What data parallelism adds to a training step: python benchmarks/ddp_step.py [--rounds 7] [--steps 20].

Two ranks, one computing thread each, train four linear layers of 2048 x 2048 (64 MiB of gradients) on batches of 16
with SGD. Both ranks step at once, in every variant. Every variant of every round has processes of its own, as in
practice: what another model has done to the heap decides whether a step's gradients are new pages, which changes a step
by a third. A figure is the slower rank's time for one step, the median of the rounds; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
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
WARM_UP = 6
VARIANTS = ("alone", "ferrodist", "ferrodist, explicit", "torch over gloo")


def measure(group: fd.Backend, variant: str, num_steps: int, meeting_file: str) -> float:
    """Seconds for a step of a variant, on this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)])
    synchronise: Callable[[], None] = _nothing
    if variant == "ferrodist":
        model = fd.DDP(model, group)
    elif variant == "ferrodist, explicit":
        model = explicit = fd.DDP(model, group, overlap_comm=False)
        synchronise = explicit.overlapped_sync_gradients
    elif variant == "torch over gloo":
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting_file}", rank=group.rank, world_size=group.world_size
        )
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs, targets = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    began = 0.0
    for step in range(WARM_UP + num_steps):
        if step == WARM_UP:
            group.barrier()
            began = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        synchronise()
        optimizer.step()
    seconds = (time.perf_counter() - began) / num_steps
    if variant == "torch over gloo":
        torch.distributed.destroy_process_group()
    return seconds


def _nothing() -> None:
    pass


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.rounds):
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                arguments = (variant, options.steps, f"{folder}/meeting")
                times[variant].append(max(run_ranks(measure, 2, *arguments, backend="native", timeout=300)))
    alone = statistics.median(times["alone"])
    print(f"{'':22} {'ms a step':>10} {'least':>8} {'most':>8} {'to alone':>9}")
    for variant, own in times.items():
        middle = statistics.median(own)
        print(f"{variant:22} {1e3 * middle:10.1f} {1e3 * min(own):8.1f} {1e3 * max(own):8.1f} {middle / alone:9.2f}")


if __name__ == "__main__":
    main()
