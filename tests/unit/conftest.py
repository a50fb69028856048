"""A fixture of tests that compile: torch's compiler, loaded and working."""

import importlib

import pytest
import torch


@pytest.fixture
def compiler():
    """Load torch's compiler once for all ranks, and let it compile whatever tests before have done.

    torch 2.10 has one flag for all threads that says whether one of them is in a dispatch mode. Two threads that were
    in modes at once can leave it set, and then nothing is compiled in the process and in those that it forks.
    """
    importlib.import_module("torch._dynamo").lookup_backend("aot_eager")
    torch.utils._python_dispatch._is_in_any_mode_without_ignore_compile_internals = False
