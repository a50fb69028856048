"""Ranks for tests of FSDP."""

from functools import partial

import pytest

from ferrodist.parallel.fsdp import flat_layout
from ferrodist.testing import run_ranks


@pytest.fixture(params=["copied", "shared"])
def run(request, monkeypatch):
    """`run_ranks` where units are gathered by copying, and where ranks compute with shards in shared memory."""
    if request.param == "copied":
        return run_ranks
    monkeypatch.setattr(flat_layout, "_SMALL_BYTES", 0)
    return partial(run_ranks, backend="native-threads")
