"""Sharded data parallelism: every rank has a part of the model and a part of each batch."""

from __future__ import annotations

from ferrodist.parallel.sharded.fsdp import FSDP
from ferrodist.parallel.sharded.mixed_precision import MixedPrecision
from ferrodist.parallel.sharded.policies import by_class, by_size
from ferrodist.parallel.sharded.strategy import ShardingStrategy

__all__ = ["FSDP", "MixedPrecision", "ShardingStrategy", "by_class", "by_size"]


def __dir__() -> list[str]:
    return sorted(__all__)
