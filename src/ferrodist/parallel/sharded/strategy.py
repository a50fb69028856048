"""What is divided over which ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ferrodist.backends.base import Backend
from ferrodist.backends.process_group import resolve_group
from ferrodist.backends.sub import SubBackend
from ferrodist.collectives.objects import all_gather_object

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Axes", "ShardingStrategy"]


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
class Axes:
    """The ranks of a model, as a grid: a row divides one copy, a column holds the same part of each copy.

    Args:
        whole: All of them.
        shard: This rank's row; None where it has one rank.
        replicate: This rank's column; None where it has one rank.
    """

    whole: Backend
    shard: Backend | None
    replicate: Backend | None

    @property
    def num_shards(self) -> int:
        """Number of ranks that divide a copy."""
        return 1 if self.shard is None else self.shard.world_size

    @property
    def shard_rank(self) -> int:
        """Which part of its copy this rank holds."""
        return 0 if self.shard is None else self.shard.rank

    @staticmethod
    def of(group: Backend | Sequence[Backend] | None, strategy: ShardingStrategy) -> Axes:
        """The grid that a strategy makes of a group, or that two groups are.

        Args:
            group: All ranks; None is the default group. Or a pair of groups: the ranks that divide a copy with this
                one, and those that hold the same part of other copies; made from one group. Then all ranks call this.
            strategy: With a pair of groups one that divides.

        Raises:
            ValueError, TypeError: They don't go together.
        """
        if isinstance(group, (tuple, list)):
            return _axes_of_pair(group, strategy)
        if group is not None and not isinstance(group, Backend):
            raise TypeError(f"group must be a group, a pair of groups or None, not {type(group).__name__}")
        whole = resolve_group(group)
        world_size = whole.world_size
        if world_size == 1:
            return Axes(whole=whole, shard=None, replicate=None)
        if not strategy.is_sharded:
            return Axes(whole=whole, shard=None, replicate=whole)
        size = world_size if strategy.shard_size is None else strategy.shard_size
        if world_size % size:
            raise ValueError(
                f"{strategy.name} divides {world_size} ranks into rows of {size}, which does not come out even: pass"
                " a size that divides the world size"
            )
        row, column = divmod(whole.rank, size)
        neighbours = list(range(row * size, (row + 1) * size))
        copies = list(range(column, world_size, size))
        return Axes(
            whole=whole,
            shard=None if size == 1 else whole if size == world_size else SubBackend(whole, neighbours),
            replicate=None if size == world_size else whole if size == 1 else SubBackend(whole, copies),
        )


def _axes_of_pair(groups: Sequence[object], strategy: ShardingStrategy) -> Axes:
    if len(groups) != 2 or not all(isinstance(group, Backend) for group in groups):
        raise TypeError("as a pair, group must be (group that shards, group that replicates)")
    if not strategy.is_sharded or strategy.shard_size is not None:
        raise ValueError(f"two groups say by themselves what is divided: pass FULL_SHARD, not {strategy.name}")
    shard, replicate = groups
    assert isinstance(shard, Backend)
    assert isinstance(replicate, Backend)
    return Axes(
        whole=_whole_of(shard, replicate),
        shard=shard if shard.world_size > 1 else None,
        replicate=replicate if replicate.world_size > 1 else None,
    )


def _whole_of(shard: Backend, replicate: Backend) -> Backend:
    """The group of all ranks of a grid, row by row; every rank of the grid calls this."""
    if shard.world_size == 1 or replicate.world_size == 1:
        return shard if shard.world_size > 1 else replicate
    parents = [group.parent if isinstance(group, SubBackend) else None for group in (shard, replicate)]
    if parents[0] is None or parents[0] is not parents[1]:
        raise ValueError(
            "FSDP must reach all ranks at once, to compare their modules: make both groups as sub-groups of one group,"
            " or pass the group of all ranks and ShardingStrategy.hybrid(ranks a copy)"
        )
    parent = parents[0]
    assert isinstance(shard, SubBackend)
    rows: list[list[int]] = all_gather_object(list(shard.members), group=replicate)
    members = [rank for row in rows for rank in row]
    if len(members) != shard.world_size * replicate.world_size or len(set(members)) != len(members):
        raise ValueError(f"the two groups make no grid: the rows are {rows}, of ranks of group {parent.name!r}")
    return parent if members == list(range(parent.world_size)) else SubBackend(parent, members)
