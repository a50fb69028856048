"""A group on a rank that is not in it: no call takes it for another group."""

import copy
import inspect
import pickle

import pytest
import torch

import ferrodist as fd
from ferrodist.checkpoint import AsyncCheckpointer
from ferrodist.parallel.pipeline import split_sequential
from ferrodist.rpc import GroupRpcBackend, RpcAgent
from ferrodist.testing import run_ranks

TENSOR = torch.ones(2)


def linear():
    """A model to be spread."""
    return torch.nn.Linear(2, 2)


def enter(context):
    """Go into a with-block."""
    with context:
        pytest.fail("a block was entered with a group that this rank is not in")


_HEADS = (torch.ones(1, 1, 2, 4),) * 3
OTHER_ARGUMENTS = {
    "ring_attention": _HEADS,
    "ulysses_attention": _HEADS,
    "context_shard": (torch.ones(2, 4),),
    "context_unshard": (torch.ones(2, 4),),
    "context_shard_batch": ({"input_ids": torch.ones(1, 4, dtype=torch.long)},),
    "DDP": (linear(),),
    "DiLoCo": (linear(),),
    "FSDP": (linear(),),
    "LocalSGD": (linear(),),
    "Pipeline": (linear(),),
    "SyncBatchNorm1d": (2,),
    "SyncBatchNorm2d": (2,),
    "SyncBatchNorm3d": (2,),
    "all_gather_object": (1,),
    "allreduce_add_rms_norm": (torch.ones(2),) * 3,
    "all_to_all": ([TENSOR, TENSOR],),
    "all_to_all_single_uneven": (TENSOR, [1, 1], [1, 1]),
    "async_all_to_all": ([TENSOR, TENSOR],),
    "barrier": (),
    "batch": ([fd.Send(TENSOR, 1)],),
    "broadcast_object": (1,),
    "convert_sync_batchnorm": (torch.nn.BatchNorm2d(2),),
    "empty_symmetric": ((2,),),
    "gather_object": (1,),
    "monitored_barrier": (),
    "new_group": ([0],),
    "recv": ((2,), torch.float32, 0),
    "recv_into": (TENSOR, 0),
    "recv_object": (0,),
    "reduce_scatter_tensor": (torch.ones(1), TENSOR),
    "scatter": (TENSOR,),
    "scatter_object": ([1, 2],),
    "send": (TENSOR, 0),
    "send_object": (1, 0),
    "sendrecv": (TENSOR, 0, (2,), 0),
}
"""What else is passed to public names that take ``group=``; a tensor to those that are not here."""

NOT_CALLED = {"DTensor", "GradientBucket", "gpu_allreduce", "gpu_broadcast"}
"""Those that have no signature, that ferrodist alone makes, and that refuse all tensors but a GPU's first."""

OTHER_CALLS = {
    "AsyncCheckpointer": lambda group, place: AsyncCheckpointer(place, group=group),
    "DeviceMesh": lambda group, _: fd.DeviceMesh(group, (1,)),
    "DeviceMesh.of_hosts": lambda group, _: fd.DeviceMesh.of_hosts(group),
    "GroupRpcBackend": lambda group, _: GroupRpcBackend(group),
    "HybridBackend": lambda group, _: fd.HybridBackend(group),
    "NcclBackend": lambda group, _: fd.NcclBackend(group),
    "RpcAgent": lambda group, _: RpcAgent(group),
    "RpcContext": lambda group, _: enter(fd.rpc.RpcContext(group)),
    "SubBackend": lambda group, _: fd.SubBackend(group, [0]),
    "UccBackend": lambda group, _: fd.UccBackend(group),
    "coalesce": lambda group, _: enter(fd.coalesce(group)),
    "load_distributed": lambda group, place: fd.checkpoint.load_distributed(place, group=group),
    "save_distributed": lambda group, place: fd.checkpoint.save_distributed({"x": TENSOR}, place, group=group),
    "split_sequential": lambda group, _: split_sequential(torch.nn.Sequential(linear(), linear()), 2, group=group),
    "use_group": lambda group, _: enter(fd.use_group(group)),
}
"""Those that take it otherwise, or are elsewhere."""


def takers():
    """The public names that take ``group=``."""
    for name in fd.__all__:
        value = getattr(fd, name)
        if name not in NOT_CALLED and callable(value) and "group" in inspect.signature(value).parameters:
            yield name


def outsider():
    """What `new_group` gives to a rank outside."""
    one, other = fd.SimulatedBackend.create_group(2)
    del other
    return one, fd.new_group([1], group=one)


@pytest.mark.parametrize("name", [name for name in takers() if name not in OTHER_CALLS])
def test_no_function_takes_it_for_the_default_group(name):
    """A program that doesn't ask who is a member gets an error there, not the world's numbers."""
    world, sub = outsider()
    options = {"period": 1} if name == "LocalSGD" else {}
    with fd.use_group(world), pytest.raises(fd.InvalidRankError, match=r"rank 0 of group 'world' is not in") as caught:
        getattr(fd, name)(*OTHER_ARGUMENTS.get(name, (TENSOR,)), group=sub, **options)
    assert "`if group.is_member:`" in str(caught.value)
    assert "which has rank 1 of 'world'" in str(caught.value)
    assert caught.value.ranks == (0,)


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_nothing_else_takes_it_either(name, tmp_path):
    """Checkpoints, calls, meshes, pipelines and groups over it are refused like collectives."""
    world, sub = outsider()
    with fd.use_group(world), pytest.raises(fd.InvalidRankError, match="only members make its calls"):
        OTHER_CALLS[name](sub, tmp_path)


@pytest.mark.parametrize(
    "use",
    [
        lambda sub: sub.rank,
        lambda sub: sub.world_size,
        lambda sub: sub.to_global(0),
        lambda sub: sub.barrier(),
        lambda sub: sub.send(b"", 0),
        lambda sub: sub.abort("no"),
    ],
)
def test_it_has_nothing_of_a_members_handle(use):
    """Code that asks a rank outside for its number in the group learns that it has none."""
    _, sub = outsider()
    with pytest.raises(fd.InvalidRankError, match="is not in group"):
        use(sub)


def test_it_may_be_closed_and_copied_where_all_ranks_do():
    """Programs close their groups and copy what holds them without asking who is a member."""
    _, sub = outsider()
    sub.close()
    assert copy.deepcopy([sub])[0] is copy.copy(sub) is sub
    assert not hasattr(sub, "_members_of")
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(sub)


@pytest.mark.parametrize("backend", ["simulated", "native"])
def test_a_program_that_does_not_ask_ends_with_an_error_on_the_ranks_outside(backend):
    """Without the guard a rank outside raises at once; the members' sum and the world's are right."""

    def program(group):
        sub = fd.new_group([0, 1])
        tensor = torch.full((2,), 100.0)
        if group.rank < 2:
            assert fd.allreduce(tensor, group=sub).tolist() == [200, 200]
        else:
            for call in (fd.allreduce, fd.async_allreduce, fd.broadcast, fd.all_gather):
                with pytest.raises(fd.InvalidRankError, match=f"rank {group.rank} of group 'world' is not in"):
                    call(tensor, group=sub)
            for call in (lambda: fd.send(tensor, 0, group=sub), lambda: fd.barrier(sub)):
                with pytest.raises(fd.InvalidRankError, match="only members"):
                    call()
        return fd.allreduce(torch.ones(2)).tolist()

    assert run_ranks(program, 4, backend=backend) == [[4, 4]] * 4
