"""Random numbers on distributed tensors, which are those of one process; and new tensors."""

import pytest
import torch
from operator_checks import assert_same, make, placements_of, spread

import ferrodist as fd
from ferrodist import DeviceMesh, Partial, Replicate, Shard
from ferrodist.errors import CollectiveMismatchError
from ferrodist.tensor import factories
from ferrodist.testing import run_ranks


def seeded(seed=5):
    return torch.Generator().manual_seed(seed)


DRAWN_IN_PLACE = {
    "bernoulli_": lambda x, g: x.bernoulli_(0.3, generator=g),
    "uniform_": lambda x, g: x.uniform_(-1, 2, generator=g),
    "normal_": lambda x, g: x.normal_(1, 2, generator=g),
    "exponential_": lambda x, g: x.exponential_(generator=g),
    "random_": lambda x, g: x.random_(0, 9, generator=g),
    "a transposed view": lambda x, g: x.t().normal_(generator=g).t(),
    "a view of another shape": lambda x, g: x.unsqueeze(0).uniform_(generator=g).squeeze(0),
    "init.normal_": lambda x, g: torch.nn.init.normal_(x, generator=g),
    "init.xavier_uniform_": lambda x, g: torch.nn.init.xavier_uniform_(x, generator=g),
    "init.kaiming_normal_": lambda x, g: torch.nn.init.kaiming_normal_(x, generator=g),
}


@pytest.mark.parametrize(("shape", "num_axes"), [((2,), 1), ((3,), 1), ((2, 2), 2)])
def test_in_place_draws_equal_one_process(shape, num_axes):
    """The same bits in every shard, and the same state of the generator afterwards."""

    def check(group):
        mesh = DeviceMesh(group, shape)
        for name, draw in DRAWN_IN_PLACE.items():
            size = (5, 7) if "transposed" in name else (5, 2, 7)
            mine, other = seeded(), seeded()
            expected = draw(make(*size), mine)
            for placements in placements_of(len(size), num_axes, partial=False):
                x = spread(make(*size), mesh, placements)
                with torch.no_grad():
                    result = draw(x, other)
                assert_same(result, expected, f"{name} of {placements}", rtol=0, atol=0)
                assert torch.equal(mine.get_state(), other.get_state())
                other = seeded()

    run_ranks(check, {(2,): 2, (3,): 3, (2, 2): 4}[shape])


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, g: torch.rand_like(x, generator=g),
        lambda x, g: torch.randn_like(x, dtype=torch.float32, generator=g),
        lambda x, g: torch.randint_like(x, 2, 9, generator=g),
        lambda x, g: torch.bernoulli(x, 0.25, generator=g),
        lambda x, g: torch.bernoulli(x.abs().clamp(max=1), generator=g),
        lambda x, g: torch.multinomial(x.abs(), 2, generator=g),
        lambda x, g: torch.empty_like(x).bernoulli_(x.abs().clamp(max=1), generator=g),
    ],
)
def test_rand_like(draw):
    """New tensors have the placements of their model; the elements of partial tensors are not needed."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for turn in (lambda x: x, torch.t):
            for placements in placements_of(2, 1):
                got = draw(turn(spread(make(5, 7), mesh, placements)), seeded())
                assert_same(got, draw(turn(make(5, 7)), seeded()), str(placements), rtol=0, atol=0)

    run_ranks(check, 2)


def test_dropout():
    """F.dropout and native_dropout, forward and backward, from processes' default generators."""
    x = make(6, 5)

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for function in (torch.nn.functional.dropout, lambda x: torch.native_dropout(x, 0.4, True)[0]):
            for placements in placements_of(2, 1):
                plain, sharded = x.clone().requires_grad_(), spread(x, mesh, placements).requires_grad_()
                torch.manual_seed(3)
                expected = function(plain)
                torch.manual_seed(3)
                got = function(sharded)
                assert_same(got, expected, f"dropout of {placements}")
                expected.square().sum().backward()
                got.square().sum().backward()
                assert_same(sharded.grad, plain.grad, f"gradient of dropout of {placements}")
        other = spread(x, mesh, [Shard(0)])
        assert torch.nn.functional.dropout(other, training=False) is other
        torch.manual_seed(group.rank)
        with pytest.raises(CollectiveMismatchError, match=r"torch\.manual_seed\(seed\) with the same seed"):
            torch.nn.functional.dropout(other)

    run_ranks(check, 2, backend="native")


def test_generators_in_different_states_raise_on_all_ranks():
    """Before anything is drawn or written."""

    def check(group):
        mesh = DeviceMesh(group, (3,))
        generator = seeded(1 if group.rank == 1 else 0)
        before = generator.get_state()
        x = fd.distribute(make(4, 5), mesh, Shard(0))
        for draw in (
            lambda: x.normal_(generator=generator),
            lambda: torch.rand_like(x, generator=generator),
            lambda: torch.bernoulli(x.abs() / 2, generator=generator),
            lambda: factories.rand((3, 3), mesh=mesh, placements=Shard(0), generator=generator),
        ):
            with pytest.raises(CollectiveMismatchError, match="generators of ranks 1 are") as caught:
                draw()
            assert caught.value.ranks == (1,)
        assert torch.equal(generator.get_state(), before)
        assert_same(x, make(4, 5), "what could not be drawn")

    run_ranks(check, 3)


def test_numbers_drawn_into_a_partial_sum_are_its_sum():
    """If each rank kept all numbers, the sum would be their double."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        x = spread(make(4, 5), mesh, [Partial()])
        x.normal_(generator=seeded())
        assert x.placements == (Partial(),)
        assert_same(x, make(4, 5).normal_(generator=seeded()), "what was drawn")

    run_ranks(check, 2)


@pytest.mark.parametrize(
    ("make_plain", "make_distributed"),
    [
        (lambda: torch.zeros(5, 3), lambda where: factories.zeros((5, 3), **where)),
        (lambda: torch.ones(5, 3), lambda where: factories.ones((5, 3), **where)),
        (lambda: torch.full((5, 3), 7), lambda where: factories.full((5, 3), 7, **where)),
        (
            lambda: torch.full((5, 3), 0.5, dtype=torch.float64),
            lambda where: factories.full((5, 3), 0.5, dtype=torch.float64, **where),
        ),
        (
            lambda: torch.rand(5, 3, generator=seeded()),
            lambda where: factories.rand((5, 3), generator=seeded(), **where),
        ),
        (
            lambda: torch.randn(5, 3, dtype=torch.float64, generator=seeded()),
            lambda where: factories.randn((5, 3), dtype=torch.float64, generator=seeded(), **where),
        ),
        (lambda: torch.arange(1, 15).view(7, 2), lambda where: factories.arange(1, 15, **where).view(7, 2)),
        (lambda: torch.empty(5, 3).fill_(1), lambda where: factories.empty((5, 3), **where).fill_(1)),
    ],
)
def test_factories(make_plain, make_distributed):
    """With every placement, on one axis and on two."""

    def check(group, shape):
        mesh = DeviceMesh(group, shape)
        expected = make_plain()
        for placements in placements_of(1 if expected.shape == (7, 2) else 2, len(shape)):
            if make_plain().eq(1).all() and Partial() in placements:
                continue
            assert_same(make_distributed({"mesh": mesh, "placements": placements}), expected, str(placements))

    run_ranks(check, 3, (3,))
    run_ranks(check, 4, (2, 2))


def test_partial_ones_and_gradients_of_leaves():
    """The sum of all ranks' values is one; and leaves get gradients."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        ones = factories.ones((3,), mesh=mesh, placements=Partial(), requires_grad=True)
        assert_same(ones, torch.ones(3), "ones")
        ones.sum().backward()
        assert_same(ones.grad, torch.ones(3), "gradient")

    run_ranks(check, 2)


def test_tensors_like_others():
    """Their elements don't depend on the other's placements, and nothing is sent; other shapes are replicated."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for placements in placements_of(2, 1):
            x, plain = spread(make(5, 4), mesh, placements), make(5, 4)
            for function in (
                torch.zeros_like,
                torch.ones_like,
                lambda x: torch.full_like(x, 3),
                lambda x: torch.zeros_like(x, dtype=torch.int32),
                lambda x: torch.empty_like(x).fill_(2),
                lambda x: x.new_zeros(2, 3),
                lambda x: x.new_ones(2),
                lambda x: x.new_full((2, 2), 5, dtype=torch.int64),
                lambda x: x.new_empty(0),
            ):
                assert_same(function(x), function(plain), f"{function} of {placements}")
            assert torch.zeros_like(x).placements == (Replicate() if placements[0] == Partial() else placements[0],)
            assert x.new_zeros(5, 4).placements == (Replicate(),)

    run_ranks(check, 2)
