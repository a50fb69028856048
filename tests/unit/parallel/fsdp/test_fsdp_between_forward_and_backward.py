"""FSDP between a forward and its backward, and around both: programs behave as in one process."""

import copy
import gc
import weakref

import pytest
import torch
from fsdp_models import INPUTS, assert_same, expected_gradients, layers, whole_gradients, wrapped

from ferrodist import FSDP, ShardingStrategy
from ferrodist.errors import UnsupportedOpError
from ferrodist.parallel.fsdp import flat_layout
from ferrodist.parallel.fsdp.backward_plan import BackwardRun, ForwardTrace, plan_backward
from ferrodist.testing import run_ranks

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]


def loss_of(model):
    return model(INPUTS).square().mean()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zero_grad_between_forward_and_backward(run, strategy):
    """Gradients of the previous step are dropped, as in one process."""
    module = layers()
    expected = expected_gradients(module, loss_of)

    def program(group):
        fsdp = wrapped(module, group, strategy=strategy)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.0)
        for drop in (fsdp.zero_grad, optimizer.zero_grad):
            loss_of(fsdp).backward()
            loss = loss_of(fsdp)
            drop()
            loss.backward()
            assert_same(whole_gradients(fsdp), expected)

    run(program, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_without_backward(run, strategy):
    """An optimizer made then gets the shards, and clipping sees all gradients."""
    module = layers()

    def program(group):
        fsdp = wrapped(module, group, strategy=strategy)
        shards = [id(shard) for shard in fsdp.parameters()]
        loss_of(fsdp).backward()
        norm = fsdp.clip_grad_norm_(1e9)
        loss_of(fsdp)
        assert [id(shard) for shard in fsdp.parameters()] == shards
        torch.testing.assert_close(fsdp.clip_grad_norm_(1e9), norm, rtol=1e-6, atol=0)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=1.0)
        before = fsdp.full_state_dict()
        optimizer.step()
        after = fsdp.full_state_dict()
        assert all(not torch.equal(after[name], before[name]) for name in before)

    run(program, 2)


def test_requires_grad_between_forward_and_backward(run):
    """A model frozen for a forward and unfrozen before its backward, as in adversarial training, is trained later."""
    module = layers(2)
    expected = expected_gradients(module, loss_of)

    def program(group):
        fsdp = wrapped(module, group)
        inputs = INPUTS.clone().requires_grad_()
        fsdp.requires_grad_(False)
        loss = fsdp(inputs).square().mean()
        fsdp.requires_grad_(True)
        loss.backward()
        assert all(shard.grad is None for shard in fsdp.parameters())
        own = copy.deepcopy(module).requires_grad_(False)
        reference = INPUTS.clone().requires_grad_()
        own(reference).square().mean().backward()
        torch.testing.assert_close(inputs.grad, reference.grad)
        loss_of(fsdp).backward()
        assert_same(whole_gradients(fsdp), expected)

    run(program, 2)


class Masked(torch.nn.Linear):
    """Changes its weight in a way that no version counter sees."""

    def forward(self, inputs):
        self.weight.data.mul_(torch.ones_like(self.weight).tril())
        return super().forward(inputs)


def test_changes_that_bypass_version_counters_end_with_the_call(run):
    """They affect the gathered parameters of one call, also where pages are shared with other ranks."""
    torch.manual_seed(1)
    module = torch.nn.Sequential(Masked(6, 6), torch.nn.Tanh(), Masked(6, 6))
    results = []

    def program(group):
        fsdp = FSDP(copy.deepcopy(module), group, wrap=Masked)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(fsdp).backward()
            optimizer.step()
        with torch.no_grad():
            for shard in fsdp.parameters():
                shard.zero_()
        return fsdp(INPUTS).abs().max().item(), fsdp.full_state_dict()

    for largest, state in run(program, 2):
        assert largest == 0
        results.append(state)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_loading_after_a_prefetch(run):
    """Prefetched values are dropped: the next forward has the loaded ones."""
    module = layers(2)
    zeros = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}

    def program(group):
        fsdp = wrapped(module, group)
        fsdp(INPUTS)
        for state in (zeros, zeros if group.rank == 0 else None):
            fsdp.load_full_state_dict(module.state_dict())
            fsdp.prefetch_forward_params()
            fsdp.load_full_state_dict(state)
            assert fsdp(INPUTS).abs().max() == 0
        loss = loss_of(fsdp)
        fsdp.load_full_state_dict(zeros if group.rank == 0 else None)
        fsdp.prefetch_forward_params()
        fsdp.broadcast_updated_params()
        assert fsdp(INPUTS).abs().max() == 0
        del loss

    run(program, 2)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_step_after_a_prefetch(run, options):
    """A unit prefetched before an optimizer's step is gathered again, also where torch doesn't count the changes."""
    module = layers()

    def trained(model, prefetch):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            prefetch()
            optimizer.step()
        return loss_of(model).detach()

    expected = trained(copy.deepcopy(module), lambda: None)

    def program(group):
        fsdp = wrapped(module, group)
        return trained(fsdp, fsdp.prefetch_forward_params)

    for found in run(program, 2):
        torch.testing.assert_close(found, expected)


class Rescaled(torch.nn.Sequential):
    """A model that scales its own weights in evaluation and back in training, as RWKV does."""

    is_scaled = False

    def forward(self, inputs):
        if self.is_scaled == self.training:
            for number, layer in enumerate(self):
                with torch.no_grad():
                    layer.weight.mul_(2.0**number if self.training else 0.5**number)
            self.is_scaled = not self.training
        return super().forward(inputs)


def test_a_forward_that_scales_its_weights(run):
    """The result is that of one process, though a unit was gathered before its weights were scaled."""
    torch.manual_seed(0)
    module = Rescaled(*[torch.nn.Linear(6, 6) for _ in range(3)])

    def used(model):
        inputs, outputs = torch.ones(2, 6), []
        for is_training in (True, True, False, False, True, False):
            model.train(is_training)
            outputs.append(model(inputs))
            if is_training:
                outputs[-1].sum().backward()
        return [output.detach() for output in outputs]

    expected = used(copy.deepcopy(module))

    def program(group):
        return used(FSDP(copy.deepcopy(module), group, wrap=torch.nn.Linear))

    for found in run(program, 2):
        torch.testing.assert_close(found, expected)


def test_a_step_between_forward_and_a_load_is_noticed(run):
    """A load between a forward and its backward would change the values that backward uses."""
    module = layers(2)

    def program(group):
        fsdp = wrapped(module, group)
        loss = loss_of(fsdp)
        fsdp.load_full_state_dict(module.state_dict() if group.rank == 0 else None)
        group.barrier()  # an error ends the group, which the other rank may still be using
        with pytest.raises(UnsupportedOpError, match="between a forward and its backward"):
            loss.backward()

    run(program, 2)


@pytest.mark.parametrize("how", ["double", "data", "vector"])
def test_shards_moved_to_other_memory_are_named(how):
    """FSDP would gather the former memory."""

    def program(group):
        fsdp = wrapped(layers(2), group)
        if how == "double":
            fsdp.double()
        elif how == "data":
            shard = max(fsdp.parameters(), key=torch.Tensor.numel)
            shard.data = shard.data.clone()
        else:
            vector = torch.nn.utils.parameters_to_vector(fsdp.parameters()).detach()
            torch.nn.utils.vector_to_parameters(vector.clone(), fsdp.parameters())
        group.barrier()  # an error ends the group, which the other rank may still be using
        with pytest.raises(UnsupportedOpError, match="was moved to other memory"):
            fsdp(INPUTS)

    run_ranks(program, 2)


@pytest.mark.parametrize("how", ["replaced", "added", "parameter", "removed"])
def test_modules_that_change_afterwards_are_named(how):
    """A new layer is named by the next forward; one without parameters may be added."""

    def program(group):
        fsdp = wrapped(layers(3), group)
        fsdp.module.append(torch.nn.Tanh())
        fsdp(INPUTS)
        if how == "replaced":
            fsdp.module[1] = torch.nn.Linear(6, 6)
        elif how == "added":
            fsdp.module.append(torch.nn.Linear(6, 6))
        elif how == "parameter":
            fsdp.module[1].scale = torch.nn.Parameter(torch.ones(()))
        else:
            del fsdp.module[1]
        group.barrier()  # an error ends the group, which the other rank may still be using
        with pytest.raises(UnsupportedOpError, match=r"was (added|removed) after FSDP"):
            fsdp(INPUTS)

    run_ranks(program, 2)


class Hidden(torch.nn.Module):
    """Gives its loss by an attribute."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, inputs):
        self.loss = self.second(self.first(inputs)).sum()


def test_a_loss_that_forward_did_not_return_is_refused():
    """Its gradients would be lost."""

    def program(group):
        fsdp = FSDP(Hidden(), group, strategy=ShardingStrategy.NO_SHARD)
        fsdp(INPUTS)
        group.barrier()
        with pytest.raises(UnsupportedOpError, match="by another path than through the forward"):
            fsdp.module.loss.backward()

    run_ranks(program, 2)


def test_double_backward_is_refused(run):
    """On every backend alike."""

    def program(group):
        fsdp = wrapped(layers(2), group)
        inputs = INPUTS.clone().requires_grad_()
        group.barrier()  # an error ends the group, which the other rank may still be using
        with pytest.raises(UnsupportedOpError, match="create_graph=True"):
            torch.autograd.grad(fsdp(inputs).sum(), inputs, create_graph=True)

    run(program, 2)


@pytest.mark.parametrize("view", [False, True])
def test_a_unit_that_returns_its_parameter_is_refused(run, view):
    """The parameter would be freed at once."""

    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(6))

        def forward(self):
            return self.weight[1:] if view else self.weight

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.layer = Scale(), torch.nn.Linear(6, 5 if view else 6)

        def forward(self, inputs):
            return self.layer(inputs) * self.scale()

    def program(group):
        fsdp = FSDP(Model(), group, wrap=(Scale, torch.nn.Linear))
        group.barrier()  # an error ends the group, which the other rank may still be using
        with pytest.raises(UnsupportedOpError, match=r"unit 'scale' \(Scale\) returned one of its parameters"):
            fsdp(INPUTS)

    run(program, 2)


def test_no_sync_and_then_a_unit_that_only_some_ranks_have_reached(run):
    """A rank without its gradient contributes zeros, also where the synchronised step skips the unit."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

        def forward(self, inputs, *, both, takes=True):
            hidden = self.first(inputs)
            return hidden + (self.second(inputs) if takes else self.second(inputs).detach()) if both else hidden

    torch.manual_seed(1)
    module = Model()

    def program(group):
        fsdp = FSDP(copy.deepcopy(module), group, wrap=torch.nn.Linear)
        with fsdp.no_sync():
            fsdp(INPUTS, both=True, takes=group.rank == 0).sum().backward()
        fsdp(INPUTS, both=False).sum().backward()
        return whole_gradients(fsdp)

    own = copy.deepcopy(module)
    own(INPUTS, both=True).sum().backward()
    own(INPUTS, both=False).sum().backward()
    expected = {name: parameter.grad for name, parameter in own.named_parameters()}
    expected.update({name: grad / 2 for name, grad in expected.items() if name.startswith("second")})
    for gradients in run(program, 2, timeout=30):
        assert_same(gradients, expected)


def test_training_inside_summon_is_refused(run):
    """Gradients and steps there would be lost."""

    def program(group):
        fsdp = wrapped(layers(2), group)
        loss_of(fsdp).backward()
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=1.0)
        with fsdp.summon_full_params(), pytest.raises(RuntimeError, match="inside summon_full_params"):
            fsdp.module(INPUTS).sum().backward()
        with pytest.raises(RuntimeError, match="were changed inside summon_full_params"), fsdp.summon_full_params():
            optimizer.step()

    run(program, 2)


def test_one_rank_goes_on_after_a_failed_backward():
    """Gradients of the failed backward are dropped."""
    module = layers()
    expected = expected_gradients(module, loss_of)

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(_, inputs):
            return inputs.clone()

        @staticmethod
        def backward(_, gradient):
            raise ValueError("on purpose")

    def program(group):
        fsdp = wrapped(module, group)
        handle = fsdp.module[1].register_forward_pre_hook(lambda _, inputs: Failing.apply(*inputs))
        with pytest.raises(ValueError, match="on purpose"):
            (1000 * loss_of(fsdp)).backward()
        handle.remove()
        fsdp.zero_grad()
        loss_of(fsdp).backward()
        assert_same(whole_gradients(fsdp), expected)

    run_ranks(program, 1)


@pytest.mark.parametrize("step", ["nothing", "forward", "backward"])
def test_a_dropped_fsdp_is_collected(monkeypatch, step):
    """With its memory, in whatever state."""
    monkeypatch.setattr(flat_layout, "_SMALL_BYTES", 0)

    def program(group):
        fsdp = wrapped(layers(2), group)
        if step != "nothing":
            loss = loss_of(fsdp)
            if step == "backward":
                loss.backward()
            del loss
        flats = [weakref.ref(flat) for unit in fsdp._units for flat in unit.flats]
        full_params = [weakref.ref(full) for flat in flats for full in flat().full_params]
        del fsdp
        gc.collect()
        return [reference() is None for reference in (*flats, *full_params)]

    for gone in run_ranks(program, 2, backend="native"):
        assert gone
        assert all(gone)


def test_many_calls_of_a_unit_cost_no_more_each():
    """A recurrent cell as a unit: the record of a forward grows by the same for each call."""
    trace = ForwardTrace()
    for number in range(3000):
        assert trace.begin_call(1) == number
        trace.end_call(1, number)
    run = BackwardRun(trace, plan_backward(trace.events, 1, [1]))
    while run.next_step is not None:
        call = run.advance().call
        assert call == -1 or run.was_used(call)
    assert not run.was_used(3000)


def test_a_child_that_is_used_and_not_called():
    """Without sharding its gradient is averaged like any other, though the child is a unit."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

        def forward(self, inputs):
            return torch.nn.functional.linear(self.first(inputs), self.second.weight)

    torch.manual_seed(1)
    module = Tied()
    expected = expected_gradients(module, loss_of)

    def program(group):
        fsdp = wrapped(module, group, strategy=ShardingStrategy.NO_SHARD)
        (2 * group.rank * loss_of(fsdp)).backward()
        return whole_gradients(fsdp)

    for gradients in run_ranks(program, 2):
        assert_same(gradients, expected)
