"""What docs/from-ferrotorch.md says of data parallel training, FSDP, meshes, DTensors and pipelines is so."""

import copy

import pytest
import torch
from crate_rows import Shown

import ferrodist as fd
from ferrodist.parallel.pipeline import Schedule
from ferrodist.testing import run_ranks

SHOWN = Shown("ddp", "sync_batch_norm", "fsdp", "device_mesh", "dtensor", "pipeline")


def layer(group, size=4, outputs=2):
    """A layer whose values differ from rank to rank."""
    made = torch.nn.Linear(size, outputs)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + 100.0 * group.rank)
    return made


def values(module):
    """All of a module's parameters, as numbers."""
    return [parameter.detach().clone().tolist() for parameter in module.parameters()]


def differs(group, value):
    """Whether the ranks have different values."""
    return len({repr(each) for each in fd.all_gather_object(value, group=group)}) > 1


@SHOWN.row("DDP::new")
def _(group):
    own = layer(group)
    assert differs(group, values(own))
    assert not differs(group, values(fd.DDP(own)))
    assert values(own)[1] == [0, 1]


@SHOWN.row("DDP::with_bucket_size")
def _(group):
    assert fd.DDP.__init__.__kwdefaults__["bucket_size_mb"] == 25
    ddp = fd.DDP(layer(group), group, bucket_size_mb=1e-6)
    ddp(torch.ones(1, 4)).sum().backward()


@SHOWN.row("DDP::into_inner")
def _(group):
    own = layer(group)
    ddp = fd.DDP(own, group)
    inputs = torch.full((1, 4), float(group.rank))
    own(inputs).sum().backward()
    assert own.weight.grad.tolist() == [[0.5] * 4] * 2
    own.zero_grad()
    with ddp.no_sync():
        own(inputs).sum().backward()
    assert own.weight.grad.tolist() == [[group.rank] * 4] * 2
    own.zero_grad()
    del ddp
    own(inputs).sum().backward()
    assert own.weight.grad.tolist() == [[group.rank] * 4] * 2


@SHOWN.row("DDP::sync_gradients", "DDP::overlapped_sync_gradients")
def _(group):
    for synchronise in (fd.DDP.sync_gradients, fd.DDP.overlapped_sync_gradients):
        ddp = fd.DDP(layer(group), group, overlap_comm=False, bucket_size_mb=1e-6)
        ddp(torch.full((1, 4), float(group.rank))).sum().backward()
        assert ddp.module.weight.grad.tolist() == [[group.rank] * 4] * 2
        synchronise(ddp)
        assert ddp.module.weight.grad.tolist() == [[0.5] * 4] * 2
        assert ddp.module.bias.grad.tolist() == [1, 1]


@SHOWN.row("DDP::broadcast_parameters")
def _(group):
    ddp = fd.DDP(layer(group), group)
    before = list(ddp.parameters())
    with torch.no_grad():
        ddp.module.bias.fill_(group.rank)
    ddp.broadcast_parameters(1)
    assert ddp.module.bias.tolist() == [1, 1]
    assert all(one is other for one, other in zip(before, ddp.parameters(), strict=True))


@SHOWN.row("DDP::parameters")
def _(group):
    assert next(fd.DDP(layer(group), group).parameters()).shape == (2, 4)


@SHOWN.row("DDP::named_parameters")
def _(group):
    ddp = fd.DDP(torch.nn.Sequential(layer(group)), group)
    assert [name for name, _ in ddp.named_parameters()] == list(ddp.state_dict()) == ["0.weight", "0.bias"]


@SHOWN.row("DDP::is_training", "SyncBatchNorm2d::is_training", "DDP::module", "FSDP::module")
def _(group):
    own = layer(group)
    ddp, norm, fsdp = fd.DDP(own, group), fd.SyncBatchNorm2d(2, group=group), fd.FSDP(layer(group), group)
    assert (ddp.training, norm.training) == (True, True)
    assert (ddp.eval().training, norm.eval().training) == (False, False)
    assert ddp.module is own
    assert sum(parameter.numel() for parameter in fsdp.module.parameters()) < 10


@SHOWN.row("SyncBatchNorm2d")
def _(group):
    whole = fd.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm2d(2), torch.nn.BatchNorm1d(2)), group)
    assert [type(each) for each in whole] == [fd.SyncBatchNorm2d, fd.SyncBatchNorm1d]


@SHOWN.row("SyncBatchNorm2d::new")
def _(group):
    norm = fd.SyncBatchNorm2d(2, 1e-3, 0.5, affine=False)
    assert (norm.eps, norm.momentum, norm.weight) == (1e-3, 0.5, None)
    norm(torch.rand(2, 2, 2, 2))  # over the default group


@SHOWN.row("SyncBatchNorm2d::running_mean", "SyncBatchNorm2d::running_var", "SyncBatchNorm2d::num_batches_tracked")
def _(group):
    names = {"running_mean", "running_var", "num_batches_tracked"}
    norm = fd.SyncBatchNorm2d(2, group=group)
    assert names == {name for name, _ in norm.named_buffers()} == names & set(norm.state_dict())


@SHOWN.row("SyncBatchNorm2d::forward")
def _(group):
    whole = torch.arange(12.0).view(3, 2, 2, 1)
    norm = fd.SyncBatchNorm2d(2, group=group)
    own = norm(whole[:1] if group.rank == 0 else whole[1:])
    expected = torch.nn.BatchNorm2d(2)(whole)
    torch.testing.assert_close(own, expected[:1] if group.rank == 0 else expected[1:])


@SHOWN.row("ShardingStrategy::ShardGradOp")
def _(group):
    fsdp = fd.FSDP(layer(group), group, strategy=fd.ShardingStrategy.SHARD_GRAD_OP)
    num_elements = [parameter.numel() for parameter in fsdp.parameters()]
    assert sum(num_elements) < 10
    seen = []
    fsdp.module.register_forward_hook(lambda module, *_: seen.append(module.weight.shape))
    fsdp(torch.ones(1, 4)).sum().backward()
    assert seen == [(2, 4)]
    assert [parameter.grad.numel() for parameter in fsdp.parameters()] == num_elements


@SHOWN.row("ShardingStrategy::HybridShard")
def _(group):
    fsdp = fd.FSDP(layer(group), group, strategy=fd.ShardingStrategy.hybrid(1))
    assert sum(parameter.numel() for parameter in fsdp.parameters()) == 10  # nodes of one rank divide nothing


@SHOWN.row("FSDP::new")
def _(group):
    own = layer(group, 5, 3)
    fsdp = fd.FSDP(own, group)
    sizes = fd.all_gather_object([parameter.numel() for parameter in fsdp.parameters()])
    assert [sum(each) for each in zip(*sizes, strict=True)] == [15, 3]
    assert sizes == [[15, 0], [0, 3]]  # the second parameter begins at 16, where the cut is
    assert fsdp.full_state_dict()["bias"].tolist() == [0, 1, 2]


@SHOWN.row("FSDP::prefetch_forward_params", "FSDP::has_pending_prefetch")
def _(group):
    for strategy in (fd.ShardingStrategy.FULL_SHARD, fd.ShardingStrategy.NO_SHARD):
        fsdp = fd.FSDP(layer(group), group, strategy=strategy)
        fsdp.prefetch_forward_params()
        fsdp.prefetch_forward_params()
        assert fsdp(torch.zeros(1, 4)).tolist() == [[0, 1]]
        assert not fsdp.has_pending_prefetch


@SHOWN.row("FSDP::into_inner")
def _(group):
    own = layer(group)
    fsdp = fd.FSDP(own, group)
    state = fsdp.full_state_dict()
    del fsdp
    assert own.weight.numel() + own.bias.numel() < 10
    anew = torch.nn.Linear(4, 2)
    anew.load_state_dict(state)
    assert anew.bias.tolist() == [0, 1]


@SHOWN.row("FSDP::sync_gradients")
def _(group):
    fsdp = fd.FSDP(layer(group), group)
    fsdp.sync_gradients()  # without a forward
    inputs = torch.full((1, 4), float(group.rank))
    fsdp(inputs).sum().backward()
    averaged = [parameter.grad.clone() for parameter in fsdp.parameters()]
    fsdp.sync_gradients()
    assert all(torch.equal(one, each.grad) for one, each in zip(averaged, fsdp.parameters(), strict=True))
    fsdp.zero_grad()
    with fsdp.no_sync():
        fsdp(inputs).sum().backward()
    fsdp.sync_gradients()
    assert all(torch.equal(one, each.grad) for one, each in zip(averaged, fsdp.parameters(), strict=True))


@SHOWN.row("FSDP::broadcast_updated_params")
def _(group):
    for strategy, expected in ((fd.ShardingStrategy.NO_SHARD, [0, 0]), (fd.ShardingStrategy.FULL_SHARD, None)):
        fsdp = fd.FSDP(layer(group), group, strategy=strategy)
        with torch.no_grad():
            for parameter in fsdp.parameters():
                parameter.fill_(group.rank)
        own = fsdp.full_state_dict()["bias"] if expected is None else None
        fsdp.broadcast_updated_params()
        found = fsdp.full_state_dict()["bias"]
        assert found.tolist() == (own.tolist() if expected is None else expected)


@SHOWN.row("FSDP::update_shards")
def _(group):
    fsdp = fd.FSDP(layer(group), group)
    own = [parameter.detach() * 0 + 7 for parameter in fsdp.parameters()]
    fsdp.update_shards(own)
    assert fsdp.full_state_dict()["bias"].tolist() == [7, 7]
    fsdp.update_shards(torch.cat([each.view(-1) for each in own]) + 1)
    assert fsdp.full_state_dict()["bias"].tolist() == [8, 8]
    with pytest.raises(ValueError, match="update_shards got a tensor of shape"):
        fsdp.update_shards(torch.zeros(11))


@SHOWN.row("DeviceMesh", "DeviceMesh::new", "DeviceMesh::new_with_names")
def _(group):
    mesh = fd.DeviceMesh(group, (1, 2), ("a", "b"))
    assert (mesh.shape, mesh.axis_names, mesh.ndim, mesh.size) == ((1, 2), ("a", "b"), 2, 2)
    assert fd.allreduce(torch.ones(1), group=mesh["b"].group).item() == 2


@SHOWN.row("DeviceMesh::coords")
def _(group):
    mesh = fd.DeviceMesh(group, (1, 2), ("a", "b"))
    assert (mesh.coords(1), mesh.rank_of((0, 1)), mesh.axis_names, mesh.axis_index("b")) == ((0, 1), 1, ("a", "b"), 1)


@SHOWN.row("DeviceMesh::ranks_along_dim")
def _(group):
    mesh = fd.DeviceMesh(group, (2,), ("a",))
    assert mesh.ranks_along_axis("a") == (0, 1)
    assert mesh.groups_along_axis("a") == [(0, 1)]
    assert mesh["a"].group.world_size == 2


@SHOWN.row("Placement")
def _(group):
    assert len({fd.Shard, fd.Replicate, fd.Partial}) == 3
    assert fd.Shard(1).dim == 1


@SHOWN.row("Placement::Shard")
def _(group):
    mesh = fd.DeviceMesh(group, (2, 1), ("a", "b"))
    twice = fd.distribute(torch.arange(4.0), mesh, (fd.Shard(0), fd.Shard(0)))
    assert twice.to_local().tolist() == [2 * group.rank, 2 * group.rank + 1]
    blocks = fd.distribute(torch.arange(4.0), mesh["a"], fd.Shard(0, blocks=2))
    assert blocks.to_local().tolist() == [group.rank, 2 + group.rank]


@SHOWN.row("Placement::Partial")
def _(group):
    mesh = fd.DeviceMesh(group, (2,), ("a",))
    results = {"SUM": 5, "MEAN": 2.5, "MIN": 2, "MAX": 3, "PRODUCT": 6}
    for op, expected in results.items():
        part = fd.DTensor.from_local(torch.tensor([2.0 + group.rank]), mesh, fd.Partial(getattr(fd.ReduceOp, op)))
        assert part.full_tensor().item() == expected


@SHOWN.row("DTensor")
def _(group):
    mesh = fd.DeviceMesh(group, (2,), ("a",))
    spread = fd.distribute(torch.arange(4.0), mesh, fd.Shard(0)).requires_grad_()
    assert isinstance(spread, torch.Tensor)
    (spread * 3).sum().backward()
    assert spread.grad.full_tensor().tolist() == [3] * 4


@SHOWN.row("DTensor::from_local")
def _(group):
    mesh = fd.DeviceMesh(group, (2,), ("a",))
    with pytest.raises((ValueError, fd.DistributedError)):
        fd.DTensor.from_local(torch.ones(2, 2 + group.rank), mesh, fd.Shard(0))


@SHOWN.row("DTensor::from_local_replicated")
def _(group):
    mesh = fd.DeviceMesh(group, (2,), ("a",))
    assert fd.DTensor.from_local(torch.ones(3), mesh, fd.Replicate()).shape == (3,)


@SHOWN.row("DTensor::redistribute")
def _(group):
    mesh = fd.DeviceMesh(group, (2,), ("a",))
    spread = fd.DTensor.from_local(torch.full((1,), float(group.rank)), mesh, fd.Shard(0))
    whole = spread.redistribute((fd.Replicate(),))
    assert whole.to_local().tolist() == [0, 1]
    assert spread.to_local().tolist() == [group.rank]


@SHOWN.row("DTensor::numel")
def _(group):
    mesh = fd.DeviceMesh(group, (2,), ("a",))
    assert fd.DTensor.from_local(torch.ones(0, 3), mesh, fd.Shard(0)).numel() == 0


@SHOWN.row("PipelineSchedule")
def _(group):
    assert len(fd.PipelineSchedule) == 7
    pipeline, _ = step(group, fd.PipelineSchedule.GPIPE)
    own = Schedule.from_text(str(pipeline.schedule))
    assert step(group, own)[0].schedule is own


def step(group, schedule):
    """Forward and backward of a batch, by a pipeline of two stages."""
    stages = [layer(group, 2), layer(group, 2)]
    pipeline = fd.Pipeline(stages, group, 4, schedule=schedule, loss_fn=torch.nn.functional.mse_loss)
    loss = pipeline.step(torch.ones(4, 2), torch.ones(4, 2))
    return pipeline, loss


@SHOWN.row("PipelineSchedule::OneFOnEB")
def _(group):
    peaks = []
    for schedule in (fd.PipelineSchedule.GPIPE, fd.PipelineSchedule.ONE_F_ONE_B):
        pipeline, _ = step(group, schedule)
        peaks.append(pipeline.peak_activations)
    assert peaks == [4, 2 - group.rank]


@SHOWN.row("Pipeline")
def _(group):
    alone = fd.SimulatedBackend.create_group(1)[0]
    assert fd.Pipeline([layer(group)], alone)(torch.zeros(1, 4)).shape == (1, 2)


@SHOWN.row("Pipeline::new", "Pipeline::forward")
def _(group):
    stages = [torch.nn.Linear(4, 2), torch.nn.Linear(2, 2)]
    one = fd.Pipeline(stages[group.rank], group, 2)
    output = one(torch.ones(4, 4))
    assert (output is not None and output.shape == (4, 2)) == (group.rank == 1)
    assert fd.Pipeline([torch.nn.Linear(4, 2), torch.nn.Linear(2, 2)], group, 2).num_microbatches == 2


@SHOWN.row("Pipeline::backward")
def _(group):
    stages = [layer(group, 2), layer(group, 2)]
    whole = torch.nn.Sequential(*copy.deepcopy(stages))
    for root, each in enumerate(whole):  # each rank's stage, as it is there
        for parameter in each.parameters():
            fd.broadcast(parameter.detach(), root, out=parameter.detach())
    inputs = torch.tensor([[1.0, 2], [3, 4]])
    expected = whole(inputs)
    expected.backward(torch.ones(2, 2))
    pipeline = fd.Pipeline([each if number == group.rank else None for number, each in enumerate(stages)], group, 2)
    output = pipeline(inputs)
    pipeline.backward(torch.ones(2, 2) if group.rank else None)
    for own, other in zip(pipeline.parameters(), whole[group.rank].parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    assert group.rank == 0 or torch.allclose(output, expected)


@SHOWN.row("Pipeline::schedule")
def _(group):
    pipeline, _ = step(group, fd.PipelineSchedule.GPIPE)
    assert len(pipeline.schedule.actions) == 2


@SHOWN.row("Pipeline::module")
def _(group):
    pipeline, _ = step(group, fd.PipelineSchedule.GPIPE)
    assert list(pipeline.stages) == [str(group.rank)]


@pytest.mark.parametrize("crate", SHOWN)
def test_what_a_row_says_is_so(crate):
    """A row that can be shown is."""
    run_ranks(SHOWN[crate], 2)


def test_no_row_of_these_tables_is_left_out():
    """A note of these tables that nothing shows."""
    assert SHOWN.missing() == []
    assert SHOWN.unknown() == []


def test_batch_norm_without_a_group():
    """The row of its constructor: nothing is left unsynchronised by mistake."""
    with pytest.raises(fd.GroupClosedError):
        fd.SyncBatchNorm2d(2)(torch.rand(2, 2, 2, 2))
