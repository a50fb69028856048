"""Parameters that stages of several ranks share, as an embedding that is the output layer too.

Their gradients are added up over the ranks, so that they stay equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrodist.backends.sub import SubBackend
from ferrodist.collectives.reductions import allreduce, broadcast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline

__all__ = ["SharedParameters"]


class SharedParameters:
    """Those of this rank.

    Args:
        places: For each shared parameter the stages that have it, and its name in each.
        stages: This rank's modules, by the numbers of their stages.
        stage_ranks: The rank of each stage.
        group: All ranks of the pipeline.

    Raises:
        ValueError: There is no such parameter.
    """

    def __init__(
        self,
        places: Sequence[Sequence[tuple[int, str]]],
        stages: Mapping[int, torch.nn.Module],
        stage_ranks: Sequence[int],
        group: Backend,
    ) -> None:
        self._members: list[tuple[torch.nn.Parameter, Backend]] = []
        self._before: list[torch.Tensor | None] = []
        for number, places_of_one in enumerate(places):
            own = {_find(stages[stage], name, stage) for stage, name in places_of_one if stage in stages}
            ranks = sorted({stage_ranks[stage] for stage, _ in places_of_one})
            if len(own) > 1:
                raise ValueError(f"{list(places_of_one)} are different parameters: stages of one rank share the object")
            if own and len(ranks) > 1:
                label = f"ferrodist.pipeline.shared.{number}"
                self._members.append((own.pop(), SubBackend(group, ranks, label=label)))

    def equalize(self, deadline: Deadline) -> None:
        """Give all ranks the values of the first that has each; all call this."""
        for parameter, group in self._members:
            broadcast(parameter.data, 0, group=group, out=parameter.data, timeout=deadline.remaining())

    def begin(self) -> None:
        """Before a step: what gradients there are has been added up by earlier ones."""
        self._before = [parameter.grad for parameter, _ in self._members]
        for parameter, _ in self._members:
            parameter.grad = None

    def finish(self, deadline: Deadline) -> None:
        """After it: add up what all ranks have found."""
        for (parameter, group), before in zip(self._members, self._before, strict=True):
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            allreduce(own, group=group, out=own, timeout=deadline.remaining())
            parameter.grad = own if before is None else before.add_(own)
        self._before = []


def _find(module: torch.nn.Module, name: str, stage: int) -> torch.nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError as error:
        raise ValueError(f"stage {stage} has no parameter {name!r} to share: {error}") from None
