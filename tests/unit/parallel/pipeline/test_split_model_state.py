"""Models whose code and modules keep state, share objects or memory, or write in place: right in stages, or refused."""

import copy
import functools
import logging
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from ferrodist import split_model
from ferrodist.parallel.pipeline import Pipeline
from ferrodist.parallel.pipeline.model_tracer import Tracer
from ferrodist.testing import run_ranks

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
DIVISIONS = [[1, 2], [2, 1], [1, 1, 1]]


class Block(nn.Module):
    """A layer whose results another function makes."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.function = function

    def forward(self, hidden, *args):
        return self.function(hidden + self.layer(hidden) / 2, *args)


class Model(nn.Module):
    """Three blocks, and code that calls them."""

    def __init__(self, code, function=lambda hidden: hidden, **parts):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(function) for _ in range(3))
        for name, part in parts.items():
            setattr(self, name, part)
        self.code = code
        self.double()

    def forward(self, *inputs):
        return self.code(self, *inputs)


def run_stages(stages, *inputs):
    value = stages[0](*inputs)
    for stage in stages[1:]:
        value = stage(value)
    return value


def gradients(*modules):
    found = {name: each.grad for module in modules for name, each in module.named_parameters()}
    assert all(each is not None for each in found.values())
    return found


def check(model, division, prepare=lambda _model: None, calls=2):
    """Outputs and gradients of some calls are those of the whole model."""
    whole = copy.deepcopy(model)
    stages = split_model(copy.deepcopy(model), len(division), None, division, sample=X)
    prepare(whole)
    for stage in stages:
        prepare(stage)
    for _ in range(calls):
        expected, found = whole(X.clone()), run_stages(stages, X.clone())
        torch.testing.assert_close(found, expected)
        expected.sum().backward()
        found.sum().backward()
        torch.testing.assert_close(gradients(*stages), gradients(whole))


def refused(model, message, *sample):
    with pytest.raises(ValueError, match=message):
        split_model(model, 2, None, [1, 2], sample=sample or X)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_blocks_are_traced_on_the_meta_device(monkeypatch, kind):
    """No block of the usual models is computed to find shapes: that would take its memory and time."""
    computed = []
    monkeypatch.setattr(Tracer, "_with_zeros", lambda _self, path: computed.append(path))
    sizes = {"vocab_size": 16, "hidden_size": 8, "num_attention_heads": 2}
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, intermediate_size=8)
        model = transformers.LlamaForCausalLM(config)
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, num_hidden_layers=2))
    ids = torch.arange(8).view(1, 8)
    split_model(model, 2, None, sample={"input_ids": ids, "labels": ids})
    assert computed == []


def plain(model, x):
    for block in model.blocks:
        x = block(x)
    return x


@pytest.mark.parametrize("division", DIVISIONS)
def test_inference_mode(division):
    """Under it stages have the model's results, with inputs from inside and outside of it."""
    model = Model(plain)
    stages = split_model(copy.deepcopy(model), len(division), None, division, sample=X)
    expected = model(X)
    with torch.inference_mode():
        torch.testing.assert_close(run_stages(stages, X), expected)
        torch.testing.assert_close(run_stages(stages, X.clone()), expected)


def test_inference_mode_in_a_pipeline():
    def add(model, x):
        hidden = model.blocks[1](model.blocks[0](x))
        hidden += 1  # which came from another stage
        return model.blocks[2](hidden)

    model = Model(add)

    def program(group):
        pipeline = Pipeline(split_model(copy.deepcopy(model), 2, group, [2, 1], sample=X), group, num_microbatches=2)
        with torch.inference_mode():
            found = pipeline(X)
        if found is not None:
            torch.testing.assert_close(found, model(X))

    run_ranks(program, 2)


def write_to_a_result(model, x):
    scale = model.blocks[0](x)
    scale += 1
    return model.blocks[2](model.blocks[1](x * scale) * scale)


@pytest.mark.parametrize("division", DIVISIONS)
def test_a_result_that_the_code_writes_and_a_later_stage_gets(division):
    """Also one that a stage between has received: each stage's code writes to its own copy."""
    check(Model(write_to_a_result), division)


def write_to_what_a_unit_returns(model, x):
    hidden = model.blocks[0](x)
    other = model.unit(hidden)
    other += 1
    return model.blocks[2](model.blocks[1](other)) + hidden


def use_the_argument_of_a_unit_in_place(model, x):
    hidden = model.blocks[0](x) - 0.1
    return model.blocks[2](model.blocks[1](model.unit(hidden))) + hidden


def write_to_residual(model, x):
    residual = x * 1
    total = residual
    for block in model.blocks:
        x, residual = block(x, residual)
        residual += x
    return x + total


def write_to_first_rows(model, x):
    for block in model.blocks:
        x, rows = block(x)
        rows *= 2
    return x


IN_PLACE = [
    (Model(write_to_what_a_unit_returns, unit=nn.Identity()), "'unit' that it also has as another tensor"),
    (Model(write_to_what_a_unit_returns, unit=nn.Flatten()), "'unit' that it also has as another tensor"),
    (Model(use_the_argument_of_a_unit_in_place, unit=nn.ReLU(inplace=True)), "'unit' writes in place to a tensor, and"),
    (
        Model(write_to_residual, lambda hidden, residual: (hidden, residual)),
        "that it also has as another tensor",
    ),
    (Model(write_to_first_rows, lambda hidden: (hidden, hidden[:1])), "'blocks.0' that it also has as another tensor"),
]


@pytest.mark.parametrize(("model", "message"), IN_PLACE)
def test_memory_that_is_one_for_a_stage_and_two_for_others(model, message):
    refused(copy.deepcopy(model), message)


def add_after_dropout(model, x):
    hidden = model.unit(model.blocks[0](x))
    hidden += x
    return model.blocks[2](model.unit(model.blocks[1](hidden)))


def relu_between(model, x):
    hidden = model.unit(model.blocks[0](x))
    return model.blocks[2](model.unit(model.blocks[1](hidden)) + hidden)


@pytest.mark.parametrize("division", DIVISIONS)
def test_memory_of_which_one_name_is_used(division):
    check(Model(add_after_dropout, unit=nn.Dropout(0.5)).eval(), division)
    check(Model(relu_between, unit=nn.ReLU(inplace=True)), division)


class Losses(nn.Module):
    """A layer that collects losses in a list."""

    def __init__(self, losses):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.losses = losses

    def forward(self, hidden):
        hidden = hidden + self.layer(hidden)
        self.losses.append(hidden.square().mean())
        return hidden


class Factor:
    """A factor that the model's code sets."""

    value = 1.0


class Scaled(nn.Module):
    """A layer that reads a factor of an object."""

    def __init__(self, factor):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.factor = factor

    def forward(self, hidden):
        return hidden + self.layer(hidden) * self.factor.value


def sum_losses(model, x):
    model.losses.clear()
    for block in model.blocks:
        x = block(x)
    return x.sum() + sum(model.losses)


def set_factor(model, x):
    model.factor.value = float(x.shape[1])
    return plain(model, x)


def with_blocks(code, kind, value, name=None):
    model = Model(code, **({} if name is None else {name: value}))
    model.blocks = nn.ModuleList(kind(value) for _ in range(3)).double()
    return model


class Flags(Losses):
    """A layer that sets what was set before, from the second call on."""

    def forward(self, hidden):
        self.losses.add("seen")
        return self.layer(hidden)


class Total(nn.Module):
    """A module without parameters that blocks write to."""

    def __init__(self):
        super().__init__()
        self.loss = 0
        self.register_buffer("mean", torch.zeros(()))


class Adds(Losses):
    """A layer that adds to an attribute of a module."""

    def forward(self, hidden):
        self.losses.loss = self.losses.loss + hidden.mean()
        return self.layer(hidden)


class Averages(Losses):
    """A layer that averages in a buffer of a module."""

    def forward(self, hidden):
        self.losses.mean.mul_(0.9).add_(hidden.detach().mean())
        return self.layer(hidden)


class Sums(Losses):
    """A layer that adds to a tensor."""

    def forward(self, hidden):
        self.losses.add_(hidden.detach().mean())
        return self.layer(hidden)


class Recorder:
    """A function that keeps what it gets."""

    def __init__(self):
        self.seen = []

    def __call__(self, *args):
        self.seen.append(args[-1])


class Records(Losses):
    """A layer that calls a recorder."""

    def forward(self, hidden):
        self.losses(hidden)
        return self.layer(hidden)


class Slots:
    """An object without a dictionary."""

    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class Counts(Losses):
    """A layer that counts."""

    def forward(self, hidden):
        self.losses.count += 1
        return self.layer(hidden)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: with_blocks(sum_losses, Losses, [], "losses"),
            "'blocks.0' changes its attribute 'losses', an object that the model's code has, too",
        ),
        (
            lambda: with_blocks(plain, Losses, []),
            "'blocks.0' changes its attribute 'losses', an object that module 'blocks.1' has, too",
        ),
        (
            lambda: with_blocks(set_factor, Scaled, Factor(), "factor"),
            "the model's code changes 'factor', which module 'blocks.0' has, too",
        ),
        (lambda: with_blocks(plain, Flags, set()), "'blocks.0' changes its attribute 'losses'"),
        (lambda: with_blocks(plain, Adds, Total(), "total"), "changes its attribute 'losses.loss'"),
        (lambda: with_blocks(plain, Averages, Total(), "total"), "'blocks.0' changes its attribute 'losses.mean'"),
        (lambda: with_blocks(plain, Sums, torch.zeros(())), "'blocks.0' changes its attribute 'losses'"),
        (lambda: with_blocks(plain, Records, Recorder()), "'blocks.0' changes its attribute 'losses'"),
        (lambda: with_blocks(plain, Counts, Slots(), "slots"), "'blocks.0' changes its attribute 'losses'"),
    ],
)
def test_objects_that_modules_share_and_change(make, message):
    refused(make(), message)


def keep_in_a_default(seen):
    return lambda module, args, output, seen=seen: seen.append(output)


@pytest.mark.parametrize(
    "hook_of",
    [
        lambda model: functools.partial(lambda owner, *_: setattr(owner, "called", _), model),
        lambda model: model.store,
        lambda model: model.store.__call__,
        lambda model: keep_in_a_default(model.store.seen),
        lambda model: functools.wraps(print)(lambda *args: model.store(args)),
    ],
)
def test_hooks_that_change_objects_of_the_model(hook_of):
    model = Model(lambda model, x: plain(model, x) + sum(model.store.seen), store=Recorder())
    for block in model.blocks:
        block.register_forward_hook(hook_of(model))
    stages = split_model(model, 2, None, [1, 2], sample=X)
    with pytest.raises(ValueError, match=r"a hook of module 'blocks.0' changes an object that other modules have"):
        stages[0](X)


@pytest.mark.parametrize("division", DIVISIONS)
def test_hooks_that_read_objects_of_the_model(division):
    model = Model(plain, options={"factor": 2})
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _args, output: output * model.options["factor"])
        block.register_forward_hook(
            functools.partial(lambda options, *args: args[-1] * options["factor"], model.options)
        )
    check(model, division)


class Reads(nn.Module):
    """A module without parameters that reads a factor of an object."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, hidden):
        return hidden * self.factor.value


def set_before_loss(model, x):
    x = plain(model, x)
    model.factor.value = 3.0
    return model.loss(x)


def append_calls(model, x):
    model.calls.append(1)
    return plain(model, x)


def test_objects_that_the_code_changes_for_others():
    """A unit without parameters, and a hook."""
    factor = Factor()
    refused(
        Model(set_before_loss, factor=factor, loss=Reads(factor)),
        "the model's code changes 'factor', which module 'loss'",
    )
    model = Model(append_calls, calls=[])
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _args, output: output * len(model.calls))
    refused(model, "the model's code changes 'calls', which a hook has, too")


def test_a_buffer_that_blocks_have_too():
    model = with_buffer(fill)
    for block in model.blocks:
        block.register_buffer("mean", model.mean)
    refused(model, "changes its buffer 'mean' in place, by aten::fill_")


class Logs(Losses):
    """A layer that logs."""

    def forward(self, hidden):
        self.losses.warning("%s", hidden.shape)
        return self.layer(hidden)


@pytest.mark.parametrize("division", DIVISIONS)
def test_loggers_that_modules_share(division):
    logger = logging.getLogger("a logger of tests")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    check(with_blocks(plain, Logs, logger, "logger"), division)


@pytest.mark.parametrize("division", DIVISIONS)
def test_objects_that_modules_share_and_leave_alone(division):
    check(with_blocks(plain, Scaled, Factor(), "factor"), division)


class Encoder(nn.Module):
    """Blocks, and a dropout in the code around them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(lambda hidden: hidden) for _ in range(2))

    def forward(self, x):
        return nn.functional.dropout(plain(self, x), 0.5, training=self.training)


class Frozen(Encoder):
    """The same, never in mode of training."""

    def train(self, _mode=True):
        return super().train(mode=False)


@pytest.mark.parametrize("division", DIVISIONS)
def test_parts_in_mode_of_evaluation(division):
    """Those that were so before the split, or whose class keeps it."""
    model = Model(lambda model, x: plain(model, model.encoder(x)), encoder=Encoder())
    model.encoder.eval()
    check(model, [*division[:-1], division[-1] + 2])
    check(model, [*division[:-1], division[-1] + 2], lambda module: module.eval())
    model = Model(lambda model, x: plain(model, model.encoder(x)), encoder=Frozen())
    check(model, [*division[:-1], division[-1] + 2], lambda module: module.train())


def test_a_part_whose_mode_is_set_in_one_stage():
    model = Model(lambda model, x: plain(model, model.encoder(x)), encoder=Encoder())
    stages = split_model(model, 2, None, [2, 3], sample=X)
    stages[0].encoder.eval()
    with pytest.raises(ValueError, match=r"'encoder' in stage 0 was set to mode of evaluation by itself"):
        stages[0](X)
    stages[0].eval()
    stages[0](X)


def test_stages_in_different_modes():
    stages = split_model(Model(plain), 2, None, [1, 2], sample=X)
    stages[1].eval()
    with pytest.raises(ValueError, match="stage 1 and the stage before it are in different modes of training"):
        run_stages(stages, X)


class NamedInputs(NamedTuple):
    """A tuple of inputs."""

    x: torch.Tensor


@pytest.mark.parametrize(
    "kind", [NamedInputs, *(lambda x, kind=kind: kind(x=x) for kind in (OrderedDict, UserDict)), lambda x: deque([x])]
)
def test_inputs_of_other_types_are_refused(kind):
    refused(Model(plain), "the model's inputs have an? .*, which goes from stage to stage as another type", kind(X))
    refused(Model(plain), "have a defaultdict, which goes", [X, defaultdict(int)])


def remember(model, x):
    hidden = model.blocks[0](x)
    earlier = getattr(model, "earlier", None)
    hidden = plain(model, hidden if earlier is None else hidden + earlier)
    model.earlier = hidden.detach().mean()
    return hidden


def collect(model, x):
    model.seen = []
    for block in model.blocks:
        x = block(x)
        model.seen.append(x.mean())
    return x + sum(model.seen)


def average(model, x):
    model.mean.mul_(0.9)
    return plain(model, x + model.mean)


def count(model, x):
    model.mean = model.mean + 1
    return plain(model, x * model.mean)


def fill(model, x):
    model.mean.fill_(float(x.shape[0]))
    return plain(model, x + model.mean)


def fill_and_change(model, x):
    model.mean.copy_(x.detach()[0])
    model.mean.mul_(2)
    return plain(model, x + model.mean)


def use_and_fill(model, x):
    x = plain(model, x + model.mean)
    model.mean.copy_(x.detach()[0])
    return x


def fill_a_part(model, x):
    model.mean[:2] = x.detach()[0, :2]
    return plain(model, x + model.mean)


def with_buffer(code):
    model = Model(code)
    model.register_buffer("mean", torch.ones(6, dtype=torch.float64))
    return model


def test_state_from_call_to_call_is_refused():
    refused(Model(remember), "has results of modules in 'earlier' from the call before")
    refused(with_buffer(average), "changes its buffer 'mean' in place, by aten::mul_")
    refused(with_buffer(use_and_fill), "changes its buffer 'mean' in place, by aten::copy_")
    refused(with_buffer(fill_a_part), "changes its buffer 'mean' in place, by aten::copy_")
    refused(with_buffer(count), "sets its parameter or buffer 'mean'")


@pytest.mark.parametrize("division", DIVISIONS)
def test_state_of_one_call(division):
    check(Model(collect), division)
    check(with_buffer(fill), division)
    check(with_buffer(fill_and_change), division)


@pytest.mark.parametrize("division", DIVISIONS)
def test_checkpoints_in_the_models_code(division):
    def code(model, x):
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    check(Model(code), division)


def test_reentrant_checkpoints_are_refused():
    def code(model, x):
        return model.blocks[2](model.blocks[1](checkpoint(model.blocks[0], x * model.factor, use_reentrant=True)))

    refused(Model(code, factor=nn.Parameter(torch.ones(6))), "'blocks.0' in torch.utils.checkpoint with use_reentrant")


@dataclass
class State:
    """An object that blocks change."""

    count: int = 0
    seen: set = field(default_factory=set)


def change_count(hidden, state):
    state.count += 1
    return hidden * state.count


def change_set(hidden, state):
    state.seen.add(len(state.seen))
    return hidden * len(state.seen)


def give_state(model, x):
    state = State()
    for block in model.blocks:
        x = block(x, state)
    return x


def give_hidden(wrap, model, x):
    hidden = model.blocks[0](x, None)
    for block in model.blocks[1:]:
        x = block(x, wrap(hidden))
    return x


@pytest.mark.parametrize("function", [change_count, change_set])
def test_objects_among_arguments_that_blocks_change(function):
    refused(Model(give_state, function), "'blocks.0' changes an object among its arguments")


@pytest.mark.parametrize(
    "wrap",
    [lambda one: functools.partial(print, one), lambda one: {one}, lambda one: lambda: one, lambda one: iter([one])],
)
def test_tensors_in_arguments_that_hide_them(wrap):
    model = Model(functools.partial(give_hidden, wrap), lambda hidden, _: hidden)
    refused(model, r"'blocks.1' gets \w+, an object that holds tensors")


def write_by_values(hidden, scale):
    if scale.sum() > 0:
        with torch.no_grad():
            scale.add_(1)
    return hidden * scale


def test_writes_that_depend_on_values():
    """The run with zeros as values doesn't see them; the stage that calls the block does."""

    def code(model, x):
        scale = x.square()
        for block in model.blocks:
            x = block(x, scale)
        return x

    stages = split_model(Model(code, write_by_values), 2, None, [1, 2], sample=X * 0)
    stages[0](X * 0)
    with pytest.raises(ValueError, match=r"'blocks.0' writes to its arguments in place, .* did not do in a run with"):
        stages[0](X)


def test_a_stage_on_the_meta_device():
    stages = split_model(Model(plain).to("meta"), 2, None, sample=X)
    with pytest.raises(ValueError, match="stage 0 is on the meta device: call materialise"):
        stages[0](X)


def test_a_module_with_the_name_of_an_attribute_of_stages():
    model = Model(lambda model, x: model.materialise(plain(model, x)), materialise=nn.Linear(6, 6))
    with pytest.raises(ValueError, match="'materialise' in the model has the name of an attribute of stages"):
        split_model(model, 2, None, sample=X)
    model = Model(lambda model, x: plain(model.contents, x), contents=Encoder())
    with pytest.raises(ValueError, match="'contents' in the model has the name of an attribute of stages"):
        split_model(model, 2, None, sample=X)
