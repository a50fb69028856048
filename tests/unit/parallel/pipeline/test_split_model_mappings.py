"""Models whose modules write to mappings that they are given, or have constants that the code around them reads."""

import copy
from collections import UserDict

import pytest
import torch
import transformers
from torch import nn

from ferrodist import split_model
from ferrodist.parallel.pipeline import Balance, Pipeline, PipelineSchedule
from ferrodist.testing import run_ranks

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A layer that reads from a mapping what an earlier one has written, or writes to it itself."""

    def __init__(self, writes):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.writes = writes

    def forward(self, hidden, shared):
        found = self.layer(hidden).tanh()
        if self.writes:
            shared["keys"] = found * 2, found.detach() + 1
            return hidden + found
        return hidden + found * shared["keys"][0] + shared["keys"][1]


class Model(nn.Module):
    """A model with a new mapping in each forward."""

    kind = UserDict

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(writes) for writes in (True, False, True, False, False))

    def forward(self, x):
        shared = self.kind()
        for block in self.blocks:
            x = block(x, shared)
        return {"loss": x.square().mean() + shared["keys"][0].mean()}


class DictModel(Model):
    """The same with a dict."""

    kind = dict


class OwnDict(dict):
    """A class of mappings that torch doesn't know."""


class OwnModel(Model):
    """The same with a class of its own."""

    kind = OwnDict


@pytest.mark.parametrize("kind", [Model, DictModel, OwnModel])
@pytest.mark.parametrize("balance", [[1, 2, 2], [3, 1, 1], Balance.TIMES])
def test_mappings_that_blocks_write(kind, balance):
    """What a block writes goes to later stages, and its gradients come back."""
    torch.manual_seed(0)
    model = kind().double()
    alone = copy.deepcopy(model)
    losses = []
    for part in X.split(2):
        loss = alone(part)["loss"]
        (loss / 2).backward()
        losses.append(loss.item())
    expected = {name: each.grad for name, each in alone.named_parameters()}

    def program(group):
        stages = split_model(copy.deepcopy(model), 3, group, balance, sample=X[:2])
        pipeline = Pipeline(stages, group, 2)
        pipeline.step(X)
        torch.testing.assert_close(pipeline.losses, losses, rtol=1e-14, atol=0)
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name])

    run_ranks(program, 3)


class Appends(nn.Module):
    """A block that adds to a list."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, hidden, seen):
        seen.append(hidden.sum())
        return self.layer(hidden)


class Removes(Appends):
    """A block that removes from a mapping."""

    def forward(self, hidden, seen):
        seen.pop("first", None)
        return self.layer(hidden)


class Replaces(Appends):
    """A block that puts another item into a list."""

    def forward(self, hidden, seen):
        seen[-1] = hidden.sum()
        return self.layer(hidden)


class Moves(Appends):
    """A block that moves a key of a mapping."""

    def forward(self, hidden, seen):
        seen["first"] = seen.pop("first")
        return self.layer(hidden)


class Collector(nn.Module):
    """A model that collects in a list or a mapping."""

    def __init__(self, block, make):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self._make = make

    def forward(self, x):
        seen = self._make()
        for block in self.blocks:
            x = block(x, seen)
        return x.sum() + sum(seen)


@pytest.mark.parametrize(
    ("block", "make"),
    [
        (Appends, list),
        (Replaces, lambda: [0, 0]),
        (Removes, lambda: {"first": 1}),
        (Moves, lambda: {"first": 1, "second": 2}),
    ],
)
def test_other_writes_are_refused(block, make):
    with pytest.raises(ValueError, match=r"module 'blocks.0' changes a list .*, or removes from a mapping"):
        split_model(Collector(block, make).double(), 2, None, sample=X)


class CodeBlock(nn.Module):
    """A block that passes its arguments on to a function of its model."""

    def __init__(self, code):
        super().__init__()
        self.layer, self._code = nn.Linear(6, 6), code

    def forward(self, hidden, *args):
        return self._code(self.layer(hidden), *args)


class ReluOfAll(nn.Module):
    """A module without parameters that writes to the tensors of a list, and returns it."""

    def forward(self, items):
        for each in items:
            each.relu_()
        return items


class FreeModel(nn.Module):
    """A model of three blocks with code of its own; the blocks' code gets what a layer returns, and their arguments."""

    def __init__(self, code, block_code=lambda hidden: hidden):
        super().__init__()
        self.blocks = nn.ModuleList(CodeBlock(block_code) for _ in range(3))
        self.relu = ReluOfAll()
        self._code = code

    def forward(self, x):
        return self._code(self, x)


def write(hidden, seen, *others):
    seen[len(seen)] = hidden.sum()
    return hidden, seen, *others


def go_on_with_what_blocks_return(kind):
    def code(model, x):
        own = given = kind()
        for block in model.blocks:
            x, given = block(x, given)
            given[len(given)] = x.mean()
        assert given is own
        return x.sum() + sum(own.values())

    return code


def give_one_mapping_twice(model, x):
    seen = {}
    for block in model.blocks:
        x, *_ = block(x, seen, seen)
    return x.sum() + sum(seen.values())


def give_one_mapping_twice_and_write_to_another(model, x):
    seen, same = {}, {"factor": 2.0}
    for block in model.blocks:
        x, _, first, second = block(x, seen, same, same)
        assert first is second
    return x.sum() + sum(seen.values())


def write_in_place_to_a_list_that_is_returned(model, x):
    first, second = model.relu([model.blocks[0](x) * 2, model.blocks[0](x + 1) * 2])
    return (model.blocks[2](model.blocks[1](first)) * first + second).square().sum()


def keep_random_numbers(model, x):
    data = {"hidden": x, "skip": torch.nn.functional.dropout(x, 0.5)}
    for block in model.blocks:
        data = block(data["hidden"], data)
    return data["hidden"].square().sum()


def skip(hidden, data):
    data["hidden"] = hidden * data["skip"]
    return data


def write_to_what_a_mapping_has(model, x):
    factor = x * 1.0
    seen = {"factor": factor}
    for block in model.blocks:
        x, *_ = block(x, seen)
    factor.mul_(2)
    return (x * seen["factor"]).sum()


def write_rows(model, x):
    rows = torch.zeros(3, 6, dtype=torch.float64)
    seen = [rows]
    for index, block in enumerate(model.blocks):
        x, *_ = block(x, seen)
        rows[index] = x.mean(0)
    return (x.sum(0) * rows).sum()


def keep_tuples(model, x):
    pair = x * 2, x * 3
    seen = {"pair": pair}
    for block in model.blocks:
        x, *_ = block(x, seen)
    assert seen["pair"] is pair
    return (x * pair[0] + pair[1]).sum()


def give(hidden, *args):
    return hidden, *args


def put_one_mapping_into_another(model, x):
    outer, inner = {}, {}
    for block in model.blocks:
        x = block(x, outer, inner)
        inner["mean"] = x.mean()
        x = x * outer["inner"]["mean"]
    return x.sum()


def put(hidden, outer, inner):
    outer["inner"] = inner
    return hidden


def write_what_is_returned(model, x):
    seen, last = {}, {}
    for block in model.blocks:
        x, last = block(x, seen)
        last["sum"] = x.mean()
    return x.sum() * sum(seen["last"].values())


def write_and_return(hidden, seen):
    seen["last"] = made = {"sum": hidden.sum()}
    return hidden, made


@pytest.mark.parametrize(
    ("code", "block_code"),
    [
        (go_on_with_what_blocks_return(dict), write),
        (go_on_with_what_blocks_return(OwnDict), write),
        (go_on_with_what_blocks_return(UserDict), write),
        (give_one_mapping_twice, write),
        (give_one_mapping_twice_and_write_to_another, write),
        (write_in_place_to_a_list_that_is_returned, lambda hidden: hidden),
        (keep_random_numbers, skip),
        (write_to_what_a_mapping_has, give),
        (write_rows, give),
        (keep_tuples, give),
        (put_one_mapping_into_another, put),
        (write_what_is_returned, write_and_return),
    ],
)
@pytest.mark.parametrize("balance", [[1, 2], [2, 1], Balance.TIMES])
def test_mappings_and_lists_keep_their_identity(code, block_code, balance):
    """A mapping or list is one object in all stages' code wherever it is one in the whole model's."""
    torch.manual_seed(0)
    model = FreeModel(code, block_code).double()

    def program(group):
        stages = split_model(copy.deepcopy(model), 2, group, balance, sample=X)
        torch.manual_seed(1)
        loss = stages[1](stages[0](X))
        loss.backward()
        torch.manual_seed(1)
        expected = model(X)
        expected.backward()
        torch.testing.assert_close(loss, expected)
        grads = {name: each.grad for name, each in model.named_parameters()}
        for stage in stages:
            for name, parameter in stage.named_parameters():
                torch.testing.assert_close(parameter.grad, grads[name])

    run_ranks(program, 1)


def use_tensors_beside_their_list(model, x):
    first = model.blocks[0](x)[0] * 2
    model.relu([first])
    return model.blocks[2](model.blocks[1](first)[0])[0].sum()


def write_to_random_numbers(model, x):
    factor = torch.nn.functional.dropout(x, 0.5)
    seen = {"factor": factor}
    for block in model.blocks:
        x, seen = block(x, seen)
    factor.mul_(2)
    return (x * seen["factor"]).sum()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (use_tensors_beside_their_list, "'relu' writes in place to a tensor, and"),
        (write_to_random_numbers, "writes in place to random numbers that are in a mapping or list"),
    ],
)
def test_writes_that_later_stages_would_miss_are_refused(code, message):
    with pytest.raises(ValueError, match=message):
        split_model(FreeModel(code, give).double(), 2, None, sample=X)


def test_a_mapping_that_is_returned_by_values_is_refused():
    def return_copies_of_some(hidden, seen):
        return hidden, seen if hidden.detach().sum().item() == 0 else dict(seen)

    def code(model, x):
        seen = {"mean": x.mean()}
        for block in model.blocks:
            x, found = block(x, seen)
            found["mean"] = x.mean() * 7
        return x.sum() + seen["mean"]

    model = FreeModel(code, return_copies_of_some).double()

    def program(group):
        stages = split_model(model, 2, group, sample=X)
        with pytest.raises(ValueError, match=r"module 'blocks.0' returned another structure"):
            stages[0](X)

    run_ranks(program, 1)


def read_inputs(model, inputs):
    hidden, first, second = inputs
    for block in model.blocks:
        hidden = block(hidden)
    return hidden.sum() + first["factor"] + second["factor"]


def test_a_mapping_that_is_two_inputs_is_refused():
    """In the sample, and in a batch; one that two inputs have a copy of is right."""
    model = FreeModel(read_inputs).double()
    factor, copied = {"factor": torch.ones((), dtype=torch.float64)}, {"factor": torch.ones((), dtype=torch.float64)}
    with pytest.raises(ValueError, match="inputs have one dict twice"):
        split_model(copy.deepcopy(model), 2, None, sample=([X, factor, factor],))

    def program(group):
        sample = [X, factor, copied]
        stages = split_model(copy.deepcopy(model), 2, group, sample=(sample,))
        torch.testing.assert_close(stages[1](stages[0](sample)), model(sample))
        with pytest.raises(ValueError, match="inputs have one dict twice"):
            stages[0]([X, factor, factor])
        with pytest.raises(ValueError, match="inputs have one dict twice"):
            Pipeline(stages, group, schedule=PipelineSchedule.LOOPED_BFS, num_microbatches=2).step([X, factor, factor])

    run_ranks(program, 1)


class Embeddings(nn.Module):
    """Embeddings with constants: default kinds, which the model's code reads, and counts of calls."""

    def __init__(self, *, counts):
        super().__init__()
        self.kinds = nn.Embedding(3, 6)
        self.register_buffer("default", torch.tensor([2, 1]).repeat(3), persistent=False)
        self.counts = counts

    def forward(self, x, kinds):
        if self.counts:
            self.default += 1
        return x + self.kinds(kinds % 3).sum(0)


class WithConstants(nn.Module):
    """A model whose later stages read constants of its first one, and the device of its parameters."""

    def __init__(self, *, counts=False):
        super().__init__()
        self.embeddings = Embeddings(counts=counts)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        device = next(self.parameters()).device
        x = self.embeddings(x, self.embeddings.default)
        for block in self.blocks:
            x = block(x.to(device)).tanh() * (self.embeddings.default + torch.ones((), device=device))
        return x.square().mean()


def test_constants_of_units_are_in_all_stages():
    """Those of integers that no checkpoint has; they are no part of a stage's state."""
    torch.manual_seed(0)
    model = WithConstants().double()
    expected = model(X)

    def program(group):
        stages = split_model(copy.deepcopy(model), 2, group, [2, 2], sample=X)
        message = stages[0](X)
        torch.testing.assert_close(stages[1](message), expected)
        assert not any("default" in name for stage in stages for name in stage.state_dict())

    run_ranks(program, 1)


def test_constants_that_change_are_refused():
    with pytest.raises(ValueError, match=r"reads 'embeddings.default', which the forward of this module sets"):
        split_model(WithConstants(counts=True).double(), 2, None, sample=X)


def test_gemma_3n_shares_keys_and_values_across_stages():
    """Its last layers take the keys and values of earlier ones from a mapping."""
    config = transformers.Gemma3nTextConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=4,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=32,
        hidden_size_per_layer_input=4,
        laurel_rank=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3nForCausalLM(config).double()
    tokens = torch.randint(3, 30, (2, 6))
    batch = {"input_ids": tokens, "labels": tokens}
    expected = model(**batch, use_cache=False).loss

    def program(group):
        pipeline = Pipeline(split_model(copy.deepcopy(model), 2, group, sample=batch), group, 1)
        pipeline.step(batch)
        torch.testing.assert_close(pipeline.losses, [expected.item()], rtol=1e-6, atol=0)

    run_ranks(program, 2)
