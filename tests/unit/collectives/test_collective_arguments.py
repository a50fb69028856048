"""Arguments that are integers or numbers of any kind, iterables, and what is refused before anything is waited for."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

import ferrodist as fd
from ferrodist.collectives.reduce_op import PremultipliedSum
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend


def test_any_integer_is_a_rank_or_a_dim() -> None:
    """numpy's integers and tensors of one integer count as what they are."""

    def on_rank(group: Backend) -> None:
        x = torch.full((2, 2), group.rank + 1.0)
        for one in (np.int64(1), np.uint8(1), torch.tensor(1)):
            assert fd.broadcast(x, one)[0, 0] == 2
            assert fd.async_broadcast(x, one).wait()[0, 0] == 2
            assert fd.reduce(x, one).numel() == 4 * group.rank
            assert fd.gather(x, one, dim=one).shape == ((2, 4) if group.rank else (0,))
            assert fd.scatter(x if group.rank else None, one, dim=one).tolist() == [[2], [2]]
            assert fd.all_gather(x, one).shape == (2, 4)
            assert fd.all_gather_uneven(x, one).shape == (2, 4)
            assert fd.reduce_scatter(x, dim=one).tolist() == [[3], [3]]
            assert fd.broadcast_object(group.rank, one) == 1
            assert fd.gather_object(group.rank, one) == ([0, 1] if group.rank else None)
            assert fd.scatter_object("ab", one) == "ab"[group.rank]
            counts = [one, one]
            assert fd.all_to_all_single_uneven(x, counts, counts).tolist() == [[1, 1], [2, 2]]
            if group.rank:
                assert fd.recv((2 * one, one + 1), None, one - 1).shape == (2, 2)
            else:
                fd.send(x, one)
            sub = fd.SubBackend(group, [one, 0])
            assert sub.members == (1, 0)
            assert type(sub.members[0]) is int
            assert sub.to_global(one - 1) == 1

    run_ranks(on_rank, 2)


def test_bools_are_no_ranks_and_no_dims() -> None:
    """Nor are floats and text: refused on the rank that passes them, which then goes on."""
    x = torch.ones(2, 2)
    for wrong in (cast("int", value) for value in (True, 1.0, "1", None, np.float64(1), np.True_)):
        calls: list[tuple[type[Exception], Callable[[Any], object]]] = [
            (fd.InvalidRankError, lambda wrong: fd.broadcast(x, wrong)),
            (fd.InvalidRankError, lambda wrong: fd.gather_object(1, wrong)),
            (fd.InvalidRankError, lambda wrong: fd.SubBackend(fd.default_group(), [0, wrong])),
            (fd.InvalidRankError, lambda wrong: fd.SubBackend(fd.default_group(), [0, 1]).to_global(wrong)),
            (TypeError, lambda wrong: fd.all_gather(x, wrong)),
            (TypeError, lambda wrong: fd.reduce_scatter(x, dim=wrong)),
            (TypeError, lambda wrong: fd.gather(x, dim=wrong)),
            (TypeError, lambda wrong: fd.scatter(None, 0, dim=wrong)),
        ]

        def on_rank(group: Backend, calls: Any = calls, wrong: int = wrong) -> None:
            if group.rank == 1:
                for kind, call in calls:
                    with pytest.raises(kind):
                        call(wrong)
            fd.barrier()

        run_ranks(on_rank, 2)


@pytest.mark.parametrize("name", ["send_counts", "recv_counts"])
def test_counts_that_are_no_integers(name: str) -> None:
    """The error says which of the two, and which of its members."""

    def on_rank(group: Backend) -> None:
        if group.rank == 1:
            for wrong in ([1, 1.0], [1, None], [1, True]):
                counts = {"send_counts": [1, 1], "recv_counts": [1, 1], name: wrong}
                with pytest.raises(TypeError, match=rf"{name}\[1\] must be an integer"):
                    fd.all_to_all_single_uneven(torch.ones(2), **counts)
            counts = {"send_counts": [1, 1], "recv_counts": [1, 1], name: 2}
            with pytest.raises(TypeError, match=f"{name} must be a list of integers, one for each rank, not int"):
                fd.all_to_all_single_uneven(torch.ones(2), **counts)
        fd.barrier()

    run_ranks(on_rank, 2)


def test_lists_that_are_no_lists() -> None:
    """Of tensors, of sizes and of objects: the error says which argument it is."""

    def on_rank(_: Backend) -> None:
        wrong: Any = 5
        with pytest.raises(TypeError, match=r"tensors must be a torch\.Tensor or a list of them, not int"):
            fd.all_to_all(wrong)
        with pytest.raises(TypeError, match="out must be a list of tensors, as tensors is, not int"):
            fd.all_to_all([torch.ones(2)], out=wrong)
        with pytest.raises(TypeError, match="shape must be a sequence of integers"):
            fd.empty_symmetric(wrong)
        with pytest.raises(ValueError, match="pass one object for each rank"):
            fd.scatter_object(wrong)

    run_ranks(on_rank, 1)


@pytest.mark.parametrize(
    ("shape", "kind", "words"),
    [
        ((-1,), ValueError, r"below 0: \(-1,\)"),
        ((2.0,), TypeError, r"shape\[0\] must be an integer, not 2\.0"),
        ((3, True), TypeError, r"shape\[1\] must be an integer"),
        ((None,), TypeError, r"shape\[0\]"),
        (5, TypeError, "sequence of integers or None, not 5"),
        ("ab", TypeError, r"shape\[0\]"),
        ((1,) * 13, ValueError, "13 dims"),
    ],
)
def test_shapes_that_nothing_fits(shape: Any, kind: type[Exception], words: str) -> None:
    """A receive that could only fail is refused before it waits, and takes no message."""

    def on_rank(group: Backend) -> None:
        if group.rank == 1:
            with pytest.raises(kind, match=words):
                fd.recv(shape, None, 0)
            with pytest.raises(kind, match=words):
                fd.sendrecv(torch.ones(1), 0, shape, 0)
            fd.barrier()
            assert fd.recv([np.int64(1), 2], None, 0).shape == (1, 2)
        else:
            fd.barrier()
            fd.send(torch.ones(1, 2), 1)

    run_ranks(on_rank, 2)


def test_a_batch_takes_any_iterable() -> None:
    """A generator too: each of its operations is done, once."""

    def on_rank(group: Backend) -> None:
        other, into = 1 - group.rank, torch.zeros(2, 3)
        sends = (fd.Send(torch.full((3,), i + 1.0), other) for i in range(2))
        assert fd.batch(sends) == [other, other]
        assert fd.batch(fd.Recv(row, other) for row in into) == [other, other]
        assert into.tolist() == [[1] * 3, [2] * 3]

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("factor", [2, 2.0, np.float32(2), np.float64(2), np.int8(2), Fraction(2)])
def test_any_real_number_is_a_factor(factor: Any) -> None:
    """Whatever class it is of."""
    op = fd.premultiplied_sum(factor)
    assert isinstance(op, PremultipliedSum)
    assert type(op.factor) is float
    assert op.factor == 2


@pytest.mark.parametrize(
    ("factor", "kind"),
    [
        (True, TypeError),
        (np.True_, TypeError),
        ("2", TypeError),
        (2j, TypeError),
        (torch.tensor(2.0), TypeError),
        (np.float32("nan"), ValueError),
        (float("inf"), ValueError),
        (10**400, ValueError),
    ],
)
def test_factors_that_are_no_finite_numbers(factor: Any, kind: type[Exception]) -> None:
    """TypeError for what is no number, ValueError for one that no float is."""
    with pytest.raises(kind, match="factor"):
        fd.premultiplied_sum(factor)


def test_shapes_are_compared_by_their_elements() -> None:
    """What the docstrings say of ranks whose shapes differ: their elements are joined in order."""

    def on_rank(group: Backend) -> None:
        x = torch.arange(6.0).view((2, 3) if group.rank else (3, 2))
        assert fd.allreduce(x).equal(2 * x)
        assert fd.broadcast(x).equal(x)
        assert fd.all_gather(x).equal(torch.cat([x, x]))
        with pytest.raises(fd.CollectiveMismatchError, match=r"float32\[12\].*float32\[10\]"):
            fd.all_gather(torch.ones(6 - group.rank))

    run_ranks(on_rank, 2)
