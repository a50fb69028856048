"""Forward-mode differentiation, functorch transforms and tracing, which don't go through collectives, are refused."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

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


pytestmark = pytest.mark.parametrize(
    "backend",
    [
        "simulated",
        pytest.param(
            "native-threads",
            marks=pytest.mark.skipif(
                not is_native_available(), reason="this installation was built without the native engine"
            ),
        ),
    ],
)
"""Of the native engine's short ways, which see plain memory or none, the calls must not get there."""


@pytest.fixture(autouse=True, scope="module")
def _decompositions() -> None:
    """Have torch load what forward mode needs, in one thread: it warns of itself."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")
        forward_ad.make_dual(torch.ones(1), torch.ones(1))


def _refused(backend: str, call: Callable[[], object], words: str) -> None:
    """On rank 1 ``call`` is refused, with nothing sent: the same group goes on."""

    def on_rank(group: Backend) -> None:
        if group.rank == 1:
            with pytest.raises(NotImplementedError, match=words):
                call()
        assert fd.allreduce(torch.ones(2)).tolist() == [2, 2]

    run_ranks(on_rank, 2, backend=backend)


@pytest.mark.parametrize("name", _CALLS)
def test_tangents_are_not_dropped(name: str, backend: str) -> None:
    """A tensor with a tangent is refused, for its result would have none."""

    def call() -> None:
        with forward_ad.dual_level():
            _CALLS[name](forward_ad.make_dual(torch.ones(2), torch.ones(2)))

    _refused(backend, call, r"forward-mode .* would be lost: .*detach\(\)")


def test_other_tensors_pass_inside_of_a_dual_level(backend: str) -> None:
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
        run_ranks(on_rank, 2, backend=backend)


_TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], object]], object]] = {
    "vmap": lambda call: torch.vmap(lambda x: (call(x), x)[1])(torch.ones(3, 2)),
    "grad": lambda call: torch.func.grad(lambda x: (call(x), x.sum())[1])(torch.ones(2)),
    "jvp": lambda call: torch.func.jvp(lambda x: (call(x), x)[1], (torch.ones(2),), (torch.ones(2),)),
    "functionalize": lambda call: torch.func.functionalize(lambda x: (call(x), x)[1])(torch.ones(2)),
    "make_fx": lambda call: make_fx(lambda x: (call(x), x)[1])(torch.ones(2)),
}
_MAKES_FX = pytest.mark.skipif(
    torch.__version__ < "2.11" and torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="torch 2.10 for CUDA crashes in the second make_fx of a process on a host without a driver",
)
_PARAMETERS = [pytest.param(name, marks=_MAKES_FX) if name == "make_fx" else name for name in _TRANSFORMS]
_WORDS = {name: "make_fx does not record" if name == "make_fx" else "functorch transforms" for name in _TRANSFORMS}


@pytest.mark.parametrize("transform", _PARAMETERS)
@pytest.mark.parametrize("name", _CALLS)
def test_transforms_are_refused(name: str, transform: str, backend: str) -> None:
    """A tensor of a functorch transform, or one that is traced, is refused with a sentence that says so."""
    _refused(backend, lambda: _TRANSFORMS[transform](_CALLS[name]), _WORDS[transform])


@pytest.mark.parametrize("transform", ["grad", "jvp", pytest.param("make_fx", marks=_MAKES_FX)])
def test_other_tensors_inside_of_a_transform(transform: str, backend: str) -> None:
    """Transforms that wrap or record whatever is made inside refuse tensors from outside and objects too."""
    tensor = torch.ones(2)
    for call in (
        lambda: fd.allreduce(tensor),
        lambda: fd.all_gather_object(1),
        lambda: fd.broadcast_object(1),
        lambda: fd.broadcast_object(1, 1),
        fd.scatter_object,
    ):
        _refused(backend, lambda call=call: _TRANSFORMS[transform](lambda _: call()), _WORDS[transform])


def test_other_dispatch_modes_are_no_tracing(backend: str) -> None:
    """Modes that count or watch, as FlopCounterMode, leave collectives what they are."""

    def on_rank(group: Backend) -> None:
        with FlopCounterMode(display=False) if group.rank else contextlib.nullcontext():
            assert fd.allreduce(torch.ones(2)).tolist() == [2, 2]

    run_ranks(on_rank, 2, backend=backend)
