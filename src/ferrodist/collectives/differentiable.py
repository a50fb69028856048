"""Autograd through collectives: the gradient of a collective is a collective.

The loss is the sum of what all ranks differentiate, so the gradient of a rank's input is the sum over ranks of what
flows back through every output it has a part in. A result records history when this rank's input requires grad (and
grad mode is on); every rank of the group must then run backward through it, for backward is a collective too, with
the group's timeout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Backward = Callable[[torch.Tensor], torch.Tensor]

__all__ = ["attach", "records_history"]


class _Attached(torch.autograd.Function):
    """Joins a result that was computed elsewhere to the graph of its input."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, result: torch.Tensor, backward: Backward) -> torch.Tensor:
        ctx.backward_of = backward
        ctx.source_shape = source.shape
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.backward_of(grads[0]).view(ctx.source_shape), None, None


def records_history(source: torch.Tensor | None) -> bool:
    """Whether a result that depends on ``source`` belongs in the autograd graph."""
    return source is not None and source.requires_grad and torch.is_grad_enabled()


def attach(source: torch.Tensor, result: torch.Tensor, backward: Backward) -> torch.Tensor:
    """``result`` with ``backward(gradient of result) -> gradient of source`` as its history."""
    attached = _Attached.apply(source, result, backward)  # type: ignore[no-untyped-call]
    assert isinstance(attached, torch.Tensor)
    return attached
