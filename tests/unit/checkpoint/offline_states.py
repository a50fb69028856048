"""Checkpoints that the tests of the tools begin with, and ways to spoil them."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ferrodist import DeviceMesh, Shard, distribute
from ferrodist.checkpoint import PerRank, save_distributed
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def make_state() -> dict:
    """All kinds of values, and tensors of many dtypes and shapes."""
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {
            "weight": torch.randn(12, 10, generator=generator),
            "bias": torch.randn(7, generator=generator),
            "half": torch.randn(6, 4, 5, generator=generator).bfloat16(),
            "counts": torch.arange(9).reshape(3, 3),
            "flags": torch.tensor([True, False, True]),
            "complex": torch.randn(4, 3, generator=generator, dtype=torch.complex128),
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 3),
        },
        "step": 7,
        "losses": [1.5, float("inf"), (1, b"x", None)],
        "numbered": {5: {"nested": "text"}, (1, 2): [3]},
    }


def _save_sharded(group, path: str, dims: dict[str, int]) -> None:
    mesh = DeviceMesh(group, (group.world_size,))
    state = make_state()
    for name, dim in dims.items():
        state["model"][name] = distribute(state["model"][name], mesh, [Shard(dim)])
    state["own"] = PerRank({"rank": group.rank, "noise": torch.full((group.rank + 1,), float(group.rank))})
    save_distributed(state, path, group=group)


def save_sharded(path: Path, num_ranks: int, **dims: int) -> Path:
    """Save `make_state` and a `PerRank` from several ranks, some tensors divided along a dim."""
    run_ranks(_save_sharded, num_ranks, str(path), dims or {"weight": 0, "half": 1, "complex": 0})
    return path


def save_whole(path: Path, state: object = None) -> Path:
    """Save from this process alone."""
    save_distributed(make_state() if state is None else state, path)
    return path


def flip(path: Path, at: int) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def measure_memory(function: Callable[[], Any]) -> int:
    """Return the peak of resident bytes during a call, above those before it."""
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    function()
    return _resident_bytes("VmHWM") - before


def _resident_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


@contextlib.contextmanager
def limited_memory(size_bytes: int) -> Iterator[None]:
    """Let the process take no more than so much beyond what it has; more is a MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
