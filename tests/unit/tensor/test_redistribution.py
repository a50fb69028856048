"""Redistribution from each spec to each other one, by the fewest bytes."""

import itertools
import random
from functools import partial

import pytest
import torch
from operator_checks import NUM_RANKS, make, placements_of, spread

import ferrodist as fd
from ferrodist import DeviceMesh, DTensor, Partial, ReduceOp, Replicate, Shard
from ferrodist.tensor.general_all_to_all import GeneralAllToAll
from ferrodist.tensor.redistribute_plan import RedistributeKind, make_plan
from ferrodist.tensor.spec import DTensorSpec, check_placements
from ferrodist.testing import run_ranks

R, P = Replicate(), Partial()


def check_pairs(group, shape, tensor, pairs):
    mesh = DeviceMesh(group, shape)
    for before, after in pairs:
        got = spread(tensor, mesh, before).redistribute(after)
        assert got.placements == after
        assert tuple(got.to_local().shape) == got._spec.local_shape
        torch.testing.assert_close(got.full_tensor(), tensor, msg=partial("{} -> {}: {}".format, before, after))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_pair_on_one_axis(size):
    """With uneven and empty shards, blocks, and each reduction."""
    places = [R, *[Shard(dim) for dim in range(3)], Shard(0, blocks=2), Shard(2, blocks=3)]
    places += [Partial(op) for op in (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX)]
    pairs = [((one,), (other,)) for one, other in itertools.product(places, repeat=2)]
    run_ranks(check_pairs, size, (size,), make(4, 3, 6), pairs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.bfloat16, torch.complex64])
def test_pairs_of_other_dtypes(dtype):
    """Complex numbers have no minimum, and integers no mean."""
    tensor = (make(5, 3) * 4).round().to(dtype)
    folds = {
        torch.int32: "SUM MIN MAX PRODUCT",
        torch.bool: "MIN MAX",
        torch.bfloat16: "MIN MAX",
        torch.complex64: "SUM",
    }
    places = [R, Shard(0), Shard(1), *[Partial(ReduceOp[name]) for name in folds[dtype].split()]]
    pairs = [((one,), (other,)) for one, other in itertools.product(places, repeat=2)]
    run_ranks(check_pairs, 2, (2,), tensor, pairs)


@pytest.mark.parametrize("shape", [(2, 2), (1, 3)])
def test_every_pair_on_two_axes(shape):
    """With two dims, one of which no axis splits evenly."""
    places = placements_of(2, 2)
    run_ranks(check_pairs, NUM_RANKS.get(shape, 3), shape, make(6, 5), list(itertools.product(places, repeat=2)))


def test_pairs_on_two_axes_in_blocks():
    """An axis shards what a later one has sharded, or what remains of flattened dims."""
    places = [(Shard(0, blocks=2), Shard(0)), (Shard(0, blocks=2), R), (R, Shard(0, blocks=3)), (Shard(0), Shard(0))]
    places += [(Shard(0, blocks=3), Shard(1)), (P, Shard(0, blocks=2)), (R, R), (Shard(1), Shard(0)), (R, Shard(0))]
    run_ranks(check_pairs, 4, (2, 2), make(12, 4), list(itertools.product(places, repeat=2)))


def test_pairs_on_three_axes():
    """A sample: there are 4096 with two dims."""
    places = placements_of(2, 3)
    pairs = random.Random(3).sample(list(itertools.product(places, repeat=2)), 50)
    run_ranks(check_pairs, 8, (2, 2, 2), make(7, 5), pairs)


@pytest.mark.parametrize("backend", ["tcp-threads", "native-threads"])
def test_pairs_on_other_backends(backend):
    """The steps are ordinary collectives."""
    places = placements_of(2, 1)
    run_ranks(check_pairs, 3, (3,), make(4, 5), list(itertools.product(places, repeat=2)), backend=backend)


def plan(shape, before, after, sizes=(8, 16), dtype=torch.float32):
    mesh = DeviceMesh(fd.SimulatedBackend.create_group(NUM_RANKS[shape])[0], shape)
    spec = DTensorSpec.make(mesh, check_placements(mesh, before, sizes), sizes, dtype)
    return make_plan(spec, spec.with_placements(after))


def moves(*arguments, **options):
    return [(step.kind, step.axes, step.size_bytes) for step in plan(*arguments, **options).steps]


WHOLE = 8 * 16 * 4


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([R], [Shard(0)], [(RedistributeKind.SLICE, 0)]),
        ([R], [P], [(RedistributeKind.MAKE_PARTIAL, 0)]),
        ([Shard(0)], [P], [(RedistributeKind.MAKE_PARTIAL, 0)]),
        ([Shard(1)], [R], [(RedistributeKind.ALL_GATHER, 3 / 4)]),
        ([Shard(0)], [Shard(1)], [(RedistributeKind.ALL_TO_ALL, 3 / 16)]),
        ([P], [Shard(1)], [(RedistributeKind.REDUCE_SCATTER, 3 / 4)]),
        ([P], [R], [(RedistributeKind.ALLREDUCE, 6 / 4)]),
    ],
)
def test_one_axis_takes_one_collective(before, after, expected):
    found = moves((4,), before, tuple(after))
    assert found == [(move, (0,), pytest.approx(part * WHOLE)) for move, part in expected]


def test_one_collective_over_several_axes():
    """One collective over several axes sends each byte once, where one after the other would send more."""
    assert moves((2, 2), [P, P], (R, R)) == [(RedistributeKind.ALLREDUCE, (0, 1), 6 / 4 * WHOLE)]
    assert moves((2, 2), [Shard(0), Shard(0)], (R, R)) == [(RedistributeKind.ALL_GATHER, (0, 1), 3 / 4 * WHOLE)]
    assert moves((2, 2), [P, P], (Shard(1), Shard(1))) == [(RedistributeKind.REDUCE_SCATTER, (0, 1), 3 / 4 * WHOLE)]


def test_slices_come_before_gathers():
    """A dim that another axis will shard is sliced first, so that less is gathered."""
    steps = moves((2, 2), [Shard(0), R], (R, Shard(1)))
    assert [move for move, _, _ in steps] == [RedistributeKind.SLICE, RedistributeKind.ALL_GATHER]
    assert sum(size for _, _, size in steps) == WHOLE / 4


def test_an_outer_axis_is_gathered_by_an_exchange():
    """Without the first of two axes that shard a dim two ranks lack a quarter of the tensor, and two lack two."""
    assert moves((2, 2), [Shard(0), Shard(0)], (R, Shard(0))) == [(RedistributeKind.EXCHANGE, (0, 1), 6 / 16 * WHOLE)]


def test_an_innermost_axis_changes_by_itself():
    """The first axis, in blocks that the second one splits: each pair of ranks gathers its shards."""
    inner = Shard(0, blocks=2)
    assert moves((2, 2), [inner, Shard(0)], (R, Shard(0))) == [(RedistributeKind.ALL_GATHER, (0,), WHOLE / 4)]
    assert moves((2, 2), [R, Shard(0)], (inner, Shard(0))) == [(RedistributeKind.SLICE, (0,), 0)]


def test_an_exchange_sends_each_element_once():
    """One of the ranks with the same shard sends it: two of four ranks lack half of 32 elements."""
    pattern = GeneralAllToAll((8, 4), [R, Shard(0)], [Shard(0), R], (2, 2))
    assert pattern.count_sent() == 8
    overlaps = [pattern.overlap(sender, receiver) for sender, receiver in itertools.permutations(GRID, 2)]
    assert sum(overlap.numel for overlap in overlaps if overlap is not None) == 4 * 8


def test_no_plan_sends_less_than_ranks_lack():
    """Without reductions the elements sent are those that ranks lack, counted one by one."""
    places = placements_of(2, 2, partial=False)
    sizes = (8, 4)
    for before, after in itertools.product(places, repeat=2):
        had, wanted = ([part_of(place, at, sizes) for at in GRID] for place in (before, after))
        lacking = sum(len(mine - its) for mine, its in zip(wanted, had, strict=True)) / 4 * 8
        found = plan((2, 2), before, after, sizes, torch.float64).size_bytes
        assert found == pytest.approx(lacking), (before, after)


GRID = list(itertools.product(range(2), repeat=2))


def part_of(placements, coordinate, sizes):
    """The elements of a rank of a mesh of 2 by 2, as pairs of indices."""
    full = torch.arange(sizes[0] * sizes[1]).view(sizes)
    for placement, at in zip(placements, coordinate, strict=True):
        if isinstance(placement, Shard):
            full = full.tensor_split([(full.shape[placement.dim] + 1) // 2], placement.dim)[at]
    return set(full.reshape(-1).tolist())


def test_no_plan_sends_more_than_through_replicate():
    """A plan is never more expensive than gathering everything and slicing it."""
    places = placements_of(2, 2)
    for before, after in itertools.product(places, repeat=2):
        direct = plan((2, 2), before, after).size_bytes
        there, back = plan((2, 2), before, (R, R)).size_bytes, plan((2, 2), (R, R), after).size_bytes
        assert direct <= there + back + 1e-9, (before, after)


def test_a_plan_is_printed_with_its_bytes():
    """Steps, axes by name, placements and bytes."""
    mesh = DeviceMesh(fd.SimulatedBackend.create_group(4)[0], (2, 2), ("dp", "tp"))
    tensor = fd.distribute(torch.zeros(8, 16), mesh, [Shard(0), P], src=None)
    assert str(tensor.plan([R, Shard(1)])).splitlines() == [
        "float32[8, 16] over {dp: Shard(0), tp: Partial()}: [Shard(0), Partial()] -> [Replicate(), Shard(1)]",
        "  1. reduce_scatter over tp: [Shard(0), Partial()] -> [Shard(0), Shard(1)], 128 bytes",
        "  2. all_gather over dp: [Shard(0), Shard(1)] -> [Replicate(), Shard(1)], 128 bytes",
        "  together 256 bytes from each rank, on average",
    ]
    assert str(tensor.plan([Shard(0), P])).splitlines()[1:] == ["  together 0 bytes from each rank, on average"]


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_gradients_have_the_placements_of_the_input(shape):
    """The gradient of redistribute has the input's placements; a partial input's is replicated."""

    def differentiate(group):
        mesh = DeviceMesh(group, shape)
        full, grad = make(4, 6), make(4, 6, seed=1)
        places = placements_of(2, len(shape))
        for before, after, its in zip(places, reversed(places), places[3:] + places[:3], strict=True):
            source = spread(full, mesh, before).requires_grad_()
            result = source.redistribute(after)
            result.backward(spread(grad, mesh, its))
            assert source.grad.placements == tuple(R if one == P else one for one in before)
            torch.testing.assert_close(source.grad.full_tensor(), grad)

    run_ranks(differentiate, NUM_RANKS[shape])


def test_a_redistribution_that_moves_nothing_is_a_view():
    """It may be written in place, as its tensor's other views, and gradients go through."""
    values = make(4, 6)

    def check(group):
        mesh = DeviceMesh(group, (2,))
        found = []
        for redistribute in (lambda x: x.redistribute(Shard(0)), lambda x: x.view(4, 6)):
            x = fd.distribute(values, mesh, Shard(0)).requires_grad_()
            y = x * 2
            redistribute(y).div_(4).exp_()
            y.square().sum().backward()
            found.append((y.full_tensor(), x.grad.full_tensor()))
        torch.testing.assert_close(*found)

    run_ranks(check, 2, backend="native")


def test_second_derivatives_go_through():
    """Gradients of gradients of redistribute, to_local and from_local."""

    def differentiate(group):
        mesh = DeviceMesh(group, (2,))
        local = make(3, 4, seed=group.rank).requires_grad_()
        full = DTensor.from_local(local, mesh, Shard(0)).redistribute(Shard(1)).redistribute(R)
        total = full.to_local().pow(3).sum()
        (first,) = torch.autograd.grad(total, local, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), local)
        torch.testing.assert_close(first, 3 * local.square())
        torch.testing.assert_close(second, 6 * local)

    run_ranks(differentiate, 2)
