"""The memory of a rank of FSDP, beside its shards of parameters, gradients and optimizer state.

    python benchmarks/fsdp_memory.py [--ranks 2 4] [--layers 12] [--width 768] [--vocabulary 16384]

A GPT of 100 million parameters with tied embeddings, its blocks units, built on the meta device; Adam; float32; ranks
are processes on the native backend. Memory is the kernel's Pss: private pages, and shared ones divided by the number of
processes that map them. *Steady* is between steps, with gradients; *highest* is the maximum during a step's forward and
backward, with activations and with free memory that libc's heap keeps. Both are relative to the process before the
model was created. The limit is (parameters + gradients + optimizer) / ranks + two largest units + 5%. *Free* is
the memory that the heap returned before *steady* was measured: unsharded gradients leave holes between smaller blocks.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch.nn import functional

import ferrodist as fd
from ferrodist.testing import run_ranks

MIB = 1 << 20
NUM_STEPS, NUM_TOKENS, NUM_HEADS = 3, 64, 12


class Block(torch.nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.attention, self.mix = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.wide, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (rows, tokens, width) to the same."""
        rows, tokens, width = hidden.shape
        heads = self.attention(self.norms[0](hidden)).view(rows, tokens, NUM_HEADS, -1).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(*heads.chunk(3, dim=-1), is_causal=True)
        hidden = hidden + self.mix(attended.transpose(1, 2).reshape(rows, tokens, width))
        return hidden + self.narrow(functional.gelu(self.wide(self.norms[1](hidden))))


class Gpt(torch.nn.Module):
    """A transformer with tied embeddings."""

    def __init__(self, num_layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.Sequential(*(Block(width) for _ in range(num_layers)))
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shape (rows, tokens) to (rows, tokens, vocabulary)."""
        return self.head(self.blocks(self.embedding(tokens)))


def held_mib() -> float:
    """The Pss of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Pss"].split()[0]) / 1024


def program(group: Any, options: argparse.Namespace) -> tuple[float, float, float, float]:
    """The program of a rank; returns MiB: steady, free, highest, and the limit."""
    torch.set_num_threads(1)
    small = torch.nn.Linear(64, 64)
    small(torch.ones(64, 64)).sum().backward()
    torch.optim.Adam(small.parameters()).step()
    gc.collect()  # it writes to all objects, which makes them this process's own after the fork
    fd.barrier(group=group)
    before = held_mib()
    with torch.device("meta"):
        model = Gpt(options.layers, options.width, options.vocabulary)
    numels = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    total = sum(p.numel() for p in model.parameters())
    units = sorted([*numels, total - sum(numels)])
    limit = 1.05 * (4 * total * 4 / group.world_size + 4 * sum(units[-2:])) / MIB
    fsdp = fd.FSDP(model, group, wrap=Block)
    optimizer = torch.optim.Adam(fsdp.parameters())
    seen: list[float] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: seen.append(held_mib()))
        block.register_full_backward_pre_hook(lambda *_: seen.append(held_mib()))
    generator = torch.Generator().manual_seed(group.rank)
    for _ in range(NUM_STEPS):
        tokens = torch.randint(options.vocabulary, (1, NUM_TOKENS), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(fsdp(tokens)[0, :-1], tokens[0, 1:]).backward()
        optimizer.step()
    gc.collect()
    untrimmed = held_mib()
    ctypes.CDLL(None).malloc_trim(0)
    fd.barrier(group=group)
    steady = held_mib()
    fd.barrier(group=group)
    return steady - before, untrimmed - steady, max(seen) - before, limit


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=16384)
    options = parser.parse_args()
    for num_ranks in options.ranks:
        results = run_ranks(program, num_ranks, options, backend="native", timeout=500)
        steady, free, highest, limit = (max(column) for column in zip(*results, strict=True))
        print(
            f"{num_ranks} ranks: steady {steady:.0f} MiB, and {free:.0f} free; highest {highest:.0f}; limit {limit:.0f}"
        )


if __name__ == "__main__":
    main()
