"""Fine-tune a Llama with LoRA (PEFT): each layer is sharded over two ranks, and the shards by FSDP over the others.

    pip install peft transformers
    ferrodist run --nproc-per-node 2 examples/huggingface/finetune_lora.py
    ferrodist run --nproc-per-node 4 examples/huggingface/finetune_lora.py --model FOLDER --text FILE

Without ``--model`` rank 0 writes a small one of random weights, whose tokens are bytes, and the text is Python's own
documentation. The adapters are written in PEFT's format.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from pydoc_data import topics
from typing import Any

import peft
import torch
import transformers

import ferrodist as fd


def write_small_model(folder: str) -> None:
    """A Llama of 0.4 million random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def lora_plan(model: Any) -> dict[str, fd.Style]:
    """A style for each layer, and for the two small ones beside it, by the model's own plan.

    A column-parallel layer has its outputs sharded, so those of LoRA's second layer are too; a row-parallel one has its
    inputs sharded, as LoRA's first one.
    """
    plan: dict[str, fd.Style] = {}
    for path, style in model.get_base_model().tp_plan.items():
        layer = f"base_model.model.{path}"
        if style in {"colwise", "colwise_gather_output"}:
            plan[f"{layer}.base_layer"] = plan[f"{layer}.lora_B.default"] = fd.ColumnParallel()
        elif style == "rowwise":
            plan[f"{layer}.base_layer"] = plan[f"{layer}.lora_A.default"] = fd.RowParallel()
    modules = dict(model.named_modules())
    return {path: style for path, style in plan.items() if any(same(path, name) for name in modules)}


def same(pattern: str, name: str) -> bool:
    """Whether a plan's path is that of a module."""
    parts = list(zip(pattern.split("."), name.split("."), strict=False))
    return pattern.count(".") == name.count(".") and all(one in ("*", other) for one, other in parts)


def make_model(folder: str, mesh: fd.DeviceMesh, rank: int) -> Any:
    """The model with adapters, sharded."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    fd.checkpoint.load_hugging_face(folder, model)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    fd.parallelize(model, mesh["tensor"], lora_plan(model))
    block = type(model.get_base_model().model.layers[0])
    return fd.FSDP(model, mesh["data"], wrap=block)


def save_adapters(fsdp: fd.FSDP[Any], folder: Path, group: fd.Backend) -> None:
    """Write the adapters, whole; every rank calls this."""
    state = fsdp.full_state_dict(rank0_only=True)
    if group.rank == 0:
        adapters = peft.get_peft_model_state_dict(fsdp.module, state_dict=state)
        fsdp.module.save_pretrained(folder, state_dict=adapters)
    fd.barrier()


def main() -> None:
    """Fine-tune as one rank of the job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Hugging Face folder of a causal language model, whose tokens are bytes")
    parser.add_argument("--text", type=Path, help="a file to learn")
    parser.add_argument("--output", type=Path, help="a folder for the adapters")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default: 8)")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    group = fd.init_process_group()
    mesh = fd.DeviceMesh(group, (-1, 2 if group.world_size % 2 == 0 else 1), ("data", "tensor"))
    data = mesh["data"].group
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or fd.broadcast_object(temporary)
        if options.model is None and group.rank == 0:
            write_small_model(folder)
        fd.barrier()
        fsdp = make_model(folder, mesh, options.rank)
        fd.barrier()
    trained = [parameter for parameter in fsdp.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    text = options.text.read_text() if options.text else "\n".join(topics.topics.values())
    tokens = torch.tensor(list(text.encode()))
    draw = torch.Generator().manual_seed(data.rank)  # ranks of "data" have other pieces, those of "tensor" the same
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(tokens) - 64, (8,), generator=draw)
        pieces = torch.stack([tokens[start : start + 64] for start in starts.tolist()])
        optimizer.zero_grad()
        loss = fsdp(input_ids=pieces, labels=pieces).loss
        loss.backward()
        fsdp.clip_grad_norm_(1.0)
        optimizer.step()
        mean = fd.allreduce(loss.detach(), fd.ReduceOp.MEAN, group=data).item()
        if group.rank == 0 and (step == 1 or step % 20 == 0):
            print(f"step {step:3}: loss {mean:.3f} nats a byte", flush=True)
    if options.output is not None:
        save_adapters(fsdp, options.output, group)
    fd.destroy_process_group()


if __name__ == "__main__":
    main()
