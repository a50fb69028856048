"""The backward of a stage in two phases: the bits of one, nothing computed twice, nothing retained."""

import copy
import gc
import threading
import weakref
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ferrodist.parallel.pipeline import split_backward
from ferrodist.parallel.pipeline.split_backward import backward_inputs


def tensors_in(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def called(module, *inputs):
    return module(*inputs)


def assert_same(found, expected, name):
    """The same bits in the same layout, or both None."""
    assert (found is None) == (expected is None), name
    if expected is None:
        return
    assert found.layout == expected.layout, name
    if expected.is_sparse:
        assert torch.equal(found._indices(), expected._indices()), name
        assert torch.equal(found._values(), expected._values()), name
        return
    assert found.stride() == expected.stride(), name
    assert torch.equal(found, expected), f"{name}: {(found - expected).abs().max()}"


def is_empty(remaining):
    return not (remaining._roots or remaining._deferred)


def fresh(inputs):
    return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]


def gradients_for(outputs, *, unused=()):
    return [None if index in unused else torch.randn_like(output) for index, output in enumerate(outputs)]


def backward_twice(forward, models, inputs, unused=()):
    """An ordinary backward of the first model, and one of the second in two phases; returns what is left of that."""
    own, others = fresh(inputs), fresh(inputs)
    seed = torch.random.get_rng_state()
    expected = tensors_in(forward(models[0], *own))
    torch.random.set_rng_state(seed)
    outputs = tensors_in(forward(models[1], *others))
    gradients = gradients_for(outputs, unused=unused)
    used = [(output, gradient) for output, gradient in zip(expected, gradients, strict=True) if gradient is not None]
    torch.autograd.backward([output for output, _ in used], [gradient.clone() for _, gradient in used])
    found, remaining = backward_inputs(outputs, gradients, [tensor for tensor in others if tensor.requires_grad])
    wanted = [tensor.grad for tensor in own if tensor.requires_grad]
    for index, (gradient, other) in enumerate(zip(found, wanted, strict=True)):
        assert_same(gradient, other, f"input {index}")
    assert all(tensor.grad is None for tensor in others)
    return remaining


def assert_same_parameters(models):
    for (name, expected), found in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert_same(found.grad, expected.grad, name)


def check(model, make_inputs, forward=called, *, defers=True, unused=(), num_microbatches=3):
    """Compare three microbatches, all of whose first phases come before the second ones, with ordinary backwards."""
    torch.manual_seed(0)
    models = model, copy.deepcopy(model)
    lefts = [backward_twice(forward, models, make_inputs(), unused) for _ in range(num_microbatches)]
    assert [not is_empty(remaining) for remaining in lefts] == [defers] * num_microbatches
    for remaining in lefts:
        remaining.run()
        assert is_empty(remaining)
    assert_same_parameters(models)


def rows(*sizes, **options):
    return lambda: [torch.randn(*sizes, requires_grad=True, **options)]


def mlp(size=6, depth=3):
    torch.manual_seed(1)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(size, size), nn.GELU())))


# Models.


def shared(layer, times=3):
    return nn.Sequential(*(component for _ in range(times) for component in (layer, nn.Tanh())))


def attention(module, tensor):
    return module(tensor, tensor, tensor)[0]


def recurrent(module, tensor):
    output, state = module(tensor)
    return [output, *tensors_in(state)]


MODELS = {
    "linear": (lambda: nn.Linear(6, 3), rows(4, 6), called),
    "linear of three dims": (mlp, rows(2, 3, 6), called),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.RMSNorm(6)), rows(4, 6), called),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, bias=False, groups=2),
            nn.GroupNorm(2, 4),
            nn.ConvTranspose2d(4, 2, 2),
        ),
        rows(2, 3, 8, 8),
        called,
    ),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), rows(2, 5, 8), called),
    "attention": (lambda: nn.MultiheadAttention(8, 2), rows(3, 2, 8), attention),
    "recurrent": (lambda: nn.GRU(4, 4, 2), rows(3, 2, 4), recurrent),
    "recurrent cell": (lambda: nn.LSTMCell(4, 4), rows(3, 4), called),
    "bilinear": (lambda: nn.Bilinear(3, 3, 2), lambda: rows(4, 3)() + rows(4, 3)(), called),
    "shared layer": (lambda: shared(nn.Linear(6, 6), 4), rows(4, 6), called),
    "shared norm": (lambda: shared(nn.LayerNorm(6), 4), rows(4, 6), called),
    "computed weight": (
        lambda: shared(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))),
        rows(4, 6),
        called,
    ),
    "complex": (lambda: shared(nn.Linear(4, 4, dtype=torch.complex64)), rows(3, 4, dtype=torch.complex64), called),
    "double": (lambda: mlp().double(), rows(4, 6, dtype=torch.float64), called),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_have_the_bits_of_an_ordinary_backward(name):
    """For modules of all kinds, over three microbatches whose second phases come late."""
    build, make_inputs, forward = MODELS[name]
    torch.manual_seed(2)
    check(build(), make_inputs, forward)


class Scale(torch.autograd.Function):
    """A custom Function, which computes the gradients of all its inputs."""

    @staticmethod
    def forward(ctx, tensor, weight):
        ctx.save_for_backward(tensor, weight, None)
        return tensor * weight

    @staticmethod
    def backward(ctx, gradient):
        tensor, weight, _ = ctx.saved_tensors
        return gradient * weight, (gradient * tensor).sum(0)


class Keep(torch.autograd.Function):
    """A custom Function with two outputs, that saves nothing, and gives one of its inputs no gradient."""

    @staticmethod
    def forward(ctx, tensor, weight):
        return tensor.clone(), weight.clone()

    @staticmethod
    def backward(ctx, first, second):
        return first, None


class Stop(torch.autograd.Function):
    """A custom Function that lets no gradient through."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def of_row(weight, tensor):
    return (tensor * weight).tanh()


def many_ways(module, tensor):
    """The weight is used in three ways, whose gradients meet in an order that the first phase doesn't have."""
    return of_row(module.weight[0], tensor) + module(tensor) + tensor * module.weight.sum(0) + module(tensor.tanh())


def in_place(module, tensor):
    copied = tensor.clone()
    copied[0] = module.bias
    copied[1].mul_(module.weight[0])
    result = module(copied)
    result.add_(module.bias)
    return result


def odd_outputs(module, tensor):
    result = module(tensor)
    return [module.weight, tensor, result, module.bias, result, result[:, 1:].t()]


def several(module, tensor):
    first, second, third = module(tensor).chunk(3, 1)
    return [first * module.bias[:2], second.unbind(0)[1], third.sum(), tensor.sum(0)]


def with_function(module, tensor):
    return functional.linear(Scale.apply(module(tensor), module.bias), module.weight)


def with_lazy_function(module, tensor):
    in_flight, weight = Keep.apply(tensor, module.weight)
    return functional.linear(module(in_flight), weight)


def with_stop(module, tensor):
    return Stop.apply(module(tensor)) + tensor.tanh() * module.weight[0]


def outside_function(module, tensor):
    return tensor + Scale.apply(module.weight, module.bias).sum(0)


def with_buffer(module, tensor):
    """A constant meets inputs and parameters, and is saved by both."""
    constant = torch.ones(6) * 2
    return (module(tensor * constant) * constant) @ module.weight + constant


def detached(module, tensor):
    return module(tensor.tanh()) + module(tensor.detach())


ODD = {
    "many ways": many_ways,
    "in place": in_place,
    "odd outputs": odd_outputs,
    "several outputs": several,
    "custom Function": with_function,
    "custom Function without a gradient": with_lazy_function,
    "custom Function without any gradient": with_stop,
    "custom Function of parameters": outside_function,
    "buffer": with_buffer,
    "transposed twice": lambda module, tensor: (tensor @ module.weight.t() + module.bias).t().t(),
    "weight by itself": lambda module, tensor: module(tensor) + (module.weight * module.weight).sum(),
    "broadcast": lambda module, tensor: tensor[:, :1] * module.weight.view(1, 36) + tensor[0, 0] * module.bias[0],
    "expanded gradient": lambda module, tensor: module(tensor).sum(),
    "views": lambda module, tensor: list(module(tensor).view(2, -1).split(6, 1)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_graphs_have_the_bits_of_an_ordinary_backward(name):
    """One linear layer, used in odd ways."""
    torch.manual_seed(3)
    check(nn.Linear(6, 6), rows(4, 6), ODD[name])


def test_gradients_that_meet_in_another_order_are_not_deferred_at_all():
    """Where a layer is used inside, and later in a part that no input leads to."""
    check(nn.Linear(6, 6), rows(4, 6), detached, defers=False)


def test_gradients_that_meet_in_another_order_have_the_same_bits():
    """Where a parameter's gradients of both sides interleave, the order of an ordinary backward is kept."""

    class Weights(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.randn(50, 50))
            self.second = nn.Parameter(torch.randn(50, 50))

    def forward(module, tensor):
        one = tensor * module.first
        two = one @ module.first.t() @ module.second
        three = two * module.first
        return three @ module.first.sin() * module.first * module.second

    for seed in range(5):
        torch.manual_seed(seed)
        check(Weights(), rows(50, 50), forward)


# What is deferred, and what is computed.


class Kernels(TorchDispatchMode):
    """Counts the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


PRODUCTS = ("mm", "addmm", "bmm", "convolution_backward", "native_layer_norm_backward")


def count_products(counts):
    return {name: counts[name] for name in PRODUCTS if counts[name]}


def test_each_product_is_computed_once_and_the_weights_ones_later():
    """Of a layer's two matrix products one is in the first phase, the other in the second."""
    model = mlp(depth=4)
    tensor = torch.randn(5, 6, requires_grad=True)
    outputs = model(tensor), model(tensor)
    with Kernels() as ordinary:
        outputs[0].backward(torch.ones(5, 6))
    with Kernels() as first:
        _, remaining = backward_inputs([outputs[1]], [torch.ones(5, 6)], [tensor])
    with Kernels() as second:
        remaining.run()
    assert count_products(ordinary.counts) == {"mm": 8}
    assert count_products(first.counts) == {"mm": 4}
    assert count_products(second.counts) == {"mm": 4}


WHOLE = {
    "custom Function": lambda module, tensor: Scale.apply(tensor, module.bias),
    "fused kernel": lambda module, tensor: functional.prelu(tensor, module.bias),
    "attention to a parameter": lambda module, tensor: functional.scaled_dot_product_attention(
        tensor.view(1, 1, 4, 6), *[module.weight.view(1, 1, 6, 6)] * 2
    ),
    "checkpoint": lambda module, tensor: checkpoint(module, tensor, use_reentrant=False),
}


@pytest.mark.parametrize("name", WHOLE)
def test_all_or_nothing_nodes_run_once(name):
    """A node that can't leave out gradients isn't called again; other layers of the stage are deferred all the same."""
    torch.manual_seed(4)
    odd = WHOLE[name]
    alone, beside = nn.Linear(6, 6), nn.Linear(6, 6)
    check(copy.deepcopy(alone), rows(4, 6), odd, defers=False)
    stage = nn.ModuleList([alone, beside])

    def forward(module, tensor):
        return odd(module[0], module[1](tensor))

    check(stage, rows(4, 6), forward)
    tensor = torch.randn(4, 6, requires_grad=True)
    outputs = forward(stage, tensor), forward(stage, tensor)
    gradient = torch.randn_like(outputs[0])
    with Kernels() as ordinary:
        outputs[0].backward(gradient)
    with Kernels() as split:
        backward_inputs([outputs[1]], [gradient], [tensor])[1].run()
    bookkeeping = {"detach", "ones_like", "zeros", "view", "clone", "new_empty_strided", "copy_", "add_", "t"}
    for kernels in (ordinary, split):
        for operator in bookkeeping:
            del kernels.counts[operator]
    assert split.counts == ordinary.counts


def test_whole_recurrent_networks_are_not_deferred():
    """The fused kernel of an LSTM computes everything at once."""
    check(nn.LSTM(4, 4), rows(3, 2, 4), recurrent, defers=False)


class Counting(nn.Module):
    """Two layers; counts how often it is called."""

    def __init__(self):
        super().__init__()
        self.layers = mlp(depth=2)
        self.scale = nn.Parameter(torch.randn(6))
        self.num_calls = 0

    def forward(self, tensor):
        self.num_calls += 1
        return self.layers(tensor) + (self.scale * self.scale).exp()


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints_are_recomputed_once(is_reentrant):
    """Their parameters' gradients come in the first phase, so that the second needs no other forward."""
    model = Counting()

    def forward(module, tensor):
        return checkpoint(module, tensor.tanh(), use_reentrant=is_reentrant)

    models = model, copy.deepcopy(model)
    remaining = backward_twice(forward, models, rows(4, 6)())
    remaining.run()
    assert [module.num_calls for module in models] == [2, 2]
    assert_same_parameters(models)


def test_layers_beside_a_checkpoint_are_deferred():
    """But not with a re-entrant one, since torch has no partial backward of those."""
    model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
    for is_reentrant in (False, True):

        def forward(module, tensor, is_reentrant=is_reentrant):
            return module[1](checkpoint(module[0], tensor, use_reentrant=is_reentrant))

        check(copy.deepcopy(model), rows(4, 6), forward, defers=not is_reentrant)


def test_a_reentrant_checkpoint_before_any_input_is_deferred():
    """In the first stage there are no inputs to have gradients, and the second phase is an ordinary backward."""

    def forward(module, tensor):
        return checkpoint(lambda dummy: module(tensor) * dummy, module.bias, use_reentrant=True)

    check(nn.Linear(6, 6), lambda: [torch.randn(4, 6)], forward)


def test_packed_tensors_are_unpacked_once():
    """Tensors packed by saved-tensor hooks are unpacked once."""
    model = mlp(depth=2)
    unpacked = Counter()

    def unpack(index):
        unpacked[index] += 1
        return in_flight[index]

    def pack(tensor):
        in_flight.append(tensor)
        return len(in_flight) - 1

    in_flight = []

    def forward(module, tensor):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return module(tensor)

    check(model, rows(4, 6), forward, defers=False, num_microbatches=1)
    assert set(unpacked.values()) == {1}
    with save_on_cpu():
        tensor = torch.randn(4, 6, requires_grad=True)
        output = model(tensor)
    backward_inputs([output], [torch.ones(4, 6)], [tensor])[1].run()


# Hooks.


def hooked_gradients(run):
    """What hooks of all kinds see in a backward, and the gradients after them."""
    seen = Counter()
    model = mlp(depth=3)
    tensor = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()

    def scale(name, factor):
        def hook(gradient):
            seen[name] += 1
            return gradient * factor

        return hook

    def after(parameter):
        seen["after", parameter.grad.sum().item()] += 1

    def entering(gradients):
        seen["entering"] += 1
        return tuple(gradient * 3 for gradient in gradients)

    tensor.register_hook(scale("input", 5))
    for index, parameter in enumerate(model.parameters()):
        parameter.register_hook(scale(f"parameter {index}", 2))
        parameter.register_post_accumulate_grad_hook(after)
    middle = model[0](tensor)
    middle.register_hook(scale("middle", 0.5))
    middle.grad_fn.register_prehook(entering)
    late = model[2](model[1](middle))
    late.retain_grad()
    output = model[4](model[3](late))
    output.register_hook(scale("output", 7))
    found = run(output, tensor)
    return seen, [found, late.grad, *(parameter.grad for parameter in model.parameters())]


def ordinary_backward(output, tensor):
    output.backward(torch.ones_like(output))
    return tensor.grad


def split_phases(output, tensor):
    (found,), remaining = backward_inputs([output], [torch.ones_like(output)], [tensor])
    assert not is_empty(remaining)
    remaining.run()
    return found


def test_hooks_run_once_as_in_an_ordinary_backward():
    """Hooks on tensors, on nodes and on parameters: their arguments, their number and their changes."""
    seen, gradients = hooked_gradients(split_phases)
    expected_seen, expected = hooked_gradients(ordinary_backward)
    assert seen == expected_seen
    for found, other in zip(gradients, expected, strict=True):
        assert_same(found, other, "hooked")


def test_hooks_on_results_of_nodes_get_all_gradients():
    """Such a hook is called once, with the gradients of the input and of the weights, and may change each."""

    def gradients(run):
        torch.manual_seed(5)
        calls = []
        model = mlp(depth=2)
        tensor = torch.ones(4, 6, requires_grad=True)
        middle = model[0](tensor)

        def double(returned, _):
            calls.append([gradient is None for gradient in returned])
            return tuple(gradient * 2 for gradient in returned)

        middle.grad_fn.register_hook(double)
        found = run(model[2](model[1](middle)), tensor)
        return calls, [found, *(parameter.grad for parameter in model.parameters())]

    calls, found = gradients(split_phases)
    expected_calls, expected = gradients(ordinary_backward)
    assert calls == expected_calls == [[False, False, False]]
    for gradient, other in zip(found, expected, strict=True):
        assert_same(gradient, other, "hooked")


def test_no_hook_is_left_on_the_graph():
    """The first phase removes its hooks, also when it fails."""
    layer = nn.Linear(6, 6)
    for fails in (False, True):
        tensor = torch.randn(4, 6, requires_grad=True)
        if fails:
            tensor.register_hook(lambda gradient: 1 / 0)
        output = layer(tensor)
        if fails:
            with pytest.raises(ZeroDivisionError):
                backward_inputs([output], [torch.ones(4, 6)], [tensor])
        else:
            backward_inputs([output], [torch.ones(4, 6)], [tensor])
        handle = output.grad_fn.register_hook(lambda *_: None)
        assert len(handle.hooks_dict_ref()) == 1


def test_errors_of_hooks_in_the_second_phase_are_raised_as_they_are():
    """The phase isn't repeated: some gradients may have been added."""
    layer = nn.Linear(6, 6)
    layer.weight.register_hook(lambda gradient: {}["missing"])
    tensor = torch.randn(4, 6, requires_grad=True)
    _, remaining = backward_inputs([layer(tensor)], [torch.ones(4, 6)], [tensor])
    with pytest.raises(KeyError, match="missing"):
        remaining.run()
    with pytest.raises(RuntimeError, match="have been added"):
        remaining.run()


# Arguments.


def test_a_first_stage_defers_everything():
    """Without inputs that require grad the first phase computes nothing."""
    model = mlp()
    output = model(torch.randn(4, 6))
    with Kernels() as first:
        found, remaining = backward_inputs([output], [torch.ones(4, 6)], [])
    assert found == []
    assert not count_products(first.counts)
    assert all(parameter.grad is None for parameter in model.parameters())
    remaining.run()
    check(mlp(), lambda: [torch.randn(4, 6)])


def test_inputs_that_outputs_do_not_depend_on_have_no_gradient():
    """An unused input, and unused outputs."""

    def forward(module, first, second):
        return [module(first), module(second) * 2, first + 1]

    torch.manual_seed(6)
    check(nn.Linear(6, 6), lambda: rows(4, 6)() + rows(4, 6)(), forward, unused=[1, 2])
    check(nn.Linear(6, 6), lambda: rows(4, 6)() + rows(4, 6)(), forward, unused=[0, 1], defers=False)
    check(nn.Linear(6, 6), lambda: rows(4, 6)() + rows(4, 6)(), forward, unused=[0, 1, 2], defers=False)


def test_nothing_is_deferred_without_parameters():
    """No parameters, frozen ones, and none on a path to the outputs."""
    frozen = mlp()
    frozen.requires_grad_(requires_grad=False)
    for model in (nn.Tanh(), nn.Identity(), frozen):
        check(model, rows(4, 6), defers=False)


def test_half_frozen_layers_have_the_bits_of_an_ordinary_backward():
    """Weights that don't require grad have no part in either phase."""
    model = mlp()
    model[0].weight.requires_grad_(requires_grad=False)
    model[2].bias.requires_grad_(requires_grad=False)
    check(model, rows(4, 6))


def test_gradients_of_inputs_stay_apart_from_what_was_there():
    """The inputs' own .grad stays, and the same input given twice has one gradient."""
    layer = nn.Linear(6, 6)
    tensor = torch.randn(4, 6, requires_grad=True)
    before = tensor.grad = torch.ones(4, 6)
    (first, second), _ = backward_inputs([layer(tensor)], [torch.ones(4, 6)], [tensor, tensor])
    assert tensor.grad is before
    assert torch.equal(before, torch.ones(4, 6))
    assert torch.equal(first, torch.ones(4, 6) @ layer.weight.detach())
    assert first is second


def test_gradients_of_inputs_are_the_callers():
    """A caller may change them without an effect on the deferred rest."""
    model = nn.Linear(6, 6)

    def forward(module, tensor):
        return tensor + module.bias + functional.linear(tensor, module.weight)

    models = model, copy.deepcopy(model)
    tensor = torch.randn(4, 6)
    own, other = fresh([tensor.requires_grad_(), tensor])
    forward(models[0], own).backward(torch.ones(4, 6))
    (found,), remaining = backward_inputs([forward(models[1], other)], [torch.ones(4, 6)], [other])
    found.zero_()
    remaining.run()
    assert_same_parameters(models)


def test_wrong_arguments_are_named():
    """Each with what to do."""
    layer = nn.Linear(6, 6)
    tensor = torch.randn(4, 6, requires_grad=True)
    output = layer(tensor)
    with pytest.raises(ValueError, match="1 output has 2 gradients"):
        backward_inputs([output], [None, None], [tensor])
    with pytest.raises(ValueError, match="output 1 doesn't require grad"):
        backward_inputs([output, output.detach()], [None, None], [tensor])
    with pytest.raises(ValueError, match=r"\(6, 4\), and the output \(4, 6\)"):
        backward_inputs([output], [torch.ones(6, 4)], [tensor])
    with pytest.raises(ValueError, match="input 1 is not a leaf"):
        backward_inputs([output], [None], [tensor, tensor * 2])
    with pytest.raises(ValueError, match="input 0 is not a leaf"):
        backward_inputs([output], [None], [tensor.detach()])


def test_a_second_phase_runs_once():
    """Gradients aren't added twice."""
    layer = nn.Linear(6, 6)
    tensor = torch.randn(4, 6, requires_grad=True)
    _, remaining = backward_inputs([layer(tensor)], [torch.ones(4, 6)], [tensor])
    remaining.run()
    in_flight = layer.weight.grad.clone()
    with pytest.raises(RuntimeError, match="each backward_inputs"):
        remaining.run()
    assert torch.equal(layer.weight.grad, in_flight)


def test_a_used_up_graph_refuses_another_backward():
    """As after an ordinary backward, with the reason."""
    model = mlp()
    tensor = torch.randn(4, 6, requires_grad=True)
    output = model(tensor)
    backward_inputs([output], [torch.ones(4, 6)], [tensor])
    with pytest.raises(RuntimeError, match="backward in two phases"):
        output.sum().backward()


# Kinds of tensors.


def test_autocast_has_the_bits_of_an_ordinary_backward():
    """Casts of weights, which several layers share, are outside."""

    def forward(module, tensor):
        with torch.autocast("cpu", torch.bfloat16):
            return module(module(tensor)).float()

    check(mlp(), rows(4, 6), forward)


def test_sparse_gradients_have_the_bits_of_an_ordinary_backward():
    """Of an embedding next to the inputs, whose gradient isn't dense, over several microbatches."""
    embedding = nn.Embedding(5, 6, sparse=True)

    def forward(module, tensor):
        return torch.tanh(tensor + module(torch.tensor([1, 3, 1, 0]))) * module(torch.tensor([2]))

    check(embedding, rows(4, 6), forward)
    check(nn.Embedding(5, 6), rows(4, 6), forward)


@pytest.mark.parametrize("limit", [1, 200, 1 << 30])
def test_gradients_are_added_in_portions(limit, monkeypatch):
    """Whatever the size of a portion: a shared weight waits until all its uses have been computed."""
    monkeypatch.setattr(split_backward, "_PENDING_BYTES", limit)
    tied = nn.Linear(6, 6)
    check(nn.Sequential(tied, nn.Linear(6, 6), nn.GELU(), tied, nn.LayerNorm(6), tied), rows(4, 6))


def test_portions_bound_the_memory(monkeypatch):
    """The gradient of one layer is added before that of the next one is computed."""
    monkeypatch.setattr(split_backward, "_PENDING_BYTES", 1)
    model = mlp(depth=3)
    tensor = torch.randn(4, 6, requires_grad=True)
    _, remaining = backward_inputs([model(tensor)], [torch.ones(4, 6)], [tensor])
    order = []
    for index in (0, 2, 4):
        model[index].weight.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))

    class Order(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket.__name__ == "mm":
                order.append("mm")
            return function(*args, **(kwargs or {}))

    with Order():
        remaining.run()
    assert order == ["mm", 4, "mm", 2, "mm", 0]


# Memory.


@pytest.fixture
def no_collector():
    """No garbage collection: what is freed in the test is freed by counting."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Watched(nn.Module):
    """Layers, and the memory of what goes between them; each of it is saved by the layer after it alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.memory = {}

    def watch(self, name, tensor):
        self.memory[name] = weakref.ref(tensor.untyped_storage())
        return tensor

    def forward(self, tensor):
        before_linear = self.watch("linear", tensor * 2)
        before_gelu = self.watch("gelu", self.linear(before_linear))
        before_scale = self.watch("function", functional.gelu(before_gelu))
        scale = self.watch("scale", self.scale.exp())
        before_last = self.watch("last", Scale.apply(before_scale, scale))
        return self.last(before_last)

    def alive(self):
        return {name for name, reference in self.memory.items() if reference() is not None}


@pytest.mark.usefixtures("no_collector")
def test_memory_is_freed_after_each_phase():
    """After the first phase only the weights' saved tensors stay, after the second nothing, though the output lives."""
    model = Watched()
    tensor = torch.randn(4, 6, requires_grad=True)
    output = model(tensor)
    assert model.alive() == {"linear", "gelu", "function", "scale", "last"}
    _, remaining = backward_inputs([output], [torch.ones(4, 6)], [tensor])
    assert model.alive() == {"linear", "last"}
    remaining.run()
    assert model.alive() == set()
    assert output.grad_fn is not None


@pytest.mark.usefixtures("no_collector")
def test_a_dropped_weight_backward_is_freed():
    """Without a second phase, once the outputs are gone too; the incoming gradient also."""
    model = Watched()
    tensor = torch.randn(4, 6, requires_grad=True)
    output = model(tensor)
    gradient = torch.ones(4, 6)
    owned = weakref.ref(gradient.untyped_storage())
    node = weakref.ref(backward_inputs([output], [gradient], [tensor])[1])
    del output, gradient
    assert node() is None
    assert owned() is None
    assert model.alive() == set()


@pytest.mark.usefixtures("no_collector")
def test_gradients_are_not_held_after_the_second_phase():
    """Neither the incoming ones nor those of the inputs, while the WeightBackward itself lives on."""
    model = Watched()
    tensor = torch.randn(4, 6, requires_grad=True)
    gradient = torch.ones(4, 6)
    found, remaining = backward_inputs([model(tensor)], [gradient], [tensor])
    owned = [weakref.ref(value.untyped_storage()) for value in (gradient, *found)]
    del gradient, found
    assert owned[1]() is None
    remaining.run()
    assert owned[0]() is None
    assert model.alive() == set()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("uses", [checkpoint, None])
def test_memory_of_undeferred_backwards_is_freed(uses):
    """Where all is computed with the inputs, nothing is retained."""
    model = Watched()
    tensor = torch.randn(4, 6, requires_grad=True)
    if uses is None:
        model.requires_grad_(requires_grad=False)
        output = model(tensor)
    else:
        output = uses(model, tensor, use_reentrant=False)
    _, remaining = backward_inputs([output], [torch.ones(4, 6)], [tensor])
    assert is_empty(remaining)
    assert model.alive() == set()


@pytest.mark.usefixtures("no_collector")
def test_graphs_outlive_their_outputs():
    """Nodes of custom Functions too, which only the graph owns."""
    models = nn.Linear(6, 6), nn.Linear(6, 6)
    models[1].load_state_dict(models[0].state_dict())
    tensor = torch.randn(4, 6)

    def forward(module, inputs):
        weight, bias = Scale.apply(module.weight, torch.ones(6)), Scale.apply(module.bias.expand(6, 6), module.bias)
        return Scale.apply(inputs @ Scale.apply(weight, torch.ones(6)) + bias[:4], torch.ones(6))

    lefts = []
    for model in models:
        own = tensor.clone().requires_grad_()
        output = forward(model, own)
        if model is models[0]:
            output.backward(torch.ones(4, 6))
        else:
            lefts.append(backward_inputs([output], [torch.ones(4, 6)], [own])[1])
        del output
    assert not is_empty(lefts[0])
    lefts[0].run()
    assert_same_parameters(models)


@pytest.mark.usefixtures("no_collector")
def test_deep_graphs_are_walked_and_freed_without_recursion():
    """A hundred thousand nodes, with parameters at both ends, whose output lives longest."""
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    tensor = torch.ones(1, 2, requires_grad=True)
    hidden = first(tensor)
    for _ in range(100_000):
        hidden = hidden * 1.0
    output = last(hidden)
    del hidden
    (found,), remaining = backward_inputs([output], [torch.ones(1, 2)], [tensor])
    remaining.run()
    del remaining, output
    assert torch.equal(found, torch.ones(1, 2) @ last.weight.detach() @ first.weight.detach())
    assert torch.equal(first.bias.grad, (torch.ones(1, 2) @ last.weight.detach())[0])
    assert last.weight.grad is not None


def test_threads_have_phases_of_their_own():
    """Ranks that are threads of one process don't disturb each other."""
    torch.manual_seed(7)
    tensors = [torch.randn(4, 6) for _ in range(20)]
    failures = []

    def rank():
        try:
            model = mlp()
            models = model, copy.deepcopy(model)
            lefts = [backward_twice(called, models, [tensor.requires_grad_()]) for tensor in tensors]
            for remaining in lefts:
                remaining.run()
            assert_same_parameters(models)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# Any graph.


class Pool(nn.Module):
    """Parameters for random programs, which may use each any number of times."""

    def __init__(self):
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)
        self.vector = nn.Parameter(torch.randn(6))

    def step(self, index, operation, states):
        """The state that an operation makes of earlier ones; ``index`` chooses among them and the parameters."""
        state = states[-1 - index % len(states)]
        last = states[-1]
        weight = self.linear[index % 2].weight
        return {
            "linear": lambda: self.linear[index % 2](last).tanh(),
            "norm": lambda: self.norm(last),
            "residual": lambda: last + state,
            "gate": lambda: last * state.sigmoid(),
            "scale": lambda: last * self.vector,
            "bias": lambda: last + self.linear[index % 2].bias,
            "convolution": lambda: self.convolution(last.unsqueeze(1)).squeeze(1),
            "transposed": lambda: torch.sin(last @ weight),
            "composed": lambda: functional.linear(last, weight * self.vector).tanh(),
            "weight row": lambda: last * weight[index % 6],
            "parameters": lambda: self.vector.expand(last.shape) * self.linear[0].bias,
            "parameter norm": lambda: last + weight.square().sum(0),
            "function": lambda: Scale.apply(last, self.vector),
            "in place": lambda: last.clone().mul_(self.vector),
            "row in place": lambda: set_row(last.clone(), self.vector),
            "halves": lambda: torch.cat(last.chunk(2, 1)[::-1], 1),
            "detached": lambda: last.detach() * self.vector,
            "checkpoint": lambda: checkpoint(self.linear[index % 2], last, use_reentrant=False),
        }[operation]()


def set_row(tensor, row):
    tensor[0] = row
    return tensor


OPERATIONS = [
    "linear", "norm", "residual", "gate", "scale", "bias", "convolution", "transposed", "composed", "weight row",
    "parameters", "parameter norm", "function", "in place", "row in place", "halves", "detached", "checkpoint",
]  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    program=st.lists(st.tuples(st.integers(0, 11), st.sampled_from(OPERATIONS)), min_size=1, max_size=14),
    outputs=st.lists(st.integers(0, 13), min_size=1, max_size=3),
    limit=st.sampled_from([1, 1 << 20]),
    has_inputs=st.sampled_from([True, True, True, False]),
)
def test_random_graphs_have_the_bits_of_an_ordinary_backward(program, outputs, limit, has_inputs):
    """Programs of layers, residuals and shared weights, whose results are used in any number of places."""
    torch.manual_seed(8)
    model = Pool()

    def forward(module, tensor):
        states = [tensor]
        for index, operation in program:
            states.append(module.step(index, operation, states))
        chosen = [states[-1 - index % len(states)] for index in outputs]
        return [state for state in chosen if state.requires_grad] or [states[-1] + module.vector]

    models = model, copy.deepcopy(model)
    before, split_backward._PENDING_BYTES = split_backward._PENDING_BYTES, limit
    try:
        lefts = [backward_twice(forward, models, [torch.randn(4, 6, requires_grad=has_inputs)]) for _ in range(2)]
        for remaining in lefts:
            remaining.run()
    finally:
        split_backward._PENDING_BYTES = before
    assert_same_parameters(models)
