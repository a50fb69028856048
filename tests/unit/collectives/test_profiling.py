"""torch's profiler shows the calls of collectives and messages."""

import inspect

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import ferrodist as fd
from ferrodist.testing import run_ranks

NOT_SHOWN = {
    *("DDP", "DTensor", "DiLoCo", "FSDP", "GradientBucket", "LocalSGD", "Pipeline"),
    *("SyncBatchNorm1d", "SyncBatchNorm2d", "SyncBatchNorm3d", "convert_sync_batchnorm", "DeviceMesh"),
    *("coalesce", "new_group", "use_group", "empty_symmetric", "gpu_allreduce", "gpu_broadcast"),
    *(name for name in fd.__all__ if name.startswith("prepare_")),
    *("context_shard", "context_shard_batch", "context_unshard", "ring_attention", "ulysses_attention"),
}
"""What takes a group and is no call of a collective, or is one by another name."""


def calls(group):
    """Each public collective and message once; ranks 0 and 1 of 2."""
    peer, tensor = 1 - group.rank, torch.ones(4)
    return {
        "all_gather": lambda: fd.all_gather(tensor),
        "all_gather_object": lambda: fd.all_gather_object(1),
        "all_gather_uneven": lambda: fd.all_gather_uneven(tensor),
        "all_to_all": lambda: fd.all_to_all(tensor),
        "all_to_all_single_uneven": lambda: fd.all_to_all_single_uneven(tensor, [2, 2], [2, 2]),
        "allreduce": lambda: fd.allreduce(tensor),
        "allreduce_add_rms_norm": lambda: fd.allreduce_add_rms_norm(tensor, tensor, tensor),
        "async_all_gather": lambda: fd.async_all_gather(tensor).wait(),
        "async_all_to_all": lambda: fd.async_all_to_all(tensor).wait(),
        "async_allreduce": lambda: fd.async_allreduce(tensor).wait(),
        "async_broadcast": lambda: fd.async_broadcast(tensor).wait(),
        "async_reduce_scatter": lambda: fd.async_reduce_scatter(tensor).wait(),
        "barrier": fd.barrier,
        "batch": lambda: fd.batch([fd.Send(tensor, peer), fd.Recv(torch.empty(4), peer)]),
        "broadcast": lambda: fd.broadcast(tensor),
        "broadcast_object": lambda: fd.broadcast_object(1),
        "gather": lambda: fd.gather(tensor),
        "gather_object": lambda: fd.gather_object(1),
        "monitored_barrier": fd.monitored_barrier,
        "recv": lambda: fd.recv((4,), torch.float32, peer) if group.rank else fd.send(tensor, peer),
        "recv_into": lambda: fd.recv_into(tensor, peer) if group.rank else fd.send(tensor, peer),
        "recv_object": lambda: fd.recv_object(peer) if group.rank else fd.send_object(1, peer),
        "reduce": lambda: fd.reduce(tensor),
        "reduce_scatter": lambda: fd.reduce_scatter(tensor),
        "reduce_scatter_tensor": lambda: fd.reduce_scatter_tensor(torch.empty(2), tensor),
        "scatter": lambda: fd.scatter(None if group.rank else tensor),
        "scatter_object": lambda: fd.scatter_object(None if group.rank else [1, 2]),
        "send": lambda: fd.recv_into(tensor, peer) if group.rank == 0 else fd.send(tensor, peer),
        "send_object": lambda: fd.recv_object(peer) if group.rank == 0 else fd.send_object(1, peer),
        "sendrecv": lambda: fd.sendrecv(tensor, peer, (4,), peer),
    }


def test_all_public_calls_are_here():
    """A collective that comes later is shown, too, or is named above."""
    (group, _) = fd.SimulatedBackend.create_group(2)
    takers = {
        name
        for name in fd.__all__
        if name not in NOT_SHOWN
        and callable(getattr(fd, name))
        and "group" in inspect.signature(getattr(fd, name)).parameters
    }
    assert takers == set(calls(group))


@pytest.mark.parametrize("backend", ["tcp", "native"])
def test_the_profiler_shows_each_call_once(backend):
    """Every call appears as `ferrodist:name`, once, and what it consists of doesn't appear by itself."""

    def program(group):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for call in calls(group).values():
                call()
        return shown(profiler)

    first, second = run_ranks(program, 2, backend=backend, timeout=100)
    names = [name.removeprefix("async_") for name in calls(fd.SimulatedBackend.create_group(2)[0])]
    other_side = {"recv": "send", "recv_into": "send", "recv_object": "send_object"}
    assert second == names
    assert first == [
        {"send": "recv_into", "send_object": "recv_object"}.get(name) or other_side.get(name, name) for name in names
    ]


def shown(profiler):
    """The names of our calls, in order."""
    prefix = "ferrodist:"
    return [event.name.removeprefix(prefix) for event in profiler.events() if event.name.startswith(prefix)]


def test_errors_leave_the_profiler_as_it_was():
    """After a call that raised the next one is shown."""
    (group,) = fd.SimulatedBackend.create_group(1)

    def names():
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            with pytest.raises(TypeError):
                fd.allreduce("no tensor", group=group)
            fd.barrier(group)
        return shown(profiler)

    assert names() == ["allreduce", "barrier"]


def test_gradients_of_a_step_are_shown():
    """What DDP sends in backward is in a profile of the step."""

    def program(group):
        model = fd.DDP(torch.nn.Linear(4, 4), group)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            model(torch.ones(2, 4)).sum().backward()
        return shown(profiler)

    assert "allreduce" in run_ranks(program, 2, backend="native", timeout=100)[0]


def test_redistributions_are_shown():
    """What a distributed tensor sends to change its placement is in a profile, in forward and in backward."""

    def program(group):
        mesh = fd.DeviceMesh(group, (2,), ("t",))
        sharded = fd.distribute(torch.ones(4, 2), mesh, fd.Shard(0)).requires_grad_()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            whole = sharded.redistribute(fd.Replicate()).to_local(grad_placements=fd.Partial())
            whole.sum().backward()
        return shown(profiler)

    assert run_ranks(program, 2, backend="tcp", timeout=100)[0] == [
        "all_gather_with_sizes",
        "reduce_scatter_with_sizes",
    ]
