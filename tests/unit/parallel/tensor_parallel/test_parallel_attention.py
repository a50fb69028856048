"""`ParallelAttention` against an unsharded attention of plain layers."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import ferrodist as fd
from ferrodist import DeviceMesh, DTensor, ParallelAttention, Replicate, Shard
from ferrodist.tensor.redistribute_plan import RedistributeKind
from ferrodist.testing import run_ranks

WIDTH, BATCH, LENGTH = 24, 2, 6
LAYERS = ("queries", "keys", "values", "output")

HEADS = {
    "one rank": (1, 4, 2),
    "as many": (2, 4, 4),
    "grouped": (2, 8, 4),
    "a head a rank": (2, 4, 2),
    "one for all": (2, 4, 1),
    "fewer than ranks": (4, 8, 2),
    "uneven heads": (2, 12, 3),
    "fewer, and not a divisor of ranks": (3, 12, 2),
}


class Attention(nn.Module):
    """Unsharded attention, written out."""

    def __init__(self, num_heads, num_kv_heads, *, bias=True, is_causal=False):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.is_causal = num_heads, num_kv_heads, is_causal
        width = WIDTH // num_heads * num_kv_heads
        self.queries, self.output = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(2))
        self.keys, self.values = (nn.Linear(WIDTH, width, bias=bias) for _ in range(2))

    def forward(self, x):
        batch, length, width = x.shape
        size = width // self.num_heads
        queries, keys, values = (
            layer(x).view(batch, length, -1, size).transpose(1, 2) for layer in (self.queries, self.keys, self.values)
        )
        # One after the other, each head of keys serves as many heads of queries.
        keys, values = (heads.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for heads in (keys, values))
        scores = queries @ keys.transpose(2, 3) / size**0.5
        if self.is_causal:
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        mixed = scores.softmax(-1) @ values
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


def unsharded(num_heads, num_kv_heads, **options):
    torch.manual_seed(0)
    return Attention(num_heads, num_kv_heads, **options).double()


def mesh_of(group):
    return DeviceMesh(group, (group.world_size,), ("tp",))


def sharded(plain, mesh, **options):
    """A parallel one with the same values."""
    options = {"bias": plain.queries.bias is not None, "is_causal": plain.is_causal, **options}
    made = ParallelAttention(
        WIDTH, plain.num_heads, num_kv_heads=plain.num_kv_heads, mesh=mesh, dtype=torch.float64, **options
    )
    for name, own in made.named_parameters():
        value = plain.get_parameter(name).detach()
        own.detach().copy_(fd.distribute(value, mesh, own.placements, src=None))
    return made


def check_gradients(made, plain):
    for name, own in made.named_parameters():
        assert own.grad.placements == own.placements, name
        torch.testing.assert_close(
            own.grad.full_tensor(),
            plain.get_parameter(name).grad,
            rtol=1e-12,
            atol=1e-12,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def inputs():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2)]


def count(steps):
    moves = {
        RedistributeKind.ALLREDUCE,
        RedistributeKind.ALL_GATHER,
        RedistributeKind.REDUCE_SCATTER,
        RedistributeKind.ALL_TO_ALL,
        RedistributeKind.EXCHANGE,
    }
    return dict(Counter(step.kind for step in steps if step.kind in moves))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_it_equals_unsharded_attention(heads, is_causal):
    """Of plain tensors, which are replicated: outputs and all gradients."""
    size, num_heads, num_kv_heads = HEADS[heads]
    plain, (x, grad) = unsharded(num_heads, num_kv_heads, is_causal=is_causal), inputs()
    mine = x.clone().requires_grad_()
    expected = plain(mine)
    expected.backward(grad)

    def program(group):
        made = sharded(plain, mesh_of(group))
        its = x.clone().requires_grad_()
        got = made(its)
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        got.backward(grad)
        torch.testing.assert_close(its.grad, mine.grad, rtol=1e-12, atol=1e-12)
        check_gradients(made, plain)

    run_ranks(program, size)


@pytest.mark.parametrize("heads", ["grouped", "fewer than ranks"])
def test_sharded_sequences(heads):
    """Shards of a sequence go in and come out, also without biases; sequences need not divide evenly."""
    size, num_heads, num_kv_heads = HEADS[heads]
    plain, (x, grad) = unsharded(num_heads, num_kv_heads, bias=False, is_causal=True), inputs()
    mine = x.clone().requires_grad_()
    expected = plain(mine)
    expected.backward(grad)

    def program(group):
        mesh = mesh_of(group)
        made = sharded(plain, mesh, sequence_dim=1)
        its = fd.distribute(x, mesh, Shard(1), src=None).requires_grad_()
        got = made(its)
        assert got.placements == (Shard(1),)
        torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-12, atol=1e-12)
        got.backward(fd.distribute(grad, mesh, Shard(1), src=None))
        torch.testing.assert_close(its.grad.full_tensor(), mine.grad, rtol=1e-12, atol=1e-12)
        check_gradients(made, plain)
        if LENGTH % group.world_size == 0:
            made.zero_grad()
            part = x.chunk(group.world_size, 1)[group.rank].clone().requires_grad_()
            out = made(part)
            assert type(out) is torch.Tensor
            assert torch.equal(out, got.to_local())
            out.backward(grad.chunk(group.world_size, 1)[group.rank])
            torch.testing.assert_close(part.grad, its.grad.to_local(), rtol=1e-12, atol=1e-12)
            check_gradients(made, plain)

    run_ranks(program, size)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(2)])
def test_distributed_inputs(placement):
    """Under all placements the output is a replicated DTensor, and the gradient has the input's placement."""
    plain, (x, grad) = unsharded(4, 2), inputs()
    mine = x.clone().requires_grad_()
    expected = plain(mine)
    expected.backward(grad)

    def program(group):
        mesh = mesh_of(group)
        made = sharded(plain, mesh)
        its = fd.distribute(x, mesh, placement, src=None).requires_grad_()
        got = made(its)
        assert isinstance(got, DTensor)
        assert got.placements == (Replicate(),)
        torch.testing.assert_close(got.to_local(), expected, rtol=1e-12, atol=1e-12)
        got.backward(fd.distribute(grad, mesh, Replicate(), src=None))
        assert its.grad.placements == (placement,)
        torch.testing.assert_close(its.grad.full_tensor(), mine.grad, rtol=1e-12, atol=1e-12)
        check_gradients(made, plain)

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("heads", "sequence_dim", "forward", "backward"),
    [
        ("as many", None, {RedistributeKind.ALLREDUCE: 1}, {RedistributeKind.ALLREDUCE: 1}),
        ("grouped", None, {RedistributeKind.ALLREDUCE: 1}, {RedistributeKind.ALLREDUCE: 1}),
        (
            "grouped",
            1,
            {RedistributeKind.ALL_GATHER: 1, RedistributeKind.REDUCE_SCATTER: 1},
            {RedistributeKind.ALL_GATHER: 1, RedistributeKind.REDUCE_SCATTER: 1},
        ),
        # The gradients of keys and values, which all ranks compute, and of their biases, are sums over the ranks.
        ("uneven heads", None, {RedistributeKind.ALLREDUCE: 1}, {RedistributeKind.ALLREDUCE: 5}),
    ],
)
def test_collectives(heads, sequence_dim, forward, backward):
    """One each way, whatever the three layers that share the input need."""
    size, num_heads, num_kv_heads = HEADS[heads]

    def program(group):
        mesh = mesh_of(group)
        made = ParallelAttention(WIDTH, num_heads, num_kv_heads=num_kv_heads, mesh=mesh, sequence_dim=sequence_dim)
        x = torch.ones(BATCH, LENGTH // (size if sequence_dim else 1), WIDTH, requires_grad=True)
        with fd.record_redistributions() as steps:
            out = made(x)
        there = count(steps)
        with fd.record_redistributions() as steps:
            out.sum().backward()
        return there, count(steps)

    assert run_ranks(program, size) == [(forward, backward)] * size


def test_initial_values_are_those_of_unsharded_layers():
    """The same seed draws the same values, layer by layer; in processes, as threads share torch's generator."""

    def program(group):
        torch.manual_seed(5)
        made = ParallelAttention(WIDTH, 6, num_kv_heads=2, mesh=mesh_of(group))
        torch.manual_seed(5)
        for name, width in zip(LAYERS, (WIDTH, 8, 8, WIDTH), strict=True):
            layer, plain = getattr(made, name), nn.Linear(WIDTH, width)
            assert torch.equal(layer.weight.detach().full_tensor(), plain.weight)
            assert torch.equal(layer.bias.detach().full_tensor(), plain.bias)

    run_ranks(program, 2, backend="native")


def test_dropout_is_that_of_one_process():
    """The same attention weights are dropped, in training alone; outputs and gradients are those of one rank."""
    x, grad = inputs()

    def program(group):
        results = []
        for ranks in ((0, 1), (group.rank,)):
            mesh = DeviceMesh(group, (len(ranks),), ("tp",), ranks=ranks)
            torch.manual_seed(5)
            made = ParallelAttention(WIDTH, 4, mesh=mesh, dropout=0.5, dtype=torch.float64)
            its = x.clone().requires_grad_()
            out = made(its)
            out.backward(grad)
            results.append((out.detach(), its.grad))
            made.eval()
            with torch.no_grad():
                results[-1] += (made(x),)
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(results[0][0], results[0][2])

    run_ranks(program, 2, backend="native")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((24, 5, None), "embed_dim=24 is not a multiple of num_heads=5"),
        ((24, 6, 4), "num_heads=6 is not a multiple of num_kv_heads=4"),
        ((24, 3, None), "num_heads=3 can't be sharded over 2 ranks"),
        ((24, 4, 0), "num_kv_heads=0"),
        ((24, 0, None), "num_heads=0"),
    ],
)
def test_sizes_that_do_not_divide_evenly(sizes, message):
    width, num_heads, num_kv_heads = sizes
    mesh = mesh_of(fd.SimulatedBackend.create_group(2)[0])
    with pytest.raises(ValueError, match=message):
        ParallelAttention(width, num_heads, num_kv_heads=num_kv_heads, mesh=mesh)


def test_an_input_without_a_batch():
    """It is refused, with the right shape."""
    layer = ParallelAttention(4, 2, mesh=mesh_of(fd.SimulatedBackend.create_group(1)[0]))
    with pytest.raises(ValueError, match=r"takes an input of shape \(B, T, embed_dim\), not \(3, 4\)"):
        layer(torch.ones(3, 4))


def test_a_mesh_of_several_axes():
    """It is refused before anything is computed from its size."""
    mesh = DeviceMesh(fd.SimulatedBackend.create_group(4)[0], (2, 2), ("dp", "tp"))
    with pytest.raises(ValueError, match=r"pass a slice, as mesh\['tp'\]"):
        ParallelAttention(24, 2, mesh=mesh)


def test_a_copy_is_another_layer():
    """A deep copy computes with its own parameters, whose gradients have their placements."""
    plain, (x, _) = unsharded(12, 3), inputs()

    def program(group):
        made = sharded(plain, mesh_of(group))
        expected = made(x).detach()
        other = copy.deepcopy(made)
        with torch.no_grad():
            for own in other.parameters():
                own.zero_()
        assert not other(x).any()
        assert torch.equal(made(x), expected)
        other(x).sum().backward()
        assert all(own.grad.placements == own.placements for own in other.parameters())
        assert all(own.grad is None for own in made.parameters())

    run_ranks(program, 2)
