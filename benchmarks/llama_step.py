"""A training step of a whole Llama by tensor parallelism over two ranks, beside transformers' plan and one process.

    python benchmarks/llama_step.py [--widths 512 2048] [--rounds 5] [--steps 5] [--plot llama-step.png]

A step is forward, backward and SGD of a LlamaForCausalLM of transformers: random weights, 8,192 words, 1 x 128 tokens,
float32, 8 layers of 512 features (2 layers of wider ones). Two ranks on one host, one computing thread each, variants
in turns in the same processes:

- "ferrodist": ``fd.parallelize(model, mesh, "auto")``,
- "transformers over ferrodist" and "over gloo": transformers' own tensor parallelism, by its plan, over groups of
  torch.distributed with these backends,
- "one process, 1 thread" and "2 threads": rank 0 alone, while rank 1 sleeps,
- "local work": both ranks with a model of half the heads, features between layers and words, without communication:
  what is left of a step if distribution costs nothing.

A figure is the slower rank's time for a step, the median of the rounds. The losses and the weights of all variants are
compared with one process's, or the benchmark fails.
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
import transformers
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

import ferrodist as fd
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

WORDS, TOKENS, HEAD = 8192, 128, 64
WARM_UP = 2
ALONE = {"one process, 1 thread": 1, "one process, 2 threads": 2}
DIVIDED = ("ferrodist", "transformers over ferrodist", "transformers over gloo")
LOCAL = "local work"
VARIANTS = (*DIVIDED, *ALONE, LOCAL)


def make_model(width: int, *, share: int = 1) -> nn.Module:
    """The model, with the same weights wherever it is made; ``share`` divides what tensor parallelism divides."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width // share,
        num_hidden_layers=8 if width <= 512 else 2,
        num_attention_heads=width // HEAD // share,
        num_key_value_heads=width // HEAD // share,
        head_dim=HEAD,
        vocab_size=WORDS // share,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


class Training:
    """A model in training, on one batch."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        words = model.config.vocab_size
        self.batch = torch.randint(words, (1, TOKENS), generator=torch.Generator().manual_seed(1))

    def step(self) -> torch.Tensor:
        """Forward, backward and the optimizer; returns the loss."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(input_ids=self.batch, labels=self.batch).loss
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


def make_variants(group: fd.Backend, width: int) -> dict[str, Training]:
    """What is measured on this rank."""
    model = make_model(width)
    mesh = fd.DeviceMesh(group, (group.world_size,), ("tp",))
    made = {"ferrodist": fd.parallelize(copy.deepcopy(model), mesh, "auto")}
    for variant, backend in zip(DIVIDED[1:], ("ferrodist", "gloo"), strict=True):
        own = copy.deepcopy(model)
        torch_mesh = DeviceMesh.from_group(torch.distributed.new_group(backend=backend), "cpu", mesh_dim_names=("tp",))
        made[variant] = apply_tensor_parallelism(own, torch_mesh, own._expand_parallel_plan(own.tp_plan))  # noqa: SLF001
    for variant in ALONE:
        if group.rank == 0:
            made[variant] = copy.deepcopy(model)
    made[LOCAL] = make_model(width, share=group.world_size)
    return {variant: Training(one) for variant, one in made.items()}


def measure(
    group: fd.Backend, width: int, num_rounds: int, num_steps: int, meeting_file: str
) -> dict[str, list[float]]:
    """Compute as one rank: seconds for a step, of each variant, in each round."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting_file}", rank=group.rank, world_size=group.world_size
    )
    variants = make_variants(group, width)
    check(variants, group.rank)
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(1, num_rounds + 1):
        for variant in VARIANTS:
            torch.distributed.barrier()  # over gloo, which sleeps: a rank that waits takes no core from the others
            if variant in variants:
                seconds[variant].append(time_steps(variants[variant], ALONE.get(variant, 1), num_steps))
        if group.rank == 0:
            print(f"{width} wide: round {number} of {num_rounds}", flush=True)
    torch.distributed.destroy_process_group()
    return seconds


def time_steps(training: Training, num_threads: int, num_steps: int) -> float:
    """Seconds for a step."""
    torch.set_num_threads(num_threads)
    for _ in range(WARM_UP):
        training.step()
    began = time.perf_counter()
    for _ in range(num_steps):
        training.step()
    taken = (time.perf_counter() - began) / num_steps
    torch.set_num_threads(1)
    return taken


def check(variants: dict[str, Training], rank: int) -> None:
    """Raise unless divided models train as one process's does."""
    found = {}
    for variant in (*DIVIDED, *list(ALONE)[:1]):
        if variant in variants:
            losses = [whole(variants[variant].step()) for _ in range(2)]
            weights = {name: whole(one.detach()) for name, one in variants[variant].model.named_parameters()}
            found[variant] = {"first loss": losses[0], "second loss": losses[1], **weights}
    if rank:
        return
    expected = found.pop(next(iter(ALONE)))
    for variant, values in found.items():
        for name, value in expected.items():
            error = ((values[name] - value).abs().max() / value.abs().max()).item()
            if error > 1e-5:
                raise RuntimeError(f"{variant}: {name} is {error:.1e} off, relative to its largest element")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in full, if it is distributed; all ranks call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    parser.add_argument("--plot", help="a PNG file for the times")
    options = parser.parse_args()
    times: dict[int, dict[str, list[float]]] = {}
    for width in options.widths:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (width, options.rounds, options.steps, f"{folder}/meeting")
            results = run_ranks(measure, 2, *arguments, backend="native", timeout=3600)
        times[width] = {
            variant: [max(pair) for pair in zip(*[one[variant] for one in results if one[variant]], strict=True)]
            for variant in VARIANTS
        }
    for width, found in times.items():
        print(f"\n{f'{width} wide':30} {'ms a step':>10} {'least':>8} {'most':>8} {'to 2 threads':>13}")
        two = statistics.median(found[list(ALONE)[1]])
        for variant, own in found.items():
            middle = statistics.median(own)
            print(f"{variant:30} {1e3 * middle:10.1f} {1e3 * min(own):8.1f} {1e3 * max(own):8.1f} {middle / two:13.2f}")
    if options.plot:
        draw(times, options.plot)


def draw(times: dict[int, dict[str, list[float]]], path: str | Path) -> None:
    """Draw the times."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only for plots

    figure = Figure(figsize=(8, 2.2 * len(times)), layout="constrained", dpi=150)
    plots: Sequence = figure.subplots(len(times), squeeze=False)[:, 0]
    for axes, (width, found) in zip(plots, times.items(), strict=True):
        names = list(reversed(VARIANTS))
        colors = ["#08519c" if name == "ferrodist" else "#bbbbbb" for name in names]
        bars = axes.barh(names, [1e3 * statistics.median(found[name]) for name in names], color=colors)
        axes.bar_label(bars, fmt="%.0f", padding=3)
        axes.set(title=f"Training step of a Llama, {width} wide, 2 ranks", xlabel="ms")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


if __name__ == "__main__":
    main()
