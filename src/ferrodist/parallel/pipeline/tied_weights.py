"""Parameters that stages of several ranks share, as an embedding that is the output layer too.

Their gradients are added up over the ranks, so that they stay equal.
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
    """Those of this rank.

    They are looked up by their names each time, for ``load_state_dict(assign=True)`` and ``to_empty`` replace them.

    Args:
        places: For each shared parameter the stages that have it, and its name in each.
        stages: This rank's modules, by the numbers of their stages.
        stage_ranks: The rank of each stage.

    Raises:
        ValueError: There is no such parameter.
    """

    def __init__(
        self,
        places: Sequence[Sequence[tuple[int, str]]],
        stages: Mapping[int, torch.nn.Module],
        stage_ranks: Sequence[int],
    ) -> None:
        self._members: list[tuple[str, Callable[[], torch.nn.Parameter], list[int]]] = []
        """Of each a label, what finds it, and the ranks that have it."""
        self._numbers: list[int] = []
        """Of each the number among those that other ranks have, too."""
        self._num_between_ranks = 0
        self._groups: list[Backend] = []
        self._before: list[torch.Tensor | None] = []
        for number, places_of_one in enumerate(places):
            for stage, name in places_of_one:
                if not 0 <= stage < len(stage_ranks):
                    raise ValueError(f"{name!r} of stage {stage} is shared, and there are {len(stage_ranks)} stages")
            found = [partial(_find, stages[stage], name, stage) for stage, name in places_of_one if stage in stages]
            ranks = sorted({stage_ranks[stage] for stage, _ in places_of_one})
            if len({find() for find in found}) > 1:
                raise ValueError(f"{list(places_of_one)} are different parameters: stages of one rank share the object")
            if len(ranks) == 1:
                continue
            if found:
                self._members.append((f"ferrodist.pipeline.shared.{number}", found[0], ranks))
                self._numbers.append(self._num_between_ranks)
            self._num_between_ranks += 1

    def join(self, group: Backend) -> None:
        """Go on in a group of the pipeline's ranks, in place of one that has failed."""
        self._groups = [SubBackend(group, ranks, label=label) for label, _, ranks in self._members]

    def abort(self, reason: DistributedError) -> None:
        """End what other ranks wait for here; no end of the pipeline's group reaches those."""
        for group in self._groups:
            group.abort(reason)

    def equalize(self, deadline: Deadline) -> None:
        """Give all ranks the values of the first that has each; all call this."""
        for parameter, group in zip(self._parameters(), self._groups, strict=True):
            broadcast(parameter.data, 0, group=group, out=parameter.data, timeout=deadline.remaining())

    def begin(self) -> None:
        """Before a step: what gradients there are has been added up by earlier ones."""
        self._before = [parameter.grad for parameter in self._parameters()]
        for parameter in self._parameters():
            parameter.grad = None

    def finish(self, group: Backend, deadline: Deadline) -> None:
        """After it: add up what all ranks have found.

        Args:
            group: All ranks of the pipeline.
            deadline: For all of it.
        """
        if not self._num_between_ranks:
            return
        is_used = torch.zeros(self._num_between_ranks, dtype=torch.bool, device="cpu")
        for number, parameter in zip(self._numbers, self._parameters(), strict=True):
            is_used[number] = parameter.grad is not None
        allreduce(is_used, ReduceOp.MAX, group=group, out=is_used, timeout=deadline.remaining())
        members = zip(self._numbers, self._parameters(), self._groups, self._before, strict=True)
        for number, parameter, owners, before in members:
            if not is_used[number]:  # optimizers would take a gradient of zeros for one
                parameter.grad = before
                continue
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            allreduce(own, group=owners, out=own, timeout=deadline.remaining())
            if parameter.requires_grad:  # a frozen one has none, for optimizers would change it
                parameter.grad = own if before is None else before.add_(own)
        self._before = []

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [find() for _, find, _ in self._members]


def _find(module: torch.nn.Module, name: str, stage: int) -> torch.nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError as error:
        raise ValueError(f"stage {stage} has no parameter {name!r} to share: {error}") from None
