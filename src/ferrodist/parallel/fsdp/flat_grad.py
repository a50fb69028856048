"""Averaging of full parameters' gradients into each rank's local shards.

    full.grad --fill rows--> buffer --reduce_scatter--> this rank's row --replicas' allreduce--> shard.grad

Rows are explained in [Note: flat units] in `flat_layout.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.all_gather import async_reduce_scatter
from ferrodist.collectives.reduce import async_allreduce
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.parallel.fsdp.dtensor_params import local_tensor, same_placements
from ferrodist.parallel.module_guard import check_dense

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.collectives.work import PendingCollective
    from ferrodist.parallel.fsdp.config import ShardAxes
    from ferrodist.parallel.fsdp.flat_layout import FlatLayout
    from ferrodist.parallel.fsdp.memory import GradientBuffer


@dataclass(slots=True, kw_only=True)
class FlatGradients:
    """The gradients of `FlatParameters`."""

    names: Sequence[str]
    full_params: Sequence[torch.nn.Parameter]
    shards: Sequence[torch.nn.Parameter]
    layout: FlatLayout
    axes: ShardAxes
    _shard_reduction: PendingCollective[torch.Tensor] | None = None
    _replica_reduction: PendingCollective[torch.Tensor] | None = None
    _own_row: torch.Tensor | None = None

    @property
    def exist(self) -> bool:
        """True if a full parameter has a gradient that is not averaged yet."""
        return any(full.grad is not None for full in self.full_params)

    def drop(self) -> None:
        """Drop gradients that are not averaged."""
        for full in self.full_params:
            full.grad = None

    def reset_after_failure(self) -> None:
        """Forget running collectives, after a failure of the group."""
        self._shard_reduction = self._replica_reduction = self._own_row = None
        self.drop()

    @torch.no_grad()
    def start(self, buffer: GradientBuffer) -> None:
        """Start averaging the full parameters' gradients, if there may be any, over the ranks, and drop them."""
        if not (self.exist or any(shard.requires_grad for shard in self.shards)):
            return
        check_dense(self.names, self.full_params, self.axes.world, wrapper="FSDP")
        axes, layout = self.axes, self.layout
        rows = buffer.acquire(layout.num_shards * layout.row_size, layout.reduce_dtype, self.reduce_across_replicas)
        self._fill(rows)
        self._own_row = rows.new_empty(layout.row_size)
        if axes.shard is not None:
            self._shard_reduction = async_reduce_scatter(rows, ReduceOp.MEAN, group=axes.shard, out=self._own_row)
        elif axes.replicate is not None:
            self._shard_reduction = async_allreduce(rows, ReduceOp.MEAN, group=axes.replicate, out=self._own_row)
        else:
            self._own_row.copy_(rows)

    def reduce_across_replicas(self) -> None:
        """Wait until the buffer is free; then start averaging over the replicas of the model, if there are any."""
        pending, self._shard_reduction = self._shard_reduction, None
        if pending is None:
            return
        row = pending.wait()
        if self.axes.shard is not None and self.axes.replicate is not None:
            self._replica_reduction = async_allreduce(row, ReduceOp.MEAN, group=self.axes.replicate, out=row)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the averages and add them to the gradients of the shards."""
        self.reduce_across_replicas()
        if self._replica_reduction is not None:
            self._replica_reduction.wait()
            self._replica_reduction = None
        row, self._own_row = self._own_row, None
        if row is None:
            return
        layout = self.layout
        present = (row[layout.shard_size :][: len(self.shards)] != 0).tolist()
        for group in (self.axes.shard, self.axes.replicate):
            if group is not None and group.failure is not None:  # on a GPU wait() may return before the work has ended
                raise group.failure.fresh()
        means = row[: layout.shard_size]
        for index, parameter in enumerate(self.shards):
            if not present[index]:
                continue
            shard_range = layout.shard_range(index, self.axes.shard_rank)
            mean = layout.shape_shard(index, means[shard_range.offset :][: shard_range.size]).to(parameter.dtype).data
            if parameter.grad is None:
                parameter.grad = mean
            else:
                parameter.grad.add_(mean)

    def _fill(self, rows: torch.Tensor) -> None:
        """Copy gradients and gradient mask to the rows, and drop the gradients."""
        layout = self.layout
        presence = rows.view(layout.num_shards, layout.row_size)[:, layout.shard_size :]
        presence.fill_(1)
        for index, full in enumerate(self.full_params):
            gradient, full.grad = full.grad, None
            if gradient is None:
                presence[:, index] = 0
            else:
                assert same_placements(gradient, full), "keep_grad_placements sees to it"
                gradient = layout.flatten(index, local_tensor(gradient))
            for shard_range in layout.shard_ranges(index):
                start = shard_range.rank * layout.row_size + shard_range.offset
                target = rows[start : start + shard_range.size]
                if gradient is None:
                    target.zero_()
                else:
                    target.copy_(gradient[shard_range.start :][: shard_range.size])
