"""Forward-mode differentiation and functorch transforms, which collectives don't go through, are refused by name."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from torch.autograd import forward_ad

import ferrodist as fd
from ferrodist.backends.native import is_native_available
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

_CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "allreduce": fd.allreduce,
    "async_allreduce": fd.async_allreduce,
    "reduce": fd.reduce,
    "broadcast": fd.broadcast,
    "all_gather": fd.all_gather,
    "all_gather_uneven": fd.all_gather_uneven,
    "gather": fd.gather,
    "scatter": lambda x: fd.scatter(x, 1),
    "reduce_scatter": fd.reduce_scatter,
    "all_to_all": lambda x: fd.all_to_all([x, x]),
    "all_to_all_single_uneven": lambda x: fd.all_to_all_single_uneven(x, [1, 1], [1, 1]),
    "out=": lambda x: fd.allreduce(torch.ones(2), out=x),
    "send": lambda x: fd.send(x, 0),
    "recv_into": lambda x: fd.recv_into(x, 0),
    "sendrecv": lambda x: fd.sendrecv(x, 0, None, 0),
}


@pytest.fixture(autouse=True, scope="module")
def _decompositions() -> None:
    """Have torch load what forward mode needs, in one thread: it warns of itself."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")
        forward_ad.make_dual(torch.ones(1), torch.ones(1))


def _refused(call: Callable[[], object], words: str) -> None:
    """On rank 1 ``call`` is refused, with nothing sent: the same group goes on."""

    def on_rank(group: Backend) -> None:
        if group.rank == 1:
            with pytest.raises(NotImplementedError, match=words):
                call()
        assert fd.allreduce(torch.ones(2)).tolist() == [2, 2]

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("name", _CALLS)
def test_tangents_are_not_dropped(name: str) -> None:
    """A tensor with a tangent is refused, for its result would have none."""

    def call() -> None:
        with forward_ad.dual_level():
            _CALLS[name](forward_ad.make_dual(torch.ones(2), torch.ones(2)))

    _refused(call, r"forward-mode .* would be lost: .*detach\(\)")


def test_other_tensors_pass_inside_of_a_dual_level() -> None:
    """Where tangents may be, tensors without one pass: of any dtype, parameters, and what detach() gives."""

    def on_rank(group: Backend) -> None:
        del group
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        for tensor in (torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2) > 0, dual.detach()):
            fd.allreduce(tensor)
        weight = torch.ones(2, requires_grad=True)
        fd.allreduce(weight).sum().backward()
        assert weight.grad.tolist() == [2, 2]

    with forward_ad.dual_level():
        run_ranks(on_rank, 2)


_TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], object]], object]] = {
    "vmap": lambda call: torch.vmap(lambda x: (call(x), x)[1])(torch.ones(3, 2)),
    "grad": lambda call: torch.func.grad(lambda x: (call(x), x.sum())[1])(torch.ones(2)),
    "jvp": lambda call: torch.func.jvp(lambda x: (call(x), x)[1], (torch.ones(2),), (torch.ones(2),)),
    "functionalize": lambda call: torch.func.functionalize(lambda x: (call(x), x)[1])(torch.ones(2)),
}


@pytest.mark.parametrize("transform", _TRANSFORMS)
@pytest.mark.parametrize("name", _CALLS)
def test_transforms_are_refused(name: str, transform: str) -> None:
    """A tensor of a functorch transform is refused with a sentence that names them."""
    _refused(lambda: _TRANSFORMS[transform](_CALLS[name]), "functorch transforms")


@pytest.mark.skipif(not is_native_available(), reason="this installation was built without the native engine")
def test_short_ways_refuse_them_too() -> None:
    """Neither a tensor with a tangent nor one of a transform gets to the engine, which sees plain memory, or none."""

    def on_rank(group: Backend) -> None:
        if group.rank == 1:
            for call in _CALLS.values():
                with forward_ad.dual_level():
                    dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
                    with pytest.raises(NotImplementedError, match="forward-mode"):
                        call(dual)
                for transform in _TRANSFORMS.values():
                    with pytest.raises(NotImplementedError, match="functorch transforms"):
                        transform(call)
        assert fd.allreduce(torch.ones(2)).tolist() == [2, 2]

    run_ranks(on_rank, 2, backend="native-threads")


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_other_tensors_inside_of_a_transform(transform: str) -> None:
    """Transforms that wrap whatever is made inside refuse tensors from outside and objects too."""
    tensor = torch.ones(2)
    for call in (
        lambda: fd.allreduce(tensor),
        lambda: fd.all_gather_object(1),
        lambda: fd.broadcast_object(1),
        lambda: fd.broadcast_object(1, 1),
        fd.scatter_object,
    ):
        _refused(lambda call=call: _TRANSFORMS[transform](lambda _: call()), "functorch transforms")
