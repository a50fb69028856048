"""Backward inside of `context_parallel`, where activation checkpoints run attention anew.

Torch hands `torch.autograd.backward` and `torch.autograd.grad` to a mode, and leaves the mode for that call; the
engine, and all that it runs, must have it. So these do what torch's functions do before they call the engine.

Outside of the block a checkpoint would run its function without the mode, and nothing would tell. One with
``use_reentrant=True`` runs it without a graph, and keeps it for backward: `guard_checkpoints` makes it raise. One with
``use_reentrant=False`` raises if it saves fewer tensors than at first: `mark` saves one more.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from ferrodist.torch_private.autograd import run_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def tensor_backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,  # noqa: FBT001
    create_graph: bool = False,  # noqa: FBT001, FBT002
    inputs: Any = None,
) -> None:
    """`torch.Tensor.backward` by the engine itself."""
    backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def backward(  # noqa: PLR0917 - torch's signature
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,  # noqa: FBT001
    create_graph: bool = False,  # noqa: FBT001, FBT002
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward` by the engine itself."""
    outputs = _as_tuple(tensors)
    wanted = () if inputs is None else _as_tuple(inputs)
    if inputs is not None and not wanted:
        raise RuntimeError("`inputs` argument to `backward()` cannot be empty.")
    gradients = _gradients(outputs, grad_variables if grad_tensors is None else grad_tensors)
    keep = create_graph if retain_graph is None else retain_graph
    run_backward(outputs, gradients, keep, create_graph, wanted, allow_unreachable=True, accumulate_grad=True)


def grad(  # noqa: PLR0917 - torch's signature
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,  # noqa: FBT001
    create_graph: bool = False,  # noqa: FBT001, FBT002
    only_inputs: bool = True,  # noqa: ARG001, FBT001, FBT002 - torch ignores it, too
    allow_unused: bool | None = None,  # noqa: FBT001
    is_grads_batched: bool = False,  # noqa: FBT001, FBT002
    materialize_grads: bool = False,  # noqa: FBT001, FBT002
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` by the engine itself."""
    if is_grads_batched:
        raise NotImplementedError("torch.autograd.grad with is_grads_batched does not work inside of context_parallel")
    if materialize_grads and allow_unused is False:
        raise ValueError("Expected allow_unused to be True or not passed when materialize_grads=True")
    outputs, wanted = _as_tuple(outputs), _as_tuple(inputs)
    if not wanted:
        raise RuntimeError("`inputs` argument to `grad()` cannot be empty.")
    result: tuple[torch.Tensor | None, ...] = run_backward(
        outputs,
        _gradients(outputs, grad_outputs),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        wanted,
        materialize_grads if allow_unused is None else allow_unused,
        accumulate_grad=False,
    )
    if materialize_grads:
        pairs = zip(result, wanted, strict=True)
        return tuple(torch.zeros_like(x, requires_grad=create_graph) if one is None else one for one, x in pairs)
    return result


def _as_tuple(values: Any) -> tuple[Any, ...]:
    if isinstance(values, (torch.Tensor, torch.autograd.graph.GradientEdge)):
        return (values,)
    return tuple(values.values()) if isinstance(values, dict) else tuple(values)


def _gradients(outputs: Sequence[Any], gradients: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradient of each output: those given, or ones for numbers."""
    given: Iterable[Any] = [None] * len(outputs) if gradients is None else _as_tuple(gradients)
    return tuple(_gradient(output, each) for output, each in zip(outputs, given, strict=True))


def _gradient(output: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if not isinstance(output, torch.Tensor):
        if gradient is None:
            raise RuntimeError("a GradientEdge needs a gradient")
        return gradient
    if gradient is None:
        if not output.requires_grad:
            return None
        if output.numel() != 1 or output.is_complex():
            raise RuntimeError("grad can be implicitly created only for real scalar outputs")
        return torch.ones_like(output)
    if gradient.shape != output.shape or gradient.is_complex() != output.is_complex():
        raise RuntimeError(
            f"a gradient of shape {tuple(gradient.shape)} and {gradient.dtype} does not fit an output of shape"
            f" {tuple(output.shape)} and {output.dtype}"
        )
    return gradient


class _Mark(torch.autograd.Function):
    """Identity that saves a tensor of no elements."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - what autograd passes
        return grad


def mark(output: torch.Tensor) -> torch.Tensor:
    """Return the output of attention, with one tensor more saved than by torch's own."""
    marked: torch.Tensor = _Mark.apply(output)  # type: ignore[no-untyped-call]
    return marked


def guard_checkpoints(is_inside: Callable[[], bool]) -> None:
    """Make the checkpoints with ``use_reentrant=True`` in whose forward this is called raise in a backward outside."""
    frame = sys._getframe()  # noqa: SLF001 - torch hands the node of a checkpoint to nobody else
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            node = frame.f_locals["ctx"]
            node.run_function = _guarded(node.run_function, is_inside)
        frame = frame.f_back  # type: ignore[assignment]


def _guarded(function: Callable[..., Any], is_inside: Callable[[], bool]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_inside():
            raise RuntimeError(
                "an activation checkpoint that ran inside of context_parallel is run anew outside of it, where"
                " attention would see this rank's tokens only: call backward inside of the block, too"
            )
        return function(*args, **kwargs)

    return run
