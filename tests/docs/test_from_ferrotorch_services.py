"""What docs/from-ferrotorch.md says of calls, checkpoints and engines is so."""

import asyncio
import tempfile
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from crate_rows import Shown
from nccl_fakes import fake_groups

import ferrodist as fd
from ferrodist import checkpoint
from ferrodist.testing import run_ranks

_BY_MPI = dict.fromkeys(
    [
        *("MpiBackend", "MpiBackend::new", "MpiBackend::from_env", "MpiBackend::allreduce_sum_f32"),
        *("MpiBackend::broadcast_f32", "is_mpi_available", "mpi-backend", "mpi-native"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
    ],
    "programs/test_mpi.py",
)
_BY_UCC = dict.fromkeys(
    [
        *("UccBackend", "UccBackend::new", "UccBackend::from_env", "UccBackend::allreduce_sum_f32"),
        *("UccBackend::broadcast_f32", "UccBackend::gpu_allreduce", "UccBackend::gpu_broadcast", "is_ucc_available"),
    ],
    "multiprocess/test_ucc.py",
)
_BY_NCCL = dict.fromkeys(
    ["NcclBackend::new", "NcclBackend::with_stream", "NcclUniqueId", "get_unique_id"],
    "gpu/test_nccl_real.py",
)

SHOWN = Shown(
    *("rpc", "checkpoint", "gloo_backend", "mpi_backend", "ucc_backend", "gpu_collective", "nccl_backend"),
    *("nccl_collective", "nccl_sys", "hybrid_backend", "Cargo features", "Environment variables"),
    elsewhere={
        **_BY_MPI,
        **_BY_UCC,
        **_BY_NCCL,
        "RpcError::InvalidMessage": "unit/rpc/test_rpc_tcp_backend.py",
        "RpcError::NoConnection": "unit/rpc/test_rpc_pairs.py",
        "TcpRpcBackend": "unit/rpc/test_rpc_survival.py",
        "TcpRpcBackend::new": "unit/rpc/test_rpc_tcp_backend.py",
        "NcclBackend": "docs/test_from_ferrotorch_services.py",
        "NcclError::NcclStatus": "unit/backends/nccl/test_nccl_failures.py",
        "GlooBackend": "unit/backends/native/test_native_backend.py",
        "GlooBackend::new": "multiprocess/test_native_hosts.py",
        "HybridBackend": "docs/test_from_ferrotorch_services.py",
        "HybridBackend::new": "docs/test_from_ferrotorch_services.py",
        "HybridBackend::synchronize_nccl": "docs/test_from_ferrotorch_services.py",
        "nccl_allreduce": "docs/test_from_ferrotorch_services.py",
        "nccl_allreduce_dtype": "docs/test_from_ferrotorch_services.py",
        "nccl_broadcast": "docs/test_from_ferrotorch_services.py",
        "nccl_all_gather": "docs/test_from_ferrotorch_services.py",
        "nccl_reduce_scatter": "docs/test_from_ferrotorch_services.py",
        "FERROTORCH_ENABLE_GPU_FALLBACK": "unit/collectives/test_gpu_staged.py",
    },
    untold={"gpu": "it says whose CUDA is"},
)


def fails():
    """A function that fails where it is called."""
    raise KeyError("nothing here")


async def later(value):
    """A coroutine function."""
    await asyncio.sleep(0)
    return value


@SHOWN.row("RpcError", "RpcError::FunctionNotFound", "RpcError::Internal")
def _(group):
    with fd.rpc.RpcContext(group, {"fails": fails}) as agent:
        with pytest.raises(fd.rpc.RpcError, match="those registered: fails"):
            agent.rpc_sync(1 - group.rank, "other")
        with pytest.raises(fd.rpc.RpcError, match=r"(?s)KeyError.*nothing here") as caught:
            agent.rpc_sync(1 - group.rank, "fails")
        assert "in fails" in caught.value.remote_traceback


@SHOWN.row("RpcError::Timeout")
def _(group):
    async def never():
        await asyncio.Event().wait()

    with (
        fd.rpc.RpcContext(group, {"never": never}) as agent,
        pytest.raises(fd.DistributedTimeoutError) as caught,
    ):
        agent.rpc_sync(1 - group.rank, "never", timeout=0.05)
    assert caught.value.ranks == (1 - group.rank,)


@SHOWN.row("RpcAgent", "RpcAgent::new", "RpcAgent::register", "RpcAgent::rpc_sync")
def _(group):
    agent = fd.rpc.RpcAgent(group, name=f"worker{group.rank}")
    agent.register("later", later)

    @agent.register("twice")
    def twice(value):
        return {"twice": [value * 2], "tensors": (value,)}

    fd.barrier()
    other = 1 - group.rank
    assert agent.rpc_sync(f"worker{other}", "later", 3) == 3
    result = agent.rpc_sync(other, "twice", torch.ones(2), timeout=20)
    assert (result["twice"][0].tolist(), result["tensors"][0].tolist()) == ([2, 2], [1, 1])
    fd.barrier()
    agent.close()


@SHOWN.row("RpcAgent::rpc_async")
def _(group):
    with fd.rpc.RpcContext(group, {"later": later}) as agent:
        assert agent.rpc_async(1 - group.rank, "later", 1, timeout=20).result() == 1

        async def waits():
            return await agent.rpc_async(1 - group.rank, "later", 2)

        assert asyncio.run(waits()) == 2


def folder(group):
    """A new folder, the same on both ranks."""
    return Path(fd.broadcast_object(tempfile.mkdtemp() if group.rank == 0 else None, group=group))


SPEC = checkpoint.TensorShardSpec(full_shape=(3, 2), shard_dim=0, shard_sizes=(1, 2))
SHARDS = checkpoint.ShardMetadata(num_ranks=2, tensor_specs={"x": SPEC})
WHOLE = torch.arange(6.0).view(3, 2)


def save(group, path):
    """A checkpoint of a tensor of which rank 0 has one row, rank 1 two."""
    own = WHOLE[:1] if group.rank == 0 else WHOLE[1:]
    checkpoint.save_distributed({"x": own}, path, group=group, shards=SHARDS)


@SHOWN.row("save_distributed", "load_distributed", "DistributedCheckpoint", "DistributedCheckpoint::shard_metadata")
def _(group):
    path = folder(group) / "saved"
    save(group, path)
    assert checkpoint.load_distributed(path, group=group)["x"].tolist() == WHOLE.tolist()
    saved = checkpoint.DistributedCheckpoint(path)
    assert saved.shard_metadata.tensor_specs["x"].full_shape == (3, 2)
    own = checkpoint.load_distributed(path, group=group, shards=saved.shard_metadata.for_ranks(2))["x"]
    assert own.tolist() == (WHOLE[:2] if group.rank == 0 else WHOLE[2:]).tolist()
    assert saved.shard_metadata.for_ranks(3).tensor_specs["x"].shard_sizes == [1, 1, 1]


@SHOWN.row("reshard")
def _(group):
    path = folder(group)
    save(group, path / "saved")
    if group.rank == 0:
        checkpoint.reshard(path / "saved", path / "of three", num_ranks=3)
    fd.barrier()
    anew = checkpoint.DistributedCheckpoint(path / "of three")
    assert anew.shard_metadata.num_ranks == 3
    loaded = checkpoint.load_distributed(path / "of three", group=group, shards=anew.shard_metadata.for_ranks(2))
    assert loaded["x"].tolist() == (WHOLE[:2] if group.rank == 0 else WHOLE[2:]).tolist()


@SHOWN.row("AsyncCheckpointer", "AsyncCheckpointer::new", "AsyncCheckpointer::dir", "AsyncCheckpointer::save_async")
def _(group):
    path = folder(group)
    own = WHOLE[:1] if group.rank == 0 else WHOLE[1:]
    with checkpoint.AsyncCheckpointer(path, group=group, shards=SHARDS) as saves:
        saves.save_async({"x": own.to(torch.bfloat16)}, 1)
        saves.save_async({"x": own.to(torch.bfloat16)}, 2).wait()  # waits for the other
        assert (Path(saves.dir), saves.rank, saves.world_size) == (path, group.rank, 2)
    assert sorted(each.name for each in path.iterdir()) == ["step-00000001", "step-00000002"]


@SHOWN.row("CheckpointFuture::wait", "CheckpointFuture::is_done")
def _(group):
    path = folder(group)
    with checkpoint.AsyncCheckpointer(path, group=group) as saves:
        future = saves.save_async({"x": torch.ones(2)}, 3)
        assert Path(future.wait()) == path / "step-00000003"
        assert future.done()
        assert hasattr(Future, "done")
    assert (path / "step-00000003" / "metadata.json").exists()


@SHOWN.row("flat_shard_metadata")
def _(group):
    found = checkpoint.flat_shard_metadata({"x": torch.ones(2, 3, dtype=torch.bool)}, 2)
    assert found.tensor_specs["x"] == checkpoint.TensorShardSpec(full_shape=[12], shard_dim=0, shard_sizes=[6, 6])


@SHOWN.row("is_gloo_available")
def _(group):
    assert fd.is_gloo_available() == fd.is_native_available()


@SHOWN.row(*("GlooBackend::from_env", "GlooBackend::ring_allreduce_sum_f32", "GlooBackend::tree_broadcast_f32"))
def _(group):
    for dtype in (torch.float64, torch.int8):
        own = torch.full((2,), group.rank + 1, dtype=dtype)
        fd.allreduce(own, fd.ReduceOp.MAX, out=own)
        fd.broadcast(own * group.rank, 1, out=own)
        assert own.tolist() == [2, 2]


@SHOWN.row("reduce_op_to_nccl")
def _(group):
    assert isinstance(fd.reduce_op_to_nccl(fd.ReduceOp.SUM), int)
    with pytest.raises(fd.UnsupportedOpError):
        fd.reduce_op_to_nccl(fd.ReduceOp.BXOR)


@SHOWN.row("gpu_allreduce")
def _(group):
    with pytest.raises(fd.UnsupportedOpError, match="use allreduce"):
        fd.gpu_allreduce(torch.ones(1))


@SHOWN.row("group_start")
def _(group):
    with fd.coalesce():
        pending = fd.async_allreduce(torch.ones(1))
    assert pending.wait().item() == 2


@SHOWN.row("NcclUniqueId::internal")
def _(group):
    assert fd.NcclUniqueId(bytes(128)).internal == bytes(128)


@pytest.mark.parametrize("crate", SHOWN)
def test_what_a_row_says_is_so(crate):
    """A row that can be shown is."""
    run_ranks(SHOWN[crate], 2)


def test_no_row_of_these_tables_is_left_out():
    """A note of these tables that nothing shows."""
    assert SHOWN.missing() == []
    assert SHOWN.unknown() == []


@pytest.mark.skipif(not fd.is_gloo_available(), reason="the native engine is not installed")
def test_a_gloo_group_of_the_environment(monkeypatch):
    """The rows of the crate's gloo: from torchrun's variables, by its own name or the general one."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    group = fd.GlooBackend.from_env()
    assert fd.allreduce(torch.ones(1), group=group).item() == 1
    group.close()


def test_hybrid_groups_are_what_their_rows_say():
    """The getters of a hybrid group are groups of its ranks; collectives of NCCL's check sizes and dtypes."""

    def program(group):
        assert isinstance(group.nccl, fd.NcclBackend)
        assert isinstance(group.tcp, fd.SimulatedBackend)
        for each in (group.nccl, group.tcp, group):
            own = torch.ones(2)
            assert fd.allreduce(own, group=each, out=own).tolist() == [2, 2]
            assert fd.broadcast(own * group.rank, 1, group=each).tolist() == [2, 2]
            assert fd.all_gather(own, group=each, out=torch.empty(4)).tolist() == [2] * 4
            with pytest.raises(ValueError, match="out"):
                fd.all_gather(own, group=each, out=torch.empty(3))
            part = torch.empty(1)
            assert fd.reduce_scatter_tensor(part, own, group=each).tolist() == [4]
        group.synchronize_nccl(timeout=20)

    run_ranks(program, 2, backend=fake_groups)


@pytest.mark.parametrize("kind", [fd.NcclBackend, fd.HybridBackend])
def test_groups_over_nccl_say_that_there_is_none(kind):
    """Where a row says that making one raises, it does."""
    if fd.is_nccl_available():
        pytest.skip("this machine has NCCL and a GPU")
    with pytest.raises(fd.BackendUnavailable):
        kind(fd.SimulatedBackend.create_group(1)[0])
    with pytest.raises(fd.BackendUnavailable):
        fd.NcclUniqueId.create()
