"""Private names of torch's dispatch and function modes.

===================================================  =================
`torch._C._len_torch_dispatch_stack`                 2.10 to 2.15
`torch._C._len_torch_function_stack`                 2.10 to 2.15
`torch._C._functorch.maybe_current_level`            2.13
`torch.utils._python_dispatch`
  `is_in_torch_dispatch_mode`                        2.10 to 2.15
  `_disable_current_modes`                           2.10 to 2.15
  `TorchDispatchMode`                                2.10 to 2.15
===================================================  =================

Without the names about dispatch and function modes these are not noticed: functions run inside of them unchanged.
Without that of functorch its transforms are taken to be everywhere: objects take the general path.
`TorchDispatchMode` is required: this module can't be imported without it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils import _python_dispatch

num_dispatch_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", int)  # int() is 0
"""Return the number of active dispatch modes of this thread."""

num_function_modes: Any = getattr(torch._C, "_len_torch_function_stack", int)
"""Return the number of active function modes of this thread."""

functorch_level: Any = getattr(getattr(torch._C, "_functorch", None), "maybe_current_level", int)
"""Return the level of the functorch transform (grad, vmap) that this thread is in, or None."""

is_in_torch_dispatch_mode: Any = getattr(_python_dispatch, "is_in_torch_dispatch_mode", num_dispatch_modes)
"""Return whether a dispatch mode is active: torch has one flag for all threads, which threads in modes can falsify."""

DispatchMode: Any = _python_dispatch.TorchDispatchMode
"""The base class of dispatch modes."""

no_modes: Any = getattr(_python_dispatch, "_disable_current_modes", contextlib.nullcontext)
"""A context manager that disables dispatch modes."""
