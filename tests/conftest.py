"""Plugins of the whole test tree, and what must be set before torch is imported."""

from __future__ import annotations

import gc
import importlib
import os
from importlib.metadata import entry_points

import pytest

# Process ranks are forked from this process. A pool of torch threads here would be missing, but waited for, in them.
os.environ["OMP_NUM_THREADS"] = "1"
# What never comes fails a test by the error that names it, before the test's time limit.
os.environ.setdefault("FERRODIST_TIMEOUT", "60")

pytest_plugins = ["pytester"]
if not any(entry.name == "ferrodist" for entry in entry_points(group="pytest11")):
    # The tree is tested where it lies; an installed ferrodist has registered its plugin by itself.
    pytest_plugins.append("ferrodist.testing.pytest_plugin")

_MANY_OBJECTS = 60_000  # a collection looks at them in some milliseconds


def pytest_collection() -> None:
    """Collect no garbage while modules are loaded and tests created: there is little, and many objects to look at."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what is loaded by now out of garbage collections: the tests' checks for leaks ask for many."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_runtest_logfinish() -> None:
    """The same for what a test leaves, as the modules of torch's compiler."""
    if len(gc.get_objects()) > _MANY_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture
def compiler() -> None:
    """Load torch's compiler once for all ranks, and let it compile whatever tests before have done.

    torch 2.10 has one flag for all threads that says whether one of them is in a dispatch mode. Two threads that were
    in modes at once can leave it set, and then nothing is compiled in the process and in those that it forks.
    """
    importlib.import_module("torch._dynamo").lookup_backend("aot_eager")
    importlib.import_module("torch.utils._python_dispatch")._is_in_any_mode_without_ignore_compile_internals = False
