"""Operators that gather and scatter by indices, on distributed tensors."""

import pytest
import torch
from operator_checks import assert_same, check_everywhere, check_operator, make, spread

import ferrodist as fd
from ferrodist import DeviceMesh, Partial, Replicate, Shard
from ferrodist.errors import UnsupportedOpError
from ferrodist.testing import run_ranks

ROWS = torch.tensor([3, 0, 3, 1, 2, 0])
COLUMNS = torch.tensor([[1], [4], [0], [2], [2], [1]])
PLACES = torch.randint(0, 4, (4, 5), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x, i: x.index_select(0, i), [make(4, 5), ROWS]),
        (lambda x, i: x.index_select(-1, i), [make(2, 4), ROWS]),
        (lambda x, i: x.gather(0, i), [make(4, 5), PLACES]),
        (lambda x, i: x.gather(1, i), [make(6, 4), PLACES]),
        (lambda x, i: x[i], [make(4, 5), ROWS]),
        (lambda x, i: x[:, i], [make(3, 5, 2), COLUMNS]),
        (lambda x, i: x.take_along_dim(i, 1), [make(4, 5), PLACES]),
    ],
)
def test_gathering_by_indices(function, inputs):
    """With every placement of the tensor and of the indices."""
    check_everywhere(function, inputs, meshes=[(2,), (3,)])


def test_several_indices():
    """Indices are broadcast; if they are not adjacent, their dims come first."""
    x, rows, columns = make(4, 3, 5), ROWS, COLUMNS
    check_everywhere(lambda x, i, j: x[i, :, j], [x, rows, columns], meshes=[(2,)])
    check_everywhere(lambda x, i, j: x[:, i % 3, j], [x, rows, columns], meshes=[(2,)])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i, y: x.index_add(0, i, y, alpha=2),
        lambda x, i, y: x.scatter_add(0, i[:, None].expand(6, 5), y),
        lambda x, i, y: x.index_put((i,), y, accumulate=True),
        lambda x, i, y: (x * 1).index_add_(0, i, y),
    ],
)
def test_adding_by_indices(function):
    """Several elements to one position; in place too, if the placements allow it."""
    inputs = [make(4, 5), ROWS, make(6, 5, seed=1)]
    if function(*inputs).equal((inputs[0] * 1).index_add(0, ROWS, inputs[2])):

        def check(group):
            mesh = DeviceMesh(group, (2,))
            for one in (Shard(1), Replicate()):
                for other in (Replicate(), Shard(0), Shard(1)):
                    check_operator(mesh, function, inputs, [[one], [Replicate()], [other]])

        run_ranks(check, 2)
    check_everywhere(lambda x, i, y: x.index_add(0, i, y), inputs, meshes=[(2,)])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i, y: x.index_copy(0, i, y),
        lambda x, i, y: x.scatter(0, i[:, None].expand(3, 5), y),
        lambda x, i, y: x.scatter(1, i[:, None].expand(3, 1), 7.0) + y[:, :1].sum(0),
        lambda x, i, y: x.index_fill(0, i, 7) + y.sum(0),
        lambda x, i, y: x.index_put((i,), y),
        lambda x, i, y: x.index_put((i,), y[0]),
        lambda x, i, y: x.scatter_reduce(0, i[:, None].expand(3, 5), y, "amax"),
    ],
)
def test_scattering_by_indices(function):
    """One element to each position."""
    check_everywhere(function, [make(4, 5), torch.tensor([3, 0, 2]), make(3, 5, seed=1)], meshes=[(2,)])


def test_assignments_by_indices_and_masks():
    """``x[index] = y`` and ``x[mask] = number`` are as in one process."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        rows, mask = spread(ROWS[1:4], mesh, [Replicate()]), spread(make(4, 5) > 0, mesh, [Shard(1)])
        for placement in (Replicate(), Shard(0), Shard(1)):
            full, x = make(4, 5), spread(make(4, 5), mesh, [placement])
            full[make(4, 5) > 0] = 9.0
            x[mask] = 9.0
            assert_same(x, full, f"by a mask, {placement}")
            if placement != Shard(0):
                full[:, ROWS[1:4]] += 5 if placement == Replicate() else 0
                if placement == Replicate():
                    x[:, rows] += 5
                assert_same(x, full, f"by numbers, {placement}")

    run_ranks(check, 2)


def test_data_dependent_shapes_are_refused():
    """The error names the operator and an alternative."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        x = fd.distribute(make(4, 5), mesh, Shard(0))
        for function in (
            lambda: x[x > 0],
            lambda: torch.masked_select(x, x > 0),
            x.nonzero,
            lambda: torch.unique(x),
            lambda: x.index_put((x > 0,), x[0]),
        ):
            with pytest.raises(UnsupportedOpError, match="depends on the"):
                function()

    run_ranks(check, 2)


def embed(**options):
    return lambda weight, rows: torch.nn.functional.embedding(rows, weight, **options)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True, "padding_idx": 0}], ids=str)
def test_embedding(options):
    """Every placement of the table, with uneven rows too, and of the tokens."""
    rows = torch.tensor([[2, 0, 4], [2, 2, 1]])
    check_everywhere(embed(**options), [make(5, 4), rows])
    check_everywhere(embed(**options), [make(3, 3), rows[:, :2] % 3], meshes=[(4,)])


def test_embedding_on_two_axes():
    """A vocabulary sharded over one axis, or over both, and batches over the other."""
    rows = torch.tensor([[2, 0, 4], [6, 2, 1]])

    def check(group):
        mesh = DeviceMesh(group, (2, 2))
        for table in ([Shard(0), Shard(0)], [Replicate(), Shard(0)], [Shard(1), Shard(0)], [Shard(0), Partial()]):
            for numbers in ([Replicate(), Replicate()], [Shard(0), Replicate()]):
                check_operator(mesh, embed(padding_idx=6), [make(7, 4), rows], [table, numbers])

    run_ranks(check, 4)


def test_sharded_vocabulary_stays_sharded():
    """Neither the table nor its gradient is gathered; gradients of replicated tables are replicated."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        rows = fd.distribute(torch.tensor([3, 0]), mesh, Replicate())
        for size, placement, then in (
            (4, Shard(0), Partial()),
            (5, Replicate(), Replicate()),
            (6, Shard(1), Shard(1)),
        ):
            table = fd.distribute(make(size, 6), mesh, placement).requires_grad_()
            found = torch.nn.functional.embedding(rows, table)
            assert found.placements == (then,)
            found.redistribute(Replicate() if isinstance(then, Partial) else then).sum().backward()
            assert table.grad.placements == (placement,)
        for wrong in (-1, 4):
            with pytest.raises(IndexError, match="index out of range"):
                torch.nn.functional.embedding(rows * 0 + wrong, fd.distribute(make(4, 6), mesh, Shard(0)))

    run_ranks(check, 2)


def test_sharded_table_after_a_replicated_one_of_its_shape():
    """The replicated table's gradient was cached first; the sharded one's is not replicated for that."""

    def gradient(mesh, placement):
        rows = fd.distribute(torch.tensor([3, 0]), mesh, Replicate(), src=None)
        table = fd.distribute(make(4, 6), mesh, placement, src=None).requires_grad_()
        torch.nn.functional.embedding(rows, table).redistribute(Replicate()).sum().backward()
        return table.grad

    def check(group):
        mesh = DeviceMesh(group, (2,))
        full, sharded, again = (gradient(mesh, placement) for placement in (Replicate(), Shard(0), Replicate()))
        assert full.placements == (Replicate(),)
        assert sharded.placements == (Shard(0),)
        assert torch.equal(full.full_tensor(), sharded.full_tensor())
        assert torch.equal(full.full_tensor(), again.full_tensor())

    run_ranks(check, 2)


def test_one_hot():
    """With the number of classes given."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for placement in (Replicate(), Shard(0)):
            rows = fd.distribute(ROWS, mesh, placement)
            one_hot = torch.nn.functional.one_hot(rows, 4)
            assert_same(one_hot, torch.nn.functional.one_hot(ROWS, 4), "one_hot")
            assert one_hot.placements == (placement,)

    run_ranks(check, 2)


def test_broadcast_values_and_unindexed_dims():
    """On two axes, with some placements of each."""
    inputs = [make(3, 4, 5), ROWS, make(3, 6, 1, seed=1)]

    def check(group):
        mesh = DeviceMesh(group, (2, 2))
        for placements in (
            [[Shard(0), Shard(2)], [Replicate(), Replicate()], [Shard(0), Replicate()]],
            [[Partial(), Shard(0)], [Shard(0), Replicate()], [Shard(1), Shard(0)]],
            [[Shard(1), Replicate()], [Shard(0), Shard(0)], [Replicate(), Partial()]],
        ):
            check_operator(
                mesh, lambda x, i, y: torch.ops.aten.index_put(x, [None, i], y, accumulate=True), inputs, placements
            )

    run_ranks(check, 4)
