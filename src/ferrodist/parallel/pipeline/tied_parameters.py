"""Parameters that stages of several ranks share, such as an embedding that is also the output layer.

Their gradients are added up over the ranks, so that the copies stay equal.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.subgroup import SubBackend
from ferrodist.collectives.reduce import allreduce, broadcast
from ferrodist.collectives.reduce_op import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline
    from ferrodist.errors import DistributedError


class TiedParameters:
    """This rank's tied parameters, which several stages share, by (stage, name) pairs; ValueError if one is missing.

    They are looked up by name each time, since ``load_state_dict(assign=True)`` and ``to_empty`` replace them.
    """

    def __init__(
        self,
        locations: Sequence[Sequence[tuple[int, str]]],
        stages: Mapping[int, torch.nn.Module],
        stage_ranks: Sequence[int],
    ) -> None:
        self._shared: list[tuple[str, Callable[[], torch.nn.Parameter], list[int]]] = []
        """For each parameter a label, a function that finds it, and the ranks that have it."""
        self._indices: list[int] = []  # for each parameter its index among those that several ranks share
        self._num_between_ranks = 0
        self._groups: list[Backend] = []
        self._accumulated: list[torch.Tensor | None] = []
        for index, pairs in enumerate(locations):
            for stage, name in pairs:
                if not 0 <= stage < len(stage_ranks):
                    raise ValueError(f"{name!r} of stage {stage} is shared, but there are {len(stage_ranks)} stages")
            found = [partial(_find, stages[stage], name, stage) for stage, name in pairs if stage in stages]
            ranks = sorted({stage_ranks[stage] for stage, _ in pairs})
            if len({find() for find in found}) > 1:
                raise ValueError(f"{list(pairs)} are different parameters: stages of one rank share the object")
            if len(ranks) == 1:
                continue
            if found:
                self._shared.append((f"ferrodist.pipeline.shared.{index}", found[0], ranks))
                self._indices.append(self._num_between_ranks)
            self._num_between_ranks += 1

    def attach(self, group: Backend) -> None:
        """Make sub-groups in a group of the pipeline's ranks, instead of those of a failed one."""
        self._groups = [SubBackend(group, ranks, label=label) for label, _, ranks in self._shared]

    def abort(self, reason: DistributedError) -> None:
        """Abort the sub-groups, which the end of the pipeline's group does not reach."""
        for group in self._groups:
            group.abort(reason)

    def broadcast_values(self, deadline: Deadline) -> None:
        """Broadcast each parameter from the first rank that has it; all call this."""
        for parameter, group in zip(self._parameters(), self._groups, strict=True):
            broadcast(parameter.data, 0, group=group, out=parameter.data, timeout=deadline.remaining())

    def before_step(self) -> None:
        """Set gradients aside that earlier steps have added up already."""
        self._accumulated = [parameter.grad for parameter in self._parameters()]
        for parameter in self._parameters():
            parameter.grad = None

    def after_step(self, group: Backend, deadline: Deadline) -> None:
        """Add up the gradients of all ranks, with those set aside."""
        if not self._num_between_ranks:
            return
        is_used = torch.zeros(self._num_between_ranks, dtype=torch.bool, device="cpu")
        for index, parameter in zip(self._indices, self._parameters(), strict=True):
            is_used[index] = parameter.grad is not None
        allreduce(is_used, ReduceOp.MAX, group=group, out=is_used, timeout=deadline.remaining())
        shared = zip(self._indices, self._parameters(), self._groups, self._accumulated, strict=True)
        for index, parameter, owners, accumulated in shared:
            if not is_used[index]:  # optimizers would apply a gradient of zeros
                parameter.grad = accumulated
                continue
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            allreduce(own, group=owners, out=own, timeout=deadline.remaining())
            if parameter.requires_grad:  # optimizers would change a frozen one
                parameter.grad = own if accumulated is None else accumulated.add_(own)
        self._accumulated = []

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [find() for _, find, _ in self._shared]


def check_locations(shared: Sequence[Sequence[tuple[int, str]]]) -> Sequence[Sequence[tuple[int, str]]]:
    """Return the (stage, name) pairs of shared parameters; TypeError if they are something else."""
    for pairs in shared:
        for pair in pairs:
            if not (isinstance(pair, (tuple, list)) and list(map(type, pair)) == [int, str]):
                raise TypeError(
                    f"shared must have a list of (stage, name) pairs for each parameter, as [(0, 'weight'), (1,"
                    f" 'weight')], not {pairs!r}"
                )
    return shared


def _find(module: torch.nn.Module, name: str, stage: int) -> torch.nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError as error:
        raise ValueError(f"stage {stage} has no parameter {name!r} to share: {error}") from None
