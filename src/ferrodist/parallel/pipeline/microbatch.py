"""Splitting of batches into microbatches, their outputs, and the weighting of their losses."""

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
    """A batch that is split already: a list of microbatches, of any shapes.

    All have the same weight in the mean of the losses.
    """


def split_batch(batch: Any, num_microbatches: int, what: str) -> tuple[list[Any], list[int] | None]:
    """Split a batch along dim 0 of its tensors; return the microbatches, and the number of samples of each.

    Tensors without dims and other values go to all. The first microbatches have one sample more, where sizes can't be
    equal; those of `Microbatches` are None. ``what`` names the batch in a ValueError.
    """
    if isinstance(batch, Microbatches):
        if len(batch) != num_microbatches:
            raise ValueError(
                f"{what} has {counted(len(batch), 'microbatch')}, and the pipeline is for {num_microbatches}"
            )
        return list(batch), None
    if batch is None:
        stage = "first" if what == "inputs" else "last"
        raise ValueError(f"{what} is None on the rank of the {stage} stage, which needs the batch: pass it there")
    spec, tensors = flatten(batch, what)
    sizes = {int(tensor.shape[0]) for tensor in tensors if tensor.dim()}
    if len(sizes) > 1:
        raise ValueError(
            f"the tensors of {what} have sizes {sorted(sizes)} in dim 0, which must be equal: divide them"
            " yourself, and pass Microbatches([...])"
        )
    if not sizes:
        raise ValueError(f"{what} has no tensor with a dim to split along: pass Microbatches([...])")
    if layout := next((tensor.layout for tensor in tensors if tensor.layout is not torch.strided), None):
        raise ValueError(f"{what} has a tensor of layout {layout}, which can't be divided: pass Microbatches([...])")
    (num_samples,) = sizes
    if num_samples < num_microbatches:
        raise ValueError(
            f"{what} has {counted(num_samples, 'sample')} along dim 0, which can't be divided into {num_microbatches}"
            " microbatches: make the pipeline with fewer, or take larger batches"
        )
    parts = [_split_tensor(tensor, num_microbatches) for tensor in tensors]
    counts = [len(part) for part in torch.empty(num_samples, 0, device="cpu").tensor_split(num_microbatches)]
    return [unflatten(spec, [part[index] for part in parts]) for index in range(num_microbatches)], counts


def _split_tensor(tensor: torch.Tensor, num_parts: int) -> Sequence[torch.Tensor]:
    if not tensor.dim():
        return [tensor] * num_parts
    tensor = tensor.resolve_conj().resolve_neg()  # these flags are not in the storage
    parts = tensor.tensor_split(num_parts)
    if tensor.requires_grad:
        return parts
    # Not views, or autograd would count a stage's write to one microbatch as a change of all.
    return [
        tensor.new_empty(0).set_(part.untyped_storage(), part.storage_offset(), part.shape, part.stride())
        for part in parts
    ]


class Outputs:
    """The last stage's outputs for each microbatch of a forward, and the splitting of their gradients."""

    def __init__(self) -> None:
        self.is_joined = True  # True if they are returned as one batch
        self._outputs: dict[int, tuple[TreeSpec, list[torch.Tensor], list[bool]]] = {}
        """For each microbatch its tree spec, its tensors, and which of them require grad; in any order."""

    def add(self, microbatch: int, value: Any) -> list[torch.Tensor]:
        """Add a microbatch's output; returns its tensors that require grad."""
        spec, tensors = flatten(value, "the output of the last stage")
        needs_grad = [tensor.requires_grad for tensor in tensors]
        self._outputs[microbatch] = spec, [tensor.detach() for tensor in tensors], needs_grad
        return [tensor for tensor in tensors if tensor.requires_grad]

    def result(self) -> Any:
        """All outputs for the program; None on ranks without the last stage."""
        found = self._in_order()
        if not found:
            return None
        if not self.is_joined:
            return Microbatches(
                unflatten(spec, _set_requires_grad(tensors, needs_grad)) for spec, tensors, needs_grad in found
            )
        spec, first, needs_grad = found[0]
        if any(other != spec for other, _, _ in found) or not all(
            each.dim() and each.shape[1:] == one.shape[1:]
            for _, others, _ in found
            for each, one in zip(others, first, strict=True)
        ):
            raise ValueError(
                "the outputs of the last stage for microbatches can't be joined along dim 0: pass the inputs as"
                " Microbatches([...]), and get the outputs one by one"
            )
        joined = [torch.cat([others[index] for _, others, _ in found]) for index in range(len(first))]
        return unflatten(spec, _set_requires_grad(joined, needs_grad))

    def split(self, gradients: Any) -> dict[int, list[torch.Tensor | None]]:
        """Split gradients of the result into those of each microbatch's tensors that require grad."""
        given = self._in_order()
        if not self.is_joined:
            parts = list(gradients) if isinstance(gradients, Microbatches) else [gradients]
            if len(parts) != len(given):
                raise ValueError(f"there are {len(given)} microbatches of outputs, and {len(parts)} of gradients")
            split = [_flatten_like(part, spec) for part, (spec, _, _) in zip(parts, given, strict=True)]
            for others, (_, tensors, _) in zip(split, given, strict=True):
                for gradient, tensor in zip(others, tensors, strict=True):
                    if gradient is not None:
                        _check_shape(gradient, tensor.shape)
        else:
            split = [[] for _ in given]
            for index, whole in enumerate(_flatten_like(gradients, given[0][0])):
                sizes = [tensors[index].shape[0] for _, tensors, _ in given]
                if whole is not None:
                    _check_shape(whole, (sum(sizes), *given[0][1][index].shape[1:]))
                pieces = [None] * len(sizes) if whole is None else torch.split(whole, sizes)
                for part, piece in zip(split, pieces, strict=True):
                    part.append(piece)
        found = {
            microbatch: [gradient for gradient, wanted in zip(others, needs_grad, strict=True) if wanted]
            for microbatch, (others, (_, _, needs_grad)) in enumerate(zip(split, given, strict=True))
        }
        wanted = [gradient for others in found.values() for gradient in others]
        if wanted and all(gradient is None for gradient in wanted):
            raise ValueError("backward() has no gradient to begin with: pass that of the result of forward() here")
        return found

    def _in_order(self) -> list[tuple[TreeSpec, list[torch.Tensor], list[bool]]]:
        return [self._outputs[microbatch] for microbatch in sorted(self._outputs)]


def _set_requires_grad(tensors: Sequence[torch.Tensor], needs_grad: Sequence[bool]) -> list[torch.Tensor]:
    return [tensor.requires_grad_(wanted) for tensor, wanted in zip(tensors, needs_grad, strict=True)]


def _check_shape(gradient: torch.Tensor, shape: Sequence[int]) -> None:
    if gradient.shape != torch.Size(shape):
        raise ValueError(
            f"backward() got a gradient of shape {tuple(gradient.shape)} for a tensor of shape {tuple(shape)} in the"
            " result of forward(): they must be equal"
        )


def _flatten_like(gradients: Any, spec: TreeSpec) -> list[torch.Tensor | None]:
    """Flatten gradients like the tensors of a tree spec; each may be None."""
    found: dict[int, torch.Tensor | None] = {}
    if not _match(gradients, spec, found):
        raise ValueError("gradients must be nested as the result of forward(), with a tensor or None for each tensor")
    return [found[index] for index in sorted(found)]


def _match(value: Any, spec: TreeSpec, found: dict[int, torch.Tensor | None]) -> bool:
    kind, content = spec
    match kind:
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


_BATCHES = ("inputs", "targets")


class LossReduction(enum.Enum):
    """The reduction of microbatches' losses to the loss of a batch."""

    MEAN = "mean"
    """Their mean, weighted by numbers of samples: the mean over all samples, if each loss is a mean."""
    SUM = "sum"
    """Their sum."""


class Losses:
    """The microbatches' losses of a step, and their weights in the loss of the batch."""

    def __init__(self, reduction: LossReduction, num_microbatches: int) -> None:
        if not isinstance(reduction, LossReduction):
            raise TypeError(f"loss_reduction must be a LossReduction, not {reduction!r}")
        self.reduction = reduction
        self._num_microbatches = num_microbatches
        self.all_losses: list[float] = []  # those of the last step's microbatches, on every rank
        self.start_gradients: dict[int, list[torch.Tensor | None]] = {}  # of backward: each loss's weight
        self._counts: dict[str, Sequence[int]] = {}
        self._own_losses: dict[int, float] = {}  # by microbatch, on the rank of the last stage

    def reset(self) -> None:
        """Forget the previous step."""
        self.start_gradients.clear()
        self._counts.clear()
        self._own_losses.clear()

    def set_sample_counts(self, counts: Sequence[int] | None, what: str) -> None:
        """Set the numbers of samples of the inputs' or targets' microbatches; None if they are unknown."""
        if counts is not None:
            self._counts[what] = counts

    def add(self, microbatch: int, loss: torch.Tensor) -> list[torch.Tensor]:
        """Add a microbatch's loss; returns the tensors from which its backward begins."""
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"the loss is of type {type(loss).__name__}: loss_fn, or the last stage, must return a tensor"
            )
        if loss.numel() != 1 or loss.is_complex():
            raise ValueError(
                f"the loss is a {loss.dtype} tensor of shape {tuple(loss.shape)}: it must have one real element"
            )
        if not loss.requires_grad:
            raise ValueError(
                "the loss has no gradient, because no tensor that it was computed from requires grad: use forward() for"
                " losses alone"
            )
        self._own_losses[microbatch] = float(loss.detach())
        self.start_gradients[microbatch] = [torch.full_like(loss, self._weight(microbatch))]
        return [loss]

    def reduce_to_all(self, group: Backend, timeout: float) -> torch.Tensor:
        """Share the losses with all ranks and return the batch's loss; every rank calls this at the end of a step."""
        count = self._num_microbatches
        # losses | weights | samples of the inputs, samples of the targets | 1 if microbatches are uneven
        own = torch.zeros(2 * count + len(_BATCHES) + 1, dtype=torch.float64, device="cpu")
        for index, value in self._own_losses.items():
            own[index], own[count + index] = value, self._weight(index)
        own[2 * count : -1] = torch.tensor([sum(self._counts.get(name, ())) for name in _BATCHES], device="cpu")
        own[-1] = len(set(self._counts.get("inputs", ()))) > 1
        found = allreduce(own, group=group, out=own, timeout=timeout).tolist()
        self.all_losses, weights = found[:count], found[count : 2 * count]
        num_inputs, num_targets, is_uneven = found[2 * count :]
        if num_inputs and num_targets and num_inputs != num_targets:
            raise CollectiveMismatchError(
                f"the first stage was given a batch of {num_inputs:g} samples, and the last one targets of"
                f" {num_targets:g}: give both the same batch"
            )
        if is_uneven and not num_targets and self.reduction is LossReduction.MEAN:
            raise CollectiveMismatchError(
                f"a batch of {num_inputs:g} samples makes uneven microbatches, and the last stage doesn't know what"
                " each counts in the mean: take a batch that can be divided, or a loss_fn with targets, or"
                " LossReduction.SUM"
            )
        total = sum(weight * value for weight, value in zip(weights, self.all_losses, strict=True))
        return torch.tensor(total, dtype=torch.float64, device="cpu")

    def _weight(self, microbatch: int) -> float:
        """A microbatch's weight in the loss of the batch, on the rank of the last stage."""
        if self.reduction is LossReduction.SUM:
            return 1.0
        counts = self._counts.get("targets")
        return counts[microbatch] / sum(counts) if counts else 1 / self._num_microbatches
