"""The losses of microbatches, and what they count in the loss of the batch."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.reductions import allreduce
from ferrodist.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend

__all__ = ["LossReduction", "Losses"]

_ENDS = ("inputs", "targets")


class LossReduction(enum.Enum):
    """What the loss of a batch is."""

    MEAN = "mean"
    """The mean of its microbatches' losses, by their samples: the mean of all samples, if each loss is a mean."""

    SUM = "sum"
    """Their sum."""


class Losses:
    """Those of a step.

    Args:
        reduction: What they are together.
        num_microbatches: How many there are.
    """

    def __init__(self, reduction: LossReduction, num_microbatches: int) -> None:
        if not isinstance(reduction, LossReduction):
            raise TypeError(f"loss_reduction must be a LossReduction, not {reduction!r}")
        self.reduction = reduction
        self._num_microbatches = num_microbatches
        self.values: list[float] = []
        """Of the last step; on all ranks."""
        self.gradients: dict[int, list[torch.Tensor | None]] = {}
        """For each loss what its backward begins with: what it counts."""
        self._counts: dict[str, Sequence[int]] = {}
        self._taken: dict[int, float] = {}

    def begin(self) -> None:
        """Forget the step before."""
        self.gradients.clear()
        self._counts.clear()
        self._taken.clear()

    def count(self, counts: Sequence[int] | None, what: str) -> None:
        """Say how many samples each microbatch of the inputs, or targets, has; None if that can't be told."""
        if counts is not None:
            self._counts[what] = counts

    def take(self, microbatch: int, loss: torch.Tensor) -> list[torch.Tensor]:
        """Take a microbatch's loss; gives the tensors from which a backward begins.

        Raises:
            TypeError, ValueError: It is no loss, or nothing goes backward from it.
        """
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"the loss is of type {type(loss).__name__}: loss_fn, or the last stage, returns a tensor")
        if loss.numel() != 1 or loss.is_complex():
            raise ValueError(f"the loss is a {loss.dtype} tensor of shape {tuple(loss.shape)}: it has one real element")
        if not loss.requires_grad:
            raise ValueError(
                "the loss has no gradient, for nothing that it was computed from wants one: take forward() for losses"
                " alone"
            )
        self._taken[microbatch] = float(loss.detach())
        self.gradients[microbatch] = [torch.full_like(loss, self._weight(microbatch))]
        return [loss]

    def share(self, group: Backend, timeout: float) -> torch.Tensor:
        """Give all ranks the losses; every rank calls this at the end of a step, and returns when all have.

        Returns:
            The loss of the batch.

        Raises:
            CollectiveMismatchError: On all ranks: inputs and targets are of other numbers of samples.
        """
        count = self._num_microbatches
        own = torch.zeros(2 * count + len(_ENDS) + 1, dtype=torch.float64, device="cpu")
        for number, value in self._taken.items():
            own[number], own[count + number] = value, self._weight(number)
        own[2 * count : -1] = torch.tensor([sum(self._counts.get(end, ())) for end in _ENDS], device="cpu")
        own[-1] = len(set(self._counts.get("inputs", ()))) > 1
        found = allreduce(own, group=group, out=own, timeout=timeout).tolist()
        self.values, weights = found[:count], found[count : 2 * count]
        self._check(*found[2 * count :])
        total = sum(weight * value for weight, value in zip(weights, self.values, strict=True))
        return torch.tensor(total, dtype=torch.float64, device="cpu")

    def _check(self, num_inputs: float, num_targets: float, is_uneven: float) -> None:
        if num_inputs and num_targets and num_inputs != num_targets:
            raise CollectiveMismatchError(
                f"the first stage was given a batch of {num_inputs:g} samples, and the last one targets of"
                f" {num_targets:g}: give both the same batch"
            )
        if is_uneven and not num_targets and self.reduction is LossReduction.MEAN:
            raise CollectiveMismatchError(
                f"a batch of {num_inputs:g} samples makes uneven microbatches, and the last stage can't tell what each"
                " counts in the mean: take a batch that can be divided, or a loss_fn with targets, or LossReduction.SUM"
            )

    def _weight(self, microbatch: int) -> float:
        """What a microbatch's loss counts in that of the batch; where the last stage is."""
        if self.reduction is LossReduction.SUM:
            return 1.0
        counts = self._counts.get("targets")
        return counts[microbatch] / sum(counts) if counts else 1 / self._num_microbatches
