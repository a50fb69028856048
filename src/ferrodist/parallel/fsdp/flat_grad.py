"""Gradients of whole parameters become the mean over the ranks, each rank's part of it.

    full.grad --fill rows--> buffer --reduce_scatter--> this rank's row --copies' allreduce--> piece.grad

What a row is says [Note: flat units] in `flat_layout.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.all_gather import async_reduce_scatter
from ferrodist.collectives.reduce import async_allreduce
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.errors import UnsupportedOpError
from ferrodist.parallel.fsdp.dtensor_params import lie_alike, part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.collectives.work import PendingCollective
    from ferrodist.parallel.fsdp.config import ShardAxes
    from ferrodist.parallel.fsdp.flat_layout import FlatLayout
    from ferrodist.parallel.fsdp.memory import GradientBuffer


class FlatGradients:
    """The gradients of `FlatParameters`.

    Args:
        names: The parameters' names in the model.
        fulls: The whole parameters, whose gradients autograd makes.
        pieces: This rank's pieces of them, in whose gradients the means end; the list is read when they do.
        layout: Where their elements lie.
        axes: Who divides and who averages.
        dtype: In which they are averaged.
    """

    def __init__(
        self,
        names: Sequence[str],
        fulls: Sequence[torch.nn.Parameter],
        pieces: Sequence[torch.nn.Parameter],
        layout: FlatLayout,
        *,
        axes: ShardAxes,
        dtype: torch.dtype,
    ) -> None:
        self.dtype = dtype
        self._names = names
        self._fulls = fulls
        self._pieces = pieces
        self._layout = layout
        self._axes = axes
        self._from_buffer: PendingCollective[torch.Tensor] | None = None
        self._over_copies: PendingCollective[torch.Tensor] | None = None
        self._row: torch.Tensor | None = None

    @property
    def size_bytes(self) -> int:
        """What all rows take."""
        return self._layout.num_shards * self._layout.row_size * self.dtype.itemsize

    @property
    def are_there(self) -> bool:
        """Whether a whole parameter has a gradient that was not averaged yet."""
        return any(full.grad is not None for full in self._fulls)

    def drop(self) -> None:
        """Forget what was not averaged."""
        for full in self._fulls:
            full.grad = None

    def abandon(self) -> None:
        """After a failure of the group: nothing is under way any more."""
        self._from_buffer = self._over_copies = self._row = None
        self.drop()

    @torch.no_grad()
    def start(self, buffer: GradientBuffer) -> None:
        """Begin to average the whole parameters' gradients over the ranks; they are dropped."""
        self._check_layouts()
        axes, layout = self._axes, self._layout
        rows = buffer.take(layout.num_shards * layout.row_size, self.dtype, self.settle)
        self._fill(rows)
        self._row = rows.new_empty(layout.row_size)
        if axes.shard is not None:
            self._from_buffer = async_reduce_scatter(rows, ReduceOp.MEAN, group=axes.shard, out=self._row)
        elif axes.replicate is not None:
            self._from_buffer = async_allreduce(rows, ReduceOp.MEAN, group=axes.replicate, out=self._row)
        else:
            self._row.copy_(rows)

    def settle(self) -> None:
        """Wait until the buffer is free; where there are copies of the model, begin to average over them."""
        pending, self._from_buffer = self._from_buffer, None
        if pending is None:
            return
        row = pending.wait()
        if self._axes.shard is not None and self._axes.replicate is not None:
            self._over_copies = async_allreduce(row, ReduceOp.MEAN, group=self._axes.replicate, out=row)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the averages and add them to the gradients of the pieces."""
        self.settle()
        if self._over_copies is not None:
            self._over_copies.wait()
            self._over_copies = None
        row, self._row = self._row, None
        if row is None:
            return
        layout = self._layout
        present = (row[layout.shard_size :][: len(self._pieces)] != 0).tolist()
        for group in (self._axes.shard, self._axes.replicate):
            if group is not None and group.failure is not None:  # on a GPU wait() may return before the work has ended
                raise group.failure.fresh()
        means = row[: layout.shard_size]
        for place, parameter in enumerate(self._pieces):
            if not present[place]:
                continue
            piece = layout.piece(place, self._axes.shard_rank)
            part = layout.shape_piece(place, means[piece.offset :][: piece.size]).to(parameter.dtype).data
            if parameter.grad is None:
                parameter.grad = part
            else:
                parameter.grad.add_(part)

    def _check_layouts(self) -> None:
        for name, full in zip(self._names, self._fulls, strict=True):
            if full.grad is not None and full.grad.layout is not torch.strided:
                group = self._axes.whole
                raise UnsupportedOpError(
                    f"the gradient of {name!r} on rank {group.rank} of group {group.name!r} has layout"
                    f" {full.grad.layout}: FSDP averages dense gradients, as of an embedding with sparse=False",
                    ranks=(group.rank,),
                )

    def _fill(self, rows: torch.Tensor) -> None:
        """Copy gradients and presence to the rows, and drop the gradients."""
        layout = self._layout
        presence = rows.view(layout.num_shards, layout.row_size)[:, layout.shard_size :]
        presence.fill_(1)
        for place, full in enumerate(self._fulls):
            gradient, full.grad = full.grad, None
            if gradient is None:
                presence[:, place] = 0
            else:
                assert lie_alike(gradient, full), "keep_grad_placements sees to it"
                gradient = layout.flatten(place, part_of(gradient))
            for piece in layout.pieces(place):
                start = piece.rank * layout.row_size + piece.offset
                target = rows[start : start + piece.size]
                if gradient is None:
                    target.zero_()
                else:
                    target.copy_(gradient[piece.start :][: piece.size])
