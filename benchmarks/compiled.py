"""Times of a training step, eager and compiled, of FSDP, DDP and tensor parallelism, beside one process.

    python benchmarks/compiled.py [--width 256] [--blocks 4] [--rows 512] [--steps 20] [--backend inductor]

Two processes with one computing thread each train a transformer's MLP blocks with SGD on one batch: each on half of its
rows, or for tensor parallelism on all of them. One process does the same by itself, with one thread and with two. Eager
and compiled steps alternate; a figure is the slower rank's time, the median of the steps, and the ratio the median of
the steps' ratios. Compilation is not timed. Losses and parameters are those of one process, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from figures import median_ratio, print_machine, print_table, slowest
from torch import nn

import ferrodist as fd
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

_WARM_UP = 3
ALONE = {"one process, 1 thread": 1, "one process, 2 threads": 2}
DIVIDED = ("DDP", "FSDP", "tensor parallel")
WAYS = ("eager", "compiled")


class Result(NamedTuple):
    """What a rank finds: the seconds of each step by `WAYS`, the losses of the whole batch, and the full parameters."""

    seconds: dict[str, list[float]]
    losses: list[torch.Tensor]
    state: dict[str, torch.Tensor]


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


def make(kind: str, model: Model, group: fd.Backend) -> tuple[nn.Module, Callable[[], dict[str, Any]]]:
    """The model spread over the ranks, and a function that gives its full parameters."""
    if kind == "FSDP":
        fsdp = fd.FSDP(model, group, wrap=Block)
        return fsdp, fsdp.full_state_dict
    if kind == "DDP":
        ddp = fd.DDP(model, group)
        return ddp, ddp.state_dict
    if kind == "tensor parallel":
        mesh = fd.DeviceMesh(group, (group.world_size,), ("tensor",))
        fd.parallelize(model, mesh, {"blocks.*.up": fd.ColumnParallel(), "blocks.*.down": fd.RowParallel()})
        return model, lambda: {name: value.full_tensor() for name, value in model.state_dict().items()}
    return model, model.state_dict


def measure(group: fd.Backend, kind: str, options: argparse.Namespace) -> Result:
    """Train as one rank: an eager model and a compiled one."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(ALONE.get(kind, 1))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    made = [make(kind, Model(options.width, options.blocks), group) for _ in WAYS]
    compiled: Any = torch.compile(made[1][0], backend=options.backend)
    calls = dict(zip(WAYS, (made[0][0], compiled), strict=True))
    optimizers = {way: torch.optim.SGD(one.parameters(), lr=0.01) for way, (one, _) in zip(WAYS, made, strict=True)}
    whole_losses = []
    for step in range(_WARM_UP + options.steps):
        inputs = torch.randn(options.rows, options.width, generator=torch.Generator().manual_seed(step))
        if kind in ("DDP", "FSDP"):
            inputs = inputs.chunk(group.world_size)[group.rank]
        losses = {}
        for way in WAYS[:: 1 if step % 2 else -1]:
            fd.barrier(group=group)
            start = time.perf_counter()
            loss = calls[way](inputs).square().mean()
            loss.backward()
            optimizers[way].step()
            optimizers[way].zero_grad()
            if step >= _WARM_UP:
                seconds[way].append(time.perf_counter() - start)
            losses[way] = loss.detach()
        torch.testing.assert_close(losses["compiled"], losses["eager"], rtol=1e-4, atol=1e-5)
        loss = losses["eager"]
        whole_losses.append(loss.full_tensor() if isinstance(loss, fd.DTensor) else loss)
    state, compiled_state = (state_of() for _, state_of in made)
    check_states(compiled_state, state)
    losses_of_all = fd.allreduce(torch.stack(whole_losses), fd.ReduceOp.MEAN, group=group)
    return Result(seconds, list(losses_of_all), {name: value.detach().clone() for name, value in state.items()})


def check_states(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Raise unless the parameters are the same, to rounding."""
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("width", 256), ("blocks", 4), ("rows", 512), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()
    torch.set_num_threads(1)  # OpenMP's pool of several threads would not survive the forks of the ranks
    print_machine()
    rows, alone = {}, None
    for kind in (*ALONE, *DIVIDED):
        results = run_ranks(measure, 1 if kind in ALONE else 2, kind, options, backend="native", timeout=1200)
        alone = alone or results[0]
        check_states(results[0].state, alone.state)
        torch.testing.assert_close(results[0].losses, alone.losses, rtol=1e-4, atol=1e-5)
        times = slowest([result.seconds for result in results])
        eager, compiled = (times[way] for way in WAYS)
        figures = [statistics.median(eager), statistics.median(compiled), min(compiled), max(compiled)]
        rows[kind] = [*[f"{1e3 * figure:.1f}" for figure in figures], f"{median_ratio(compiled, eager):.2f}"]
        print(f"measured {kind}", flush=True)
    title = f"A training step: {options.blocks} blocks of {options.width} features, {options.rows} rows"
    print_table(title, ("eager, ms", "compiled, ms", "least", "most", "compiled to eager"), rows)


if __name__ == "__main__":
    main()
