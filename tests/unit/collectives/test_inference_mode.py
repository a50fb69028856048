"""Collectives and messages of tensors that were made in torch.inference_mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from fake_streams import FakeStreams

import ferrodist as fd
from ferrodist.collectives.engines import select
from ferrodist.collectives.engines.gpu_staged import HostStagedEngine
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend


def _mine(group: Backend) -> torch.Tensor:
    return torch.arange(8.0).view(4, 2) + group.rank


def _coalesced(group: Backend) -> list[torch.Tensor]:
    with fd.coalesce():
        started = [fd.async_allreduce(_mine(group)) for _ in range(2)]
    return [pending.wait() for pending in started]


_INSIDE: dict[str, Callable[[Backend], object]] = {
    "allreduce": lambda group: fd.async_allreduce(_mine(group)).wait(),
    "broadcast": lambda group: fd.async_broadcast(_mine(group), 1).wait(),
    "all_gather": lambda group: fd.async_all_gather(_mine(group), dim=1).wait(),
    "reduce_scatter": lambda group: fd.async_reduce_scatter(_mine(group), dim=1).wait(),
    "all_to_all": lambda group: fd.async_all_to_all([_mine(group), _mine(group)]).wait(),
    "coalesced": _coalesced,
}

_INTO: dict[str, tuple[tuple[int, ...], Callable[[Backend, torch.Tensor], object]]] = {
    "allreduce": ((2, 4), lambda group, out: fd.allreduce(_mine(group), out=out.t())),
    "broadcast": ((4, 2), lambda group, out: fd.broadcast(_mine(group), 1, out=out)),
    "reduce": ((4, 2), lambda group, out: fd.reduce(_mine(group), 1, out=out if group.rank else None)),
    "all_gather": ((4, 4), lambda group, out: fd.all_gather(_mine(group), dim=1, out=out)),
    "scatter": ((2, 2), lambda group, out: fd.scatter(_mine(group) if group.rank else None, 1, out=out)),
    "all_to_all": ((2, 4, 2), lambda group, out: fd.all_to_all([_mine(group)] * 2, out=list(out))),
    "message": ((2, 4), lambda group, out: fd.recv_into(out.t(), 0) if group.rank else fd.send(_mine(group), 1)),
}


@pytest.fixture(params=["simulated", "native-threads", "staged"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Python's engine, the native one, and tensors on a fake of a GPU."""
    if request.param != "staged":
        return str(request.param)

    def staged_of(group: Backend) -> HostStagedEngine:
        streams = FakeStreams("early")
        return group.attachments.setdefault("staged", HostStagedEngine(group, lambda _: streams, 16))

    monkeypatch.setattr(select, "host_engine_of", staged_of)
    return "simulated"


def _values(result: object) -> list[object]:
    return [tensor.tolist() for tensor in (result if isinstance(result, list) else [result])]


@pytest.mark.parametrize("name", _INSIDE)
def test_started_inside(name: str, backend: str) -> None:
    """What is started in inference mode has the result that it has outside, though another thread makes it."""

    def on_rank(group: Backend) -> None:
        expected = _values(_INSIDE[name](group))
        with torch.inference_mode():
            assert _values(_INSIDE[name](group)) == expected
        assert group.failure is None

    run_ranks(on_rank, 2, backend=backend, timeout=30.0)


@pytest.mark.parametrize("name", _INTO)
def test_written_outside(name: str, backend: str) -> None:
    """Tensors that were made in inference mode take results outside of it, on all ranks."""
    shape, call = _INTO[name]

    def on_rank(group: Backend) -> None:
        expected = torch.zeros(shape)
        with torch.inference_mode():
            found = torch.zeros(shape)
        call(group, expected)
        call(group, found)
        assert found.tolist() == expected.tolist()
        assert group.failure is None

    run_ranks(on_rank, 2, backend=backend, timeout=30.0)
