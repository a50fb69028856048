"""Autograd through collectives: the gradient of a collective is a collective.

The loss is the sum of what all ranks differentiate, so the gradient of a rank's input is the sum over ranks of what
flows back through every output it has a part in. A result records history when this rank's input requires grad (and
grad mode is on); every rank of the group must then run backward through it, for backward is a collective too, with
the group's timeout.

[Note: gradients out of step]
A gradient's collective is compared like any other: operation, dtype, reduction, number of elements, root and dim. Where
one of them differs from what a rank out of step calls, all raise `CollectiveMismatchError`. That a call is a gradient's
is not among them: when one rank is in the backward of an allreduce and another makes a forward allreduce of as many
elements of that dtype and reduction, they are joined, and both get a fold of what doesn't belong together. So ranks
must run the same forwards and backwards in the same order. DDP tells its buckets apart from all else by marks of their
own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Callable

    Backward = Callable[..., torch.Tensor]

__all__ = ["attach", "records_history"]


class _Attached(torch.autograd.Function):
    """Joins a result that was computed elsewhere to the graph of its input."""

    @staticmethod
    def forward(
        ctx: Any,
        source: torch.Tensor,
        computed: list[torch.Tensor],
        backward: Backward,
        saved: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        ctx.backward_of = backward
        ctx.source_shape = source.shape
        ctx.save_for_backward(*saved)
        return computed[0]  # in a list: as an argument it would come out as a view, which users may not write to

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        grad = ctx.backward_of(grads[0], *ctx.saved_tensors)
        return grad.view(ctx.source_shape), None, None, None


class _AttachedOnce(_Attached):
    """The same, for a gradient that has no gradient."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _Attached.backward(ctx, *grads)


def records_history(source: torch.Tensor | None) -> bool:
    """Whether a result that depends on ``source`` belongs in the autograd graph."""
    return source is not None and source.requires_grad and torch.is_grad_enabled()


def attach(
    source: torch.Tensor, result: torch.Tensor, backward: Backward, *saved: torch.Tensor, once: bool = False
) -> torch.Tensor:
    """``result`` with ``backward(gradient of result, *saved) -> gradient of source`` as its history.

    What ``backward`` needs of ``source`` and ``result`` goes through ``saved``, so that autograd finds writes to them.
    ``once`` refuses a second derivative: of operations with a root, for only there it would have a history, and the
    other ranks would not take part.
    """
    function = _AttachedOnce if once else _Attached
    attached = function.apply(source, [result], backward, saved)  # type: ignore[no-untyped-call]
    assert isinstance(attached, torch.Tensor)
    return attached
