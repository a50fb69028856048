"""Private names of torch's modes, which see operators and functions before they run.

===================================================  =================
`torch._C._len_torch_dispatch_stack`                 2.10 to 2.15
`torch._C._len_torch_function_stack`                 2.10 to 2.15
`torch.utils._python_dispatch`
  `is_in_torch_dispatch_mode`                        2.10 to 2.15
  `_disable_current_modes`                           2.10 to 2.15
===================================================  =================

Without the names modes are not seen: functions run inside of them as they are.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils import _python_dispatch

__all__ = ["is_in_torch_dispatch_mode", "no_modes", "num_dispatch_modes", "num_function_modes"]


def _none() -> int:
    return 0


num_dispatch_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", _none)
"""Count the modes of operators that this thread is in."""

num_function_modes: Any = getattr(torch._C, "_len_torch_function_stack", _none)
"""Count the modes of functions that this thread is in."""

is_in_torch_dispatch_mode: Any = getattr(_python_dispatch, "is_in_torch_dispatch_mode", num_dispatch_modes)
"""Whether this thread is in a mode of operators."""

no_modes: Any = getattr(_python_dispatch, "_disable_current_modes", contextlib.nullcontext)
"""A block in which no mode of operators sees anything."""
