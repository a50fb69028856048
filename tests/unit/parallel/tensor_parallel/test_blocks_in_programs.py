"""Blocks on local tensors in programs that wrap forwards, look in on one rank alone, or take second derivatives."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn

import ferrodist as fd
from ferrodist.parallel.tensor_parallel.local_blocks import LocalBlock
from ferrodist.testing import run_ranks

WIDTH = 16
PLAN = {"blocks.*.up*": fd.ColumnParallel(), "blocks.*.down*": fd.RowParallel()}


class Norm(nn.Module):
    """A norm that takes a number, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, eps=1e-6):
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.weight


class Block(nn.Module):
    """Two branches, whose norms are computed in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.act = nn.LayerNorm(WIDTH), Norm(), nn.GELU()
        self.up1, self.up2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down1, self.down2 = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        other = self.other(x, 1e-3) if x.shape[1] == 7 else self.other(x)
        one = self.one(x)
        x = x + self.down1(self.act(self.up1(one)))
        return x + self.down2(self.act(self.up2(other)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def _initial() -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model()


INITIAL = _initial()


def batch(step=0, length=5):
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(step))


def split(group, **options):
    options = {"local_blocks": True} | options
    return fd.parallelize(copy.deepcopy(INITIAL), fd.DeviceMesh(group, (2,)), PLAN, **options)


def tried(group, **options):
    """A model after the forwards and backwards that its blocks' trials take."""
    model = split(group, **options)
    for step in range(4):
        model(batch(step, 5 + (step == 1))).square().mean().backward()
    model.zero_grad()
    return model


def are_local(model):
    """For each block whether all kinds of its forwards run on local tensors; None if none was tried."""
    found = []
    for one in model.blocks:
        forward = one.forward
        while not isinstance(forward, LocalBlock):
            forward = forward._forward
        kinds = forward.trials.values()
        found.append(all(each.sizes and not each.has_failed for each in kinds) if kinds else None)
    return found


def grads(model):
    return [one.grad.full_tensor() for one in model.parameters()]


def test_one_rank_that_looks_in_sends_the_same_messages():
    """Its DTensors sum gradients in the order of norms, the other rank's local tensors likewise: both have one size."""

    def program(group):
        found = []
        for local_blocks in (True, False):
            model = tried(group, local_blocks=local_blocks)
            if local_blocks:
                assert are_local(model) == [True] * 2
            if group.rank == 0:
                model.blocks[0].act.register_forward_hook(lambda *_: None)
            model(batch()).square().mean().backward()
            found.append(grads(model))
        assert all(map(torch.equal, *found))

    run_ranks(program, 2, backend="simulated")


def test_a_norm_that_takes_a_number_stays_distributed():
    """A call that the block's code makes in one size alone, after its trials, ends the local way without an error."""

    def program(group):
        model = tried(group)
        plain = copy.deepcopy(INITIAL)
        torch.testing.assert_close(model(batch(0, 7)), plain(batch(0, 7)))
        assert are_local(model) == [False] * 2

    run_ranks(program, 2, backend="simulated")


def test_wrapped_forwards_are_called():
    """A forward that a program puts around a module's by functools.wraps, as accelerate does, runs in each call: with
    gradients and without, whether it is there before or comes later.
    """

    def wrap(module, calls):
        inner = module.forward

        @functools.wraps(inner)
        def forward(*args):
            calls.append(torch.is_grad_enabled())
            return inner(*args)

        module.forward = forward

    def program(group):
        mesh, early_calls, late_calls = fd.DeviceMesh(group, (2,)), [], []
        early = copy.deepcopy(INITIAL)
        wrap(early.blocks[0].act, early_calls)
        early, late = fd.parallelize(early, mesh, PLAN, local_blocks=True), split(group)
        run_both_ways(late)
        wrap(late.blocks[0].act, late_calls)
        for model, calls in ((early, early_calls), (late, late_calls)):
            run_both_ways(model)
            calls.clear()
            run_both_ways(model)
            assert calls == [True, True, False, False] * 4

    def run_both_ways(model):
        for step in range(4):
            model(batch(step, 5 + (step == 1))).sum().backward()
            with torch.no_grad():
                model(batch(step, 5 + (step == 1)))

    run_ranks(program, 2, backend="simulated")


def test_second_derivatives_of_biases():
    """A gradient penalty on all parameters, also the replicated biases of layers by rows, is one process's."""

    def penalty(model):
        taken = torch.autograd.grad(model(batch()).square().mean(), [*model.parameters()], create_graph=True)
        whole = [one.full_tensor() if isinstance(one, fd.DTensor) else one for one in taken]
        sum(one.square().sum() for one in whole).backward()

    plain = copy.deepcopy(INITIAL)
    penalty(plain)

    def program(group):
        model = tried(group)
        assert are_local(model) == [True] * 2
        penalty(model)
        for found, expected in zip(grads(model), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected.grad, rtol=1e-4, atol=1e-5)

    run_ranks(program, 2, backend="simulated")
