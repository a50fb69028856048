"""What a run leaves behind: JSON and NumPy files in a folder, which hold data and never code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_HISTORY = "history.json"


class History(msgspec.Struct, frozen=True, kw_only=True):
    """How a training went.

    Args:
        losses: Loss of the global batch at each step, before the step.
        accuracies: Share of the test images that are recognised after each epoch.
        seconds: What the training took, without starting processes.
        num_train: Training images.
        num_test: Test images.
        batch_size: Images in a step, over all ranks.
    """

    losses: list[float]
    accuracies: list[float]
    seconds: float
    num_train: int
    num_test: int
    batch_size: int


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run.

    Args:
        history: As rank 0 recorded it.
        weights: By rank: each parameter's values by name.
    """

    history: History
    weights: list[dict[str, Any]]


def write_history(folder: Path, history: History) -> None:
    """Write rank 0's record."""
    (folder / _HISTORY).write_bytes(msgspec.json.encode(history))


def write_weights(folder: Path, rank: int, weights: Mapping[str, Any]) -> None:
    """Write one rank's parameters: NumPy arrays by name."""
    np.savez(_weights_file(folder, rank), allow_pickle=False, **weights)


def read_result(folder: Path, num_ranks: int) -> RunResult:
    """Read what the ranks of a finished run have written."""
    history = msgspec.json.decode((folder / _HISTORY).read_bytes(), type=History)
    weights: list[dict[str, Any]] = []
    for rank in range(num_ranks):
        with np.load(_weights_file(folder, rank), allow_pickle=False) as arrays:
            weights.append({name: arrays[name] for name in arrays.files})
    return RunResult(history=history, weights=weights)


def _weights_file(folder: Path, rank: int) -> Path:
    return folder / f"weights-of-rank-{rank}.npz"
