"""Sharded checkpoints: all ranks save at once, any number of ranks loads; a failed save leaves the previous checkpoint.

::

    all ranks      save_distributed, load_distributed, AsyncCheckpointer -> CheckpointFuture
    in a state     OptimizerState, PerRank, RandomState; Placed; ShardMetadata, TensorShardSpec, flat_shard_metadata
    folders        find_latest, list_checkpoints, DistributedCheckpoint
    one process    verify -> VerificationReport, compare -> Difference, inspect_checkpoint -> Inspection, reshard;
                   other formats are in `ferrodist.checkpoint.convert`
"""

from ferrodist.checkpoint.api import load_distributed, save_distributed
from ferrodist.checkpoint.async_checkpointer import AsyncCheckpointer, CheckpointFuture
from ferrodist.checkpoint.format.tree import PerRank
from ferrodist.checkpoint.load_plan import Placed
from ferrodist.checkpoint.retention import find_latest, list_checkpoints
from ferrodist.checkpoint.shard_metadata import (
    DistributedCheckpoint,
    ShardMetadata,
    TensorShardSpec,
    flat_shard_metadata,
)
from ferrodist.checkpoint.state import OptimizerState, RandomState
from ferrodist.checkpoint.tools.diff import Difference, DifferenceKind, compare
from ferrodist.checkpoint.tools.inspect import Inspection, inspect_checkpoint
from ferrodist.checkpoint.tools.reshard import RewriteOptions, reshard
from ferrodist.checkpoint.tools.verify import Problem, VerificationReport, verify
from ferrodist.errors import DistCheckpointError

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
    "reshard",
    "save_distributed",
    "verify",
]


def __dir__() -> list[str]:
    return sorted(__all__)
