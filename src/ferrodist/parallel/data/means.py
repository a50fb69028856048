"""The mean of parameters over the ranks, in memory that is made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.collectives.reductions import allreduce
from ferrodist.collectives.symmetric import empty_symmetric
from ferrodist.errors import BackendUnavailable
from ferrodist.parallel.data.buckets import plan_buckets
from ferrodist.parallel.data.marks import MARK_SIZE, check_marks, make_mark

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ferrodist.backends.base import Backend

__all__ = ["MAX_BYTES", "Means"]

MAX_BYTES = 25 << 20
"""Of a message."""


class Means:
    """Flat memory for the mean of some parameters over the ranks, made once; see [Note: marks] in `marks.py`."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], group: Backend, number: int) -> None:
        self.parameters = parameters
        self._group = group
        self._number = number
        self._flats: list[torch.Tensor] = []
        names, owners = list(parameters), list(parameters.values())
        places: dict[int, torch.Tensor] = {}
        for bucket in plan_buckets(owners, MAX_BYTES):
            sizes = [owners[place].numel() for place in bucket.members]
            flat = _make(sum(sizes) + group.world_size * MARK_SIZE, bucket.dtype, bucket.device, group)
            self._flats.append(flat)
            parts = torch.split(flat[: sum(sizes)], sizes)
            places.update(zip(bucket.members, parts, strict=True))
        self.tensors = {name: places[place].view(owners[place].shape) for place, name in enumerate(names)}
        """The means, by name, after `take`."""

    @torch.no_grad()
    def take(self) -> None:
        """Set `tensors` to the means of the parameters as they are now."""
        for name, parameter in self.parameters.items():
            self.tensors[name].copy_(parameter)
        for index, flat in enumerate(self._flats):
            marks = flat[-self._group.world_size * MARK_SIZE :]
            own = marks.zero_()[self._group.rank * MARK_SIZE :][:MARK_SIZE]
            own.copy_(torch.tensor(make_mark(self._number, index), device=flat.device))
            allreduce(flat, ReduceOp.MEAN, group=self._group, out=flat)
            check_marks(marks.tolist(), self._group)


def _make(count: int, dtype: torch.dtype, device: torch.device, group: Backend) -> torch.Tensor:
    if device.type == "cpu":
        try:
            return empty_symmetric((count,), dtype, group=group)
        except BackendUnavailable:  # on all ranks
            pass
    return torch.empty(count, dtype=dtype, device=device)
