"""Tensors that collectives and messages don't carry: one clear error from each of them, before anything is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import ferrodist as fd
from ferrodist.backends.native import is_native_available
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

_NATIVE = pytest.mark.skipif(not is_native_available(), reason="this installation was built without the native engine")


_PARTS = [torch.ones(2), torch.ones(4)]

_TENSORS: dict[str, tuple[Callable[[], torch.Tensor], type[Exception], str]] = {
    "nested": (lambda: torch.nested.nested_tensor(_PARTS), fd.UnsupportedOpError, "is a nested tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor(_PARTS, layout=torch.jagged),
        fd.UnsupportedOpError,
        "is a nested tensor",
    ),
    "COO": (lambda: torch.eye(4).to_sparse(), fd.UnsupportedOpError, "has layout torch.sparse_coo"),
    "CSR": (lambda: torch.eye(4).to_sparse_csr(), fd.UnsupportedOpError, "has layout torch.sparse_csr"),
    "BSR": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), fd.UnsupportedOpError, "has layout torch.sparse_bsr"),
    "MKLDNN": (lambda: torch.ones(4).to_mkldnn(), fd.UnsupportedOpError, "has layout torch._mkldnn"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        TypeError,
        "collectives carry .*float32",
    ),
    "meta": (lambda: torch.ones(4, device="meta"), fd.UnsupportedOpError, "is on meta"),
    "zero": (lambda: torch._efficientzerotensor((4,)), NotImplementedError, "has no memory to send"),
}

_CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "allreduce": fd.allreduce,
    "async_allreduce": fd.async_allreduce,
    "allreduce out": lambda tensor: fd.allreduce(torch.ones(4), out=tensor),
    "reduce": lambda tensor: fd.reduce(tensor, 0),
    "broadcast": lambda tensor: fd.broadcast(tensor, 0),
    "async_broadcast": lambda tensor: fd.async_broadcast(tensor, 0),
    "all_gather": fd.all_gather,
    "async_all_gather": fd.async_all_gather,
    "all_gather_uneven": fd.all_gather_uneven,
    "gather": lambda tensor: fd.gather(tensor, 0),
    "scatter": lambda tensor: fd.scatter(tensor, fd.default_group().rank),
    "reduce_scatter": fd.reduce_scatter,
    "async_reduce_scatter": fd.async_reduce_scatter,
    "all_to_all": fd.all_to_all,
    "send": lambda tensor: fd.send(tensor, 1 - fd.default_group().rank),
    "recv_into": lambda tensor: fd.recv_into(tensor, 1 - fd.default_group().rank),
    "sendrecv": lambda tensor: fd.sendrecv(tensor, 1 - fd.default_group().rank, None, 1 - fd.default_group().rank),
    "batch": lambda tensor: fd.batch([fd.Send(tensor, 1 - fd.default_group().rank)]),
}


@pytest.mark.parametrize("backend", ["simulated", pytest.param("native-threads", marks=_NATIVE)])
@pytest.mark.parametrize("kind", _TENSORS)
@pytest.mark.filterwarnings("ignore:.*(prototype|beta|nested tensor|Sparse|quantiz).*")
def test_tensors_that_are_not_carried(kind: str, backend: str) -> None:
    """Every call refuses them in the same words, whichever way it would go, and the group is still good."""
    make, error, text = _TENSORS[kind]

    def program(group: fd.Backend) -> None:
        tensor = make()
        for call in _CALLS.values():
            with pytest.raises(error, match=text):
                call(tensor)
        assert fd.allreduce(torch.ones(1)).item() == 2.0

    run_ranks(program, 2, backend=backend)
