"""Groups over a real UCC, wherever there is one: FERRODIST_UCC_LIBRARY names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from ucc_group import CONTROLS, UccRunner

from ferrodist.backends.ucc.library import why_no_ucc
from ferrodist.testing import BACKEND_CHECKS
from ferrodist.testing.collective_conformance import COLLECTIVE_CHECKS

if TYPE_CHECKING:
    from ferrodist.testing.backend_checks.harness import BackendCheck
    from ferrodist.testing.collective_checks.harness import CollectiveCheck

_REASON = why_no_ucc()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=_REASON or "")


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_promises_of_a_backend(check: BackendCheck) -> None:
    """Every promise of `Backend` holds."""
    check(UccRunner("tcp"), 3)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("check", COLLECTIVE_CHECKS, ids=lambda check: check.__name__)
def test_collectives(check: CollectiveCheck, world_size: int) -> None:
    """Every collective gives the bits it has on any backend, in every type, and its errors."""
    UccRunner(CONTROLS[-1]).run(world_size, check)
