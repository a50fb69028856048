"""What a thread does for others is done as if it were in none of torch's modes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrodist.torch_private.modes import no_modes, num_dispatch_modes, num_function_modes
from ferrodist.torch_private.tensors import no_torch_function

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["outside_of_modes"]


def outside_of_modes(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that makes tensors for anybody, whatever mode this thread is in.

    To look whether it is in one costs 0.3 us, and to leave one 20 us.
    """
    if not (torch.is_inference_mode_enabled() or num_dispatch_modes() or num_function_modes()):
        return function(*arguments)
    with torch.inference_mode(False), no_modes(), no_torch_function():
        return function(*arguments)
