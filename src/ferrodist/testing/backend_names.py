"""The names of the backends for the ranks of a test."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

BackendName: TypeAlias = Literal["simulated", "tcp", "tcp-threads", "native", "native-threads", "gloo", "gloo-threads"]

RANKS_BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
"""The names that `run_ranks`, the marker ``ranks`` and ``--ranks-backend`` accept."""
