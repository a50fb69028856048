"""Train a mixture of experts (a small Mixtral), whose experts lie on different ranks, on Python's documentation.

    pip install transformers
    ferrodist run --nproc-per-node 2 examples/huggingface/experts.py
    ferrodist run --nproc-per-node 4 examples/huggingface/experts.py --data-parallel 2

Attention and head are sharded by the model's own plan; each rank has some of the experts whole, to which the others
send their tokens. With ``--data-parallel`` FSDP shards all of it over another axis.
"""

from __future__ import annotations

import argparse
from pydoc_data import topics
from typing import Any

import torch
import transformers

import ferrodist as fd


def make_model(num_experts: int) -> Any:
    """A Mixtral whose tokens are bytes, on the meta device."""
    config = transformers.MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=num_experts,
        output_router_logits=True,  # the loss has a term that balances the experts
        router_aux_loss_coef=0.02,
    )
    with torch.device("meta"):
        return transformers.MixtralForCausalLM(config)


def main() -> None:
    """Train as one rank of the job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--experts", type=int, default=8, help="in each layer (default: 8)")
    parser.add_argument("--data-parallel", type=int, default=1, help="groups of ranks with batches of their own")
    options = parser.parse_args()
    group = fd.init_process_group()
    mesh = fd.DeviceMesh(group, (options.data_parallel, -1), ("data", "tensor"))
    data = mesh["data"].group

    model = make_model(options.experts)
    plan = {path: style for path, style in model.tp_plan.items() if ".experts" not in path}
    plan["model.layers.*.mlp.experts"] = fd.ExpertParallel()
    if group.rank == 0:
        print(fd.describe_plan(model, mesh["tensor"], plan), flush=True)
    torch.manual_seed(0)
    fd.parallelize(model, mesh["tensor"], plan)
    fsdp = fd.FSDP(model, mesh["data"], wrap=type(model.model.layers[0]))
    optimizer = torch.optim.AdamW(fsdp.parameters(), lr=3e-3)

    tokens = torch.tensor(list("\n".join(topics.topics.values()).encode()))
    draw = torch.Generator().manual_seed(data.rank)
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(tokens) - 64, (8,), generator=draw)
        pieces = torch.stack([tokens[start : start + 64] for start in starts.tolist()])
        optimizer.zero_grad()
        loss = fsdp(input_ids=pieces, labels=pieces).loss
        loss.backward()
        optimizer.step()
        mean = fd.allreduce(loss.detach(), fd.ReduceOp.MEAN, group=data).item()
        if group.rank == 0 and (step == 1 or step % 20 == 0):
            print(f"step {step:3}: loss {mean:.3f} nats a byte, and the balance's", flush=True)
    for path, load in fd.expert_loads(model).items():
        if group.rank == 0:
            print(f"{path}: tokens of each expert {load.counts.tolist()}, the largest {load.imbalance:.2f} of the mean")
    fd.destroy_process_group()


if __name__ == "__main__":
    main()
