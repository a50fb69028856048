"""Write text by a language model whose layers are split over ranks, such as the sockets of one server.

    pip install transformers
    ferrodist run --nproc-per-node 2 examples/inference/generate.py [--model FOLDER] [--prompt TEXT] [--tokens 64]

Each rank has a share of every layer, and computes with its own cores and memory. Blocks compute on local tensors,
so a token costs two sums of a few kilobytes a layer and little else. ``--model`` is a folder that
transformers can load, with its tokenizer; each rank reads the weights of its own shards. Without it the model is a
Llama with random weights, whose text means nothing and whose speed is that of a real one of its size.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers

import ferrodist as fd


def load_model(folder: str | None, mesh: fd.DeviceMesh) -> tuple[Any, Any]:
    """The split model, and its tokenizer if it has one; no rank ever holds the whole."""
    if folder is None:
        config = transformers.LlamaConfig(
            vocab_size=32_000,
            hidden_size=512,
            intermediate_size=2048,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
            bos_token_id=None,
            eos_token_id=None,
        )
    else:
        config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    fd.parallelize(model, mesh, "auto", init=None if folder is None else "empty")
    if folder is None:
        return model, None
    fd.checkpoint.load_hugging_face(folder, model)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def main() -> None:
    """Generate as one rank of the job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="FOLDER", help="a folder of transformers; default: random weights")
    parser.add_argument("--prompt", default="The train leaves at")
    parser.add_argument("--tokens", type=int, default=64, help="to write")
    parser.add_argument("--rounds", type=int, default=3, help="the first one tries blocks out, and is slower")
    options = parser.parse_args()
    group = fd.init_process_group()
    torch.manual_seed(0)
    model, tokenizer = load_model(options.model, fd.DeviceMesh(group, (group.world_size,), ("tensor",)))
    if tokenizer is None:
        prompt = torch.tensor([list(options.prompt.encode())])
    else:
        prompt = tokenizer(options.prompt, return_tensors="pt").input_ids
    for number in range(options.rounds):
        began = time.perf_counter()
        made = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=options.tokens, do_sample=False
        )
        seconds = time.perf_counter() - began
        num_made = made.shape[1] - prompt.shape[1]
        if group.rank == 0:
            print(f"round {number + 1}: {num_made} tokens, {num_made / seconds:.1f} tokens/s", flush=True)
    if group.rank == 0:
        print(made[0].tolist() if tokenizer is None else tokenizer.decode(made[0]), flush=True)
    fd.destroy_process_group()


if __name__ == "__main__":
    main()
