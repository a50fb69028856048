"""Blocks of parallel models on local tensors: the same bits as on DTensors, and only where the code allows it."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ferrodist as fd
from ferrodist.parallel.tensor_parallel.local_blocks import LocalBlock
from ferrodist.testing import run_ranks

WIDTH, HEADS = 24, 6
PLAN = {
    "blocks.*.q": fd.ColumnParallel(),
    "blocks.*.k": fd.ColumnParallel(),
    "blocks.*.v": fd.ColumnParallel(),
    "blocks.*.o": fd.RowParallel(),
    "blocks.*.up": fd.ColumnParallel(),
    "blocks.*.down": fd.RowParallel(),
}


class Block(nn.Module):
    """A decoder's layer, whose code does not use the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.before, self.after = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)

    def split(self, x):
        return x.view(*x.shape[:-1], -1, WIDTH // HEADS).transpose(1, 2)

    def attend(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(*x.shape[:-1], -1)

    def forward(self, x, scale=None):
        x = x + self.o(self.attend(self.before(x)))
        x = x if scale is None else x * scale
        return x + self.down(functional.gelu(self.up(self.after(x))))


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block, num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind() for _ in range(num_blocks)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x, scale=None):
        for block in self.blocks:
            x = block(x, scale)
            if isinstance(x, tuple):
                x = x[0] * (x[1] / WIDTH)
        return self.head(x)


@functools.cache
def _initial(kind: type[nn.Module]) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(kind)


def seeded(kind: type[nn.Module] = Block) -> Model:
    """A model with the same parameters at each call; made before the ranks start, as threads share torch's seed."""
    return copy.deepcopy(_initial(kind))


@pytest.fixture(autouse=True)
def _models():
    for kind in (Block, Smooth, ByHeads, NormsOfHeads, Gated, Mean, Dropping, Keeping, Counting, Writing, Weighted):
        _initial(kind)


def batch(step: int = 0, length: int = 5) -> torch.Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(step))


def states(model: nn.Module) -> list[str]:
    """For each block "local" if a kind of forwards runs on local tensors, else "distributed"; "" if none was tried."""
    found = []
    for one in model.modules():
        forward = one.__dict__.get("forward")
        while forward is not None and not isinstance(forward, LocalBlock):
            forward = getattr(forward, "_forward", None)
        if isinstance(forward, LocalBlock):
            found.append(
                "local"
                if any(one.sizes for one in forward.trials.values())
                else "distributed"
                if forward.trials
                else ""
            )
    return found


def train(model: nn.Module, steps: int = 3, **options):
    """Losses and parameters of some steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step), **options).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *[one.full_tensor().detach() for one in model.parameters()]]


def same(ones, others) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_blocks_train_with_the_bits_of_dtensors(n):
    """Results, gradients and messages are those of the operators on DTensors."""

    def program(group):
        mesh = fd.DeviceMesh(group, (n,))
        model = fd.parallelize(seeded(), mesh, PLAN, local_blocks=True)
        other = fd.parallelize(seeded(), mesh, PLAN, local_blocks=False)
        assert same(train(model), train(other))
        steps = []
        for one in (model, other):
            with fd.record_redistributions() as recorded:
                one(batch()).sum().backward()
            steps.append([(step.kind, step.size_bytes) for step in recorded])
        assert steps[0] == steps[1]
        return states(model)

    assert run_ranks(program, n) == [["local", "local"]] * n


def test_one_process_is_what_they_compute():
    """The trial compares two ways of ours: this compares with a third."""
    expected = seeded()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        expected(batch(step)).square().mean().backward()
        optimizer.step()

    def program(group):
        model = fd.parallelize(seeded(), fd.DeviceMesh(group, (2,)), PLAN, local_blocks=True)
        trained = train(model)[3:]
        for one, other in zip(trained, expected.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-5)
        return states(model)

    assert run_ranks(program, 2) == [["local", "local"]] * 2


class ByHeads(Block):
    """Code that uses the number of heads."""

    def split(self, x):
        return x.view(*x.shape[:-1], HEADS, -1).transpose(1, 2)


class NormsOfHeads(Block):
    """A replicated norm of heads, whose gradients are this rank's part; the first output is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.of_heads = nn.RMSNorm(WIDTH // HEADS)
        nn.init.zeros_(self.o.weight)

    def split(self, x):
        return self.of_heads(super().split(x))


class Gated(Block):
    """A replicated gate of sharded features, whose gradient is this rank's part."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)

    def attend(self, x):
        return super().attend(x) * self.gate(x).sigmoid()


class Mean(Block):
    """A sum over all heads."""

    def attend(self, x):
        mixed = super().attend(x)
        return mixed - mixed.mean(-1, keepdim=True)


class Dropping(Block):
    """Dropout, whose numbers depend on the shape."""

    def attend(self, x):
        return functional.dropout(super().attend(x), 0.5, self.training)


class Keeping(Block):
    """An attribute that each forward sets."""

    def attend(self, x):
        self.kept = super().attend(x)
        return self.kept


class Writing(Block):
    """A forward that writes to its input."""

    def forward(self, x, scale=None):
        x = x.clone() if x.requires_grad else x.mul_(2)
        return super().forward(x, scale)


class Counting(Block):
    """A result that has the number of a rank's features."""

    def forward(self, x, scale=None):
        count = self.attend(self.before(x)).shape[-1]
        return super().forward(x, scale), count


class Weighted(Block):
    """A parameter of the block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def attend(self, x):
        return super().attend(x * self.weight)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ByHeads, "distributed"),
        (NormsOfHeads, "distributed"),
        (Gated, "distributed"),
        (Mean, "distributed"),
        (Dropping, "distributed"),
        (Keeping, "distributed"),
        (Counting, "distributed"),
        (Weighted, None),
    ],
)
def test_code_that_needs_dtensors_keeps_them(kind, expected):
    """Such code gives other results or gradients on a rank's own heads, with random parameters too."""

    def program(group):
        torch.manual_seed(1)
        mesh = fd.DeviceMesh(group, (2,))
        model = fd.parallelize(seeded(kind), mesh, PLAN, local_blocks=True)
        other = fd.parallelize(seeded(kind), mesh, PLAN, local_blocks=False)
        if kind is not Dropping:
            assert same(train(model), train(other))
        else:
            train(model)
        return states(model)

    assert run_ranks(program, 2, backend="native") == [[expected] * 2 if expected else []] * 2


def test_written_inputs_are_written_once():
    """A trial must not write to the user's tensors."""

    def program(group):
        mesh = fd.DeviceMesh(group, (2,))
        results = []
        for local_blocks in (True, False):
            model = fd.parallelize(seeded(Writing), mesh, PLAN, local_blocks=local_blocks)
            with torch.no_grad():
                results.append([model(batch(step)) for step in range(3)])
        return same(*results)

    assert run_ranks(program, 2) == [True, True]


def test_settings_are_kinds_of_their_own():
    """Frozen parameters, evaluation and other inputs are tried anew."""

    def program(group):
        mesh = fd.DeviceMesh(group, (2,))
        results = []
        for local_blocks in (True, False):
            model = fd.parallelize(seeded(), mesh, PLAN, local_blocks=local_blocks)
            found = train(model)
            model.blocks[0].q.weight.requires_grad_(requires_grad=False)
            for parameter in model.blocks[1].parameters():
                parameter.requires_grad_(requires_grad=False)
            model(batch()).sum().backward()
            found += [one.grad.full_tensor() for one in model.parameters()]
            model.eval()
            with torch.no_grad():
                found += [model(batch(length=length)) for length in (3, 4, 5, 6)]
                found.append(model(batch(), torch.tensor(0.5)))
            with torch.inference_mode():
                found.append(model(batch()))
            given = batch().requires_grad_()
            model(given, 2.0).sum().backward()
            found.append(given.grad)
            results.append(found)
        return same(*results)

    assert run_ranks(program, 2) == [True, True]


def test_other_numbers_in_each_call_are_not_tried_forever():
    """A factor that changes with the steps makes each forward one of a new kind."""

    def program(group):
        model = fd.parallelize(seeded(), fd.DeviceMesh(group, (2,)), PLAN, local_blocks=True)
        other = fd.parallelize(seeded(), fd.DeviceMesh(group, (2,)), PLAN, local_blocks=False)
        counts = []
        for step in range(12):
            with torch.no_grad():
                assert same([model(batch(), 1.0 + step)], [other(batch(), 1.0 + step)])
            forward = model.blocks[0].forward._forward
            counts.append(len(forward.trials))
        return counts

    assert run_ranks(program, 2) == [[*range(1, 9), 8, 8, 8, 8]] * 2


def test_gradients_of_gradients():
    """Second derivatives pass the sums over ranks once, in each direction."""

    def program(group):
        mesh = fd.DeviceMesh(group, (2,))
        results = []
        for local_blocks in (True, False):
            model = fd.parallelize(seeded(Smooth).double(), mesh, PLAN, local_blocks=local_blocks)
            model(batch().double()).sum().backward()
            model.zero_grad()
            given = batch().double().requires_grad_()
            (grad,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
            grad.square().mean().backward()
            results.append([given.grad, *[one.grad.full_tensor() for one in model.parameters()]])
            if local_blocks:
                assert states(model) == ["local"] * 2
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)

    run_ranks(program, 2)


class Smooth(Block):
    """Attention that has second derivatives."""

    def attend(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return mixed.transpose(1, 2).reshape(*x.shape[:-1], -1)


def test_who_looks_into_a_block_sees_dtensors():
    """Hooks of modules inside, checkpoints, and modes see what they see without local blocks."""

    def program(group):
        model = fd.parallelize(seeded(), fd.DeviceMesh(group, (2,)), PLAN, local_blocks=True)
        train(model)
        assert states(model) == ["local"] * 2
        seen = []
        handle = model.blocks[0].q.register_forward_hook(lambda *call: seen.append(type(call[2])))
        model(batch())
        handle.remove()
        model(batch())
        checkpoint(model, batch(), use_reentrant=False).sum().backward()
        return seen

    assert run_ranks(program, 2) == [[fd.DTensor]] * 2


def test_a_replaced_part_ends_it():
    """What was tried is another module then, as with adapters."""

    class Adapter(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x) * torch.arange(WIDTH)

    def program(group):
        results = []
        for local_blocks in (True, False):
            model = fd.parallelize(seeded(), fd.DeviceMesh(group, (2,)), PLAN, local_blocks=local_blocks)
            train(model)
            for block in model.blocks:
                block.q = Adapter(block.q)
            results.append([model(batch())])
        return same(*results)

    assert run_ranks(program, 2) == [True, True]


def test_copies_have_blocks_of_their_own():
    """A copy computes with its own parameters, and is tried anew."""

    def program(group):
        model = fd.parallelize(seeded(), fd.DeviceMesh(group, (2,)), PLAN, local_blocks=True)
        train(model)
        other = copy.deepcopy(model)
        before = model(batch())
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        assert same([model(batch())], [before])
        assert not same([other(batch())], [before])
        other(batch())  # the first one has noted what is tried now
        return states(other)

    assert run_ranks(program, 2) == [["local"] * 2] * 2


def test_shards_of_unequal_size_stay_distributed():
    """Ranks whose code may differ must not try it, for one of them could wait for the others."""

    def program(group):
        model = fd.parallelize(seeded(), fd.DeviceMesh(group, (5,)), PLAN, local_blocks=True)
        train(model)
        return states(model)

    assert run_ranks(program, 5) == [[]] * 5
