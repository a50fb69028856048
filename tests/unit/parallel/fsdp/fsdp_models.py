"""Small models for tests of FSDP, and the whole gradients that they get with and without it."""

import copy

import torch

from ferrodist import FSDP

INPUTS = torch.linspace(-1, 1, 24).view(4, 6)


def layers(count=3):
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(count)))


def wrapped(module, group, **options):
    return FSDP(copy.deepcopy(module), group, **{"wrap": torch.nn.Linear, **options})


def whole_gradients(fsdp):
    """The gradients, whole, by the names of their parameters; None for none."""
    state = {}
    with torch.no_grad():
        for unit in fsdp._units:
            for flat in unit.flats:
                names = [name for name, shard in zip(flat.names, flat.parameters, strict=True) if shard.grad is None]
                saved = flat.shard.clone()
                for shard in flat.parameters:
                    shard.copy_(torch.zeros_like(shard) if shard.grad is None else shard.grad)
                state.update(zip(flat.names, (value.clone() for value in flat.gather_full()), strict=True))
                state.update(dict.fromkeys(names))
                flat.shard.copy_(saved)
    return state


def expected_gradients(module, loss):
    own = copy.deepcopy(module)
    loss(own).backward()
    return {name: parameter.grad for name, parameter in own.named_parameters()}


def assert_same(gradients, expected):
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert gradients[name] is None, name
        else:
            torch.testing.assert_close(gradients[name], value, msg=lambda text, name=name: f"{name}: {text}")
