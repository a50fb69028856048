"""FSDP's configuration: dtypes, sharding strategies, and the grid of ranks that they make."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ferrodist.arguments import check_int, check_type
from ferrodist.backends.base import Backend
from ferrodist.backends.non_member import NonMemberGroup
from ferrodist.errors import add_error_context
from ferrodist.mesh import DeviceMesh
from ferrodist.parallel.program_failures import report_failure
from ferrodist.torch_private.modules import own_buffers
from ferrodist.torch_private.pytree import tree_flatten, tree_unflatten
from ferrodist.wording import counted

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """Dtypes other than those of the shards, which stay unchanged for the optimizer.

    After P. Micikevicius et al., "Mixed Precision Training", ICLR 2018 (https://arxiv.org/abs/1710.03740). They apply
    to floating-point tensors only. None leaves a dtype unchanged.

    Args:
        param_dtype: Dtype in which parameters are gathered, and forward and backward computed.
        reduce_dtype: Dtype in which gradients are averaged; None is ``param_dtype``.
        buffer_dtype: Dtype to which buffers are converted when FSDP is made.
        cast_inputs: Convert the tensors in the model's arguments to ``param_dtype``.

    Raises:
        TypeError: An argument is not a floating-point dtype of at least 16 bits.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            check_type(dtype, torch.dtype, f"{name} must be a torch.dtype or None")
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise TypeError(f"{name} must be a floating-point dtype of at least 16 bits, not {dtype}")

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter with shards of ``dtype`` is gathered and used."""
        return self.param_dtype if self.param_dtype is not None and dtype.is_floating_point else dtype

    def reduced(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the gradient of a parameter with shards of ``dtype`` is averaged."""
        return self.reduce_dtype if self.reduce_dtype is not None and dtype.is_floating_point else self.computed(dtype)

    def cast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast arguments of the model, in any nesting of lists, tuples and dicts, to ``param_dtype``.

        Those in which nothing is to be cast stay the same objects, which the model may write to.
        """
        if self.param_dtype is None or not self.cast_inputs:
            return args, kwargs
        return tuple(map(self._cast_argument, args)), {name: self._cast_argument(each) for name, each in kwargs.items()}

    def _cast_argument(self, value: Any) -> Any:
        leaves, spec = tree_flatten(value)
        cast = [
            leaf.to(self.param_dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
            for leaf in leaves
        ]
        is_same = all(one is other for one, other in zip(leaves, cast, strict=True))
        return value if is_same else tree_unflatten(cast, spec)

    def convert_buffers(self, module: torch.nn.Module) -> None:
        """Convert the module's floating-point buffers to ``buffer_dtype``, in place."""
        if self.buffer_dtype is None:
            return
        for each in module.modules():
            for name, buffer in own_buffers(each).items():
                if buffer is not None and buffer.is_floating_point():
                    own_buffers(each)[name] = buffer.to(self.buffer_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingStrategy:
    """The tensors that are sharded; names after S. Rajbhandari et al., "ZeRO", SC 2020, and torch.

    ``FULL_SHARD`` (ZeRO-3) shards parameters, gradients and optimizer state, and gathers a unit's parameters before its
    forward and again before its backward. ``SHARD_GRAD_OP`` (ZeRO-2) keeps them gathered from forward to backward: a
    third less to send, the whole model in memory meanwhile. ``NO_SHARD`` shards nothing: gradients are averaged, as by
    `DDP`. `hybrid` shards over few ranks, and averages the gradients over the others.

    Args:
        name: Name in messages.
        is_sharded: Whether parameters are sharded.
        reshards_after_forward: Whether units are freed between forward and backward.
        shard_size: Number of neighbouring ranks that shard one replica of the model; None is all of the group.
    """

    FULL_SHARD: ClassVar[ShardingStrategy]
    SHARD_GRAD_OP: ClassVar[ShardingStrategy]
    NO_SHARD: ClassVar[ShardingStrategy]

    name: str
    is_sharded: bool = True
    reshards_after_forward: bool = True
    shard_size: int | None = None

    @staticmethod
    def hybrid(intra_node_size: int) -> ShardingStrategy:
        """Shard a replica of the model over each ``intra_node_size`` neighbouring ranks, such as those of a host.

        Raises:
            ValueError, TypeError: The size is not a positive integer.
        """
        size = check_int("intra_node_size", intra_node_size, min=1)
        return ShardingStrategy(name=f"HYBRID_SHARD({size})", shard_size=size)


ShardingStrategy.FULL_SHARD = ShardingStrategy(name="FULL_SHARD")
ShardingStrategy.SHARD_GRAD_OP = ShardingStrategy(name="SHARD_GRAD_OP", reshards_after_forward=False)
ShardingStrategy.NO_SHARD = ShardingStrategy(name="NO_SHARD", is_sharded=False, reshards_after_forward=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAxes:
    """The groups of this rank along the two axes of a model's grid of ranks.

    The ranks of ``shard`` divide one replica, those of ``replicate`` hold the same shard of each replica. A group of
    one rank is None. Over ``other_groups`` parameters
    are DTensors: each of their ranks is in another grid. See [Note: sharded DTensors] in `dtensor_params.py`.
    """

    world: Backend
    shard: Backend | None
    replicate: Backend | None
    other_groups: tuple[Backend, ...] = ()

    @property
    def num_shards(self) -> int:
        """Number of ranks that shard a replica."""
        return 1 if self.shard is None else self.shard.world_size

    @property
    def shard_rank(self) -> int:
        """Index of this rank's shard."""
        return 0 if self.shard is None else self.shard.rank

    def in_collective(self, what: str) -> AbstractContextManager[None]:
        """A block whose errors say what this rank was doing, which every rank must do."""
        return add_error_context(lambda: f"Rank {self.world.rank} was {what}.", "Every rank must call it.")

    def report_failure(self, where: str, error: Exception) -> None:
        """Let the ranks of all groups know of an error of the program on this one; see `program_failures`."""
        groups = [group for group in (self.shard, self.replicate) if group is not None]
        for group in groups:
            report_failure(group, where, error, ends_with_it=(self.world, *groups, *self.other_groups))

    @staticmethod
    def make(group: Backend | DeviceMesh | None, strategy: ShardingStrategy) -> ShardAxes:
        """Make the grid of a strategy and a group or mesh."""
        if not isinstance(group, DeviceMesh):
            check_type(group, (Backend, NonMemberGroup, NoneType), "FSDP takes a group, a DeviceMesh or None")
            group = DeviceMesh(group, (-1,))
        if group.ndim == 1:
            world_size = group.group.world_size
            size = 1 if not strategy.is_sharded else strategy.shard_size or world_size
            if world_size % size:
                raise ValueError(
                    f"{strategy.name} can't divide {counted(world_size, 'rank')} into groups of {size}: pass a size"
                    " that divides the world size"
                )
            mesh = DeviceMesh(group.group, (world_size // size, size))
        elif group.ndim == 2 and strategy.is_sharded and strategy.shard_size is None:
            mesh = group
        else:
            raise ValueError(
                f"FSDP with {strategy.name} can't take a mesh of {counted(group.ndim, 'axis')} {group.axis_names}: pass"
                " a slice of one axis, or one of two (replicas, and the ranks that divide each) with FULL_SHARD or"
                " SHARD_GRAD_OP"
            )
        replicate, shard = (mesh[name] for name in mesh.axis_names)
        return ShardAxes(
            world=mesh.group,
            shard=shard.group if shard.size > 1 else None,
            replicate=replicate.group if replicate.size > 1 else None,
        )


def check_prefetch(**counts: int) -> None:
    """Raise ValueError unless numbers of units to prefetch are integers from 0 on."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"{name} must be a number of units, at least 0, not {count!r}")
