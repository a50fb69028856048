"""Train a small GPT on the source code of Python's standard library, byte by byte.

    ferrodist run --nproc-per-node 2 examples/gpt/train.py --parallel fsdp
    ferrodist run --nproc-per-node 2 examples/gpt/train.py --parallel ddp
    ferrodist run --nproc-per-node 4 examples/gpt/train.py --parallel fsdp --tensor-parallel 2
    python examples/gpt/train.py

The last form is one process and needs no launcher. All see the same batches, so they have the same losses but for
rounding: ``compare.py`` runs all of them and draws them. With ``--checkpoints FOLDER`` a training that is stopped goes
on where it was saved, also on another number of ranks, or divided in another way.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import ferrodist as fd
from ferrodist import checkpoint

VOCABULARY = 256  # a token is a byte

# How the ranks that share each layer divide it. Queries, keys and values are one layer: each is divided by heads.
PLAN = {
    "tokens": fd.VocabularyParallel(),
    "blocks.*.queries_keys_values": fd.ColumnParallel(blocks=3),
    "blocks.*.projection": fd.RowParallel(),
    "blocks.*.hidden": fd.ColumnParallel(),
    "blocks.*.output": fd.RowParallel(),
    "head": fd.ColumnParallel(),
}


class Block(nn.Module):
    """Causal attention and a network of one hidden layer, each added to what comes in."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.hidden = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        parts = self.queries_keys_values(self.norms[0](x)).view(batch, length, 3, self.num_heads, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.output(functional.gelu(self.hidden(self.norms[1](x))))


class Gpt(nn.Module):
    """A GPT whose output layer is its embedding."""

    def __init__(self, width: int, num_layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, num_heads=max(1, width // 64)) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (batch, length) to scores (batch, length, 256) of the byte that follows each."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))


def load_text() -> torch.Tensor:
    """All modules of the standard library, in the order of their names, as one line of bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def parse_arguments() -> argparse.Namespace:
    """What to train, and how."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp", help="how ranks share the model")
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="RANKS",
        help="neighbouring ranks that divide each layer, with fsdp over the others; heads must divide (default: 1)",
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8, help="pieces of text over all ranks (default: 8)")
    parser.add_argument("--length", type=int, default=128, help="bytes of a piece (default: 128)")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--checkpoints", type=Path, help="a folder to save to, and to go on from")
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="end there, as a job that is taken down")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--history", type=Path, help="a JSON file for the losses and the time of a step")
    return parser.parse_args()


def resume(
    saves: checkpoint.AsyncCheckpointer, state: dict[str, object], draw: torch.Generator, group: fd.Backend
) -> list[float]:
    """Load the newest checkpoint, if there is one, and give the losses so far."""
    path = fd.broadcast_object(checkpoint.find_latest(saves.dir), group=group)
    if path is None:
        return []
    loaded = checkpoint.load_distributed(path, {**state, "losses": None, "draw": None}, group=group)
    draw.set_state(loaded["draw"])
    return loaded["losses"]


def make_model(options: argparse.Namespace, mesh: fd.DeviceMesh) -> nn.Module:
    """The model, divided over the ranks."""
    torch.manual_seed(0)
    model = Gpt(options.width, options.layers, options.length)
    if mesh.group.rank == 0:
        print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} million parameters", flush=True)
    if options.tensor_parallel > 1:
        fd.parallelize(model, mesh["tensor"], PLAN)
    # With DDP every rank has the whole model, and gradients are averaged; with FSDP it keeps a part of each block.
    data = mesh["data"].group
    return fd.DDP(model, data) if options.parallel == "ddp" else fd.FSDP(model, data, wrap=Block)


def main() -> None:
    """Train as one rank of the job, or alone when no launcher has given this process a rank."""
    options = parse_arguments()
    group = fd.init_process_group() if "RANK" in os.environ else fd.SimulatedBackend.create_group(1)[0]
    # Ranks along "data" have other batches, ranks along "tensor" parts of each layer.
    mesh = fd.DeviceMesh(group, (-1, options.tensor_parallel), ("data", "tensor"))
    data = mesh["data"].group
    if options.batch_size % data.world_size:
        raise SystemExit(f"--batch-size {options.batch_size} must be a multiple of {data.world_size} ranks")

    text = load_text()
    model = make_model(options, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-4, total_steps=options.steps + 1)
    losses: list[float] = []
    draw = torch.Generator().manual_seed(0)  # the same pieces on every rank
    state = {"model": model, "optimizer": checkpoint.OptimizerState(model, optimizer), "schedule": schedule}
    saves = None
    if options.checkpoints is not None:
        saves = checkpoint.AsyncCheckpointer(options.checkpoints, group=group, keep_last=2)
        losses = resume(saves, state, draw, group)
    first = len(losses) + 1
    began = time.perf_counter()
    for step in range(first, options.steps + 1):
        starts = torch.randint(len(text) - options.length - 1, (options.batch_size,), generator=draw)
        mine = starts[data.rank :: data.world_size]  # this rank's part of the batch
        pieces = torch.stack([text[start : start + options.length + 1] for start in mine.tolist()]).long()
        optimizer.zero_grad()
        scores = model(pieces[:, :-1])
        loss = functional.cross_entropy(scores.reshape(-1, VOCABULARY), pieces[:, 1:].reshape(-1))
        loss.backward()  # when it returns, gradients are the mean over the ranks
        optimizer.step()
        schedule.step()
        losses.append(fd.allreduce(loss.detach(), fd.ReduceOp.MEAN, group=data).item())
        if saves is not None and (step % options.save_every == 0 or step == options.steps):
            # It is written while training goes on.
            saves.save_async({**state, "losses": losses, "draw": draw.get_state()}, step)
        if group.rank == 0 and (step % 10 == 0 or step == options.steps):
            print(f"step {step:4} of {options.steps}: loss {losses[-1]:.4f} nats a byte", flush=True)
        if step == options.stop_after:
            break
    seconds = (time.perf_counter() - began) / max(1, options.steps + 1 - first)
    if saves is not None:
        saves.close()
    if group.rank == 0:
        print(f"{group.world_size} rank(s): {1e3 * seconds:.0f} ms a step")
        if options.history is not None:
            options.history.write_text(json.dumps({"losses": losses, "seconds_per_step": seconds}))
    fd.destroy_process_group()  # does nothing for a process that trains alone


if __name__ == "__main__":
    main()
