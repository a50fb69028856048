"""States of undivided modules, loaded into divided ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrodist.tensor.distribution import distribute
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.gradient_placement import keep_gradients_placed
from ferrodist.torch_private.modules import own_buffers, own_parameters

if TYPE_CHECKING:
    from torch import nn

__all__ = ["take_whole_states"]


def take_whole_states(module: nn.Module) -> None:
    """Have ``load_state_dict`` of a module, or of one in it, take plain whole tensors too, of which rank 0's count."""
    for one in module.modules():
        one.register_load_state_dict_pre_hook(_distribute_values)  # type: ignore[no-untyped-call]
        one.register_load_state_dict_post_hook(_place_gradients)  # type: ignore[no-untyped-call]


def _distribute_values(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    tensors = {**own_parameters(module), **own_buffers(module)}
    for key, own in tensors.items():
        value = state.get(prefix + key)
        if not isinstance(own, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == own.shape:  # else torch says what doesn't fit
            state[prefix + key] = distribute(value.detach(), own.mesh, own.placements)


def _place_gradients(module: nn.Module, *_: Any) -> None:
    """Parameters that were assigned are other ones than those that had their gradients placed."""
    parameters: dict[str, torch.Tensor | None] = {**own_parameters(module)}
    for own in parameters.values():
        if isinstance(own, DTensor):
            keep_gradients_placed(own)
