"""Fully sharded data parallelism: every rank has a shard of the model and a share of each batch."""

from ferrodist.parallel.fsdp.config import MixedPrecision, ShardingStrategy
from ferrodist.parallel.fsdp.fsdp import FSDP
from ferrodist.parallel.fsdp.wrap import by_class, by_size

__all__ = ["FSDP", "MixedPrecision", "ShardingStrategy", "by_class", "by_size"]


def __dir__() -> list[str]:
    return sorted(__all__)
