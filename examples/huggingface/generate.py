"""Train a small Llama with FSDP, write it as a Hugging Face folder, and have it write text, sharded in two ways.

    pip install transformers
    ferrodist run --nproc-per-node 2 examples/huggingface/generate.py

The text is Python's documentation, byte by byte. First FSDP's own shards generate, where each rank has a prompt of its
own; then a model that no rank ever holds whole: made on the meta device, sharded by its own plan, and loaded from the
folder straight into the shards, for one prompt of all ranks. Both write the same.
"""

from __future__ import annotations

import argparse
import tempfile
from pydoc_data import topics
from typing import Any

import torch
import transformers

import ferrodist as fd

PROMPTS = ["The statement", "A class is ", "If the expression", "Names are "]


def make_model() -> Any:
    """A Llama of 0.4 million weights, on the meta device."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def train(fsdp: fd.FSDP[Any], group: fd.Backend, steps: int) -> None:
    """Learn to continue Python's documentation."""
    tokens = torch.tensor(list("\n".join(topics.topics.values()).encode()))
    optimizer = torch.optim.AdamW(fsdp.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(group.rank)
    for step in range(1, steps + 1):
        starts = torch.randint(len(tokens) - 64, (8,), generator=draw)
        pieces = torch.stack([tokens[start : start + 64] for start in starts.tolist()])
        optimizer.zero_grad()
        loss = fsdp(input_ids=pieces, labels=pieces).loss
        loss.backward()
        optimizer.step()
        mean = fd.allreduce(loss.detach(), fd.ReduceOp.MEAN).item()
        if group.rank == 0 and (step == 1 or step % 20 == 0):
            print(f"step {step:3}: loss {mean:.3f} nats a byte", flush=True)


def write(model: Any, prompt: str) -> str:
    """The text that a model makes of a prompt, the likeliest byte at a time."""
    tokens = torch.tensor([list(prompt.encode())])
    mask = torch.ones_like(tokens)
    made = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=40, do_sample=False)
    return bytes(made[0].tolist()).decode(errors="replace")


def main() -> None:
    """Train and generate as one rank of the job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    group = fd.init_process_group()
    torch.manual_seed(0)
    model = make_model()
    fsdp = fd.FSDP(model, group, wrap=type(model.model.layers[0]))
    train(fsdp, group, options.steps)

    fd.register_forward_method(fsdp, "generate")
    own = write(fsdp.eval(), PROMPTS[group.rank % len(PROMPTS)])
    texts = fd.all_gather_object(own)

    with tempfile.TemporaryDirectory() as temporary:
        folder = fd.broadcast_object(temporary)
        state = fsdp.full_state_dict(rank0_only=True)
        if group.rank == 0:
            model.save_pretrained(folder, state_dict=state)
        fd.barrier()
        sharded = make_model().eval()
        fd.parallelize(sharded, fd.DeviceMesh(group, (group.world_size,), ("tensor",)), "auto", init="empty")
        fd.checkpoint.load_hugging_face(folder, sharded)
        fd.barrier()
    for prompt, text in zip(PROMPTS, texts, strict=False):
        again = write(sharded, prompt)
        if group.rank == 0:
            print(f"{text!r}\n{'the same' if again == text else again!r} from the tensor parallel model", flush=True)
    fd.destroy_process_group()


if __name__ == "__main__":
    main()
