"""The sharding of plain tensors, as declared by a program that shards them itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ferrodist.arguments import check_int, check_type
from ferrodist.collectives.arguments import compute_shard_sizes, offsets_of
from ferrodist.tensor.box import Box
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.local_shards import LocalShard, flat_shard_of, local_shard
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShardSpec:
    """The sharding of a tensor along one dim.

    Args:
        full_shape: The full tensor's shape.
        shard_dim: The sharded dim.
        shard_sizes: The dim's size on each rank, in rank order.

    Raises:
        TypeError: A size or the dim is not an int.
        ValueError: The sizes don't add up to the dim's, or the dim doesn't exist.
    """

    full_shape: Sequence[int]
    shard_dim: int
    shard_sizes: Sequence[int]

    def __post_init__(self) -> None:
        for size in self.full_shape:
            check_int("full_shape", size, min=0)
        for size in self.shard_sizes:
            check_int("shard_sizes", size, min=0)
        check_int("shard_dim", self.shard_dim)
        if not 0 <= self.shard_dim < len(self.full_shape):
            raise ValueError(f"a tensor of shape {tuple(self.full_shape)} has no dim {self.shard_dim}")
        size = self.full_shape[self.shard_dim]
        if sum(self.shard_sizes) != size:
            raise ValueError(f"shards of {list(self.shard_sizes)} are not dim {self.shard_dim} of {size} together")

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard."""
        shape = [*self.full_shape]
        shape[self.shard_dim] = self.shard_sizes[rank]
        return tuple(shape)

    def part(self, tensor: torch.Tensor, rank: int) -> LocalShard:
        """Describe a rank's shard, which is ``tensor``; a flat shard may have any shape.

        Raises:
            ValueError: The tensor has another shape, or a flat shard is not contiguous.
        """
        shape = self.shape_of(rank)
        if len(shape) == 1 and tensor.dim() != 1 and tensor.numel() == shape[0]:
            if not tensor.is_contiguous():
                raise ValueError("it is a flat shard, and not contiguous: save contiguous() of it")
            tensor = tensor.view(-1)
        if tensor.shape != shape:
            raise ValueError(f"it has shape {tuple(tensor.shape)} on rank {rank}, where shards has {shape}")
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
    """The sharding of tensors by name.

    Args:
        num_ranks: The number of ranks, at least 1.
        tensor_specs: The spec of each sharded tensor; names of nested tensors are joined by dots.

    Raises:
        TypeError: ``num_ranks`` is not an int, or a spec is not a `TensorShardSpec`.
        ValueError: ``num_ranks`` is below 1, or a tensor has shards for another number of ranks.
    """

    num_ranks: int
    tensor_specs: Mapping[str, TensorShardSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_int("num_ranks", self.num_ranks, min=1)
        for name, spec in self.tensor_specs.items():
            check_type(spec, TensorShardSpec, f"the spec of tensor {name!r} must be a TensorShardSpec")
            if len(spec.shard_sizes) != self.num_ranks:
                shards = counted(len(spec.shard_sizes), "shard")
                raise ValueError(f"tensor {name!r} has {shards} for {counted(self.num_ranks, 'rank')}")

    def for_ranks(self, num_ranks: int) -> ShardMetadata:
        """Shard the same tensors along the same dims over another number of ranks, as evenly as possible.

        Args:
            num_ranks: The number of ranks; the first ones get an element more if the division leaves a remainder.

        Raises:
            TypeError, ValueError: ``num_ranks`` is not a positive int.
        """
        check_int("num_ranks", num_ranks, min=1)
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
        """Raise ValueError unless this is for ``world_size`` ranks."""
        if self.num_ranks != world_size:
            raise ValueError(f"shards is for {counted(self.num_ranks, 'rank')}, and the group has {world_size}")

    def part(self, key: str, tensor: torch.Tensor, rank: int) -> LocalShard:
        """Describe a rank's shard of a tensor.

        Raises:
            ValueError: The tensor doesn't fit its spec.
        """
        spec = self.tensor_specs.get(key)
        if spec is None:
            return local_shard(tensor)
        if isinstance(tensor, DTensor) or flat_shard_of(tensor) is not None:
            raise ValueError(f"tensor {key!r} has a sharding of its own: leave it out of shards")
        try:
            return spec.part(tensor, rank)
        except ValueError as error:
            raise ValueError(f"tensor {key!r}: {error}") from None


def flat_shard_metadata(state_dict: Mapping[str, torch.Tensor], world_size: int) -> ShardMetadata:
    """Return the metadata of evenly sharded flat tensors: every rank has as many elements as this one.

    Args:
        state_dict: This rank's shards; tensors of several dims count as flattened, row-major.
        world_size: The number of ranks.

    Raises:
        TypeError, ValueError: ``world_size`` is not a positive int.
    """
    check_int("world_size", world_size, min=1)
    specs = {}
    for name, tensor in state_dict.items():
        size = tensor.numel()
        specs[name] = TensorShardSpec(full_shape=[size * world_size], shard_dim=0, shard_sizes=[size] * world_size)
    return ShardMetadata(num_ranks=world_size, tensor_specs=specs)
