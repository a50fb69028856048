"""Gradients of distributed parameters, redistributed to the parameters' placements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.tensor.dtensor import DTensor
from ferrodist.torch_private.autograd import backward_hooks

if TYPE_CHECKING:
    import torch


def keep_grad_placements(parameter: torch.Tensor) -> None:
    """Redistribute each backward's gradient of a parameter to the parameter's placements; once is enough.

    Gradients are right under any placements; but a partial one would be reduced anew by each operator that reads it.
    """
    assert isinstance(parameter, DTensor), "others have no placements"
    has_hook = any(map(is_grad_placement_hook, backward_hooks(parameter).values()))
    if not has_hook and (parameter.is_floating_point() or parameter.is_complex()):
        # Frozen parameters may be trained later, and only those that require grad take a hook.
        requires_grad = parameter.requires_grad
        parameter.requires_grad_(True)
        parameter.register_hook(_RedistributeGrad(parameter))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(requires_grad)


def is_grad_placement_hook(hook: object) -> bool:
    """Return whether a parameter's hook is one of `keep_grad_placements`."""
    return isinstance(hook, _RedistributeGrad)


class _RedistributeGrad:
    is_copied_with_tensor = True
    """Deep copies of the parameter have the hook too, though torch copies no hooks: they have the placements."""

    def __init__(self, parameter: DTensor) -> None:
        self._placements = parameter.placements

    def __call__(self, grad: Any) -> Any:
        return grad if grad.placements == self._placements else grad.redistribute(self._placements)
