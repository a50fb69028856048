"""Models and optimizers that are divided in one way, saved, and loaded into another division: training goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrodist as fd
from ferrodist.checkpoint import DistCheckpointError, OptimizerState, load_distributed, save_distributed
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ferrodist.backends.base import Backend

_STEPS = 3


class _Model(nn.Module):
    """Two linear layers with a tied one, a norm with buffers, and a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9, bias=False)
        self.norm = nn.BatchNorm1d(9)
        self.down = nn.Linear(9, 6)
        self.tied = nn.Linear(6, 9, bias=False)
        self.tied.weight = self.up.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.tied(self.down(self.norm(self.up(data)).relu())) * self.scale


def _make_model(seed: int) -> _Model:
    generator = torch.Generator().manual_seed(seed)
    model = _Model().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) + 0.1)
    return model


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> list[float]:
    """Every rank trains on the same data, so that any number of ranks does the same."""
    losses = []
    for step in range(first, first + steps):
        data = torch.rand(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        loss = (model(data) - 1).square().mean()
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        losses.append(float(loss.full_tensor() if isinstance(loss, fd.DTensor) else loss))
    return losses


def _fsdp(seed: int, group: Backend) -> nn.Module:
    return fd.FSDP(_make_model(seed), group, wrap=nn.BatchNorm1d)


def _hybrid(seed: int, group: Backend) -> nn.Module:
    return fd.FSDP(_make_model(seed), group, strategy=fd.ShardingStrategy.hybrid(2))


def _ddp(seed: int, group: Backend) -> nn.Module:
    return fd.DDP(_make_model(seed), group)


def _tensor_parallel(seed: int, group: Backend) -> nn.Module:
    mesh = fd.DeviceMesh(group, (group.world_size,), ("tensor",))
    plan = {"up": fd.ColumnParallel(outputs=fd.Replicate()), "tied": fd.ColumnParallel(outputs=fd.Replicate())}
    return fd.parallelize(_make_model(seed), mesh, plan)


def _both(seed: int, group: Backend) -> nn.Module:
    mesh = fd.DeviceMesh(group, (2, group.world_size // 2), ("data", "tensor"))
    plan = {"up": fd.ColumnParallel(outputs=fd.Replicate()), "tied": fd.ColumnParallel(outputs=fd.Replicate())}
    model = fd.parallelize(_make_model(seed), mesh["tensor"], plan)
    return fd.FSDP(model, mesh["data"])


_DIVISIONS: dict[str, tuple[Callable[[int, Backend], nn.Module], tuple[int, ...]]] = {
    "fsdp": (_fsdp, (1, 2, 3, 4)),
    "hybrid": (_hybrid, (2, 4)),
    "ddp": (_ddp, (1, 3)),
    "tensor": (_tensor_parallel, (2, 3)),
    "both": (_both, (4,)),
}


def _optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate)


def _save(group: Backend, division: str, path: Path) -> list[float]:
    model = _DIVISIONS[division][0](0, group)
    optimizer = _optimizer(model, 0.01)
    _train(model, optimizer, 0, _STEPS)
    save_distributed({"model": model, "optimizer": OptimizerState(model, optimizer)}, path, group=group)
    return _train(model, optimizer, _STEPS, _STEPS)


def _resume(group: Backend, division: str, path: Path) -> list[float]:
    model = _DIVISIONS[division][0](1, group)
    optimizer = _optimizer(model, 0.5)
    load_distributed(path, {"model": model, "optimizer": OptimizerState(model, optimizer)}, group=group)
    return _train(model, optimizer, _STEPS, _STEPS)


@pytest.fixture(scope="module")
def losses() -> list[float]:
    """The losses of one uninterrupted process."""
    model = _make_model(0)
    optimizer = _optimizer(model, 0.01)
    return _train(model, optimizer, 0, 2 * _STEPS)[_STEPS:]


@pytest.mark.parametrize("division", list(_DIVISIONS))
def test_training_continues_with_any_sharding(division: str, tmp_path: Path, losses: list[float]) -> None:
    """Saved with one sharding and loaded with every other one, the losses are as without interruption."""
    for ranks in _DIVISIONS[division][1]:
        path = tmp_path / str(ranks)
        found = run_ranks(lambda group, path=path: _save(group, division, path), ranks)
        assert found[0] == pytest.approx(losses, rel=1e-9)
        for other, (_, numbers) in _DIVISIONS.items():
            for number in numbers[-2:]:
                resumed = run_ranks(lambda group, other=other, path=path: _resume(group, other, path), number)
                assert resumed[-1] == pytest.approx(losses, rel=1e-9), (division, ranks, other, number)
        model = _make_model(2)
        optimizer = _optimizer(model, 0.3)
        load_distributed(path, {"model": model, "optimizer": OptimizerState(model, optimizer)})
        assert _train(model, optimizer, _STEPS, _STEPS) == pytest.approx(losses, rel=1e-9)


def test_a_prefetch_before_the_load_is_noticed(tmp_path: Path) -> None:
    """Parameters that FSDP prefetched before its shards were loaded are not used."""

    def program(group: Backend) -> None:
        model = _fsdp(0, group)
        save_distributed({"model": model}, tmp_path, group=group)
        other = _fsdp(1, group)
        data = torch.ones(4, 6, dtype=torch.float64)
        other.eval()
        other(data)
        load_distributed(tmp_path, {"model": other}, group=group)
        assert torch.equal(other(data), model.eval()(data))

    run_ranks(program, 2)


def test_buffers_are_those_of_rank_0(tmp_path: Path) -> None:
    """Batch norm's running statistics differ between ranks; saving them under DDP is not an error."""

    def program(group: Backend) -> tuple[Any, Any]:
        for name, wrap in (("fsdp", _fsdp), ("ddp", _ddp)):
            model = wrap(0, group)
            model(torch.full((4, 6), float(group.rank + 1), dtype=torch.float64))
            save_distributed(model, tmp_path / name, group=group)
        return model.module.norm.running_mean.clone(), load_distributed(tmp_path / "fsdp", group=group)

    (mean, state), (other, _) = run_ranks(program, 2)
    assert not torch.equal(mean, other)
    assert torch.equal(state["norm.running_mean"], mean)


def test_an_optimizer_by_itself_is_refused(tmp_path: Path) -> None:
    """Its parameters have only indices; the error says what to save."""
    model = _make_model(0)
    with pytest.raises(TypeError, match="OptimizerState"):
        save_distributed({"optimizer": _optimizer(model, 0.1)}, tmp_path)


def test_an_optimizer_with_other_parameters(tmp_path: Path) -> None:
    """State of a parameter that the optimizer has not is an error that names it; nothing is lost silently."""
    model = _make_model(0)
    optimizer = _optimizer(model, 0.1)
    _train(model, optimizer, 0, 1)
    save_distributed({"optimizer": OptimizerState(model, optimizer)}, tmp_path)
    fewer = torch.optim.AdamW([model.up.weight, model.scale])
    with pytest.raises(DistCheckpointError, match=r"'down\.bias' is only in one of them"):
        load_distributed(tmp_path, {"optimizer": OptimizerState(model, fewer)})


def test_tied_parameters_are_written_once(tmp_path: Path) -> None:
    """With every kind of sharding."""

    def program(group: Backend) -> set[str]:
        model = _fsdp(0, group)
        save_distributed(model, tmp_path, group=group)
        return set(fd.checkpoint.DistributedCheckpoint(tmp_path).manifest.tensors)

    keys = run_ranks(program, 3)[0]
    assert "up.weight" in keys
    assert "tied.weight" not in keys
