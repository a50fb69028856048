"""The communication overhead of tensor parallelism over two ranks.

    python benchmarks/tensor_parallel.py [--rounds 7] [--steps 10] [--plot network.png]

Two ranks on one host, one computing thread each: a linear layer from 4096 to 16384 features, GELU, and one back, for
64 tokens, without and with the gradients of weights and input. "half" is a rank's share, as plain layers of half the
hidden features, without communication. Variants alternate in the same processes. A figure is the slower rank's time
for a step, the median of the rounds; a ratio is the median of the rounds' ratios to "half". Outputs and gradients of
all but "half" are compared with the unsharded network's, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ferrodist as fd
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH, HIDDEN, TOKENS = 4096, 16384, 64
WARM_UP = 2
VARIANTS = ("half", "ferrodist", "torch over gloo")
KINDS = ("forward", "forward and backward")


def make_network(hidden: int) -> nn.Sequential:
    """The network, with the same weights wherever it is made."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))


def measure(
    group: fd.Backend, num_rounds: int, num_steps: int, meeting_file: str
) -> dict[tuple[str, str], list[float]]:
    """Compute as one rank: seconds for a step, of each variant and kind, in each round."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting_file}", rank=group.rank, world_size=group.world_size
    )
    mesh = fd.DeviceMesh(group, (group.world_size,), ("tp",))
    torch_mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (group.world_size,))
    torch.manual_seed(1)
    tokens, grad = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
    networks = {
        "half": make_network(HIDDEN // group.world_size),
        "ferrodist": fd.parallelize(make_network(HIDDEN), mesh, {"0": fd.ColumnParallel(), "2": fd.RowParallel()}),
        "torch over gloo": parallelize_module(
            make_network(HIDDEN), torch_mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
        ),
    }
    check(networks, tokens, grad)
    seconds: dict[tuple[str, str], list[float]] = {(variant, kind): [] for variant in VARIANTS for kind in KINDS}
    for number in range(1, num_rounds + 1):
        for kind in KINDS:
            step = forward if kind == "forward" else forward_and_backward
            for variant in VARIANTS:
                network = networks[variant]
                taken = time_steps(step, network, tokens, grad, group=group, num_steps=num_steps)
                seconds[variant, kind].append(taken)
        if group.rank == 0:
            print(f"round {number} of {num_rounds}", flush=True)
    torch.distributed.destroy_process_group()
    return seconds


def forward(network: nn.Module, tokens: torch.Tensor, grad: torch.Tensor) -> None:
    """One step without gradients."""
    del grad
    with torch.no_grad():
        network(tokens)


def forward_and_backward(network: nn.Module, tokens: torch.Tensor, grad: torch.Tensor) -> None:
    """One step with gradients, which replace those before."""
    network.zero_grad()
    network(tokens.detach().requires_grad_()).backward(grad)


def time_steps(
    step: Callable[[nn.Module, torch.Tensor, torch.Tensor], None],
    network: nn.Module,
    tokens: torch.Tensor,
    grad: torch.Tensor,
    *,
    group: fd.Backend,
    num_steps: int,
) -> float:
    """Seconds for a step."""
    for _ in range(WARM_UP):
        step(network, tokens, grad)
    group.barrier()
    began = time.perf_counter()
    for _ in range(num_steps):
        step(network, tokens, grad)
    return (time.perf_counter() - began) / num_steps


def check(networks: dict[str, nn.Module], tokens: torch.Tensor, grad: torch.Tensor) -> None:
    """Raise unless the divided networks compute what the undivided one does."""
    whole = make_network(HIDDEN)
    expected = run_once(whole, tokens, grad)
    names = [name for name, _ in whole.named_parameters()]
    del whole
    for variant in VARIANTS[1:]:
        got = run_once(networks[variant], tokens, grad)
        for name, one, other in zip(["output", "input's gradient", *names], got, expected, strict=True):
            error = ((one - other).abs().max() / other.abs().max()).item()
            if error > 1e-5:
                raise RuntimeError(f"{variant}: {name} is {error:.1e} off, relative to its largest element")


def run_once(network: nn.Module, tokens: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """The output, and all gradients whole."""
    mine = tokens.clone().requires_grad_()
    output = network(mine)
    output.backward(grad)
    found = [output.detach(), mine.grad, *[parameter.grad for parameter in network.parameters()]]
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--plot", help="a PNG file for the ratios")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.rounds, options.steps, f"{folder}/meeting")
        results = run_ranks(measure, 2, *arguments, backend="native", timeout=1800)
    times = {key: [max(pair) for pair in zip(*[result[key] for result in results], strict=True)] for key in results[0]}
    ratios = {
        (variant, kind): statistics.median(
            own / half for own, half in zip(times[variant, kind], times["half", kind], strict=True)
        )
        for variant, kind in times
    }
    print(f"{'':40} {'ms a step':>10} {'least':>8} {'most':>8} {'to half':>8}")
    for (variant, kind), own in sorted(times.items(), key=lambda item: KINDS.index(item[0][1])):
        label, middle = f"{kind}, {variant}", statistics.median(own)
        ratio = ratios[variant, kind]
        print(f"{label:40} {1e3 * middle:10.1f} {1e3 * min(own):8.1f} {1e3 * max(own):8.1f} {ratio:8.3f}")
    if options.plot:
        draw(ratios, options.plot)


def draw(ratios: dict[tuple[str, str], float], path: str | Path) -> None:
    """Draw the ratios."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only for plots

    figure = Figure(figsize=(8, 2.6), layout="constrained", dpi=150)
    axes = figure.subplots()
    keys = [(variant, kind) for kind in reversed(KINDS) for variant in reversed(VARIANTS)]
    colors = ["#08519c" if variant == "ferrodist" else "#bbbbbb" for variant, _ in keys]
    bars = axes.barh([f"{kind}, {variant}" for variant, kind in keys], [ratios[key] for key in keys], color=colors)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color="#888888", linewidth=1, linestyle="--")
    axes.set(title="Time beside half of the network without communication", xlabel="ratio")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


if __name__ == "__main__":
    main()
