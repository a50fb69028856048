"""Tensors of more than 2 GiB: no size or offset on the way is a 32-bit number, and little memory is taken besides."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import ferrodist as fd
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend

_SIZE = 2**31 + 251 + 5
_PERIOD = torch.arange(251, dtype=torch.uint8)
_STEP = 251 << 16
_MEMORY_LIMIT = 12 << 30
_TENSORS = 2  # one a rank

_AVAILABLE = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

pytestmark = pytest.mark.skipif(_AVAILABLE < _MEMORY_LIMIT, reason="less than 12 GiB of memory are free")


def _patterned(times: int) -> torch.Tensor:
    tensor = torch.empty(_SIZE, dtype=torch.uint8)
    whole = _SIZE // 251 * 251
    tensor[:whole].view(-1, 251).copy_(_PERIOD * times)
    tensor[whole:] = (_PERIOD * times)[: _SIZE - whole]
    return tensor


def _is_patterned(tensor: torch.Tensor, times: int) -> bool:
    period = _PERIOD * times
    return all(
        bool((piece[: len(piece) // 251 * 251].view(-1, 251) == period).all())
        and torch.equal(piece[len(piece) // 251 * 251 :], period[: len(piece) % 251])
        for piece in (tensor[start : start + _STEP] for start in range(0, _SIZE, _STEP))
    )


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


def _run(call, backend: str) -> None:
    """Run on two ranks, and look at the memory of this process, which is both."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _resident_bytes("VmRSS")

    def on_rank(group: Backend) -> bool:
        return call(group)

    assert run_ranks(on_rank, 2, backend=backend) == [True, True]
    taken = _resident_bytes("VmHWM") - before
    assert taken < _TENSORS * _SIZE + (1 << 29), f"{taken >> 20} MiB for two tensors of 2 GiB"


def test_allreduce_of_more_than_2_gib() -> None:
    """An allreduce in place folds every byte, with the memory of a few segments besides."""

    def call(group: Backend) -> bool:
        tensor = _patterned(group.rank + 1)
        return _is_patterned(fd.allreduce(tensor, out=tensor), 3)

    _run(call, "simulated")


def test_messages_of_more_than_2_gib() -> None:
    """A tensor sent from rank to rank arrives whole, as one message."""

    def call(group: Backend) -> bool:
        if group.rank == 0:
            fd.send(_patterned(1), 1)
            return True
        return _is_patterned(fd.recv(None, None, 0), 1)

    _run(call, "tcp-threads")
