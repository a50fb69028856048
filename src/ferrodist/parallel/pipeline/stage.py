"""One stage at work: forwards of microbatches, and their backwards, whole or split.

The ways that values go from stage to stage.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from ferrodist.collectives.pytree import unflatten
from ferrodist.parallel.pipeline.split_backward import backward_inputs
from ferrodist.parallel.pipeline.state_dict import unwrap
from ferrodist.torch_private.autograd import base_of
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AbstractContextManager

    from ferrodist.collectives.serialization import PackedValue
    from ferrodist.parallel.pipeline.split_backward import WeightBackward

MAIN = ""
"""The name of what goes from each stage to the next one; skips have names of their own."""


class Edge(NamedTuple):
    """A way from stage to stage.

    Args:
        name: Of a skip, or that of the way to the next stage.
        source: The stage that gives.
        target: The stage that takes.
    """

    name: str
    source: int
    target: int


def find_edges(num_stages: int, skips: Mapping[str, tuple[int, int]]) -> list[Edge]:
    """All ways between stages: from each to the next, and what goes past some.

    Args:
        num_stages: Of the model.
        skips: By their names: the stage that gives it, and the one that takes it.

    Raises:
        ValueError: A skip goes nowhere, or its name is none of an argument.
    """
    edges = [Edge(MAIN, stage, stage + 1) for stage in range(num_stages - 1)]
    for name, (source, target) in skips.items():
        if not name.isidentifier():
            raise ValueError(f"the skip {name!r} is no name of an argument")
        if not 0 <= source < target < num_stages:
            raise ValueError(
                f"the skip {name!r} goes from stage {source} to stage {target}: a later one, of"
                f" {counted(num_stages, 'stage')}"
            )
        edges.append(Edge(name, source, target))
    return edges


Gradients = dict[str, list[torch.Tensor | None]]
"""For what came or went under each name, the gradients of those of its tensors that want one, in their order."""


class PipelineOutput:
    """What a stage returns that has something for a later stage than the next one.

    Args:
        value: For the next stage, as if it was returned alone.
        skips: For the stages that the pipeline was told of, where each is a keyword argument of this name.
    """

    def __init__(self, value: Any, **skips: Any) -> None:
        self.value = value
        self.skips = skips


@runtime_checkable
class _Averaging(Protocol):
    """A module that averages gradients over other ranks, as DDP and FSDP are."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave it to a later backward."""


class _Entry(torch.autograd.Function):
    """Makes of a leaf what a stage may write to, as it may to what the layer before has made in one process."""

    @staticmethod
    def forward(_ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@dataclass(slots=True)
class _InFlightMicrobatch:
    """A microbatch between its forward and its backward.

    Args:
        inputs: The leaves that the stage was called with and that want gradients.
        outputs: The tensors that went on and want gradients.
    """

    inputs: dict[str, list[torch.Tensor]]
    outputs: dict[str, list[torch.Tensor]]


class Stage:
    """A module, and the microbatches that are under way in it.

    Args:
        module: One that averages gradients does so in the backward of the last microbatch; there backwards are whole.
        last: The microbatch that goes backward last.
    """

    def __init__(self, module: torch.nn.Module, last: int) -> None:
        self.module = module
        self._last = last
        self._averaging = module if isinstance(module, _Averaging) else None
        self._takes_one = type(unwrap(module)).forward is torch.nn.Sequential.forward
        self._live: dict[int, _InFlightMicrobatch] = {}
        self._weights: dict[int, WeightBackward | None] = {}

    @property
    def device(self) -> torch.device:
        """Where the module is; a module without parameters and buffers is on the current GPU, if there is one."""
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            return tensor.device
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def num_live(self) -> int:
        """How many microbatches have gone forward and are not done with going backward."""
        return len(self._live) + len(self._weights)

    def forward(self, microbatch: int, received: Mapping[str, PackedValue], value: Any) -> PipelineOutput:
        """Call the module.

        Args:
            microbatch: Its number.
            received: What comes from other stages.
            value: What the module is called with if nothing comes from the stage before.
        """
        inputs: dict[str, list[torch.Tensor]] = {}
        values: dict[str, Any] = {MAIN: value}
        for name, parcel in received.items():
            leaves = [tensor.detach() for tensor in parcel.tensors]
            wanting = [leaf for leaf, wants in zip(leaves, parcel.wants_gradient, strict=True) if wants]
            if torch.is_grad_enabled():
                inputs[name] = [leaf.requires_grad_() for leaf in wanting]
                leaves = [_Entry.apply(leaf) if leaf.requires_grad else leaf for leaf in leaves]  # type: ignore[no-untyped-call]
            values[name] = unflatten(parcel.spec, leaves)
        main = values.pop(MAIN)
        with self._syncing_only_at(microbatch):
            result = self.module(*(main if self._is_divided(main, received) else (main,)), **values)
        if torch.is_grad_enabled():
            self._live[microbatch] = _InFlightMicrobatch(inputs, {})
        return result if isinstance(result, PipelineOutput) else PipelineOutput(result)

    def _is_divided(self, main: Any, received: Mapping[str, PackedValue]) -> bool:
        """Whether a value is several arguments; a Sequential takes one, as its children take it from each other."""
        if not isinstance(main, tuple):
            return False
        return not self._takes_one or (MAIN not in received and len(main) == 1)

    def has_buffers(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether some are buffers of the module, or views of these, to which its next forward may write."""
        without_history = {
            id(each) for tensor in tensors if not tensor.requires_grad for each in (tensor, base_of(tensor))
        }
        return bool(without_history) and any(id(buffer) in without_history for buffer in self.module.buffers())

    def hold(self, microbatch: int, name: str, tensors: list[torch.Tensor]) -> None:
        """Keep tensors that went on under a name until their gradients come."""
        if microbatch in self._live:
            self._live[microbatch].outputs[name] = tensors

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        """Bring gradients of what went on back to what came, and add those of the parameters."""
        live = self._live.pop(microbatch)
        tensors, given = _reached(live, gradients)
        if not tensors and self._averaging is not None and microbatch == self._last:
            # Without a backward, what the other microbatches have left would not be averaged.
            tensors = [tensor for each in live.outputs.values() for tensor in each]
            given = [torch.zeros_like(tensor) for tensor in tensors]
        if tensors:
            with self._syncing_only_at(microbatch):
                torch.autograd.backward(tensors, given)
        return {name: [leaf.grad for leaf in leaves] for name, leaves in live.inputs.items()}

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        """The first part of a backward; the parameters' gradients are left to `backward_weight`."""
        if self._averaging is not None:
            # What it has hooked on gradients expects all of them in one backward.
            self._weights[microbatch] = None
            return self.backward(microbatch, gradients)
        live = self._live.pop(microbatch)
        tensors, given = _reached(live, gradients)
        leaves = [leaf for each in live.inputs.values() for leaf in each]
        found, self._weights[microbatch] = backward_inputs(tensors, given, leaves)
        left = iter(found)
        return {name: [next(left) for _ in each] for name, each in live.inputs.items()}

    def backward_weight(self, microbatch: int) -> None:
        """The second part."""
        weights = self._weights.pop(microbatch)
        if weights is not None:
            weights.run()

    def forget(self) -> None:
        """Drop all microbatches that are under way."""
        self._live.clear()
        self._weights.clear()

    def drop_unsynced(self) -> None:
        """Drop what backwards have left with a module that averages later; a next step would count it."""
        if self._averaging is not None:
            self.module.zero_grad()

    def _syncing_only_at(self, microbatch: int) -> AbstractContextManager[None]:
        if self._averaging is not None and microbatch != self._last:
            return self._averaging.no_sync()
        return contextlib.nullcontext()


def _reached(live: _InFlightMicrobatch, gradients: Gradients) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The outputs that have a gradient, and these."""
    pairs = [
        (tensor, gradient)
        for name, tensors in live.outputs.items()
        for tensor, gradient in zip(tensors, gradients[name], strict=True)
        if gradient is not None
    ]
    return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]
