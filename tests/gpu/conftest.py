"""Skips the tests on a real GPU, with the reason, where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Whether there is a GPU is asked in a way that makes no CUDA context here, which forked ranks could not use.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_HERE = Path(__file__).parent


def _why_not() -> str:
    """The reason why no GPU can be used here."""
    if not torch.backends.cuda.is_built():
        return "this torch is built without CUDA"
    return "" if torch.cuda.device_count() else "no CUDA device is here"


_REASON = _why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU."""
    if _REASON:
        for item in items:
            if _HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=_REASON))
