"""What a thread does for others is done as if it were in none of torch's modes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["outside_of_modes"]


def outside_of_modes(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that makes tensors for anybody, whatever mode this thread is in.

    To look whether it is in one costs 0.3 us, and to leave one 20 us.
    """
    # There are no public names for what is on the stacks of modes.
    if not (
        torch.is_inference_mode_enabled()
        or torch._C._len_torch_dispatch_stack()  # noqa: SLF001
        or torch._C._len_torch_function_stack()  # noqa: SLF001
    ):
        return function(*arguments)
    with torch.inference_mode(False), _disable_current_modes(), torch._C.DisableTorchFunction():  # noqa: SLF001
        return function(*arguments)
