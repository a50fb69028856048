"""The examples for models of Hugging Face, as a user runs them on two ranks."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

import ferrodist

SOURCE = Path(ferrodist.__file__).parents[1]
EXAMPLES = SOURCE.parent / "examples"
LIMIT = 200  # seconds; each takes about 10 where nothing else runs

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


def run(name, *arguments, folder="huggingface"):
    """Run an example on two ranks, and give what rank 0 printed."""
    command = [
        sys.executable,
        "-m",
        "ferrodist",
        "run",
        "--nproc-per-node",
        "2",
        str(EXAMPLES / folder / name),
        *arguments,
    ]
    paths = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(output):
    return [float(found) for found in re.findall(r"loss ([\d.]+) nats a byte", output)]


@needs_peft
def test_lora(tmp_path):
    """Adapters learn under a plan and FSDP, and what is written has PEFT's names and whole shapes."""
    first, last = losses(run("finetune_lora.py", "--steps", "20", "--output", str(tmp_path)))
    assert last < first - 0.2
    adapters = load_file(tmp_path / "adapter_model.safetensors")
    path = "base_model.model.model.layers.1.self_attn.k_proj"
    assert adapters[f"{path}.lora_A.weight"].shape == (8, 128)
    assert adapters[f"{path}.lora_B.weight"].shape == (64, 8)
    assert adapters[f"{path}.lora_B.weight"].abs().max() > 0
    assert len(adapters) == 2 * 7 * 2


def test_experts():
    """Both ranks have half of the experts, and the loss falls."""
    output = run("experts.py", "--steps", "20")
    assert re.search(r"layers.1.mlp.experts.down_proj +\(8, 64, 128\) +Shard\(0\)", output)
    first, last = losses(output)
    assert last < first - 1
    assert "model.layers.1.mlp.experts: tokens of each expert [" in output


def test_generation():
    """What FSDP trained and wrote as a folder, a tensor parallel model reads: both continue texts alike."""
    output = run("generate.py", "--steps", "20")
    assert "'The statement" in output
    assert "'A class is " in output
    assert output.count("'the same' from the tensor parallel model") == 2


def test_inference(tmp_path):
    """A model from a folder writes over two ranks what it writes in one process."""
    words = {f"w{number}": number for number in range(64)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    prompt = torch.tensor([[5, 9, 2]])
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    options = ("--model", str(tmp_path), "--prompt", "w5 w9 w2", "--tokens", "12")
    output = run("generate.py", *options, folder="inference")
    assert output.count(": 12 tokens, ") == 3
    assert " ".join(f"w{number}" for number in expected[0].tolist()) in output
