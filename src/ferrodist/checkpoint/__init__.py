"""Sharded checkpoints: all ranks save at once, any number of ranks loads; a failed save leaves the previous checkpoint.

::

    all ranks      save_distributed, load_distributed, AsyncCheckpointer -> CheckpointFuture; load_hugging_face
    in a state     OptimizerState, PerRank, RandomState; Placed; ShardMetadata, TensorShardSpec, flat_shard_metadata
    folders        find_latest, list_checkpoints, DistributedCheckpoint
    one process    verify -> VerificationReport, compare -> Difference, inspect_checkpoint -> Inspection, reshard;
                   other formats are in `ferrodist.checkpoint.convert`

The modules::

    save_distributed.py    one save of a group                         load_distributed.py  a load
    state.py               a state as a tree and tensors by key        load_plan.py  which tensors a load fills
    save_plan.py           who writes which boxes into which file      reader.py     reads manifests and boxes
    writer.py              writes a rank's safetensors file            distributed_checkpoint.py  a manifest's sharding
    commit.py              the commit, and leftovers of dead saves     checkpoint_folder.py  list, find, remove
    collective_steps.py    steps that succeed on all ranks or none     async_checkpointer.py  saves in a thread
    optimizer_state.py, random_state.py                                shard_metadata.py      shards by the program
    load_hugging_face.py   safetensors folders into a model's shards
    format/                the state tree, the manifest, safetensors   storage/  local folders, object stores
    tools/                 inspect, verify, compare, reshard           convert/  other formats
"""

from typing import TYPE_CHECKING, Any

from ferrodist.checkpoint.async_checkpointer import AsyncCheckpointer, CheckpointFuture
from ferrodist.checkpoint.checkpoint_folder import find_latest, list_checkpoints
from ferrodist.checkpoint.distributed_checkpoint import DistributedCheckpoint
from ferrodist.checkpoint.format.tree import PerRank
from ferrodist.checkpoint.load_distributed import load_distributed
from ferrodist.checkpoint.load_hugging_face import load_hugging_face
from ferrodist.checkpoint.load_plan import Placed
from ferrodist.checkpoint.optimizer_state import OptimizerState
from ferrodist.checkpoint.random_state import RandomState
from ferrodist.checkpoint.save_distributed import save_distributed
from ferrodist.checkpoint.shard_metadata import (
    ShardMetadata,
    TensorShardSpec,
    flat_shard_metadata,
)
from ferrodist.checkpoint.tools.diff import Difference, DifferenceKind, compare
from ferrodist.checkpoint.tools.inspect import Inspection, inspect_checkpoint
from ferrodist.checkpoint.tools.reshard import reshard
from ferrodist.checkpoint.tools.rewrite import RewriteOptions
from ferrodist.checkpoint.tools.verify import Problem, VerificationReport, verify
from ferrodist.errors import DistCheckpointError
from ferrodist.torch_equivalents import missing_attribute

__all__ = [
    "AsyncCheckpointer",
    "CheckpointFuture",
    "Difference",
    "DifferenceKind",
    "DistCheckpointError",
    "DistributedCheckpoint",
    "Inspection",
    "OptimizerState",
    "PerRank",
    "Placed",
    "Problem",
    "RandomState",
    "RewriteOptions",
    "ShardMetadata",
    "TensorShardSpec",
    "VerificationReport",
    "compare",
    "find_latest",
    "flat_shard_metadata",
    "inspect_checkpoint",
    "list_checkpoints",
    "load_distributed",
    "load_hugging_face",
    "reshard",
    "save_distributed",
    "verify",
]


if not TYPE_CHECKING:  # checkers refuse names that are not there

    def __getattr__(name: str) -> Any:
        raise missing_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
