"""Models on a GPU train over the fallback as they do in one process: ranks are processes that share the GPU."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

import ferrodist as fd
from ferrodist import checkpoint
from ferrodist.parallel.pipeline import split_sequential
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

_EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt" / "train.py"
_STEPS = 4


@pytest.fixture(autouse=True)
def _fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRODIST_ENABLE_GPU_FALLBACK", "1")


def _gpt(example: dict[str, Any], device: str = "cuda") -> torch.nn.Module:
    torch.manual_seed(0)
    return example["Gpt"](128, 2, 32).to(device)


def _batches(device: str = "cuda") -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (_STEPS, 8, 33), generator=draw).to(device)
    return [(batch[:, :-1], batch[:, 1:]) for batch in tokens]


def _loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.reshape(-1, 256), targets.reshape(-1))


def _alone(example: dict[str, Any]) -> list[float]:
    model = _gpt(example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens, targets in _batches():
        optimizer.zero_grad()
        loss = _loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _train(group: Backend, wrap: Callable[[torch.nn.Module, dict[str, Any]], torch.nn.Module]) -> None:
    """Check that the losses and the gradients' norm equal those of one process."""
    example = runpy.run_path(str(_EXAMPLE))
    expected = _alone(example)
    model = wrap(_gpt(example), example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens, targets in _batches():
        optimizer.zero_grad()
        half = slice(4 * group.rank, 4 * group.rank + 4)
        loss = _loss(model(tokens[half]), targets[half])
        loss.backward()
        if isinstance(model, fd.FSDP):
            model.clip_grad_norm_(1e6)
        optimizer.step()
        losses.append(fd.allreduce(loss.detach(), fd.ReduceOp.MEAN).item())
    torch.testing.assert_close(losses, expected, rtol=2e-4, atol=0)
    assert losses[-1] < losses[0]
    assert all(parameter.is_cuda for parameter in model.parameters())


_WRAPS: dict[str, Callable[[torch.nn.Module, dict[str, Any]], torch.nn.Module]] = {
    "ddp": lambda module, _: fd.DDP(module),
    "ddp of small buckets, copied": lambda module, _: fd.DDP(module, bucket_size_mb=0.1, gradient_as_bucket_view=False),
    "ddp by hand": lambda module, _: fd.DDP(module, find_unused_parameters=True),
    "ddp of bfloat16": lambda module, _: fd.DDP(module, comm_hook=fd.comm_hooks.bfloat16_compression),
    "fsdp": lambda module, example: fd.FSDP(module, wrap=example["Block"]),
    "fsdp in one unit": lambda module, _: fd.FSDP(module),
    "fsdp with gradients divided": lambda module, example: fd.FSDP(
        module, wrap=example["Block"], strategy=fd.ShardingStrategy.SHARD_GRAD_OP
    ),
    "fsdp of copies": lambda module, example: fd.FSDP(
        module, wrap=example["Block"], strategy=fd.ShardingStrategy.NO_SHARD
    ),
}


@pytest.mark.parametrize("name", _WRAPS)
def test_training(name: str) -> None:
    """Losses equal those of one process with both ranks' batches."""
    run_ranks(_train, 2, _WRAPS[name], backend="native", timeout=100.0)


def test_mixed_precision_and_scaler() -> None:
    """FSDP gathers and reduces in bfloat16, and the ranks' scalers find the same infinities."""

    def on_rank(group: Backend) -> None:
        example = runpy.run_path(str(_EXAMPLE))
        expected = _alone(example)
        precision = fd.MixedPrecision(param_dtype=torch.bfloat16)
        model = fd.FSDP(_gpt(example), wrap=example["Block"], mixed_precision=precision)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        tokens, targets = _batches()[0]
        half = slice(4 * group.rank, 4 * group.rank + 4)
        loss = _loss(model(tokens[half]).float(), targets[half])
        scaler.scale(loss).backward()
        if group.rank == 1:
            next(p for p in model.parameters() if p.grad is not None and p.grad.numel()).grad.view(-1)[0] = float("inf")
        model.unscale_(scaler, optimizer)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        scaler.step(optimizer)
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        found = fd.allreduce(loss.detach(), fd.ReduceOp.MEAN).item()
        assert abs(found - expected[0]) < 0.05

    run_ranks(on_rank, 2, backend="native", timeout=100.0)


def test_models_from_the_meta_device() -> None:
    """A model on the meta device is allocated on the GPU with rank 0's values."""

    def on_rank(group: Backend) -> None:
        with torch.device("meta"):
            module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        torch.manual_seed(group.rank)
        model = fd.FSDP(module, wrap=torch.nn.Linear, device="cuda")
        assert all(parameter.is_cuda for parameter in model.parameters())
        whole = model.full_state_dict()
        assert all(value.is_cuda for value in whole.values())
        total = torch.stack([value.double().sum() for value in whole.values()])
        assert fd.allreduce(total, fd.ReduceOp.MAX).tolist() == total.tolist()
        with pytest.raises(fd.UnsupportedOpError, match="cpu_offload"):
            fd.FSDP(torch.nn.Linear(2, 2, device="cuda"), cpu_offload=True)
        mixed = torch.nn.Sequential(torch.nn.Linear(2, 2, device="cuda"), torch.nn.Linear(2, 2))
        for make in (fd.DDP, fd.FSDP):
            with pytest.raises(fd.UnsupportedOpError, match="one device"):
                make(mixed)

    run_ranks(on_rank, 2, backend="native")


@pytest.mark.parametrize("batch", [16, 2048], ids=["small messages", "large messages"])
@pytest.mark.parametrize(
    "schedule",
    [fd.PipelineSchedule.GPIPE, fd.PipelineSchedule.ONE_F_ONE_B, fd.PipelineSchedule.ZERO_BUBBLE_H1],
    ids=lambda schedule: schedule.name,
)
def test_pipeline(schedule: fd.PipelineSchedule, batch: int) -> None:
    """Stages on the GPU, with messages through the host, give the losses and gradients of one process."""

    def on_rank(group: Backend) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Tanh()) for _ in range(4)]
        whole = torch.nn.Sequential(*layers).cuda()
        inputs, targets = torch.randn(batch, 300, device="cuda"), torch.randn(batch, 300, device="cuda")
        alone = functional.mse_loss(whole(inputs), targets)
        alone.backward()
        expected = [parameter.grad.clone() for parameter in whole.parameters()]
        whole.zero_grad()
        stages = split_sequential(whole, 2)
        pipeline = fd.Pipeline(stages[group.rank], group, 4, schedule=schedule, loss_fn=functional.mse_loss)
        loss = pipeline.step(inputs if group.rank == 0 else None, targets if group.rank == 1 else None)
        assert abs(float(loss) - alone.item()) < 1e-5
        mine = expected[4 * group.rank : 4 * group.rank + 4]
        for parameter, gradient in zip(stages[group.rank].parameters(), mine, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)

    run_ranks(on_rank, 2, backend="native")


def test_sync_batch_norm() -> None:
    """Statistics are those of both ranks' batches, forward and backward."""

    def on_rank(group: Backend) -> None:
        torch.manual_seed(0)
        batch = torch.randn(8, 3, 5, device="cuda")
        own = torch.nn.BatchNorm1d(3).cuda()
        whole = batch.clone().requires_grad_()
        own(whole).square().sum().backward()
        half = batch[4 * group.rank : 4 * group.rank + 4].clone().requires_grad_()
        layer = fd.SyncBatchNorm1d(3).cuda()
        layer(half).square().sum().backward()
        torch.testing.assert_close(half.grad, whole.grad[4 * group.rank :][:4], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.running_var, own.running_var)

    run_ranks(on_rank, 2, backend="native")


def test_local_sgd() -> None:
    """Parameters on the GPU are averaged."""

    def on_rank(group: Backend) -> None:
        module = torch.nn.Linear(3, 2, device="cuda")
        averaging = fd.LocalSGD(module, group, period=1)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(2.0 * group.rank)
        averaging.step()
        assert all(parameter.eq(1).all() for parameter in module.parameters())

    run_ranks(on_rank, 2, backend="native")


def test_checkpoints(tmp_path: Path) -> None:
    """FSDP and DDP models on the GPU are saved, and loaded into models on the GPU and on the CPU."""

    def on_rank(group: Backend) -> None:
        torch.manual_seed(3)
        module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)).cuda()
        model = fd.FSDP(module, wrap=torch.nn.Linear)
        expected = {name: value.cpu() for name, value in model.full_state_dict().items()}
        checkpoint.save_distributed({"model": model}, tmp_path / "saved")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        checkpoint.load_distributed(tmp_path / "saved", {"model": model})
        other = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        checkpoint.load_distributed(tmp_path / "saved", {"model": other})
        twin = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)).cuda()
        checkpoint.load_distributed(tmp_path / "saved", {"model": fd.DDP(twin)})
        for name, value in model.full_state_dict().items():
            assert value.is_cuda
            for found in (value, other.state_dict()[name], twin.state_dict()[name]):
                assert torch.equal(found.cpu(), expected[name])

    run_ranks(on_rank, 2, backend="native")
