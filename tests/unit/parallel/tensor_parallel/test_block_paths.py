"""Blocks on local tensors whose code takes another path later, or has effects that a trial would repeat."""

from __future__ import annotations

import copy
import functools
import gc
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ferrodist as fd
from ferrodist.parallel.tensor_parallel.block_state import BlockState
from ferrodist.parallel.tensor_parallel.local_blocks import LocalBlock
from ferrodist.testing import run_ranks

WIDTH = 24
PLAN = {"blocks.*.up": fd.ColumnParallel(), "blocks.*.down": fd.RowParallel()}


class Block(nn.Module):
    """A block whose features are centered if something says so: then it can't compute on local tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.centers = False
        self.dropout = nn.Dropout(0.0)
        self.config = SimpleNamespace(options={"centers": False}, steps=[1, 2])

    def is_centered(self, x):
        return self.centers or self.config.options["centers"] or len(self.config.steps) > 2

    def forward(self, x):
        inner = self.dropout(functional.gelu(self.up(self.norm(x))))
        if self.is_centered(x):
            inner = inner - inner.mean(-1, keepdim=True)
        return x + self.down(inner)


class BySize(Block):
    """A path for long inputs."""

    def is_centered(self, x):
        return x.shape[1] > 64


class ByValue(Block):
    """A path for large values."""

    def is_centered(self, x):
        return x.max().item() > 100


class ByArray(Block):
    """A path for large values, read by another operator."""

    def is_centered(self, x):
        return x[x > 100].numel() > 0


class Borrowing(Block):
    """A parameter that the block does not own."""

    def forward(self, x):
        return super().forward(x) + self.down(functional.gelu(self.up(self.norm(x))) * self.config.borrowed[0])


class Returning(Block):
    """A result that is the input."""

    def forward(self, x):
        return super().forward(x), x


class Counting(Block):
    """A counter in a list, by which every fifth call is centered."""

    def is_centered(self, x):
        self.config.steps.append(0)
        return len(self.config.steps) % 5 == 0


class Generating(Block):
    """Noise of a generator of the block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return super().forward(x) + torch.randn(WIDTH, generator=self.generator)


class Skipping(Block):
    """A block that is skipped at random, by Python's generator or numpy's."""

    source = random.random

    def forward(self, x):
        return x + 1 if type(self).source() < 0.5 else super().forward(x)


class SkippingByNumpy(Skipping):
    """The same."""

    source = np.random.random


class HookingActivations(Block):
    """Hooks on gradients of activations, which would see a rank's own features."""

    def forward(self, x):
        inner = functional.gelu(self.up(self.norm(x)))
        if inner.requires_grad:
            inner.register_hook(self.config.steps.append)
        return x + self.down(inner)


class CountingLarge(Block):
    """A counter of large values, which random ones would move on."""

    def forward(self, x):
        if (x.abs() > 1e3).any():
            self.config.steps.append(0)
        return super().forward(x)


class WithoutNorm(Block):
    """A block whose input goes straight into its column layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()


class Model(nn.Module):
    """Two blocks."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind() for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(WIDTH * 2))
        for block in self.blocks:
            block.config.borrowed = [self.scale[:WIDTH].detach()]

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if isinstance(x, tuple):
                x, given = x
                x = x + given.mul_(0.5)
        return x


KINDS = [
    WithoutNorm,
    Block,
    HookingActivations,
    CountingLarge,
    BySize,
    ByValue,
    ByArray,
    Borrowing,
    Returning,
    Counting,
    Generating,
    Skipping,
    SkippingByNumpy,
]


@functools.cache
def _initial(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(kind)


@pytest.fixture(autouse=True)
def _models():
    """Made before the ranks start, as threads share torch's seed."""
    for kind in KINDS:
        _initial(kind)


def batch(step=0, length=5, factor=1.0):
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(step)) * factor


def is_local(model):
    """Return whether the first block's next forward of a kind that was tried is on local tensors."""
    block = block_of(model)
    return local_kinds(model) > 0 and block.is_plain_call() and block.state.is_current()


def local_kinds(model):
    """The number of kinds of the first block's forwards that run on local tensors."""
    return sum(bool(one.sizes) and not one.has_failed for one in block_of(model).trials.values())


def block_of(model):
    """The first block's forward."""
    forward = model.blocks[0].forward
    while not isinstance(forward, LocalBlock):
        forward = forward._forward
    return forward


def make_both(kind, n=2):
    """For each rank a model with local blocks, and one without."""

    def make(group):
        mesh = fd.DeviceMesh(group, (n,))
        return [
            fd.parallelize(copy.deepcopy(_initial(kind)), mesh, PLAN, local_blocks=local) for local in (True, False)
        ]

    return make


def check_equal(models, given):
    """The models' results and gradients have the same bits."""
    found = []
    for model in models:
        model.zero_grad()
        own = given.clone().requires_grad_()
        result = model(own * 1)
        result.square().sum().backward()
        grads = [one.grad.full_tensor() for one in model.parameters() if one.grad is not None]
        found.append([result.detach(), own.grad, *grads])
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def set_attribute(block):
    block.centers = True


def set_in_configuration(block):
    block.config.options["centers"] = True


def append_to_configuration(block):
    block.config.steps.append(3)


def replace_configuration(block):
    block.config = SimpleNamespace(options={"centers": True}, steps=[])


def change_method(block):
    block.is_centered = lambda _x: True


@pytest.mark.parametrize(
    "change", [set_attribute, set_in_configuration, append_to_configuration, replace_configuration, change_method]
)
def test_attributes_that_change_the_path(change):
    def program(group):
        models = make_both(Block)(group)
        for step in range(3):
            check_equal(models, batch(step))
        counts = [local_kinds(models[0])]
        for model in models:
            for block in model.blocks:
                change(block)
        for step in range(3):
            check_equal(models, batch(step))
        return [*counts, local_kinds(models[0])]

    assert run_ranks(program, 2) == [[1, 0]] * 2


def test_a_probability_that_is_set_later():
    """Dropout draws by the shape, so ranks with features of their own would draw other numbers."""

    def program(group):
        model, _ = make_both(Block)(group)
        with torch.no_grad():
            for step in range(3):
                model(batch(step))
            for block in model.blocks:
                block.dropout.p = 0.5
            model(batch())
            model(batch())
        return local_kinds(model)

    assert run_ranks(program, 2) == [0, 0]


def test_modes_take_turns():
    """Training and evaluation are tried once each."""

    def program(group):
        models = make_both(Block)(group)
        counts = []
        for step in range(4):
            for model in models:
                model.train(step % 2 == 0)
            check_equal(models, batch(step))
            counts.append(local_kinds(models[0]))
        return counts

    assert run_ranks(program, 2) == [[0, 0, 1, 2]] * 2


def test_an_attribute_that_is_set_back():
    """Each state is tried, up to a number of them."""

    def program(group):
        models = make_both(Block)(group)
        counts = []
        for step, value in enumerate((0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0)):
            for model in models:
                for block in model.blocks:
                    block.dropout.p = value
                model.eval()
            check_equal(models, batch(step))
            counts.append(is_local(models[0]))
        return counts

    assert run_ranks(program, 2) == [[False, True] * 4 + [False] * 2] * 2


@pytest.mark.parametrize("kind", [ByValue, ByArray])
def test_values_that_decide_the_path(kind):
    """No trial with random values sees the other path."""

    def program(group):
        models = make_both(kind)(group)
        for step in range(3):
            check_equal(models, batch(step))
        check_equal(models, batch(factor=1000.0))
        return local_kinds(models[0])

    assert run_ranks(program, 2) == [0, 0]


def test_sizes_that_decide_the_path():
    """Larger inputs are tried again; all trials of a kind have to succeed."""

    def program(group):
        models = make_both(BySize)(group)
        for length in (5, 6, 7, 40, 41, 200, 201):
            check_equal(models, batch(length=length))
        return True

    assert run_ranks(program, 2) == [True, True]


def test_parameters_of_others():
    """Ranks would keep their own parts of the gradient."""

    def program(group):
        models = make_both(Borrowing)(group)
        for model in models:
            for block in model.blocks:
                block.config.borrowed[0] = nn.Parameter(
                    fd.distribute(torch.ones(2 * WIDTH), model.scale.mesh, [fd.Replicate()])
                )
        for step in range(3):
            check_equal(models, batch(step))
            ones, others = ([block.config.borrowed[0].grad for block in model.blocks] for model in models)
            assert all(
                torch.equal(one.full_tensor(), other.full_tensor()) for one, other in zip(ones, others, strict=True)
            )
        return local_kinds(models[0])

    assert run_ranks(program, 2) == [0, 0]


def test_inputs_among_results():
    """The model writes to the second result, which is the input of the block."""

    def program(group):
        models = make_both(Returning)(group)
        with torch.no_grad():
            for step in range(3):
                ones, others = (model(batch(step) * 1) for model in models)
                assert torch.equal(ones, others)
        return local_kinds(models[0])

    assert run_ranks(program, 2) == [0, 0]


@pytest.mark.parametrize("kind", [Counting, Generating])
def test_state_of_the_blocks_own(kind):
    """A trial would move it on."""

    def program(group):
        models = make_both(kind)(group)
        for step in range(6):
            check_equal(models, batch(step))
        return local_kinds(models[0])

    assert run_ranks(program, 2) == [0, 0]


@pytest.mark.parametrize("kind", [Skipping, SkippingByNumpy])
def test_generators_of_python_and_numpy(kind):
    """One rank alone, for threads share the generators."""

    def program(group):
        models = make_both(kind, 1)(group)
        found = []
        for model in models:
            random.seed(1)
            np.random.seed(1)
            with torch.no_grad():
                found.append([model(batch(step)) for step in range(8)])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        return local_kinds(models[0])

    assert run_ranks(program, 1) == [0]


def test_what_a_state_sees():
    """Equal values are no change, whatever the objects."""
    block = Block()
    state = BlockState(list(block.modules()))
    assert state.is_current()
    block.config.options = dict(block.config.options)
    assert not state.is_current()
    state = BlockState(list(block.modules()))
    block.name = "a" * 3
    assert not state.is_current()
    state = BlockState(list(block.modules()))
    block.name = "".join(["a"] * 3)
    assert state.is_current()
    block.config.options["other"] = block.config.options.pop("centers")
    assert not state.is_current()
    state = BlockState(list(block.modules()))
    block.dropout.p = 0.25
    assert not state.is_current()
    block.dropout.p = 0.0
    assert state.is_current()


def set_on_rank_0(model, group):
    if group.rank == 0:
        model.blocks[0].config.run_name = "first"


def hook_on_rank_0(model, group):
    if group.rank == 0:
        model.blocks[0].up.register_forward_hook(lambda *_: None)


def evaluate_on_rank_0(model, group):
    if group.rank == 0:
        model.blocks[0].up.eval()


@pytest.mark.parametrize("kind", [Block, WithoutNorm])
@pytest.mark.parametrize("change", [set_on_rank_0, hook_on_rank_0, evaluate_on_rank_0])
@pytest.mark.parametrize("at", [0, 3])
def test_what_one_rank_does_alone(kind, change, at):
    """It computes on DTensors, with the messages of the others; ranks agree on trials before they make them."""

    def program(group):
        models = make_both(kind)(group)
        for step in range(8):
            if step == at:
                change(models[0], group)
            check_equal(models, batch(step, length=5 + step % 3))
        return is_local(models[0])

    if kind is WithoutNorm or (at == 0 and change is not set_on_rank_0):
        expected = [False, False]
    elif at == 0:
        expected = [True, True]
    else:
        expected = [change is evaluate_on_rank_0, True]  # with another kind of forwards
    assert run_ranks(program, 2) == expected


class Optioned(Block):
    """An argument that changes nothing."""

    def forward(self, x, name=""):
        assert name is not None
        return super().forward(x)


class Passing(Model):
    """A model whose blocks get the argument."""

    def forward(self, x, name=""):
        for block in self.blocks:
            x = block(x, name=name)
        return x


def test_a_copy_and_other_arguments_on_one_rank():
    """Both make kinds that this rank alone has."""
    initial = Passing(Optioned)

    def program(group):
        mesh = fd.DeviceMesh(group, (2,))
        models = [fd.parallelize(copy.deepcopy(initial), mesh, PLAN, local_blocks=local) for local in (True, False)]
        for step in range(12):
            if step == 4 and group.rank == 0:
                models[0] = copy.deepcopy(models[0])
            name = f"step {step}" if group.rank == 0 and step in (1, 2, 8, 9) else ""
            ones, others = (model(batch(step, length=5 + step), name=name) for model in models)
            assert torch.equal(ones, others)

    run_ranks(program, 2)


def test_hooks_of_parameters_see_no_trial():
    def program(group):
        sums = []
        for model in make_both(Block)(group):
            seen = []
            model.blocks[0].up.weight.register_hook(lambda grad, seen=seen: seen.append(grad.full_tensor()))
            for step in range(3):
                model(batch(step)).sum().backward()
            sums.append(torch.stack(seen))
        return torch.equal(*sums)

    assert run_ranks(program, 2) == [True, True]


@pytest.mark.parametrize("kind", [HookingActivations, CountingLarge])
def test_effects_that_a_trial_would_repeat(kind):
    def program(group):
        lengths = []
        for model in make_both(kind)(group):
            for step in range(4):
                model(batch(step)).sum().backward()
            lengths.append([len(block.config.steps) for block in model.blocks])
            if kind is HookingActivations:
                assert all(one.shape[-1] == 2 * WIDTH for one in model.blocks[0].config.steps[2:])
        return lengths[0] == lengths[1]

    assert run_ranks(program, 2) == [True, True]


def test_loaded_parameters_take_the_place_of_others():
    """Blocks go on with what ``load_state_dict(assign=True)`` puts there, and keep nothing of the old."""

    def program(group):
        models = make_both(Block)(group)
        for step in range(2):
            check_equal(models, batch(step))
        for model in models:
            old = [weakref.ref(one) for one in model.parameters()]
            state = {
                name: fd.DTensor.from_local(one.to_local() * 2, one.mesh, one.placements, shape=one.shape)
                for name, one in model.state_dict().items()
            }
            model.load_state_dict(state, assign=True)
            model.zero_grad()
            gc.collect()
            assert not any(one() is not None for one in old)
        check_equal(models, batch(3))
        return is_local(models[0])

    assert run_ranks(program, 2) == [True, True]


def test_a_written_result_that_gradients_need():
    """torch's error, which local tensors must not hide."""

    class Ending(Block):
        def forward(self, x):
            return super().forward(x).tanh()

    initial = Model(Ending)

    def program(group):
        model = fd.parallelize(copy.deepcopy(initial), fd.DeviceMesh(group, (2,)), PLAN, local_blocks=True)
        model(batch()).sum().backward()
        result = model(batch())
        result = model.blocks[1](model.blocks[0](batch()))
        hidden = fd.distribute(batch(), model.scale.mesh, [fd.Replicate()])
        result = model.blocks[0](hidden)
        assert is_local(model)
        result.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()

    run_ranks(program, 2)


def test_blocks_of_unknown_packages_are_asked_for():
    """Code of other packages than `KNOWN_PACKAGES` is tried if a program says so."""

    def program(group):
        mesh = fd.DeviceMesh(group, (2,))
        counts = []
        for local_blocks in (None, True, False):
            model = fd.parallelize(copy.deepcopy(_initial(Block)), mesh, PLAN, local_blocks=local_blocks)
            counts.append(sum(isinstance(getattr(one.forward, "_forward", None), LocalBlock) for one in model.blocks))
        with pytest.raises(TypeError, match="local_blocks must be True or False"):
            fd.parallelize(copy.deepcopy(_initial(Block)), mesh, PLAN, local_blocks="all")
        return counts

    assert run_ranks(program, 2) == [[0, 2, 0]] * 2
