"""Models whose code reads a parameter of a unit outside of its call: it is in all stages that need it."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from ferrodist import split_model
from ferrodist.checkpoint import load_distributed, save_distributed
from ferrodist.parallel.pipeline import Balance, Pipeline
from ferrodist.testing import run_ranks

WORDS = torch.arange(20).reshape(4, 5) % 9


class Block(nn.Module):
    """A layer that gets the rows of a table."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, hidden, rows):
        return hidden + self.layer(hidden).tanh() @ rows.t() @ rows


class Model(nn.Module):
    """A model whose blocks get the table of an embedding, and whose head is that of another one."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.distances = nn.Embedding(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(6)

    def forward(self, words):
        hidden = self.words(words)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, self.distances.weight * index)
        return {"loss": functional.linear(self.norm(hidden), self.words.weight).square().mean()}


def made():
    torch.manual_seed(0)
    return Model().double()


def one_process(model):
    alone, losses = copy.deepcopy(model), []
    for part in WORDS.split(2):
        loss = alone(part)["loss"]
        (loss / 2).backward()
        losses.append(loss.item())
    return losses, {name: each.grad for name, each in alone.named_parameters()}


@pytest.mark.parametrize("balance", [[2, 2, 2], [1, 1, 4], Balance.TIMES])
def test_losses_and_gradients_are_those_of_one_process(balance):
    model = made()
    losses, expected = one_process(model)

    def program(group):
        stages = split_model(copy.deepcopy(model), 3, group, balance, sample=WORDS[:2])
        pipeline = Pipeline(stages, group, 2)
        pipeline.step(WORDS)
        torch.testing.assert_close(pipeline.losses, losses, rtol=1e-14, atol=0)
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name])
        return {name for name, _ in pipeline.named_parameters()}

    names = run_ranks(program, 3)
    assert set().union(*names) == set(expected)
    assert all("words.weight" in each for each in (names[0], names[2]))
    assert "words.weight" not in names[1]


def test_checkpoints_load_into_stages_of_a_meta_model(tmp_path):
    model = made()
    losses, _ = one_process(model)

    def save(group):
        save_distributed(
            {"model": Pipeline(split_model(copy.deepcopy(model), 2, group, sample=WORDS[:2]), group, 2)}, tmp_path
        )

    def load(group):
        with torch.device("meta"):
            other = Model().double()
        stages = split_model(other, 3, group, sample=WORDS[:2])
        stages[group.rank].materialise()
        pipeline = Pipeline(stages, group, 2)
        load_distributed(tmp_path, {"model": pipeline})
        pipeline.step(WORDS)
        torch.testing.assert_close(pipeline.losses, losses, rtol=1e-14, atol=0)

    run_ranks(save, 2)
    run_ranks(load, 3)


def test_relative_embeddings_of_deberta():
    config = transformers.DebertaV2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=32,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    )
    torch.manual_seed(0)
    model = transformers.DebertaV2ForMaskedLM(config).double()
    tokens = torch.randint(3, 30, (4, 6))
    batch = {"input_ids": tokens, "labels": tokens}
    alone = copy.deepcopy(model)
    alone(**batch).loss.backward()
    expected = {name: each.grad for name, each in alone.named_parameters(remove_duplicate=False)}

    def program(group):
        pipeline = Pipeline(split_model(copy.deepcopy(model), 2, group, sample=batch), group, 1)
        pipeline.step(batch)
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], msg=name)

    run_ranks(program, 2)


class ManyReads(nn.Module):
    """A model whose last code reads four parameters, one of them tied, of modules with others beside them."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.tables = nn.ModuleList(nn.Linear(6, 9) for _ in range(3))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(6, 9)
        self.head.weight = self.words.weight

    def forward(self, words):
        hidden = self.words(words)
        for table in self.tables:
            hidden = hidden + table(hidden) @ table.weight
        for block in self.blocks:
            hidden = block(hidden, self.tables[0].weight)
        read = self.tables[2].weight * self.tables[1].weight + self.words.weight
        return {"loss": (self.head(hidden) + hidden @ read.t()).square().mean()}


def test_shared_parameters_have_the_models_order():
    """The ranks of a stage, processes with hashes of their own, register parameters in the same order."""
    stages = split_model(ManyReads().double(), 2, None, sample=WORDS[:2])
    names = [name for name, _ in stages[1].named_parameters()]
    read = [name for name in names if name.startswith("tables")]
    assert read == [f"tables.{index}.weight" for index in range(3)]


def test_gradients_of_many_shared_parameters():
    torch.manual_seed(0)
    model = ManyReads().double()
    losses, expected = one_process(model)

    def program(group):
        pipeline = Pipeline(split_model(copy.deepcopy(model), 2, group, sample=WORDS[:2]), group, 2)
        pipeline.step(WORDS)
        torch.testing.assert_close(pipeline.losses, losses, rtol=1e-14, atol=0)
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name.replace("head.weight", "words.weight")])

    run_ranks(program, 2)


def test_shared_parameters_beside_others_on_the_meta_device():
    with torch.device("meta"):
        model = ManyReads()
    for stage in split_model(model, 2, None, sample=WORDS[:2]):
        stage.materialise()
        assert not any(each.is_meta for each in stage.parameters())
