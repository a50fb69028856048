"""FSDP of unusual models and uses: each works as without FSDP, or raises with the reason."""

import copy
import math
import pickle

import pytest
import torch
from fsdp_models import INPUTS, assert_same, expected_gradients, layers, whole_gradients, wrapped
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ferrodist import FSDP, MixedPrecision, ShardingStrategy
from ferrodist.errors import DistributedError
from ferrodist.parallel.fsdp.unit import UnitState


def check_gradients(run, module, loss, world_size=2, **options):
    """The ranks get the same inputs, so that the mean of their gradients is that of one process."""
    expected = expected_gradients(module, loss)

    def program(group):
        fsdp = wrapped(module, group, **options)
        loss(fsdp).backward()
        assert_same(whole_gradients(fsdp), expected)
        fsdp.zero_grad()
        loss(fsdp).backward()
        assert_same(whole_gradients(fsdp), expected)

    run(program, world_size)


class Twice(torch.nn.Module):
    """Calls one layer twice, around another."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, inputs):
        return self.first(self.second(self.first(inputs).tanh())).sum()


class Odd(torch.nn.Module):
    """Parameters of many kinds, a unit of scalars and one without parameters."""

    def __init__(self):
        super().__init__()
        self.plain = torch.nn.Identity()
        self.first = torch.nn.Linear(6, 5)
        self.wide = torch.nn.Linear(5, 3).double()
        self.scale = torch.nn.PReLU()
        self.scalar = torch.nn.Parameter(torch.tensor(2.0))
        self.nothing = torch.nn.Parameter(torch.empty(0, 7))
        self.turn = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.numbers = torch.nn.Parameter(torch.tensor([2, 3, 4]), requires_grad=False)

    def forward(self, inputs):
        hidden = self.wide(self.scale(self.first(self.plain(inputs))).double()) * self.numbers
        return (hidden * self.turn).abs().sum() * self.scalar + self.nothing.sum()


class Views(torch.nn.Module):
    """A unit's output is a view."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)

    def forward(self, inputs):
        return self.inner(inputs).view(-1)


class Frozen(torch.nn.Module):
    """Frozen units before, between and after trainable ones."""

    def __init__(self):
        super().__init__()
        self.layers = layers(5)
        for index in (0, 2, 4):
            self.layers[index].requires_grad_(False)

    def forward(self, inputs):
        return self.layers(inputs)


def seeded(kind):
    torch.manual_seed(1)
    return kind()


def test_a_unit_that_is_called_twice(run):
    """Its gradients are reduced when those of both calls are there."""
    check_gradients(run, seeded(Twice), lambda model: model(INPUTS))


@pytest.mark.parametrize("world_size", [1, 3])
def test_parameters_of_all_kinds(run, world_size):
    """Scalars, no parameters, complex ones, two dtypes, integers; units without parameters."""
    wrap = (torch.nn.Linear, torch.nn.PReLU, torch.nn.Identity)
    model = seeded(Odd)
    expected = expected_gradients(model, lambda model: model(INPUTS))

    def program(group):
        fsdp = wrapped(model, group, wrap=wrap)
        fsdp(INPUTS).backward()
        assert_same(whole_gradients(fsdp), expected)
        norm = torch.nn.utils.get_total_norm([value for value in expected.values() if value is not None])
        assert float(fsdp.clip_grad_norm_(math.inf)) == pytest.approx(float(norm), rel=1e-5)

    run(program, world_size)


def test_an_output_that_is_a_view_and_is_changed_in_place(run):
    """Backward still notices the unit: an in-place operation removes a view's hooks."""

    def loss(model):
        hidden = model(INPUTS)
        hidden += 1
        return hidden.square().sum()

    check_gradients(run, seeded(Views), loss, wrap=None)
    check_gradients(run, torch.nn.Sequential(seeded(Views)), loss, wrap=Views)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_frozen_units(run, strategy):
    """They are gathered for backward, and not reduced."""
    check_gradients(run, seeded(Frozen), lambda model: model(INPUTS).sum(), strategy=strategy)


def test_a_model_whose_every_parameter_is_frozen(run):
    """Gradients go through it to its inputs."""

    model = layers().requires_grad_(False)

    def program(group):
        fsdp = wrapped(model, group)
        inputs = INPUTS.clone().requires_grad_()
        fsdp(inputs).sum().backward()
        expected = INPUTS.clone().requires_grad_()
        model(expected).sum().backward()
        torch.testing.assert_close(inputs.grad, expected.grad)
        assert all(shard.grad is None for shard in fsdp.parameters())

    run(program, 2)


def test_evaluation_between_forward_and_backward(run):
    """A forward under no_grad or inference_mode, in eval mode, doesn't disturb the other forward's backward."""
    model = layers()
    expected = expected_gradients(model, lambda model: model(INPUTS).square().sum())

    def program(group):
        fsdp = wrapped(model, group)
        loss = fsdp(INPUTS).square().sum()
        fsdp.eval()
        with torch.no_grad():
            first = fsdp(INPUTS)
        with torch.inference_mode():
            second = fsdp(INPUTS)
        fsdp.train()
        loss.backward()
        assert torch.equal(first, second)
        assert_same(whole_gradients(fsdp), expected)

    run(program, 2)


def test_a_forward_whose_result_is_not_used(run):
    """Its backward never comes, and the next forward works."""
    model = layers()
    expected = expected_gradients(model, lambda model: model(INPUTS).sum())

    def program(group):
        fsdp = wrapped(model, group)
        for _ in range(3):
            fsdp(INPUTS + 1)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.0)
        optimizer.step()
        fsdp(INPUTS).sum().backward()
        assert_same(whole_gradients(fsdp), expected)

    run(program, 2)


def test_no_grad_inside_of_a_model(run):
    """Units that run without gradients get none, and those after them do."""

    class Partly(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers(3)

        def forward(self, inputs):
            with torch.no_grad():
                inputs = self.layers[1](self.layers[0](inputs))
            return self.layers[2](inputs)

    check_gradients(run, Partly(), lambda model: model(INPUTS).sum())


def test_two_losses_and_a_second_backward_through_one_graph(run):
    """Gradients of backwards add up, whether they go through one forward or two."""
    model = layers()

    def both(own):
        hidden = own(INPUTS)
        first, second = hidden.sum(), hidden.square().sum()
        first.backward(retain_graph=True)
        return second

    check_gradients(run, model, both)
    check_gradients(run, model, lambda own: own(INPUTS).sum() + own(INPUTS * 2).square().sum())


def test_gradients_of_chosen_tensors(run):
    """torch.autograd.grad with respect to inputs leaves the shards without gradients, and the model usable."""
    model = layers()
    expected = expected_gradients(model, lambda model: model(INPUTS).sum())

    def program(group):
        fsdp = wrapped(model, group)
        inputs = INPUTS.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(fsdp(inputs).sum(), inputs)
        own = INPUTS.clone().requires_grad_()
        torch.testing.assert_close(gradient, torch.autograd.grad(model(own).sum(), own)[0])
        assert all(shard.grad is None for shard in fsdp.parameters())
        fsdp(INPUTS).sum().backward()
        assert_same(whole_gradients(fsdp), expected)

    run(program, 2)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("wrap", [torch.nn.Sequential, torch.nn.Linear])
def test_checkpoints_around_and_inside_of_units(run, wrap, use_reentrant):
    """Recomputed modules find their parameters, whether a checkpoint contains units or a unit contains checkpoints."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.first = torch.nn.Linear(6, 6)
            self.blocks = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6)) for _ in range(3)
            )

        def forward(self, inputs):
            hidden = self.first(inputs)
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=use_reentrant)
            return hidden.sum()

    check_gradients(run, Model(), lambda model: model(INPUTS), wrap=wrap)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler looks at it of all inputs
@pytest.mark.usefixtures("compiles_in_threads")
def test_compiled_modules_inside(run):
    """A compiled module without units inside sees full parameters."""
    model = layers()

    class Compiled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = copy.deepcopy(model)
            self.compiled = torch.compile(functional.silu, backend="eager")

        def forward(self, inputs):
            return self.compiled(self.layers(inputs)).sum()

    check_gradients(run, Compiled(), lambda model: model(INPUTS))

    def program(group):
        own = copy.deepcopy(model)
        own[1].compile(backend="eager")
        fsdp = FSDP(own, group, wrap=torch.nn.Linear)
        fsdp(INPUTS).sum().backward()
        assert_same(whole_gradients(fsdp), expected_gradients(model, lambda model: model(INPUTS).sum()))

    run(program, 2)


def test_gradient_scaler(run):
    """Infinities of one rank are found on all ranks."""
    model = layers()

    def program(group):
        fsdp = wrapped(model, group)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = fsdp.full_state_dict()
        scaler.scale(fsdp(INPUTS).sum()).backward()
        fsdp.unscale_(scaler, optimizer)
        assert_same(whole_gradients(fsdp), expected_gradients(model, lambda model: model(INPUTS).sum()))
        scaler.step(optimizer)
        scaler.update()
        after = fsdp.full_state_dict()
        assert not torch.equal(after["0.weight"], before["0.weight"])

    run(program, 2)


def test_a_forward_that_raises_on_all_ranks(run):
    """The next one works."""

    class Refusing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers()

        def forward(self, inputs, raises=False):
            hidden = self.layers[0](inputs)
            if raises:
                raise KeyError("on purpose")
            return self.layers[2](self.layers[1](hidden)).sum()

    model = Refusing()
    expected = expected_gradients(model, lambda model: model(INPUTS))

    def program(group):
        fsdp = wrapped(model, group)
        for _ in range(2):
            with pytest.raises(KeyError):
                fsdp(INPUTS, raises=True)
        fsdp(INPUTS).backward()
        assert_same(whole_gradients(fsdp), expected)

    run(program, 2)


def test_a_call_that_raises_and_is_caught_by_the_model(run):
    """The rest of the forward, and its backward, continue without it."""

    class Trying(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers()

        def forward(self, inputs):
            try:
                self.layers[1](inputs[:, :2])
            except RuntimeError:
                inputs = inputs * 2
            return self.layers[2](self.layers[0](inputs)).sum()

    check_gradients(run, Trying(), lambda model: model(INPUTS))


def test_copies_and_pickles_are_refused(run):
    """An FSDP belongs to its group."""

    def program(group):
        fsdp = wrapped(layers(), group)
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="full_state_dict"):
                attempt(fsdp)

    run(program, 2)


def test_an_optimizer_step_between_forward_and_backward(run):
    """Backward would use other parameters than forward: an error on all ranks."""

    def program(group):
        fsdp = wrapped(layers(), group)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
        fsdp(INPUTS).sum().backward()
        loss = fsdp(INPUTS).sum()
        optimizer.step()
        with pytest.raises(DistributedError, match="between a forward and its backward"):
            loss.backward()

    run(program, 2)


def test_two_models_of_one_shape_are_told_apart(run):
    """Ranks that call different models get an error, not each other's parameters."""

    def program(group):
        models = [wrapped(layers(), group) for _ in range(2)]
        with torch.no_grad(), pytest.raises(DistributedError, match="gathering unit '0'"):
            models[group.rank](INPUTS)

    run(program, 2)


def test_a_rank_that_changes_its_shard_early(run):
    """A rank that finishes a forward and changes its shard at once doesn't affect ranks that still compute."""
    model = layers()

    def linger(*_):
        torch.mm(torch.ones(600, 600), torch.ones(600, 600))

    def program(group):
        fsdp = wrapped(model, group)
        if group.rank:
            fsdp.module[2].register_forward_pre_hook(linger)
        outputs = []
        for _ in range(10):
            with torch.no_grad():
                outputs.append(fsdp(INPUTS))
                for shard in fsdp.parameters():
                    shard.add_(1)
        return outputs

    results = run(program, 2)
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_mixed_precision_of_buffers_and_inputs(run):
    """Floating-point computation uses the dtype; shards and integers keep theirs."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6))
    precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)

    def program(group):
        fsdp = wrapped(model, group, mixed_precision=precision)
        assert fsdp(INPUTS).dtype is torch.bfloat16
        fsdp(INPUTS).sum().backward()
        assert fsdp.module[1].running_mean.dtype is torch.bfloat16
        assert fsdp.module[1].num_batches_tracked.dtype is torch.int64
        assert {shard.dtype for shard in fsdp.parameters()} == {torch.float32}
        assert {shard.grad.dtype for shard in fsdp.parameters()} == {torch.float32}
        assert MixedPrecision().cast((INPUTS,), {}) == ((INPUTS,), {})

    run(program, 2)


def test_half_precision_scaling(run):
    """float16 with a GradScaler: an overflow is found, and its step skipped, on every rank."""
    model = layers()

    def program(group):
        fsdp = wrapped(model, group, mixed_precision=MixedPrecision(param_dtype=torch.float16))
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        before = fsdp.full_state_dict()
        scaler.scale(fsdp(INPUTS).float().sum()).backward()
        if group.rank:  # what only this rank has
            for shard in fsdp.parameters():
                shard.grad.fill_(1)
        else:
            next(iter(fsdp.parameters())).grad.fill_(math.inf)
        fsdp.unscale_(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        after = fsdp.full_state_dict()
        assert scaler.get_scale() == 2.0**39
        assert all(torch.equal(after[name], before[name]) for name in before)

    run(program, 2)


def test_a_model_without_parameters(run):
    """It runs; there is nothing to divide."""

    def program(group):
        inputs = INPUTS.clone().requires_grad_()
        fsdp = FSDP(torch.nn.Tanh(), group)
        fsdp(inputs).sum().backward()
        assert inputs.grad is not None
        assert list(fsdp.parameters()) == []
        assert float(fsdp.clip_grad_norm_(1.0)) == 0
        assert fsdp.full_state_dict() == {}

    run(program, 2)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_forwards_with_changing_control_flow(run, prefetch):
    """On all ranks alike: unneeded prefetched units are freed, and needed ones are gathered."""

    class Ways(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers(4)

        def forward(self, inputs, *taken):
            for index in taken:
                inputs = self.layers[index](inputs)
            return inputs.sum()

    model = Ways()
    ways = [(0, 1, 2, 3), (3, 2), (1, 1, 0), (0, 1, 2, 3), (2,)]

    def program(group):
        fsdp = wrapped(model, group, forward_prefetch=prefetch, backward_prefetch=prefetch)
        for taken in ways:
            fsdp.zero_grad()
            fsdp(INPUTS, *taken).backward()
            expected = expected_gradients(model, lambda model, taken=taken: model(INPUTS, *taken))
            assert_same(whole_gradients(fsdp), expected)
            assert {unit.state for unit in fsdp._units} == {UnitState.SHARDED}

    run(program, 2)
