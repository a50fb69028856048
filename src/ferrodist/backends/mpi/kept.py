"""What MPI has been given, can't give back, and nobody waits for any more."""

from __future__ import annotations

from typing import Any

__all__ = ["keep_for_ever", "num_kept"]

_kept: list[Any] = []


def keep_for_ever(request: Any) -> None:
    """Keep a request, with its buffers: MPI may read and write them at any time."""
    _kept.append(request)


def num_kept() -> int:
    """How many requests may still be under way."""
    return len(_kept)
