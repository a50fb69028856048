"""Decoding and prefill of a whole Llama split over ranks, beside gloo and one process.

    python benchmarks/inference.py [--widths 512 1024 1536] [--ranks 2] [--tokens 32] [--prompt 256] [--rounds 5]

A LlamaForCausalLM of transformers: random weights, 32,000 words, float32, 8 layers of 512 or 1,024 features (4 layers
of wider ones), one computing thread for each rank. Variants in turns in the same processes:

- "ferrodist": ``fd.parallelize(model, mesh, "auto")``, also with ``local_blocks=False``: on DTensors,
- "transformers over ferrodist" and "over gloo": transformers' own tensor parallelism, by its plan, over groups of
  torch.distributed with these backends,
- "DeepSpeed": its automatic tensor parallelism over its kernel for shared memory, if its package is there
  (``pip install deepspeed ninja``; it compiles the kernel at the first use, which takes minutes),
- "one process, 1 thread" and "2 threads": rank 0 alone, while the others sleep,
- "local work": all ranks with a model of a share of the heads, features between layers and words, without
  communication: what a token costs if distribution costs nothing.

Decoding is ``model.generate`` after a prompt of 8 tokens, greedy, with a key-value cache; prefill is one forward of the
whole prompt without gradients. ``--busy N`` runs N processes beside it that compute all the time. A figure is the
slower rank's, the median of the rounds; a ratio is the median of the rounds' ratios. The tokens and logits of all
variants are compared with one process's, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import logging
import os
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed
import transformers
from figures import (
    draw_bars,
    median_ratio,
    print_machine,
    print_table,
    run_with_meeting,
    slowest,
    time_rounds,
    torch_world,
)
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

import ferrodist as fd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

WORDS, HEAD, START = 32_000, 64, 8
ALONE = {"one process, 1 thread": 1, "one process, 2 threads": 2}
ON_DTENSORS = ", on DTensors"
OURS = ("ferrodist", f"ferrodist{ON_DTENSORS}")
THEIRS = {"transformers over ferrodist": "ferrodist", "transformers over gloo": "gloo"}
"""The backend of each."""

DEEPSPEED = ("DeepSpeed",) if importlib.util.find_spec("deepspeed") else ()
LOCAL = "local work"
DIVIDED = (*OURS, *THEIRS, *DEEPSPEED)
VARIANTS = (*DIVIDED, *ALONE, LOCAL)
WORK = "while True: sum(range(10_000))"


def make_model(width: int, *, share: int = 1) -> nn.Module:
    """The model, with the same weights wherever it is made; ``share`` divides what tensor parallelism divides."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width // share,
        num_hidden_layers=8 if width <= 1024 else 4,
        num_attention_heads=width // HEAD // share,
        num_key_value_heads=width // HEAD // share,
        head_dim=HEAD,
        vocab_size=WORDS // share,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.eval()


def divide_by_deepspeed(model: nn.Module, num_ranks: int) -> nn.Module:
    """The model over all ranks, which are on one host, by DeepSpeed."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(num_ranks)}  # without the size it takes gloo
    import deepspeed  # noqa: PLC0415 - reads the environment

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    engine = deepspeed.init_inference(
        model, tensor_parallel={"tp_size": num_ranks}, dtype=torch.float32, replace_with_kernel_inject=False
    )
    divided: nn.Module = engine.module
    return divided


class Inference:
    """A model that decodes and prefills, with a number of threads."""

    def __init__(self, model: nn.Module, num_threads: int, num_tokens: int, prompt_size: int) -> None:
        self._model = model
        self._num_threads = num_threads
        self._num_tokens = num_tokens
        words = model.config.vocab_size
        self._prompt = torch.randint(words, (1, prompt_size), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def decode(self) -> torch.Tensor:
        """The tokens after the start of the prompt."""
        torch.set_num_threads(self._num_threads)
        start = self._prompt[:, :START]
        tokens: torch.Tensor = self._model.generate(
            start, attention_mask=torch.ones_like(start), max_new_tokens=self._num_tokens, do_sample=False
        )
        return tokens[0, START:]

    @torch.no_grad()
    def prefill(self) -> torch.Tensor:
        """The logits after the prompt."""
        torch.set_num_threads(self._num_threads)
        logits = self._model(input_ids=self._prompt, logits_to_keep=1).logits
        return logits.full_tensor() if hasattr(logits, "full_tensor") else logits


def make_variants(group: fd.Backend, width: int, num_tokens: int, prompt_size: int) -> dict[str, Inference]:
    """What is measured on this rank."""
    model = make_model(width)
    mesh = fd.DeviceMesh(group, (group.world_size,), ("tp",))
    made: dict[str, tuple[nn.Module, int]] = {}
    for variant in OURS:
        local_blocks = False if variant.endswith(ON_DTENSORS) else None
        made[variant] = fd.parallelize(copy.deepcopy(model), mesh, "auto", local_blocks=local_blocks), 1
    for variant, backend in THEIRS.items():
        own = copy.deepcopy(model)
        # Meshes with equal names are equal to torch, also over other groups: its caches would give one's group to both.
        torch_mesh = DeviceMesh.from_group(
            torch.distributed.new_group(backend=backend), "cpu", mesh_dim_names=(variant.replace(" ", "_"),)
        )
        apply_tensor_parallelism(own, torch_mesh, own._expand_parallel_plan(own.tp_plan))  # noqa: SLF001
        made[variant] = own, 1
    for variant in DEEPSPEED:
        made[variant] = divide_by_deepspeed(copy.deepcopy(model), group.world_size), 1
    if group.rank == 0:
        made |= {variant: (model, num_threads) for variant, num_threads in ALONE.items()}
    made[LOCAL] = make_model(width, share=group.world_size), 1
    return {variant: Inference(*one, num_tokens, prompt_size) for variant, one in made.items()}


def measure(
    group: fd.Backend, width: int, lengths: tuple[int, int], num_rounds: int, meeting_file: str
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Compute as one rank: seconds of each variant in each round, for decoding and for prefill."""
    with torch_world(group, meeting_file):
        variants = make_variants(group, width, *lengths)
        check(variants, group.rank)
        found = []
        for name in ("decode", "prefill"):
            steps: dict[str, Callable[[], object] | None] = {
                variant: getattr(variants[variant], name) if variant in variants else None for variant in VARIANTS
            }
            found.append(time_rounds(steps, num_rounds, 1, label=f"{width} wide, {name}", warm_up=1))
    return found[0], found[1]


def check(variants: dict[str, Inference], rank: int) -> None:
    """Raise unless divided models compute as one process's does."""
    found = {}
    for variant in (*DIVIDED, *ALONE):
        if variant in variants:
            found[variant] = variants[variant].decode(), variants[variant].prefill()
    if rank:
        return
    tokens, logits = found.pop(next(iter(ALONE)))
    for variant, (own_tokens, own_logits) in found.items():
        error = ((own_logits - logits).abs().max() / logits.abs().max()).item()
        if not torch.equal(own_tokens, tokens) or error > 1e-4:
            raise RuntimeError(f"{variant}: other tokens, or logits that are {error:.1e} off")


@contextlib.contextmanager
def busy_neighbours(number: int) -> Iterator[None]:
    """A block beside which so many processes compute."""
    processes = [subprocess.Popen([sys.executable, "-c", WORK]) for _ in range(number)]  # noqa: S603 - fixed command
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 1024, 1536])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32, help="to decode")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prefill")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that compute beside it")
    parser.add_argument("--plot", help="a PNG file for the tokens per second")
    options = parser.parse_args()
    print_machine()
    panels = {}
    for width in options.widths:
        with busy_neighbours(options.busy):
            results = run_with_meeting(measure, options.ranks, width, (options.tokens, options.prompt), options.rounds)
        decode, prefill = (slowest([result[place] for result in results]) for place in range(2))
        best = min(ALONE, key=lambda one: statistics.median(decode[one]))
        rows = {}
        for variant, own in decode.items():
            rows[variant] = [
                f"{options.tokens / statistics.median(own):.1f}",
                f"{median_ratio(decode['transformers over gloo'], own):.2f}",
                f"{median_ratio(decode[best], own):.2f}",
                f"{1e3 * statistics.median(prefill[variant]):.1f}",
                f"{median_ratio(prefill['transformers over gloo'], prefill[variant]):.2f}",
            ]
        title = f"{width} wide, {options.ranks} ranks, {options.busy} busy neighbours"
        columns = ["tokens/s", "to gloo", "to the best process", "prefill, ms", "prefill to gloo"]
        print_table(title, columns, rows)
        panels[title] = {variant: options.tokens / statistics.median(own) for variant, own in decode.items()}
    if options.plot:
        draw_bars(options.plot, panels, "tokens per second", number="%.0f")


if __name__ == "__main__":
    main()
