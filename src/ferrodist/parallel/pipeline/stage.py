"""One stage: forwards of microbatches and their backwards, and the edges to other stages.

Most schedules run a microbatch's backward as a whole; zero-bubble schedules split it, by `split_backward.py`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ferrodist.collectives.pytree import unflatten
from ferrodist.parallel.pipeline.split_backward import WeightBackward, backward_inputs
from ferrodist.parallel.pipeline.state_dict import unwrap
from ferrodist.torch_private.autograd import base_of
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AbstractContextManager

    from ferrodist.collectives.serialization import PackedValue

MAIN = ""  # name of the edge from each stage to the next one; skips have names of their own


class Edge(NamedTuple):
    """A path of values from stage to stage; ``name`` is that of a skip, or `MAIN`."""

    name: str
    source: int
    target: int


def find_edges(num_stages: int, skips: Mapping[str, tuple[int, int]]) -> list[Edge]:
    """All edges between stages: from each to the next, and skips."""
    edges = [Edge(MAIN, stage, stage + 1) for stage in range(num_stages - 1)]
    for name, ends in skips.items():
        if not (isinstance(ends, (tuple, list)) and list(map(type, ends)) == [int, int]):
            raise TypeError(f"the skip {name!r} must have a pair of stages, its source and its target, not {ends!r}")
        source, target = ends
        if not name.isidentifier():
            raise ValueError(f"the skip {name!r} can't be the name of an argument")
        if not 0 <= source < target < num_stages:
            raise ValueError(
                f"the skip {name!r} goes from stage {source} to stage {target}: it must go to a later one, of"
                f" {counted(num_stages, 'stage')}"
            )
        edges.append(Edge(name, source, target))
    return edges


EdgeGradients = dict[str, list[torch.Tensor | None]]  # by edge: those of tensors that require one, in order


class PipelineOutput:
    """A stage's result with values for later stages than the next one.

    Args:
        value: The value for the next stage, as if it was returned alone.
        skips: Values for the stages that the pipeline's ``skips`` names, where each is a keyword argument.
    """

    def __init__(self, value: Any, **skips: Any) -> None:
        self.value = value
        self.skips = skips


class _WritableLeaf(torch.autograd.Function):
    """Makes a non-leaf of a leaf, so that a stage may write to it, as to the result of a layer in one process."""

    @staticmethod
    def forward(_ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _InFlightMicrobatch(NamedTuple):
    """A microbatch between its forward and its backward."""

    inputs: dict[str, list[torch.Tensor]]
    outputs: dict[str, list[torch.Tensor]]


class Stage:
    """A module and its microbatches in flight."""

    def __init__(self, module: torch.nn.Module, last_microbatch: int) -> None:
        self.module = module
        self._last_microbatch = last_microbatch
        self._grad_syncer: Any = module if hasattr(module, "no_sync") else None
        """The module, if it averages gradients over other ranks, as DDP and FSDP do."""
        self._is_sequential = type(unwrap(module)).forward is torch.nn.Sequential.forward
        self._in_flight: dict[int, _InFlightMicrobatch] = {}
        self._weight_backwards: dict[int, WeightBackward | None] = {}

    @property
    def device(self) -> torch.device:
        """The module's device; without parameters and buffers the current GPU, if there is one."""
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            return tensor.device
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def num_in_flight(self) -> int:
        """Number of microbatches that have run forward and not finished backward."""
        return len(self._in_flight) + len(self._weight_backwards)

    def forward(self, microbatch: int, received: Mapping[str, PackedValue], value: Any) -> PipelineOutput:
        """Call the module on received values as new leaves; a training microbatch is in flight until its backward."""
        inputs: dict[str, list[torch.Tensor]] = {}
        values: dict[str, Any] = {MAIN: value}
        for name, packed in received.items():
            leaves = [tensor.detach() for tensor in packed.tensors]
            requiring_grad = [
                leaf for leaf, needs_grad in zip(leaves, packed.wants_gradient, strict=True) if needs_grad
            ]
            if torch.is_grad_enabled():
                inputs[name] = [leaf.requires_grad_() for leaf in requiring_grad]
                leaves = [_WritableLeaf.apply(leaf) if leaf.requires_grad else leaf for leaf in leaves]  # type: ignore[no-untyped-call]
            values[name] = unflatten(packed.spec, leaves)
        main = values.pop(MAIN)
        # A tuple is several arguments; a Sequential takes it as one, as its children take it from each other.
        is_one = not isinstance(main, tuple) or (self._is_sequential and (MAIN in received or len(main) != 1))
        with self._sync_only_at(microbatch):
            result = self.module(*((main,) if is_one else main), **values)
        if torch.is_grad_enabled():
            self._in_flight[microbatch] = _InFlightMicrobatch(inputs, {})
        return result if isinstance(result, PipelineOutput) else PipelineOutput(result)

    def includes_buffers(self, tensors: Iterable[torch.Tensor]) -> bool:
        """True if some tensors are buffers of the module, or views of them, to which its next forward may write."""
        without_history = {
            id(each) for tensor in tensors if not tensor.requires_grad for each in (tensor, base_of(tensor))
        }
        return bool(without_history) and any(id(buffer) in without_history for buffer in self.module.buffers())

    def retain_outputs(self, microbatch: int, name: str, tensors: list[torch.Tensor]) -> None:
        """Retain an edge's output tensors until their gradients come."""
        if microbatch in self._in_flight:
            self._in_flight[microbatch].outputs[name] = tensors

    def backward(self, microbatch: int, gradients: EdgeGradients) -> EdgeGradients:
        """Compute the gradients of the inputs from those of the outputs, and add those of the parameters."""
        in_flight = self._in_flight.pop(microbatch)
        tensors, gradients_given = _outputs_with_gradients(in_flight, gradients)
        if not tensors and self._grad_syncer is not None and microbatch == self._last_microbatch:
            # Without a backward, gradients left by the other microbatches would not be averaged.
            tensors = [tensor for each in in_flight.outputs.values() for tensor in each]
            gradients_given = [torch.zeros_like(tensor) for tensor in tensors]
        if tensors:
            with self._sync_only_at(microbatch):
                torch.autograd.backward(tensors, gradients_given)
        return {name: [leaf.grad for leaf in leaves] for name, leaves in in_flight.inputs.items()}

    def backward_input(self, microbatch: int, gradients: EdgeGradients) -> EdgeGradients:
        """Compute the gradients of the inputs, and leave those of the parameters to `backward_weight`."""
        if self._grad_syncer is not None:
            # Its hooks on gradients expect all of them in one backward.
            self._weight_backwards[microbatch] = None
            return self.backward(microbatch, gradients)
        in_flight = self._in_flight.pop(microbatch)
        tensors, gradients_given = _outputs_with_gradients(in_flight, gradients)
        leaves = [leaf for each in in_flight.inputs.values() for leaf in each]
        found, self._weight_backwards[microbatch] = backward_inputs(tensors, gradients_given, leaves)
        remaining = iter(found)
        return {name: [next(remaining) for _ in each] for name, each in in_flight.inputs.items()}

    def backward_weight(self, microbatch: int) -> None:
        """Add the gradients of the parameters."""
        weights = self._weight_backwards.pop(microbatch)
        if weights is not None:
            weights.run()

    def reset(self) -> None:
        """Drop all microbatches in flight."""
        self._in_flight.clear()
        self._weight_backwards.clear()

    def drop_unsynced(self) -> None:
        """Drop gradients that a module was to average later; the next step would count them."""
        if self._grad_syncer is not None:
            self.module.zero_grad()

    def _sync_only_at(self, microbatch: int) -> AbstractContextManager[None]:
        if self._grad_syncer is not None and microbatch != self._last_microbatch:
            return self._grad_syncer.no_sync()  # type: ignore[no-any-return]
        return contextlib.nullcontext()


def _outputs_with_gradients(
    in_flight: _InFlightMicrobatch, gradients: EdgeGradients
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The outputs that have a gradient, and their gradients."""
    pairs = [
        (tensor, gradient)
        for name, tensors in in_flight.outputs.items()
        for tensor, gradient in zip(tensors, gradients[name], strict=True)
        if gradient is not None
    ]
    return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]
