"""Private names of torch's dispatch and function modes.

===================================================  =================
`torch._C._len_torch_dispatch_stack`                 2.10 to 2.15
`torch._C._len_torch_function_stack`                 2.10 to 2.15
`torch.utils._python_dispatch`
  `is_in_torch_dispatch_mode`                        2.10 to 2.15
  `_disable_current_modes`                           2.10 to 2.15
  `TorchDispatchMode`                                2.10 to 2.15
===================================================  =================

Without the first four names modes are not noticed: functions run inside of them unchanged. `TorchDispatchMode` is
required: this module can't be imported without it.
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

is_in_torch_dispatch_mode: Any = getattr(_python_dispatch, "is_in_torch_dispatch_mode", num_dispatch_modes)
"""Return whether a dispatch mode is active: torch has one flag for all threads, which threads in modes can falsify."""

DispatchMode: Any = _python_dispatch.TorchDispatchMode
"""The base class of dispatch modes."""

no_modes: Any = getattr(_python_dispatch, "_disable_current_modes", contextlib.nullcontext)
"""A context manager that disables dispatch modes."""
