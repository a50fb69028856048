"""Times of a training step, eager and compiled, of FSDP, DDP and tensor parallelism.

Two processes with one compute thread each train a small transformer's MLP blocks. Eager and compiled steps alternate,
and their losses and parameters must agree. Compilation is not timed::

    python benchmarks/compiled.py [--width 256] [--blocks 4] [--rows 256] [--steps 20] [--backend inductor]
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import ferrodist as fd
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

_WARM_UP = 3


class Block(nn.Module):
    """A norm and two linear layers, with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the block: (rows, width) to the same."""
        result: torch.Tensor = hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        return result


class Model(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the model: (rows, width) to the same."""
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def make(kind: str, model: Model, group: Backend) -> tuple[nn.Module, Callable[[], dict[str, Any]]]:
    """The model spread over the ranks, and a function that gives its full parameters."""
    if kind == "FSDP":
        fsdp = fd.FSDP(model, group, wrap=Block)
        return fsdp, fsdp.full_state_dict
    if kind == "DDP":
        ddp = fd.DDP(model, group)
        return ddp, ddp.state_dict
    mesh = fd.DeviceMesh(group, (group.world_size,), ("tensor",))
    fd.parallelize(model, mesh, {"blocks.*.up": fd.ColumnParallel(), "blocks.*.down": fd.RowParallel()})
    return model, lambda: {name: value.full_tensor() for name, value in model.state_dict().items()}


def measure(kind: str, options: argparse.Namespace, group: Backend) -> tuple[list[float], list[float]]:
    """The seconds of each eager and each compiled step."""
    times: tuple[list[float], list[float]] = [], []
    eager, state_of = make(kind, Model(options.width, options.blocks), group)
    other, compiled_state_of = make(kind, Model(options.width, options.blocks), group)
    compiled: Any = torch.compile(other, backend=options.backend)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (eager, other)]
    for step in range(_WARM_UP + options.steps):
        generator = torch.Generator().manual_seed(step if kind == "tensor parallel" else 2 * step + group.rank)
        inputs = torch.randn(options.rows, options.width, generator=generator)
        losses = []
        calls: list[Callable[..., torch.Tensor]] = [eager, compiled]
        for called, optimizer, own in zip(calls, optimizers, times, strict=True):
            fd.barrier(group=group)
            start = time.perf_counter()
            loss = called(inputs).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if step >= _WARM_UP:
                own.append(time.perf_counter() - start)
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    expected, found = state_of(), compiled_state_of()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 256), ("blocks", 4), ("rows", 256), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()

    def program(group: Backend) -> dict[str, tuple[list[float], list[float]]]:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        return {kind: measure(kind, options, group) for kind in ("DDP", "FSDP", "tensor parallel")}

    found = run_ranks(program, 2, backend="native", timeout=1200)[0]
    print("| | eager, ms | compiled, ms | compiled, least to most | ratio |\n|---|---|---|---|---|")
    for kind, (eager, compiled) in found.items():
        one, other = (1e3 * statistics.median(times) for times in (eager, compiled))
        spread = f"{1e3 * min(compiled):.1f} to {1e3 * max(compiled):.1f}"
        print(f"| {kind} | {one:.1f} | {other:.1f} | {spread} | {other / one:.2f} |")


if __name__ == "__main__":
    main()
