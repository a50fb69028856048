"""Random generators go on where they were."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from ferrodist.checkpoint import DistCheckpointError, PerRank, RandomState, load_distributed, save_distributed
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from ferrodist.backends.base import Backend


def _draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def _save(group: Backend, path: Path) -> list[float]:
    random.seed(group.rank)
    np.random.seed(group.rank)
    torch.manual_seed(group.rank)
    save_distributed({"random": PerRank(RandomState())}, path, group=group)
    return _draw()


def test_each_rank_continues_its_own_random_numbers(tmp_path: Path) -> None:
    """Random numbers after a load equal those after the save."""
    expected = run_ranks(_save, 2, tmp_path, backend="native")

    def load(group: Backend) -> list[float]:
        load_distributed(tmp_path, {"random": PerRank(RandomState())}, group=group)
        return _draw()

    assert run_ranks(load, 2, backend="native") == expected
    assert expected[0] != expected[1]


def test_the_state_of_another_object() -> None:
    """It is refused, and says what it lacks."""
    with pytest.raises(ValueError, match="not that of a RandomState: it lacks cuda, numpy, torch"):
        RandomState().load_state_dict({"python": random.getstate()})


def test_another_number_of_ranks(tmp_path: Path) -> None:
    """Loading is an error with advice, unless the program supplies each rank's state."""
    expected = run_ranks(_save, 2, tmp_path, backend="native")

    def load(group: Backend) -> list[float]:
        with pytest.raises(DistCheckpointError, match=r"saved by 2 ranks.*resize"):
            load_distributed(tmp_path, {"random": PerRank(RandomState())}, group=group)
        own = PerRank(RandomState(), resize=lambda saved, rank, world_size: saved[rank % len(saved)])
        load_distributed(tmp_path, {"random": own}, group=group)
        return _draw()

    assert run_ranks(load, 3, backend="native") == [expected[0], expected[1], expected[0]]
