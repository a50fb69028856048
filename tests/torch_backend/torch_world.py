"""Ranks that torch brings together: forked processes with a default group of torch's, of one backend or another."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ferrodist.backends.base import Backend

__all__ = ["close", "run_world", "same", "world"]

BACKENDS = ("gloo", "ferrodist")


@contextmanager
def world(backend: str, folder: str | Path, rank: int, size: int, *, seconds: float = 60.0) -> Iterator[None]:
    """torch's default group inside the block."""
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{folder}/{backend}", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_world(
    program: Callable[..., Any], size: int = 2, *, backends: tuple[str, ...] = BACKENDS, timeout: float = 100.0
) -> list[dict[str, Any]]:
    """Run ``program()`` on each rank in a default group of each backend, one after the other.

    Returns:
        By rank, and then by backend, what it returned.
    """
    with tempfile.TemporaryDirectory() as folder:

        def body(group: Backend) -> dict[str, Any]:
            torch.set_num_threads(1)  # a pool of threads does not survive a fork
            found = {}
            for backend in backends:
                torch.manual_seed(group.rank)
                with world(backend, folder, group.rank, size):
                    found[backend] = program()
            return found

        return run_ranks(body, size, backend="tcp", timeout=timeout)


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal, bit for bit."""
    return _agree(one, other, torch.equal)


def close(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two results are, to a part or to an amount."""
    return _agree(one, other, lambda *pair: torch.allclose(*pair, rtol=tolerance, atol=tolerance))


def _agree(one: Any, other: Any, agree: Callable[[torch.Tensor, torch.Tensor], bool]) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and agree(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_agree(*pair, agree) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_agree(one[key], other[key], agree) for key in one)
    return bool(one == other)
