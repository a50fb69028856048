"""The overhead of data parallelism in a training step.

    python benchmarks/training_step.py [--rounds 7] [--steps 20] [--plot step.png]

Two ranks on one host, one computing thread each, train four linear layers of 2048 x 2048 (64 MiB of parameters, and
as much of gradients) on 16 rows a rank with SGD. Both ranks step at the same time in every variant, also without
communication. Every variant of every round has processes of its own, as in practice. A figure is the slower rank's
time for a step, the median of the rounds; a ratio is the median of the rounds' ratios. All variants that average end
with the same weights, to rounding, or the benchmark fails.

Without communication, a step returns the memory of its gradients to the system and gets it again, page by page.
Whether it does depends on the program's other allocations, and is a third of the step here. In an environment with
``MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1099511627776`` the C library keeps freed memory.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed
from figures import SPREAD, draw_bars, median_ratio, print_machine, print_table, run_with_meeting, spread, torch_world
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ferrodist as fd

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, ROWS, NUM_LAYERS = 2048, 16, 4
WARM_UP = 6
VARIANTS = (
    "alone",
    "ferrodist DDP",
    "ferrodist DDP, explicit",
    "torch DDP over gloo",
    "ferrodist FSDP",
    "torch FSDP2 over gloo",
)


class Result(NamedTuple):
    """The results of a rank."""

    seconds: float
    norm: float  # of the weights at the end, of the whole model


def measure(group: fd.Backend, variant: str, num_steps: int, meeting_file: str) -> Result:
    """Train as one rank."""
    with contextlib.ExitStack() as stack:
        if "torch" in variant:
            stack.enter_context(torch_world(group, meeting_file))
        return train(group, variant, num_steps)


def train(group: fd.Backend, variant: str, num_steps: int) -> Result:
    """Train in the world of the variant."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)])
    model, synchronise = wrap(model, variant, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + group.rank)
    inputs, targets = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    began = 0.0
    for step in range(WARM_UP + num_steps):
        if step == WARM_UP:
            group.barrier()
            began = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        synchronise()
        optimizer.step()
    return Result((time.perf_counter() - began) / num_steps, norm_of(model))


def wrap(model: torch.nn.Module, variant: str, group: fd.Backend) -> tuple[torch.nn.Module, Callable[[], object]]:
    """The model as a variant trains it, and what it calls between backward and the optimizer."""
    if variant == "ferrodist DDP":
        return fd.DDP(model, group), nothing
    if variant == "ferrodist DDP, explicit":
        ddp = fd.DDP(model, group, overlap_comm=False)
        return ddp, ddp.overlapped_sync_gradients
    if variant == "torch DDP over gloo":
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), nothing
    if variant == "ferrodist FSDP":
        return fd.FSDP(model, group, wrap=torch.nn.Linear), nothing
    if variant == "torch FSDP2 over gloo":
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (group.world_size,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, nothing


def nothing() -> None:
    """Averages nothing."""


def norm_of(model: torch.nn.Module) -> float:
    """The norm of all weights of the whole model, which every rank calls.

    A sum over a shard of ferrodist's FSDP is that over the full tensor already; torch's FSDP2 has DTensors.
    """
    weights = [parameter.detach() for parameter in model.parameters()]
    full = [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in weights]
    return math.sqrt(sum(weight.double().square().sum().item() for weight in full))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--plot", help="a PNG file for the ratios")
    options = parser.parse_args()
    print_machine()
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    norms: dict[str, float] = {}
    for number in range(1, options.rounds + 1):
        for variant in VARIANTS:
            results = run_with_meeting(measure, 2, variant, options.steps, timeout=300)
            times[variant].append(max(result.seconds for result in results))
            norms[variant] = results[0].norm
        print(f"round {number} of {options.rounds}", flush=True)
    check(norms)
    ratios = {variant: median_ratio(own, times["alone"]) for variant, own in times.items()}
    rows = {variant: [*spread(own), f"{ratios[variant]:.2f}"] for variant, own in times.items()}
    print_table("A training step", [*SPREAD, "to alone"], rows)
    if options.plot:
        draw_bars(options.plot, {"Time of a step beside that of a rank alone": ratios}, "ratio", line=1)


def check(norms: dict[str, float]) -> None:
    """Raise unless all that average have the same weights."""
    expected = norms["torch DDP over gloo"]
    for variant, norm in norms.items():
        if variant != "alone" and not math.isclose(norm, expected, rel_tol=1e-6):
            raise RuntimeError(f"{variant} ended with weights of norm {norm}, torch's DDP with {expected}")


if __name__ == "__main__":
    main()
