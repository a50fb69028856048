"""Ranks for tests of FSDP."""

from functools import partial

import pytest

from ferrodist.parallel.fsdp import flat_layout
from ferrodist.testing import run_ranks


@pytest.fixture(params=["copied", "joined"])
def run(request, monkeypatch):
    """`run_ranks` where units are gathered by copying, and where ranks use each other's shards as they lie."""
    if request.param == "copied":
        return run_ranks
    monkeypatch.setattr(flat_layout, "_SMALL_BYTES", 0)
    return partial(run_ranks, backend="native-threads")
