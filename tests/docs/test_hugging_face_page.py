"""The page on models of Hugging Face says what is true: its code runs, on two ranks."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file

import ferrodist as fd
from ferrodist.testing import run_ranks

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "hugging-face.md").read_text()
SECTIONS = {
    title: re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for title, text in re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
MESH = SECTIONS["Plans"][0].splitlines()[3]

PREAMBLE = """
import sys, torch, transformers
output = sys.argv[1]
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{sizes}))
dataset = [dict(input_ids=torch.arange(12), labels=torch.arange(12))] * 8
"""


def write(kind, folder):
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return config


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What the blocks have from before."""
    places = {name: str(tmp_path_factory.mktemp(name)) for name in ("folder", "output", "checkpoint", "exported")}
    config = write("Llama", places["folder"])
    mixtral_folder = str(tmp_path_factory.mktemp("mixtral"))
    mixtral_config = write("Mixtral", mixtral_folder)
    tokens = torch.randint(1, 64, (4, 12), generator=torch.Generator().manual_seed(0))
    modules = {"fd": fd, "torch": torch, "transformers": transformers}
    folders = {**places, "mixtral_folder": mixtral_folder}
    return {**modules, **folders, "config": config, "mixtral_config": mixtral_config, "tokens": tokens}


def run_blocks(names, *titles, backend="simulated", result=lambda here: here):
    """Run the blocks of some sections on two ranks, and return what rank 0 has at the end, or a part of it.

    Blocks that call ``from_pretrained`` need ranks that are processes: it patches transformers while it runs.
    """

    def program(group):
        here = {**names, "group": group, "__name__": "page"}
        exec(MESH, here)
        exec("from transformers.models.llama.modeling_llama import LlamaDecoderLayer", here)
        for title in titles:
            for block in SECTIONS[title]:
                exec(compile(block, f"docs/hugging-face.md, {title}", "exec"), here)
        return result(here)

    return run_ranks(program, 2, backend=backend)[0]


def graded_parameters(here):
    return [name for name, one in here["adapted"].named_parameters() if one.grad is not None]


def test_from_plan_to_text(names, capsys):
    """A model that no rank has whole is loaded, trained, saved in two ways and writes text."""
    found = run_blocks(names, "Plans", "Loading", "Training and saving", "Generating")
    assert "model.layers.1.self_attn.q_proj.weight" in capsys.readouterr().out
    trained = load_file(f"{names['output']}/model.safetensors")
    exported = load_file(f"{names['exported']}/model.safetensors")
    before = load_file(f"{names['folder']}/model.safetensors")
    assert trained.keys() == exported.keys() == before.keys()
    assert all(exported[name].equal(value) for name, value in trained.items())
    assert not trained["lm_head.weight"].equal(before["lm_head.weight"])
    again = fd.checkpoint.load_hugging_face(names["exported"], transformers.LlamaForCausalLM(names["config"]))
    prompt = names["tokens"][:, :5]
    alone = again.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)
    assert found["written"].tolist() == alone.tolist()


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT 0.21 asks for it
def test_lora(names):
    """The adapters alone have gradients, and are sharded as the layers beside them."""
    graded = run_blocks(names, "LoRA and other adapters (PEFT)", backend="native", result=graded_parameters)
    assert len(graded) == 8
    assert all("lora_" in name for name in graded)


def test_experts(names, capsys):
    """Each rank loads its experts, and counts the tokens that they get."""
    found = run_blocks(names, "Experts")
    weight = found["model"].model.layers[0].mlp.experts.gate_up_proj
    assert weight.placements == (fd.Shard(0),)
    assert "model.layers.1.mlp.experts tensor([" in capsys.readouterr().out


def test_long_sequences_and_pipelines(names):
    """Both compute, and the pipeline's loss is that of the model."""
    run_blocks(names, "Long sequences", backend="native", result=list)
    loss = run_blocks(names, "Pipelines", backend="native", result=lambda here: here["loss"])
    whole = transformers.LlamaForCausalLM.from_pretrained(names["folder"])
    batch = {"input_ids": names["tokens"], "labels": names["tokens"]}
    torch.testing.assert_close(loss, whole(**batch).loss.detach(), check_dtype=False)


def test_the_trainer(tmp_path):
    """The Trainer runs on two ranks under the launcher."""
    program = tmp_path / "program.py"
    program.write_text(
        PREAMBLE.format(sizes=SIZES) + SECTIONS["The Trainer"][0] + "\nprint(trainer.state.global_step)\n"
    )
    command = [sys.executable, "-m", "ferrodist", "run", "--nproc-per-node", "2", str(program), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert sorted(re.findall(r"^\[rank (\d)\] 2$", done.stdout, re.MULTILINE)) == ["0", "1"]


def test_all_blocks_are_run():
    """A section that is added here has a test above."""
    assert {title for title, blocks in SECTIONS.items() if blocks} == {
        *("Plans", "Loading", "Training and saving", "Generating", "LoRA and other adapters (PEFT)", "Experts"),
        *("Long sequences", "Pipelines", "The Trainer"),
    }
