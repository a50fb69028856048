"""ferrodist: distributed training for PyTorch on a communication layer of its own.

::

    groups        init_process_group, destroy_process_group, default_group, is_initialized, new_group, use_group,
                  NonMemberGroup
    backends      Backend, NativeBackend, GlooBackend, TcpBackend, MpiBackend, UccBackend, SimulatedBackend, SubBackend,
                  register_backend; HybridBackend, NcclBackend, NcclUniqueId, reduce_op_to_nccl; is_native_available,
                  is_gloo_available, is_mpi_available, is_ucc_available, is_nccl_available
    collectives   allreduce, reduce, broadcast, all_gather, gather, scatter, reduce_scatter, all_to_all, barrier and
                  their forms; ReduceOp, premultiplied_sum; async_* -> PendingCollective; coalesce;
                  empty_symmetric; gpu_allreduce, gpu_broadcast; allreduce_add_rms_norm
    objects       all_gather_object, broadcast_object, gather_object, scatter_object, send_object, recv_object
    messages      send, recv, recv_into, sendrecv, batch(Send, Recv), ANY_SOURCE
    training      DDP, FSDP, LocalSGD, DiLoCo, SyncBatchNorm1d, ...; comm_hooks; parallelize and the styles of its plans
    generation    register_forward_method, join_forward_method
    sequences     context_parallel, context_shard_batch; ring_attention, ulysses_attention; context_shard,
                  context_unshard
    tensors       DeviceMesh; DTensor, distribute, factories; Shard, Replicate, Partial; allow_replication,
                  record_redistributions
    pipelines     Pipeline, PipelineSchedule, PipelineOutput, Microbatches, LossReduction; split_model; schedules and
                  more are in ferrodist.parallel.pipeline
    checkpoints   checkpoint: save_distributed, load_distributed, AsyncCheckpointer, ...
    calls         rpc: RpcContext, RpcAgent, RRef, TcpRpcBackend, ...
    errors        DistributedError and the tree below it, drawn in ferrodist.errors

Names load when they are first used, so that ``ferrodist run`` starts without torch.
``help(ferrodist.DDP)`` describes one.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ferrodist import errors

if TYPE_CHECKING:
    from ferrodist import checkpoint as checkpoint
    from ferrodist import rpc as rpc
    from ferrodist.backends.base import Backend as Backend
    from ferrodist.backends.mpi import MpiBackend as MpiBackend
    from ferrodist.backends.mpi import is_mpi_available as is_mpi_available
    from ferrodist.backends.native import GlooBackend as GlooBackend
    from ferrodist.backends.native import NativeBackend as NativeBackend
    from ferrodist.backends.native import is_gloo_available as is_gloo_available
    from ferrodist.backends.native import is_native_available as is_native_available
    from ferrodist.backends.nccl import NcclBackend as NcclBackend
    from ferrodist.backends.nccl import NcclUniqueId as NcclUniqueId
    from ferrodist.backends.nccl import is_nccl_available as is_nccl_available
    from ferrodist.backends.nccl import reduce_op_to_nccl as reduce_op_to_nccl
    from ferrodist.backends.nccl.backend import HybridBackend as HybridBackend
    from ferrodist.backends.non_member import NonMemberGroup as NonMemberGroup
    from ferrodist.backends.process_group import default_group as default_group
    from ferrodist.backends.process_group import destroy_process_group as destroy_process_group
    from ferrodist.backends.process_group import init_process_group as init_process_group
    from ferrodist.backends.process_group import is_initialized as is_initialized
    from ferrodist.backends.process_group import new_group as new_group
    from ferrodist.backends.process_group import register_backend as register_backend
    from ferrodist.backends.process_group import use_group as use_group
    from ferrodist.backends.simulated import SimulatedBackend as SimulatedBackend
    from ferrodist.backends.subgroup import SubBackend as SubBackend
    from ferrodist.backends.tags import ANY_SOURCE as ANY_SOURCE
    from ferrodist.backends.tcp import TcpBackend as TcpBackend
    from ferrodist.backends.ucc import UccBackend as UccBackend
    from ferrodist.backends.ucc import is_ucc_available as is_ucc_available
    from ferrodist.collectives.all_gather import all_gather as all_gather
    from ferrodist.collectives.all_gather import all_gather_uneven as all_gather_uneven
    from ferrodist.collectives.all_gather import async_all_gather as async_all_gather
    from ferrodist.collectives.all_gather import async_reduce_scatter as async_reduce_scatter
    from ferrodist.collectives.all_gather import reduce_scatter as reduce_scatter
    from ferrodist.collectives.all_gather import reduce_scatter_tensor as reduce_scatter_tensor
    from ferrodist.collectives.all_to_all import all_to_all as all_to_all
    from ferrodist.collectives.all_to_all import all_to_all_single_uneven as all_to_all_single_uneven
    from ferrodist.collectives.all_to_all import async_all_to_all as async_all_to_all
    from ferrodist.collectives.arguments import compute_shard_sizes as compute_shard_sizes
    from ferrodist.collectives.barrier import barrier as barrier
    from ferrodist.collectives.barrier import monitored_barrier as monitored_barrier
    from ferrodist.collectives.coalescing import coalesce as coalesce
    from ferrodist.collectives.fused import allreduce_add_rms_norm as allreduce_add_rms_norm
    from ferrodist.collectives.gather import gather as gather
    from ferrodist.collectives.gather import scatter as scatter
    from ferrodist.collectives.host_p2p import Recv as Recv
    from ferrodist.collectives.host_p2p import Send as Send
    from ferrodist.collectives.objects import all_gather_object as all_gather_object
    from ferrodist.collectives.objects import broadcast_object as broadcast_object
    from ferrodist.collectives.objects import gather_object as gather_object
    from ferrodist.collectives.objects import recv_object as recv_object
    from ferrodist.collectives.objects import scatter_object as scatter_object
    from ferrodist.collectives.objects import send_object as send_object
    from ferrodist.collectives.p2p import batch as batch
    from ferrodist.collectives.p2p import recv as recv
    from ferrodist.collectives.p2p import recv_into as recv_into
    from ferrodist.collectives.p2p import send as send
    from ferrodist.collectives.p2p import sendrecv as sendrecv
    from ferrodist.collectives.prepared import PreparedCollective as PreparedCollective
    from ferrodist.collectives.prepared import prepare_all_gather as prepare_all_gather
    from ferrodist.collectives.prepared import prepare_all_to_all as prepare_all_to_all
    from ferrodist.collectives.prepared import prepare_allreduce as prepare_allreduce
    from ferrodist.collectives.prepared import prepare_broadcast as prepare_broadcast
    from ferrodist.collectives.prepared import prepare_reduce_scatter as prepare_reduce_scatter
    from ferrodist.collectives.reduce import allreduce as allreduce
    from ferrodist.collectives.reduce import async_allreduce as async_allreduce
    from ferrodist.collectives.reduce import async_broadcast as async_broadcast
    from ferrodist.collectives.reduce import broadcast as broadcast
    from ferrodist.collectives.reduce import gpu_allreduce as gpu_allreduce
    from ferrodist.collectives.reduce import gpu_broadcast as gpu_broadcast
    from ferrodist.collectives.reduce import reduce as reduce
    from ferrodist.collectives.reduce_op import ReduceOp as ReduceOp
    from ferrodist.collectives.reduce_op import premultiplied_sum as premultiplied_sum
    from ferrodist.collectives.symmetric_memory import empty_symmetric as empty_symmetric
    from ferrodist.collectives.work import PendingCollective as PendingCollective
    from ferrodist.deadline import DEFAULT_COLLECTIVE_TIMEOUT as DEFAULT_COLLECTIVE_TIMEOUT
    from ferrodist.errors import AuthenticationError as AuthenticationError
    from ferrodist.errors import BackendUnavailable as BackendUnavailable
    from ferrodist.errors import CollectiveMismatchError as CollectiveMismatchError
    from ferrodist.errors import DistCheckpointError as DistCheckpointError
    from ferrodist.errors import DistributedError as DistributedError
    from ferrodist.errors import DistributedTimeoutError as DistributedTimeoutError
    from ferrodist.errors import GroupAbortedError as GroupAbortedError
    from ferrodist.errors import GroupClosedError as GroupClosedError
    from ferrodist.errors import InvalidRankError as InvalidRankError
    from ferrodist.errors import InvalidWorldSizeError as InvalidWorldSizeError
    from ferrodist.errors import NoConnectionError as NoConnectionError
    from ferrodist.errors import PeerLostError as PeerLostError
    from ferrodist.errors import PipelineError as PipelineError
    from ferrodist.errors import ProtocolError as ProtocolError
    from ferrodist.errors import RankFailedError as RankFailedError
    from ferrodist.errors import RendezvousError as RendezvousError
    from ferrodist.errors import RpcError as RpcError
    from ferrodist.errors import SelfSendError as SelfSendError
    from ferrodist.errors import SizeMismatchError as SizeMismatchError
    from ferrodist.errors import UnsupportedOpError as UnsupportedOpError
    from ferrodist.mesh import DeviceMesh as DeviceMesh
    from ferrodist.parallel.context_parallel import context_parallel as context_parallel
    from ferrodist.parallel.context_parallel import context_shard as context_shard
    from ferrodist.parallel.context_parallel import context_shard_batch as context_shard_batch
    from ferrodist.parallel.context_parallel import context_unshard as context_unshard
    from ferrodist.parallel.context_parallel import ring_attention as ring_attention
    from ferrodist.parallel.context_parallel import ulysses_attention as ulysses_attention
    from ferrodist.parallel.ddp import DDP as DDP
    from ferrodist.parallel.ddp import GradientBucket as GradientBucket
    from ferrodist.parallel.ddp import comm_hooks as comm_hooks
    from ferrodist.parallel.fsdp import FSDP as FSDP
    from ferrodist.parallel.fsdp import MixedPrecision as MixedPrecision
    from ferrodist.parallel.fsdp import ShardingStrategy as ShardingStrategy
    from ferrodist.parallel.fsdp import by_class as by_class
    from ferrodist.parallel.fsdp import by_size as by_size
    from ferrodist.parallel.fsdp import join_forward_method as join_forward_method
    from ferrodist.parallel.fsdp import register_forward_method as register_forward_method
    from ferrodist.parallel.local_sgd import DiLoCo as DiLoCo
    from ferrodist.parallel.local_sgd import LocalSGD as LocalSGD
    from ferrodist.parallel.pipeline import LossReduction as LossReduction
    from ferrodist.parallel.pipeline import Microbatches as Microbatches
    from ferrodist.parallel.pipeline import Pipeline as Pipeline
    from ferrodist.parallel.pipeline import PipelineOutput as PipelineOutput
    from ferrodist.parallel.pipeline import PipelineSchedule as PipelineSchedule
    from ferrodist.parallel.pipeline import split_model as split_model
    from ferrodist.parallel.sync_batch_norm import SyncBatchNorm1d as SyncBatchNorm1d
    from ferrodist.parallel.sync_batch_norm import SyncBatchNorm2d as SyncBatchNorm2d
    from ferrodist.parallel.sync_batch_norm import SyncBatchNorm3d as SyncBatchNorm3d
    from ferrodist.parallel.sync_batch_norm import convert_sync_batchnorm as convert_sync_batchnorm
    from ferrodist.parallel.tensor_parallel import ColumnParallel as ColumnParallel
    from ferrodist.parallel.tensor_parallel import ColumnParallelLinear as ColumnParallelLinear
    from ferrodist.parallel.tensor_parallel import ExpertLoad as ExpertLoad
    from ferrodist.parallel.tensor_parallel import ExpertParallel as ExpertParallel
    from ferrodist.parallel.tensor_parallel import ParallelAttention as ParallelAttention
    from ferrodist.parallel.tensor_parallel import ParallelEmbedding as ParallelEmbedding
    from ferrodist.parallel.tensor_parallel import RowParallel as RowParallel
    from ferrodist.parallel.tensor_parallel import RowParallelLinear as RowParallelLinear
    from ferrodist.parallel.tensor_parallel import SequenceParallel as SequenceParallel
    from ferrodist.parallel.tensor_parallel import Style as Style
    from ferrodist.parallel.tensor_parallel import TensorParallelExperts as TensorParallelExperts
    from ferrodist.parallel.tensor_parallel import VocabularyParallel as VocabularyParallel
    from ferrodist.parallel.tensor_parallel import describe_plan as describe_plan
    from ferrodist.parallel.tensor_parallel import expert_loads as expert_loads
    from ferrodist.parallel.tensor_parallel import parallelize as parallelize
    from ferrodist.parallel.tensor_parallel import parallelize_experts as parallelize_experts
    from ferrodist.parallel.tensor_parallel import update_expert_bias as update_expert_bias
    from ferrodist.tensor import factories as factories
    from ferrodist.tensor.dtensor import DTensor as DTensor
    from ferrodist.tensor.factories import distribute as distribute
    from ferrodist.tensor.fallback import allow_replication as allow_replication
    from ferrodist.tensor.placement import Partial as Partial
    from ferrodist.tensor.placement import Replicate as Replicate
    from ferrodist.tensor.placement import Shard as Shard
    from ferrodist.tensor.redistribute import record_redistributions as record_redistributions

__version__ = "0.1.0"

_NAMES_BY_MODULE = {
    "backends.base": "Backend",
    "backends.mpi": "MpiBackend is_mpi_available",
    "backends.native": "GlooBackend NativeBackend is_gloo_available is_native_available",
    "backends.nccl": "NcclBackend NcclUniqueId is_nccl_available reduce_op_to_nccl",
    "backends.nccl.backend": "HybridBackend",
    "backends.non_member": "NonMemberGroup",
    "backends.process_group": "default_group destroy_process_group init_process_group is_initialized new_group"
    " register_backend use_group",
    "backends.simulated": "SimulatedBackend",
    "backends.subgroup": "SubBackend",
    "backends.tags": "ANY_SOURCE",
    "backends.tcp": "TcpBackend",
    "backends.ucc": "UccBackend is_ucc_available",
    "collectives.all_gather": "all_gather all_gather_uneven async_all_gather async_reduce_scatter reduce_scatter"
    " reduce_scatter_tensor",
    "collectives.all_to_all": "all_to_all all_to_all_single_uneven async_all_to_all",
    "collectives.barrier": "barrier monitored_barrier",
    "collectives.arguments": "compute_shard_sizes",
    "collectives.coalescing": "coalesce",
    "collectives.fused": "allreduce_add_rms_norm",
    "collectives.gather": "gather scatter",
    "collectives.objects": "all_gather_object broadcast_object gather_object recv_object scatter_object send_object",
    "collectives.p2p": "batch recv recv_into send sendrecv",
    "collectives.prepared": "PreparedCollective prepare_all_gather prepare_all_to_all prepare_allreduce"
    " prepare_broadcast prepare_reduce_scatter",
    "collectives.reduce": "allreduce async_allreduce async_broadcast broadcast gpu_allreduce gpu_broadcast reduce",
    "collectives.reduce_op": "ReduceOp premultiplied_sum",
    "collectives.symmetric_memory": "empty_symmetric",
    "collectives.host_p2p": "Recv Send",
    "collectives.work": "PendingCollective",
    "deadline": "DEFAULT_COLLECTIVE_TIMEOUT",
    "errors": " ".join(name for name in errors.__all__ if name[0].isupper()),
    "mesh": "DeviceMesh",
    "parallel.context_parallel": "context_parallel context_shard context_shard_batch context_unshard ring_attention"
    " ulysses_attention",
    "parallel.ddp": "DDP GradientBucket comm_hooks",
    "parallel.fsdp": "FSDP MixedPrecision ShardingStrategy by_class by_size join_forward_method"
    " register_forward_method",
    "parallel.local_sgd": "DiLoCo LocalSGD",
    "parallel.pipeline": "LossReduction Microbatches Pipeline PipelineOutput PipelineSchedule split_model",
    "parallel.sync_batch_norm": "SyncBatchNorm1d SyncBatchNorm2d SyncBatchNorm3d convert_sync_batchnorm",
    "parallel.tensor_parallel": "ColumnParallel ColumnParallelLinear ExpertLoad ExpertParallel ParallelAttention"
    " ParallelEmbedding RowParallel RowParallelLinear SequenceParallel Style TensorParallelExperts VocabularyParallel"
    " describe_plan expert_loads parallelize parallelize_experts update_expert_bias",
    "tensor": "factories",
    "tensor.dtensor": "DTensor",
    "tensor.factories": "distribute",
    "tensor.fallback": "allow_replication",
    "tensor.placement": "Partial Replicate Shard",
    "tensor.redistribute": "record_redistributions",
}
_PACKAGES = ["checkpoint", "rpc"]
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}

__all__ = ["__version__", *_PACKAGES, *_MODULE_OF]  # noqa: PLE0604 - names that __getattr__ gives


if not TYPE_CHECKING:  # checkers refuse names that are not there

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return import_module(f"{__name__}.{name}")
        module = _MODULE_OF.get(name)
        if module is None:
            from ferrodist.torch_equivalents import missing_attribute  # noqa: PLC0415 - seldom needed

            raise missing_attribute(__name__, name)
        value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
        return value


def __dir__() -> list[str]:
    if _is_for_help():
        return ["__doc__", "__name__", "__version__"]
    return sorted(__all__)


def _is_for_help() -> bool:
    """Return whether pydoc is the caller: it would print 23,000 lines for the names listed above."""
    frame: Any = sys._getframe(2)  # noqa: SLF001 - who calls is known nowhere else
    while frame is not None and frame.f_globals.get("__name__") == "inspect":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "pydoc"
