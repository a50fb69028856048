"""`torch.nn.MultiheadAttention` and torch's transformer layers in `context_parallel`."""

import copy

import pytest
import torch
from torch import nn

import ferrodist as fd
from ferrodist.testing import run_ranks

METHODS = ["ring", "ulysses"]


def drawn(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def filled(module):
    """The module in float64, with parameters from a generator of its own; torch's biases would be 0."""
    module = module.double()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=seed) / 4)
    return module


def causal_mask(length):
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)


def gradients(module, x):
    """The input's gradient, and those of parameters."""
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_torchs_encoder_trains_as_in_one_process(method, causal, batch_first):
    """The mask that torch makes for a rank's tokens says nothing but that attention is causal."""
    dim = 1 if batch_first else 0
    layer = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=batch_first)
    start = filled(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    whole = drawn(*((2, 13, 12) if batch_first else (13, 2, 12)))
    grad = drawn(*whole.shape, seed=1)

    def run(model, x):
        mask = causal_mask(x.shape[dim]) if causal else None
        return model(x, mask=mask, is_causal=causal)

    alone, x = copy.deepcopy(start), whole.clone().requires_grad_()
    expected = run(alone, x)
    expected.backward(grad)
    with torch.no_grad():
        evaluated = run(copy.deepcopy(start).eval(), whole)

    def program(group):
        model = copy.deepcopy(start)
        x = fd.context_shard(whole, dim, group).requires_grad_()
        with fd.context_parallel(fd.DeviceMesh(group, (-1,)), method):
            output = run(model, x)
            with torch.no_grad():  # where torch's layers have another path
                torch.testing.assert_close(run(copy.deepcopy(model).eval(), x), output)
        output.backward(fd.context_shard(grad, dim, group))
        sums = [fd.allreduce(parameter.grad, group=group) for parameter in model.parameters()]
        return [fd.context_unshard(each.detach(), dim, group) for each in (output, x.grad)] + sums

    torch.testing.assert_close(evaluated, expected)
    for results in run_ranks(program, 3):
        for one, other in zip(results, [expected, *gradients(alone, x)], strict=True):
            torch.testing.assert_close(one, other)


SHAPES = {
    "sizes of their own": ({"kdim": 5, "vdim": 7}, (11, 2, 12), (6, 2, 5), (6, 2, 7)),
    "no biases": ({"bias": False}, (11, 2, 12), (11, 2, 12), (11, 2, 12)),
    "no batch": ({}, (11, 12), (6, 12), (6, 12)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_attention_of_one_sequence_to_another(name):
    """Every form of weights and inputs that the layer takes."""
    options, *shapes = SHAPES[name]
    start = filled(nn.MultiheadAttention(12, 3, **options))
    inputs = [drawn(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    alone = copy.deepcopy(start)
    expected, _ = alone(*inputs, need_weights=False)
    expected.square().sum().backward()

    def program(group):
        layer = copy.deepcopy(start)
        with fd.context_parallel(fd.DeviceMesh(group, (-1,))):
            output, weights = layer(*[fd.context_shard(x, 0, group) for x in inputs], need_weights=False)
        assert weights is None
        output.square().sum().backward()
        sums = [fd.allreduce(parameter.grad, group=group) for parameter in layer.parameters()]
        return [fd.context_unshard(output.detach(), 0, group), *sums]

    for results in run_ranks(program, 2):
        wanted = [expected, *(parameter.grad for parameter in alone.parameters())]
        for one, other in zip(results, wanted, strict=True):
            torch.testing.assert_close(one, other)


MASK = torch.zeros(4, 4, dtype=torch.bool)
REFUSED = {
    "weights": ({}, {}, "need_weights=False"),
    "mask": ({}, {"need_weights": False, "attn_mask": MASK}, "is_causal=True"),
    "padding": ({}, {"need_weights": False, "key_padding_mask": MASK[:2]}, "key_padding_mask"),
    "bias": ({"add_bias_kv": True}, {"need_weights": False}, "add_bias_kv"),
    "zeros": ({"add_zero_attn": True}, {"need_weights": False}, "add_zero_attn"),
    "dropout": ({"dropout": 0.5}, {"need_weights": False}, "dropout_p must be 0"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("is_on_all", [False, True])
def test_what_attention_over_ranks_has_not_is_refused_on_all_ranks(name, is_on_all):
    """Each would be of this rank's tokens only; a rank that does not raise would wait for one that did."""
    options, arguments, match = REFUSED[name]

    def program(group):
        layer, x = filled(nn.MultiheadAttention(12, 3, **options)), drawn(4, 2, 12)
        is_wrong = is_on_all or group.rank == 1
        if not is_wrong:
            layer, wrong = filled(nn.MultiheadAttention(12, 3)), {"need_weights": False}
        else:
            wrong = arguments
        with (
            pytest.raises(ValueError if is_wrong else fd.CollectiveMismatchError, match=match),
            fd.context_parallel(fd.DeviceMesh(group, (-1,))),
        ):
            layer(x, x, x, **wrong)
        fd.barrier(group=group)

    run_ranks(program, 2)
