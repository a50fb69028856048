"""The conformance suite of collectives on NCCL's engine, over a fake of NCCL that works on tensors of the CPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
from nccl_fakes import fake_groups, send_cpu_tensors_to_nccl

from ferrodist.backends.process_group import use_group
from ferrodist.backends.sub import SubBackend
from ferrodist.testing import run_ranks
from ferrodist.testing.collective_conformance import COLLECTIVE_CHECKS

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.testing.collective_checks.harness import CollectiveCheck


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("check", COLLECTIVE_CHECKS, ids=lambda check: check.__name__)
def test_collectives_conform(world_size: int, check: CollectiveCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check that holds for NCCL passes on its engine."""
    send_cpu_tensors_to_nccl(monkeypatch)
    run_ranks(check, world_size, backend=partial(fake_groups, timeout=30.0), timeout=60.0)
