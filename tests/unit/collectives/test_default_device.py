"""Collectives are for CPU tensors, whatever device torch makes tensors on when none is named."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch

import ferrodist as fd
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrodist.backends.base import Backend


@contextlib.contextmanager
def _set_default(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def _cpu(*elements: float) -> torch.Tensor:
    return torch.tensor(elements, dtype=torch.float32, device="cpu")


def _mine(group: Backend, size: int = 2) -> torch.Tensor:
    return torch.arange(size, device="cpu") + 10.0 * group.rank


def _out(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="cpu")


def _of_rank_0(group: Backend, value: object) -> object:
    return value if group.rank == 0 else None


_CALLS: dict[str, Callable[[Backend], object]] = {
    "allreduce": lambda group: fd.allreduce(_mine(group)),
    "allreduce of many elements": lambda group: fd.allreduce(_mine(group, 40_000)),
    "allreduce in float16": lambda group: fd.allreduce(_mine(group).half(), fd.ReduceOp.MEAN),
    "premultiplied sum": lambda group: fd.allreduce(_mine(group), fd.premultiplied_sum(0.5)),
    "allreduce of no elements": lambda group: fd.allreduce(_out(0)),
    "allreduce into a transposed tensor": lambda group: fd.allreduce(_mine(group, 6).view(2, 3), out=_out(3, 2).t()),
    "async_allreduce": lambda group: fd.async_allreduce(_mine(group)).wait(),
    "reduce": lambda group: fd.reduce(_mine(group)),
    "broadcast": lambda group: fd.broadcast(_mine(group)),
    "async_broadcast": lambda group: fd.async_broadcast(_mine(group)).wait(),
    "all_gather": lambda group: fd.all_gather(_mine(group)),
    "all_gather along 1": lambda group: fd.all_gather(_mine(group, 6).view(2, 3), 1),
    "all_gather_uneven": lambda group: fd.all_gather_uneven(_mine(group, group.rank + 1)),
    "gather": lambda group: fd.gather(_mine(group)),
    "scatter": lambda group: fd.scatter(_mine(group, 5) if group.rank == 0 else None),
    "scatter with gradients": lambda group: fd.scatter(_mine(group).requires_grad_() if group.rank == 0 else None),
    "reduce_scatter": lambda group: fd.reduce_scatter(_mine(group, 5)),
    "reduce_scatter_tensor": lambda group: fd.reduce_scatter_tensor(_out(2), _mine(group, 4)),
    "all_to_all": lambda group: fd.all_to_all([_mine(group), _mine(group)]),
    "all_to_all into strided tensors": lambda group: fd.all_to_all(
        [_mine(group)] * 2, out=list(_out(2, 2).as_strided((2, 2), (1, 2)))
    ),
    "all_to_all_single_uneven": lambda group: fd.all_to_all_single_uneven(
        _mine(group, 3), [1, 2], [1 + group.rank] * 2
    ),
    "barrier": lambda group: fd.barrier(),
    "all_gather_object": lambda group: fd.all_gather_object({"rank": group.rank}),
    "broadcast_object": lambda group: fd.broadcast_object("text" * 100 * group.rank, 1),
    "gather_object": lambda group: fd.gather_object(group.rank),
    "scatter_object": lambda group: fd.scatter_object(["a", "b" * 300] if group.rank == 0 else None),
    "send, recv": lambda group: fd.recv((3,), None, 0) if group.rank else fd.send(_mine(group, 3), 1),
    "recv_into": lambda group: fd.recv_into(_out(3, 1).t(), 0) if group.rank else fd.send(_cpu(1, 2, 3).view(1, 3), 1),
    "sendrecv": lambda group: fd.sendrecv(_mine(group), 1 - group.rank, (2,), 1 - group.rank),
    "send_object, recv_object": lambda group: fd.recv_object(0) if group.rank else fd.send_object([1, "two"], 1),
}


@pytest.mark.parametrize("using", [torch.device, _set_default], ids=["with torch.device", "set_default_device"])
@pytest.mark.parametrize("name", _CALLS)
def test_results_are_where_the_elements_are(
    name: str, using: Callable[[str], contextlib.AbstractContextManager]
) -> None:
    """With another default device every call returns what it returns without, on the CPU."""

    def on_rank(group: Backend) -> None:
        expected = _CALLS[name](group)
        with using("meta"):
            result = _CALLS[name](group)
        if isinstance(expected, torch.Tensor) or name.startswith("all_to_all"):
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
        else:
            assert result == expected

    run_ranks(on_rank, 2)


def test_coalesced_operations() -> None:
    """A coalesce block joins its operations on the CPU."""

    def on_rank(group: Backend) -> None:
        with torch.device("meta"):
            with fd.coalesce():
                pending = [fd.async_allreduce(_mine(group)), fd.async_allreduce(_mine(group, 3))]
            assert [handle.wait().tolist() for handle in pending] == [[10, 12], [10, 12, 14]]

    run_ranks(on_rank, 2)


def test_gradients() -> None:
    """Backward of every collective gives the gradient that it gives without another default device."""
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        fd.allreduce,
        lambda x: fd.allreduce(x, fd.ReduceOp.MAX),
        lambda x: fd.allreduce(x, fd.ReduceOp.PRODUCT),
        fd.reduce,
        lambda x: fd.reduce(x, 0, fd.ReduceOp.MIN),
        fd.broadcast,
        fd.all_gather,
        fd.gather,
        fd.reduce_scatter,
        fd.all_to_all,
    ]

    def gradient(group: Backend, call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        tensor = _mine(group, 4).requires_grad_()
        call(tensor).square().sum().backward()
        return tensor.grad

    def on_rank(group: Backend) -> None:
        for call in calls:
            expected = gradient(group, call)
            with torch.device("meta"):
                result = gradient(group, call)
            torch.testing.assert_close(result, expected, rtol=0, atol=0)

    run_ranks(on_rank, 2)


def test_ddp() -> None:
    """DDP of a module on the CPU trains as without another default device."""

    def on_rank(group: Backend) -> list[float]:
        with torch.device("meta"):
            module = torch.nn.Sequential(
                torch.nn.Linear(3, 2, device="cpu"), torch.nn.BatchNorm1d(2, device="cpu"), torch.nn.ReLU()
            )
            with torch.no_grad():
                for place, parameter in enumerate(module.parameters()):
                    parameter.fill_(place + group.rank + 1.0)
            model = fd.DDP(module)
            model(_mine(group, 6).view(2, 3)).sum().backward()
        assert all(parameter.grad.device.type == "cpu" for parameter in module.parameters())
        assert module[0].weight[0, 0] == 1  # rank 0's
        return [parameter.grad.sum().item() for parameter in module.parameters()]

    first, second = run_ranks(on_rank, 2)
    assert first == second
    assert any(first)


def _small_model() -> torch.nn.Module:
    layers = [torch.nn.Linear(2, 6, device="cpu"), torch.nn.Tanh(), torch.nn.Linear(6, 6, device="cpu")]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in layers[::2]:
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator, device="cpu"))
            layer.bias.zero_()
    return torch.nn.Sequential(*layers)


def _train(make: Callable[[torch.nn.Module, Backend], object], group: Backend, device: str) -> list[float]:
    with torch.device(device):
        made = make(_small_model(), group)
        module = made if isinstance(made, torch.nn.Module) else made.module  # type: ignore[attr-defined]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with made.join() if isinstance(made, fd.DDP) else contextlib.nullcontext():
            for _ in range(3):
                optimizer.zero_grad()
                module(_mine(group, 2).view(1, 2)).square().sum().backward()
                if isinstance(made, fd.FSDP):
                    made.clip_grad_norm_(1.0)
                optimizer.step()
                if isinstance(made, fd.LocalSGD):
                    made.step()
    return [parameter.detach().double().sum().item() for parameter in module.parameters()]


class _Averaging(fd.LocalSGD):
    """Knows its module."""

    def __init__(self, module: torch.nn.Module, group: Backend) -> None:
        super().__init__(module, group, period=2)
        self.module = module


_WRAPPERS: dict[str, Callable[[torch.nn.Module, Backend], object]] = {
    "ddp": fd.DDP,
    "power_sgd": lambda module, group: fd.DDP(module, group, comm_hook=fd.comm_hooks.PowerSGD(1, start_step=1)),
    "top_k": lambda module, group: fd.DDP(module, group, comm_hook=fd.comm_hooks.TopK(0.5)),
    "local_sgd": _Averaging,
    "fsdp": fd.FSDP,
    "fsdp of units": lambda module, group: fd.FSDP(module, group, wrap=torch.nn.Linear),
}


@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
@pytest.mark.parametrize("name", _WRAPPERS)
def test_training(name: str, backend: str) -> None:
    """With another default device training gives the values that it gives without."""
    expected = run_ranks(lambda group: _train(_WRAPPERS[name], group, "cpu"), 2, backend=backend)
    assert run_ranks(lambda group: _train(_WRAPPERS[name], group, "meta"), 2, backend=backend) == expected
