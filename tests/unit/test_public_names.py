"""What ``import ferrodist`` gives, and what it costs."""

import ast
import importlib
import inspect
import pydoc
import subprocess
import sys

import pytest

import ferrodist as fd
import ferrodist.testing
import ferrodist.torch_backend

PACKAGES = [
    "",
    "checkpoint",
    "checkpoint.convert",
    "checkpoint.storage",
    "interop",
    "launch",
    "mesh",
    "parallel",
    "parallel.context_parallel",
    "parallel.ddp",
    "parallel.ddp.comm_hooks",
    "parallel.pipeline",
    "parallel.fsdp",
    "parallel.tensor_parallel",
    "rendezvous",
    "rpc",
    "tensor",
    "testing",
    "torch_backend",
]

PUBLIC = [
    "ANY_SOURCE",
    "AuthenticationError",
    "Backend",
    "BackendUnavailable",
    "CollectiveMismatchError",
    "ColumnParallel",
    "ColumnParallelLinear",
    "DDP",
    "DEFAULT_COLLECTIVE_TIMEOUT",
    "DTensor",
    "DeviceMesh",
    "DiLoCo",
    "DistCheckpointError",
    "DistributedError",
    "DistributedTimeoutError",
    "ExpertLoad",
    "ExpertParallel",
    "FSDP",
    "GlooBackend",
    "GradientBucket",
    "GroupAbortedError",
    "GroupClosedError",
    "HybridBackend",
    "InvalidRankError",
    "InvalidWorldSizeError",
    "LocalSGD",
    "LossReduction",
    "Microbatches",
    "MixedPrecision",
    "MpiBackend",
    "NativeBackend",
    "NcclBackend",
    "NcclUniqueId",
    "NoConnectionError",
    "NonMemberGroup",
    "ParallelAttention",
    "ParallelEmbedding",
    "Partial",
    "PeerLostError",
    "PendingCollective",
    "Pipeline",
    "PipelineError",
    "PipelineOutput",
    "PipelineSchedule",
    "PreparedCollective",
    "ProtocolError",
    "RankFailedError",
    "Recv",
    "ReduceOp",
    "RendezvousError",
    "Replicate",
    "RowParallel",
    "RowParallelLinear",
    "RpcError",
    "SelfSendError",
    "Send",
    "SequenceParallel",
    "Shard",
    "ShardingStrategy",
    "SimulatedBackend",
    "SizeMismatchError",
    "Style",
    "SubBackend",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "TcpBackend",
    "TensorParallelExperts",
    "UccBackend",
    "UnsupportedOpError",
    "VocabularyParallel",
    "__version__",
    "all_gather",
    "all_gather_object",
    "all_gather_uneven",
    "all_to_all",
    "all_to_all_single_uneven",
    "allow_replication",
    "allreduce",
    "allreduce_add_rms_norm",
    "async_all_gather",
    "async_all_to_all",
    "async_allreduce",
    "async_broadcast",
    "async_reduce_scatter",
    "barrier",
    "batch",
    "broadcast",
    "broadcast_object",
    "by_class",
    "by_size",
    "checkpoint",
    "coalesce",
    "comm_hooks",
    "compute_shard_sizes",
    "context_parallel",
    "context_shard",
    "context_shard_batch",
    "context_unshard",
    "convert_sync_batchnorm",
    "default_group",
    "describe_plan",
    "destroy_process_group",
    "distribute",
    "empty_symmetric",
    "expert_loads",
    "factories",
    "gather",
    "gather_object",
    "gpu_allreduce",
    "gpu_broadcast",
    "init_process_group",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_native_available",
    "is_nccl_available",
    "is_ucc_available",
    "join_forward_method",
    "monitored_barrier",
    "new_group",
    "parallelize",
    "parallelize_experts",
    "premultiplied_sum",
    "prepare_all_gather",
    "prepare_all_to_all",
    "prepare_allreduce",
    "prepare_broadcast",
    "prepare_reduce_scatter",
    "record_redistributions",
    "recv",
    "recv_into",
    "recv_object",
    "reduce",
    "reduce_op_to_nccl",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "register_backend",
    "register_forward_method",
    "ring_attention",
    "rpc",
    "scatter",
    "scatter_object",
    "send",
    "send_object",
    "sendrecv",
    "split_model",
    "ulysses_attention",
    "update_expert_bias",
    "use_group",
]


def test_public_names_are_these():
    """A name comes or goes on purpose only."""
    assert sorted(fd.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(fd))


@pytest.mark.parametrize("name", PUBLIC)
def test_each_name_loads_and_is_described(name):
    """Every public name resolves, and every function and class has a docstring."""
    value = getattr(fd, name)
    if callable(value):
        assert inspect.getdoc(value)


def test_type_checkers_see_the_same_names():
    """The imports for type checkers and the names loaded at run time are the same list, from the same modules."""
    tree = ast.parse(inspect.getsource(fd))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module.removeprefix("ferrodist.") for node in block.body for alias in node.names}
    assert seen == fd._MODULE_OF | dict.fromkeys(fd._PACKAGES, "ferrodist")


def test_checkers_do_not_see_the_loading_of_names():
    """A module's ``__getattr__`` would have any name pass for one that there is."""
    for module in (fd, ferrodist.testing, ferrodist.torch_backend):
        tree = ast.parse(inspect.getsource(module))
        assert "__getattr__" not in {getattr(node, "name", "") for node in tree.body}
        hidden = [
            node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "not TYPE_CHECKING"
        ]
        assert [function.name for node in hidden for function in node.body] == ["__getattr__"]


@pytest.mark.parametrize("name", PACKAGES)
def test_dir_shows_what_is_public(name):
    """Packages show their public names, and not the modules that these come from."""
    package = importlib.import_module(f"ferrodist.{name}" if name else "ferrodist")
    assert dir(package) == sorted(package.__all__)
    for each in package.__all__:
        assert getattr(package, each, None) is not None or importlib.import_module(f"{package.__name__}.{each}")


def test_help_of_the_package_is_a_page():
    """The page lists the names; each has help of its own."""
    shown = pydoc.render_doc(fd, renderer=pydoc.plaintext)
    assert len(shown.splitlines()) < 120
    assert "init_process_group, destroy_process_group" in shown
    assert "allreduce(tensor" in pydoc.render_doc(fd.allreduce, renderer=pydoc.plaintext)


def test_unknown_name_is_an_attribute_error():
    """A misspelt name fails as in any module."""
    with pytest.raises(AttributeError, match=r"'all_reduction'$"):
        _ = fd.all_reduction


def test_importing_the_package_does_not_import_torch():
    """The launcher must start at once: torch loads with the first name that needs it."""
    code = "import sys, ferrodist, ferrodist.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
