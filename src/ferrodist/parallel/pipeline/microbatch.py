"""A batch in microbatches, and back.

The losses of microbatches, and what they count in the loss of the batch.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.pytree import TreeSpec, flatten, unflatten
from ferrodist.collectives.reduce import allreduce
from ferrodist.errors import CollectiveMismatchError
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend


class Microbatches(list[Any]):
    """A batch that is divided already: a list of what each microbatch is, of whatever shapes.

    All count the same in the mean of the losses.
    """


def split_batch(batch: Any, num_microbatches: int, what: str) -> tuple[list[Any], list[int] | None]:
    """Divide a batch along dim 0 of its tensors.

    Args:
        batch: Nested values, or `Microbatches`. Tensors of no dim, and what is no tensor, go to all.
        num_microbatches: How many to make: the first have one sample more, where they can't have equally many.
        what: What it is, for errors.

    Returns:
        The microbatches, and how many samples each has; None for those that were divided already.

    Raises:
        ValueError: It can't be divided so, or is divided otherwise.
    """
    if isinstance(batch, Microbatches):
        if len(batch) != num_microbatches:
            raise ValueError(
                f"{what} has {counted(len(batch), 'microbatch')}, and the pipeline is for {num_microbatches}"
            )
        return list(batch), None
    plan, tensors = flatten(batch, what)
    sizes = {int(tensor.shape[0]) for tensor in tensors if tensor.dim()}
    if len(sizes) > 1:
        raise ValueError(
            f"the tensors of {what} have {sorted(sizes)} samples along dim 0, which must be equally many: divide them"
            " yourself, and pass Microbatches([...])"
        )
    if not sizes:
        raise ValueError(f"{what} has no tensor with a dim to be divided along: pass Microbatches([...])")
    if layout := next((tensor.layout for tensor in tensors if tensor.layout is not torch.strided), None):
        raise ValueError(f"{what} has a tensor of layout {layout}, which can't be divided: pass Microbatches([...])")
    (num_samples,) = sizes
    if num_samples < num_microbatches:
        raise ValueError(
            f"{what} has {counted(num_samples, 'sample')} along dim 0, which can't be divided into {num_microbatches}"
            " microbatches: make the pipeline with fewer, or take larger batches"
        )
    parts = [_divide(tensor, num_microbatches) for tensor in tensors]
    counts = [len(part) for part in torch.empty(num_samples, 0, device="cpu").tensor_split(num_microbatches)]
    return [unflatten(plan, [part[number] for part in parts]) for number in range(num_microbatches)], counts


def _divide(tensor: torch.Tensor, num_parts: int) -> Sequence[torch.Tensor]:
    if not tensor.dim():
        return [tensor] * num_parts
    tensor = tensor.resolve_conj().resolve_neg()  # no storage has what these say
    parts = tensor.tensor_split(num_parts)
    if tensor.requires_grad:
        return parts
    # No views of one tensor to autograd, for which a stage's write to one microbatch would be a change of all.
    return [
        tensor.new_empty(0).set_(part.untyped_storage(), part.storage_offset(), part.shape, part.stride())
        for part in parts
    ]


class Outputs:
    """What the last stage returns for each microbatch of a forward, and the way back of its gradients."""

    def __init__(self) -> None:
        self.is_joined = True
        """Whether they are given as one batch."""
        self._found: dict[int, tuple[TreeSpec, list[torch.Tensor], list[bool]]] = {}
        """For each microbatch its plan, its tensors, and which of them want a gradient; in any order."""

    def take(self, microbatch: int, value: Any) -> list[torch.Tensor]:
        """Take what is returned for a microbatch; gives its tensors that want a gradient."""
        plan, tensors = flatten(value, "what the last stage returns")
        wants = [tensor.requires_grad for tensor in tensors]
        self._found[microbatch] = plan, [tensor.detach() for tensor in tensors], wants
        return [tensor for tensor in tensors if tensor.requires_grad]

    def give(self) -> Any:
        """All of it, for the program; None where the last stage is not.

        Raises:
            ValueError: It can't be joined.
        """
        found = self._in_order()
        if not found:
            return None
        if not self.is_joined:
            return Microbatches(unflatten(plan, _wanting(tensors, wants)) for plan, tensors, wants in found)
        plan, first, wants = found[0]
        if any(other != plan for other, _, _ in found) or not all(each.dim() for _, of, _ in found for each in of):
            raise ValueError(
                "what the last stage returns for microbatches can't be joined along dim 0: pass the inputs as"
                " Microbatches([...]), and get the outputs one by one"
            )
        joined = [torch.cat([of[number] for _, of, _ in found]) for number in range(len(first))]
        return unflatten(plan, _wanting(joined, wants))

    def split(self, gradients: Any) -> dict[int, list[torch.Tensor | None]]:
        """Gradients of what was given, for each microbatch those of the tensors that want one.

        Raises:
            ValueError: They are not nested as what was given, or there is none.
        """
        given = self._in_order()
        if not self.is_joined:
            parts = list(gradients) if isinstance(gradients, Microbatches) else [gradients]
            if len(parts) != len(given):
                raise ValueError(f"there are {len(given)} microbatches of outputs, and {len(parts)} of gradients")
            split = [_like(part, plan) for part, (plan, _, _) in zip(parts, given, strict=True)]
        else:
            split = [[] for _ in given]
            for number, whole in enumerate(_like(gradients, given[0][0])):
                sizes = [tensors[number].shape[0] for _, tensors, _ in given]
                pieces = [None] * len(sizes) if whole is None else torch.split(whole, sizes)
                for part, piece in zip(split, pieces, strict=True):
                    part.append(piece)
        found = {
            microbatch: [gradient for gradient, wanted in zip(of, wants, strict=True) if wanted]
            for microbatch, (of, (_, _, wants)) in enumerate(zip(split, given, strict=True))
        }
        wanted = [gradient for of in found.values() for gradient in of]
        if wanted and all(gradient is None for gradient in wanted):
            raise ValueError("backward() has no gradient to begin with: pass that of what forward() returned here")
        return found

    def _in_order(self) -> list[tuple[TreeSpec, list[torch.Tensor], list[bool]]]:
        return [self._found[microbatch] for microbatch in sorted(self._found)]


def _wanting(tensors: Sequence[torch.Tensor], wants: Sequence[bool]) -> list[torch.Tensor]:
    return [tensor.requires_grad_(wanted) for tensor, wanted in zip(tensors, wants, strict=True)]


def _like(gradients: Any, plan: TreeSpec) -> list[torch.Tensor | None]:
    """Gradients by the numbers of the tensors that a plan has; each may be None."""
    found: dict[int, torch.Tensor | None] = {}
    if not _match(gradients, plan, found):
        raise ValueError("gradients are nested as what forward() returned, with a tensor or None for each tensor")
    return [found[number] for number in sorted(found)]


def _match(value: Any, plan: TreeSpec, found: dict[int, torch.Tensor | None]) -> bool:
    mark, content = plan
    match mark:
        case "tensor":
            found[content] = value
            return value is None or isinstance(value, torch.Tensor)
        case "tuple" | "list":
            return (
                isinstance(value, (tuple, list))
                and len(value) == len(content)
                and all(_match(each, inner, found) for each, inner in zip(value, content, strict=True))
            )
        case "dict":
            return isinstance(value, dict) and all(
                key in value and _match(value[key], inner, found) for key, inner in content
            )
    return True


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
