"""Private names of torch's profiler: ``torch.autograd.profiler._is_profiler_enabled``, 2.10 to 2.15.

Without it `torch.autograd._profiler_enabled` takes its place, which is slower; without that nothing is recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import profiler

FLAG_OWNER: dict[str, Any] | None = vars(profiler) if hasattr(profiler, "_is_profiler_enabled") else None
"""The names of the module that has the flag, for the compiled module; None without it."""

if hasattr(profiler, "_is_profiler_enabled"):

    def is_profiling() -> bool:
        """Return whether torch's profiler records, as torch itself does."""
        return profiler._is_profiler_enabled

else:

    def is_profiling() -> bool:
        """Return whether torch's profiler records."""
        ask = getattr(torch.autograd, "_profiler_enabled", None)
        return ask is not None and bool(ask())
