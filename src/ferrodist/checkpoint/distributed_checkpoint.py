"""`DistributedCheckpoint`: the manifest of an existing checkpoint, and how its tensors are sharded."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from ferrodist.checkpoint.reader import read_manifest
from ferrodist.checkpoint.shard_metadata import ShardMetadata, TensorShardSpec
from ferrodist.checkpoint.storage import open_storage

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from ferrodist.checkpoint.format.manifest import TensorEntry


class DistributedCheckpoint:
    """An existing checkpoint, for a look at its metadata.

    Args:
        path: The checkpoint's folder, or an fsspec URL.
        storage_options: Options of fsspec's file system, if ``path`` is a URL.

    Raises:
        DistCheckpointError: The checkpoint is missing, or its manifest is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
        storage = open_storage(path, storage_options)
        self.checkpoint_dir = storage.url
        """The checkpoint's folder."""
        self.manifest = read_manifest(storage)
        """The checkpoint's manifest."""

    @property
    def shard_metadata(self) -> ShardMetadata:
        """The sharding of its tensors, without tensors that are sharded otherwise than along one dim."""
        num_ranks = self.manifest.world_size
        found = {key: _spec(entry, num_ranks) for key, entry in self.manifest.tensors.items()}
        return ShardMetadata(
            num_ranks=num_ranks, tensor_specs={key: spec for key, spec in found.items() if spec is not None}
        )


def _spec(entry: TensorEntry, num_ranks: int) -> TensorShardSpec | None:
    """Return a tensor's spec if each rank has one shard of it along one dim."""
    dims = {
        dim
        for shard in entry.shards
        for dim, (size, whole) in enumerate(zip(shard.shape, entry.shape, strict=True))
        if size != whole
    }
    if len(dims) != 1 or len(entry.shards) != num_ranks or not prod(entry.shape):
        return None
    dim = dims.pop()
    sizes = [shard.shape[dim] for shard in sorted(entry.shards, key=lambda shard: shard.offsets)]
    return TensorShardSpec(full_shape=entry.shape, shard_dim=dim, shard_sizes=sizes)
