"""A training step of a whole Llama by tensor parallelism over two ranks, beside torch's ways and one process.

    python benchmarks/tensor_parallel.py [--widths 512 2048] [--rounds 5] [--steps 5] [--plot tensor-parallel.png]

A step is forward, backward and SGD of a LlamaForCausalLM of transformers: random weights, 8,192 words, 1 x 128 tokens,
float32, 8 layers of 512 features (2 layers of wider ones). Two ranks on one host, one computing thread each, variants
in turns in the same processes:

- "ferrodist": ``fd.parallelize(model, mesh, "auto")``, also with ``local_blocks=False``: on DTensors, and compiled,
- "transformers over ferrodist" and "over gloo": transformers' own tensor parallelism, by its plan, over groups of
  torch.distributed with these backends,
- "torch over gloo": ``parallelize_module`` of torch, layers and head by columns and rows,
- "one process, 1 thread" and "2 threads", and compiled: rank 0 alone, while rank 1 sleeps,
- "local work": both ranks with a model of half the heads, features between layers and words, without communication:
  what is left of a step if distribution costs nothing.

A figure is the slower rank's time for a step, the median of the rounds; a ratio is the median of the rounds' ratios.
The losses and the weights of all variants are compared with one process's, or the benchmark fails.

Where the time goes is that of the middle one of three more steps, under torch's profiler: the messages, the time in
which they move and that for which the other rank is waited for, and the matrix products, attention's with them. The
rest of the step's median is everything else: other operators, their dispatch, the optimizer.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from typing import TYPE_CHECKING

import torch
import torch.distributed
import transformers
from figures import (
    PARTS,
    SPREAD,
    StepProfile,
    draw_bars,
    median_ratio,
    parts_of,
    print_machine,
    print_table,
    profile_steps,
    run_with_meeting,
    slowest,
    spread,
    time_rounds,
    torch_world,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

import ferrodist as fd

if TYPE_CHECKING:
    from torch import nn

WORDS, TOKENS, HEAD = 8192, 128, 64
COMPILED = ", compiled"
ALONE = {"one process, 1 thread": 1, "one process, 2 threads": 2, f"one process, 2 threads{COMPILED}": 2}
ON_DTENSORS = ", on DTensors"
OURS = ("ferrodist", f"ferrodist{ON_DTENSORS}", f"ferrodist{COMPILED}")
THEIRS = {
    "transformers over ferrodist": "ferrodist",
    "transformers over gloo": "gloo",
    "torch over gloo": "gloo",
}
"""The backend of each."""

LOCAL = "local work"
VARIANTS = (*OURS, *THEIRS, *ALONE, LOCAL)
TORCH_PLAN = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


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

    def __init__(self, model: nn.Module, num_threads: int = 1, *, compiled: bool = False) -> None:
        self.model = model
        if compiled:
            model.compile()  # type: ignore[no-untyped-call]
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        words = model.config.vocab_size
        self.batch = torch.randint(words, (1, TOKENS), generator=torch.Generator().manual_seed(1))
        self.num_threads = num_threads

    def step(self) -> torch.Tensor:
        """Forward, backward and the optimizer; returns the loss."""
        torch.set_num_threads(self.num_threads)
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(input_ids=self.batch, labels=self.batch).loss
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


def make_variants(group: fd.Backend, width: int) -> dict[str, Training]:
    """What is measured on this rank."""
    model = make_model(width)
    mesh = fd.DeviceMesh(group, (group.world_size,), ("tp",))
    made = {
        variant: Training(
            fd.parallelize(
                copy.deepcopy(model), mesh, "auto", local_blocks=False if variant.endswith(ON_DTENSORS) else None
            ),
            compiled=variant.endswith(COMPILED),
        )
        for variant in OURS
    }
    for variant, backend in THEIRS.items():
        own = copy.deepcopy(model)
        # Meshes with equal names are equal to torch, also over other groups: its caches would give one's group to both.
        torch_mesh = DeviceMesh.from_group(
            torch.distributed.new_group(backend=backend), "cpu", mesh_dim_names=(variant.replace(" ", "_"),)
        )
        if variant.startswith("transformers"):
            apply_tensor_parallelism(own, torch_mesh, own._expand_parallel_plan(own.tp_plan))  # noqa: SLF001
        else:
            parallelize_module(own, torch_mesh, TORCH_PLAN)
        made[variant] = Training(own)
    for variant, num_threads in ALONE.items():
        if group.rank == 0:
            made[variant] = Training(copy.deepcopy(model), num_threads, compiled=variant.endswith(COMPILED))
    made[LOCAL] = Training(make_model(width, share=group.world_size))
    return made


def measure(
    group: fd.Backend, width: int, num_rounds: int, num_steps: int, meeting_file: str
) -> tuple[dict[str, list[float]], dict[str, list[StepProfile]]]:
    """Compute as one rank: seconds for a step, of each variant, in each round, and where a step's time goes."""
    with torch_world(group, meeting_file):
        variants = make_variants(group, width)
        check(variants, group.rank)
        steps = {variant: variants[variant].step if variant in variants else None for variant in VARIANTS}
        seconds = time_rounds(steps, num_rounds, num_steps, label=f"{width} wide")
        profiles = {}
        for variant, step in steps.items():
            torch.distributed.barrier()
            if step is not None:
                profiles[variant] = profile_steps(step)
        for variant, expected in {**dict.fromkeys(OURS, "ferrodist"), **THEIRS}.items():
            if (over := profiles[variant][0].over) != {expected}:
                raise RuntimeError(f"the messages of {variant!r} went over {sorted(over)}")
        torch.distributed.barrier()
    return seconds, profiles


def check(variants: dict[str, Training], rank: int) -> None:
    """Raise unless divided models train as one process's does."""
    found = {}
    for variant in (*OURS, *THEIRS, *ALONE):
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
    print_machine()
    panels = {}
    for width in options.widths:
        results = run_with_meeting(measure, 2, width, options.rounds, options.steps)
        times = slowest([seconds for seconds, _ in results])
        two = times[list(ALONE)[1]]
        rows = {}
        for variant, own in times.items():
            middle = statistics.median(own)
            parts = parts_of([profiles[variant] for _, profiles in results if variant in profiles], middle)
            rows[variant] = [*spread(own), f"{median_ratio(own, two):.2f}", *parts]
        print_table(f"{width} wide", [*SPREAD, "to 2 threads", *PARTS], rows)
        title = f"Training step of a Llama, {width} wide, 2 ranks"
        panels[title] = {variant: 1e3 * statistics.median(own) for variant, own in times.items()}
    if options.plot:
        draw_bars(options.plot, panels, "ms", number="%.0f")


if __name__ == "__main__":
    main()
