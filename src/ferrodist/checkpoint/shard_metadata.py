"""Which part of a tensor each rank has, said by the program: for plain tensors that it has divided itself."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from ferrodist.checkpoint.retention import read_manifest
from ferrodist.checkpoint.storage import open_storage
from ferrodist.collectives.arguments import compute_shard_sizes, offsets_of
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.local_shards import Box, LocalShard, flat_shard_of, local_shard
from ferrodist.wording import counted

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import torch

    from ferrodist.checkpoint.format.manifest import TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShardSpec:
    """How a tensor is divided along one dim.

    Args:
        full_shape: Of the whole tensor.
        shard_dim: The dim.
        shard_sizes: Its size on each rank, in their order.

    Raises:
        TypeError: A size or the dim is no int.
        ValueError: The sizes are not the dim's together, or there is no such dim.
    """

    full_shape: Sequence[int]
    shard_dim: int
    shard_sizes: Sequence[int]

    def __post_init__(self) -> None:
        try:
            for each in (*self.full_shape, self.shard_dim, *self.shard_sizes):
                operator.index(each)
        except TypeError:
            raise TypeError("full_shape, shard_dim and shard_sizes must be ints") from None
        if any(size < 0 for size in self.full_shape):
            raise ValueError(f"no tensor has shape {tuple(self.full_shape)}")
        if not 0 <= self.shard_dim < len(self.full_shape):
            raise ValueError(f"a tensor of shape {tuple(self.full_shape)} has no dim {self.shard_dim}")
        size = self.full_shape[self.shard_dim]
        if any(each < 0 for each in self.shard_sizes) or sum(self.shard_sizes) != size:
            raise ValueError(f"shards of {list(self.shard_sizes)} are not dim {self.shard_dim} of {size} together")

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's part."""
        shape = [*self.full_shape]
        shape[self.shard_dim] = self.shard_sizes[rank]
        return tuple(shape)

    def part(self, tensor: torch.Tensor, rank: int) -> LocalShard:
        """What a rank has of the tensor, which is ``tensor``; a flat shard may have any shape.

        Raises:
            ValueError: It has another shape, or a flat shard is not contiguous.
        """
        shape = self.shape_of(rank)
        if len(shape) == 1 and tensor.dim() != 1 and tensor.numel() == shape[0]:
            if not tensor.is_contiguous():
                raise ValueError("it is a flat shard, and not contiguous: save contiguous() of it")
            tensor = tensor.view(-1)
        if tensor.shape != shape:
            raise ValueError(f"it has shape {tuple(tensor.shape)} on rank {rank}, where shards says {shape}")
        offsets = [0] * len(shape)
        offsets[self.shard_dim] = offsets_of(self.shard_sizes)[rank]
        box = Box(tuple(offsets), shape)
        return LocalShard(
            shape=tuple(self.full_shape),
            dtype=tensor.dtype,
            boxes=[(box, tensor.detach())] if box.numel else [],
            placement=f"Shard({self.shard_dim}) of {len(self.shard_sizes)}",
            is_replicated=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMetadata:
    """How tensors are divided, by name.

    Args:
        num_ranks: Over how many ranks, from 1 on.
        tensor_specs: For each tensor that is divided; names of nested ones are joined by dots.

    Raises:
        TypeError: ``num_ranks`` is no int.
        ValueError: ``num_ranks`` is below 1, or a tensor has shards for another number of ranks.
    """

    num_ranks: int
    tensor_specs: Mapping[str, TensorShardSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_num_ranks("num_ranks", self.num_ranks)
        for name, spec in self.tensor_specs.items():
            if len(spec.shard_sizes) != self.num_ranks:
                shards = counted(len(spec.shard_sizes), "shard")
                raise ValueError(f"tensor {name!r} has {shards} for {counted(self.num_ranks, 'rank')}")

    def for_ranks(self, num_ranks: int) -> ShardMetadata:
        """The same tensors, along the same dims, over another number of ranks, as evenly as can be.

        Args:
            num_ranks: How many; the first ones have an element more where the division leaves a rest.

        Raises:
            TypeError, ValueError: It is no number of ranks.
        """
        check_num_ranks("num_ranks", num_ranks)
        specs = {
            name: TensorShardSpec(
                full_shape=spec.full_shape,
                shard_dim=spec.shard_dim,
                shard_sizes=compute_shard_sizes(spec.full_shape[spec.shard_dim], num_ranks),
            )
            for name, spec in self.tensor_specs.items()
        }
        return ShardMetadata(num_ranks=num_ranks, tensor_specs=specs)

    def check(self, world_size: int) -> None:
        """Raise ValueError unless it is for this number of ranks."""
        if self.num_ranks != world_size:
            raise ValueError(f"shards is for {counted(self.num_ranks, 'rank')}, and the group has {world_size}")

    def part(self, key: str, tensor: torch.Tensor, rank: int) -> LocalShard:
        """What a rank has of a tensor.

        Raises:
            ValueError: It doesn't fit what is said of it here.
        """
        spec = self.tensor_specs.get(key)
        if spec is None:
            return local_shard(tensor)
        if isinstance(tensor, DTensor) or flat_shard_of(tensor) is not None:
            raise ValueError(f"tensor {key!r} is in shards, and says itself how it is divided: leave it out")
        try:
            return spec.part(tensor, rank)
        except ValueError as error:
            raise ValueError(f"tensor {key!r}: {error}") from None


def check_num_ranks(name: str, value: object) -> None:
    """Raise unless an argument is a number of ranks."""
    if type(value) is not int:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be a number of ranks from 1, not {value}")


def flat_shard_metadata(state_dict: Mapping[str, torch.Tensor], world_size: int) -> ShardMetadata:
    """The metadata of flat tensors that are divided evenly: each rank has as many elements as this one.

    Args:
        state_dict: This rank's parts. Those of several dims count as flat, row-major.
        world_size: How many ranks there are.

    Raises:
        TypeError, ValueError: ``world_size`` is no number of ranks.
    """
    check_num_ranks("world_size", world_size)
    specs = {}
    for name, tensor in state_dict.items():
        size = tensor.numel()
        specs[name] = TensorShardSpec(full_shape=[size * world_size], shard_dim=0, shard_sizes=[size] * world_size)
    return ShardMetadata(num_ranks=world_size, tensor_specs=specs)


class DistributedCheckpoint:
    """A checkpoint that lies there, to be looked at.

    Args:
        path: Its folder, or a URL of fsspec's.
        storage_options: For fsspec's file system, if it is a URL.

    Raises:
        DistCheckpointError: There is none, or its manifest is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
        storage = open_storage(path, storage_options)
        self.checkpoint_dir = storage.url
        """Its folder."""
        self.manifest = read_manifest(storage)
        """All that is known of it."""

    @property
    def shard_metadata(self) -> ShardMetadata:
        """How its tensors are divided; those that are divided in another way than along one dim are left out."""
        num_ranks = self.manifest.world_size
        found = {key: _spec(entry, num_ranks) for key, entry in self.manifest.tensors.items()}
        return ShardMetadata(
            num_ranks=num_ranks, tensor_specs={key: spec for key, spec in found.items() if spec is not None}
        )


def _spec(entry: TensorEntry, num_ranks: int) -> TensorShardSpec | None:
    """How a tensor lies, if each rank has one part of it along one dim."""
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
