"""Models on GPUs, as far as that can be tested without one; tests/gpu has the rest."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrodist as fd
from ferrodist.collectives.serialization import PackedValue
from ferrodist.deadline import Deadline
from ferrodist.parallel.ddp import bucket
from ferrodist.parallel.fsdp import flat_param, init
from ferrodist.parallel.pipeline.schedule_executor import PendingRecv, send_value
from ferrodist.parallel.pipeline.stage import Stage
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend

_CPU, _CUDA, _META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")


def _linear(device: torch.device = _CPU) -> torch.nn.Module:
    return torch.nn.Linear(2, 2, device=device)


def test_ddp_takes_a_module_on_one_device() -> None:
    """Parameters on two devices are refused on all ranks, naming both."""

    def on_rank(group: Backend) -> None:
        module = torch.nn.Sequential(_linear(), _linear(_META))
        with pytest.raises(fd.UnsupportedOpError, match=r"parameter '1.weight'.* on meta, parameter '0.weight' on cpu"):
            fd.DDP(module)
        fd.barrier()

    run_ranks(on_rank, 2)


def test_fsdp_takes_a_module_on_one_device() -> None:
    """Two devices are refused, apart from meta; a group without GPU support says what to do."""

    def on_rank(group: Backend) -> None:
        def refusal(device: torch.device, **tensors: torch.device) -> str | None:
            made = {name: SimpleNamespace(is_meta=where == _META, device=where) for name, where in tensors.items()}
            return init._device_refusal(made, device, group)

        assert refusal(_CPU, one=_CPU, other=_META) is None
        assert "'other' is on cuda:0 and not on cpu" in refusal(_CPU, one=_CPU, other=_CUDA)
        assert "FERRODIST_ENABLE_GPU_FALLBACK=1" in refusal(_CUDA, one=_CUDA)
        group.use_engine("cuda", object())
        assert refusal(_CUDA, one=_CUDA) is None

    run_ranks(on_rank, 2)


def test_device_of_models_from_the_meta_device() -> None:
    """The device of the other parameters, or the given one, which must be the same."""

    def find(module: torch.nn.Module, given: torch.device | str | None) -> torch.device:
        return init.find_device([SimpleNamespace(parameters=dict(module.named_parameters()))], module, given)

    assert find(_linear(_META), None) == _CPU
    assert find(_linear(_META), "cuda:0") == _CUDA
    assert find(_linear(), None) == find(_linear(), "cpu") == _CPU
    with pytest.raises(ValueError, match=r"device='cuda:0' is not where the module is, on cpu"):
        find(_linear(), "cuda:0")
    (group,) = fd.SimulatedBackend.create_group(1)
    model = fd.FSDP(_linear(_META), group, device="cpu")
    assert all(parameter.device == _CPU for parameter in model.parameters())
    group.close()


def test_offloading_is_for_modules_on_the_cpu() -> None:
    """A module on a GPU with cpu_offload is refused."""
    assert init.choose_device(_CPU, cpu_offload=True) == _CPU
    assert init.choose_device(_CUDA, cpu_offload=False) == _CUDA
    with pytest.raises(fd.UnsupportedOpError, match=r"cpu_offload=True.*on cuda:0"):
        init.choose_device(_CUDA, cpu_offload=True)


class _Unfinished:
    """A collective whose wait returns though it will fail, as one on a stream does."""

    def __init__(self, group: Backend, result: torch.Tensor) -> None:
        self.group = group
        self.result = result

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        self.group.abort("the device has failed")
        return self.result


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_failures_after_wait_are_raised(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward raises the group's later failure instead of returning wrong gradients."""

    def start(tensor: torch.Tensor, *_: Any, group: Backend, out: torch.Tensor, **__: Any) -> _Unfinished:
        return _Unfinished(group, out)

    def on_rank(group: Backend) -> None:
        model = fd.DDP(_linear()) if kind == "ddp" else fd.FSDP(_linear())
        loss = model(torch.ones(1, 2)).sum()
        group.barrier()
        with pytest.raises(fd.GroupAbortedError, match="the device has failed"):
            loss.backward()

    monkeypatch.setattr(bucket, "async_allreduce", start)
    monkeypatch.setattr(flat_param, "async_reduce_scatter", start)
    run_ranks(on_rank, 2)


def test_pipeline_values_arrive_on_the_stages_device() -> None:
    """Tensors that the sender has on a GPU, small or large; the others stay on the CPU."""

    def on_rank(group: Backend) -> None:
        if group.rank == 0:
            packed = PackedValue.of([torch.ones(2), torch.zeros(100_000), torch.ones(3)], "values")
            assert packed.is_on_gpu == [False] * 3
            send_value(dataclasses.replace(packed, is_on_gpu=[True, True, False]), 1, 0, group)
            fd.barrier()
        else:
            found = PendingRecv(0, 0, group, prefetch=False, device=_META).wait(Deadline(30.0))
            assert [tensor.device for tensor in found.tensors] == [_META, _META, _CPU]
            assert found.copy().is_on_gpu == [True, True, False]
            fd.barrier()

    run_ranks(on_rank, 2)


def test_the_device_of_a_stage() -> None:
    """That of its first parameter or buffer; without any, the current GPU if there is one."""
    assert Stage(_linear(_META), 0).device == _META
    assert Stage(torch.nn.BatchNorm1d(2, affine=False, device="meta"), 0).device == _META
    assert Stage(torch.nn.Tanh(), 0).device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_the_names_of_the_crate_are_for_gpus() -> None:
    """A tensor on the CPU is refused, naming the function for it."""
    for call, name in ((fd.gpu_allreduce, "allreduce"), (fd.gpu_broadcast, "broadcast")):
        with pytest.raises(fd.UnsupportedOpError, match=rf"gpu_{name} is for tensors on a GPU.*on cpu: use {name}"):
            call(torch.ones(2))


class _OnGpu(torch.Tensor):
    is_cuda = True


def test_functions_for_cpu_tensors_refuse_gpu_tensors() -> None:
    """Calls of other ranks, DTensors and tensor parallelism refuse tensors on a GPU, with advice."""

    def on_rank(group: Backend) -> None:
        tensor = torch.ones(2).as_subclass(_OnGpu)
        mesh = fd.DeviceMesh(group, (2,), ("data",))
        for make in (fd.distribute, fd.DTensor.from_local):
            with pytest.raises(fd.UnsupportedOpError, match="distributed tensors are on the CPU"):
                make(tensor, mesh, fd.Replicate())
        module = _linear()
        module.weight = torch.nn.Parameter(torch.ones(2, 2).as_subclass(_OnGpu))
        with pytest.raises(fd.UnsupportedOpError, match=r"parameter 'weight'.*parallelize module.cpu\(\)"):
            fd.parallelize(module, mesh, {"": fd.ColumnParallel()})
        with fd.rpc.RpcContext(group, {"same": lambda value: value}) as agent:
            with pytest.raises(fd.UnsupportedOpError, match=r"pass tensor.cpu\(\)"):
                agent.rpc_sync(1 - group.rank, "same", tensor)
            assert agent.rpc_sync(1 - group.rank, "same", torch.ones(2)).tolist() == [1, 1]

    run_ranks(on_rank, 2)
