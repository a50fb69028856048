"""Which dtypes a model computes, sends and keeps.

What is divided over which ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ferrodist.backends.base import Backend
from ferrodist.backends.non_member import NonMemberGroup
from ferrodist.mesh import DeviceMesh
from ferrodist.torch_private.modules import own_buffers
from ferrodist.torch_private.pytree import tree_map
from ferrodist.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """Dtypes other than those of the shards, which stay as they are for the optimizer.

    After P. Micikevicius et al., "Mixed Precision Training", ICLR 2018 (https://arxiv.org/abs/1710.03740). They apply
    to floating-point tensors only. None leaves a dtype as it is.

    Args:
        param_dtype: Parameters are gathered, and forward and backward computed, in this.
        reduce_dtype: Gradients are averaged in this; None is ``param_dtype``.
        buffer_dtype: Buffers are converted to this when FSDP is made.
        cast_inputs: Convert the tensors that the model is called with to ``param_dtype``.

    Raises:
        TypeError: A dtype is none, or not a floating-point one.
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
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name} must be a torch.dtype or None, not {type(dtype).__name__}")
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise TypeError(f"{name} must be a floating-point dtype of at least 16 bits, not {dtype}")

    def computed(self, kept: torch.dtype) -> torch.dtype:
        """In which dtype a parameter that is kept in ``kept`` is gathered and used."""
        return self.param_dtype if self.param_dtype is not None and kept.is_floating_point else kept

    def reduced(self, kept: torch.dtype) -> torch.dtype:
        """In which dtype its gradient is averaged."""
        return self.reduce_dtype if self.reduce_dtype is not None and kept.is_floating_point else self.computed(kept)

    def cast(self, inputs: Any) -> Any:
        """Inputs of the model, in any nesting of lists, tuples and dicts, in the dtype in which it computes."""
        dtype = self.param_dtype
        if dtype is None or not self.cast_inputs:
            return inputs
        return tree_map(
            lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, inputs
        )

    def convert_buffers(self, module: torch.nn.Module) -> None:
        """Give the module's floating-point buffers ``buffer_dtype``, in place."""
        if self.buffer_dtype is None:
            return
        for each in module.modules():
            for name, buffer in own_buffers(each).items():
                if buffer is not None and buffer.is_floating_point():
                    own_buffers(each)[name] = buffer.to(self.buffer_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingStrategy:
    """How a model's memory is divided; the names are those of S. Rajbhandari et al., "ZeRO", SC 2020, and of torch.

    ``FULL_SHARD`` (ZeRO-3) divides parameters, gradients and optimizer state, and gathers a unit's parameters before
    its forward and again before its backward. ``SHARD_GRAD_OP`` (ZeRO-2) keeps them from forward to backward: a third
    less to send, the whole model in memory meanwhile. ``NO_SHARD`` divides nothing: gradients are averaged, as by
    `DDP`. `hybrid` divides over few ranks, and averages the gradients over the others.

    Args:
        name: What messages call it.
        is_sharded: Whether ranks hold parts.
        reshards_after_forward: Whether parts are all they hold between forward and backward.
        shard_size: Number of neighbouring ranks that divide one copy of the model; None is all of the group.
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
        """Divide a copy of the model over each ``intra_node_size`` neighbouring ranks, as those of a host are.

        Raises:
            ValueError, TypeError: It is no positive integer.
        """
        if isinstance(intra_node_size, bool) or not isinstance(intra_node_size, int):
            raise TypeError(f"intra_node_size must be an integer, not {type(intra_node_size).__name__}")
        if intra_node_size < 1:
            raise ValueError(f"intra_node_size must be at least 1, not {intra_node_size}")
        return ShardingStrategy(name=f"HYBRID_SHARD({intra_node_size})", shard_size=intra_node_size)


ShardingStrategy.FULL_SHARD = ShardingStrategy(name="FULL_SHARD")
ShardingStrategy.SHARD_GRAD_OP = ShardingStrategy(name="SHARD_GRAD_OP", reshards_after_forward=False)
ShardingStrategy.NO_SHARD = ShardingStrategy(name="NO_SHARD", is_sharded=False, reshards_after_forward=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAxes:
    """The ranks of a model, as a grid: a row divides one copy, a column holds the same part of each copy.

    Args:
        whole: All of them.
        shard: This rank's row; None where it has one rank.
        replicate: This rank's column; None where it has one rank.
        others: Groups over which parameters lie beside: each rank of them is in another grid. See [Note: parts] in
            `dtensor_params.py`.
    """

    whole: Backend
    shard: Backend | None
    replicate: Backend | None
    others: tuple[Backend, ...] = ()

    @property
    def num_shards(self) -> int:
        """Number of ranks that divide a copy."""
        return 1 if self.shard is None else self.shard.world_size

    @property
    def shard_rank(self) -> int:
        """Which part of its copy this rank holds."""
        return 0 if self.shard is None else self.shard.rank

    @staticmethod
    def of(group: Backend | DeviceMesh | None, strategy: ShardingStrategy) -> ShardAxes:
        """The grid that a strategy makes of a group, or that a mesh is.

        Args:
            group: All ranks; None is the default group. Or a mesh of one axis, or of two: the first holds copies, the
                second divides one.
            strategy: With a mesh of two axes one that divides, and leaves it to the mesh by how many.

        Raises:
            ValueError, TypeError: They don't go together.
        """
        if not isinstance(group, DeviceMesh):
            if group is not None and not isinstance(group, Backend | NonMemberGroup):
                raise TypeError(f"FSDP takes a group, a DeviceMesh or None, not {type(group).__name__}")
            group = DeviceMesh(group, (-1,))
        if group.ndim == 1:
            mesh = DeviceMesh(group.group, _grid(group.group, strategy))
        elif group.ndim == 2 and strategy.is_sharded and strategy.shard_size is None:
            mesh = group
        else:
            raise ValueError(
                f"FSDP with {strategy.name} can't take a mesh of {counted(group.ndim, 'axis')}"
                f" {group.axis_names}: pass a slice of"
                " one axis, or one of two (copies, and the ranks that divide each) with FULL_SHARD or SHARD_GRAD_OP"
            )
        copies, parts = (mesh[name] for name in mesh.axis_names)
        return ShardAxes(
            whole=mesh.group,
            shard=parts.group if parts.size > 1 else None,
            replicate=copies.group if copies.size > 1 else None,
        )


def _grid(group: Backend, strategy: ShardingStrategy) -> tuple[int, int]:
    """Number of copies, and of the ranks that divide each."""
    world_size = group.world_size
    size = world_size if strategy.shard_size is None else strategy.shard_size
    if not strategy.is_sharded:
        size = 1
    if world_size % size:
        raise ValueError(
            f"{strategy.name} divides {counted(world_size, 'rank')} into rows of {size}, which does not come"
            " out even: pass"
            " a size that divides the world size"
        )
    return world_size // size, size
