"""Gradients of distributed parameters, brought to lie as the parameters do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.tensor.dtensor import DTensor
from ferrodist.torch_private.autograd import backward_hooks

if TYPE_CHECKING:
    import torch

__all__ = ["keep_gradients_placed", "places_gradients"]


def keep_gradients_placed(parameter: torch.Tensor) -> None:
    """Have each backward's gradient of a parameter lie as the parameter does; once is enough.

    A gradient is right however it lies; but one that is partial would be folded anew by each operator that reads it.
    """
    assert isinstance(parameter, DTensor), "others have nothing to place"
    has_it = any(map(places_gradients, backward_hooks(parameter).values()))
    if not has_it and (parameter.is_floating_point() or parameter.is_complex()):
        # Those that are frozen now may be trained later, and only such as are take a hook.
        wanted = parameter.requires_grad
        parameter.requires_grad_(True)
        parameter.register_hook(_Place(parameter))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(wanted)


def places_gradients(hook: object) -> bool:
    """Whether a hook of a parameter is one that `keep_gradients_placed` made."""
    return isinstance(hook, _Place)


class _Place:
    is_of_layout = True
    """Copies of the parameter have it too, though torch copies no hooks: they lie as the parameter does."""

    def __init__(self, parameter: DTensor) -> None:
        self._placements = parameter.placements

    def __call__(self, grad: Any) -> Any:
        return grad if grad.placements == self._placements else grad.redistribute(self._placements)
