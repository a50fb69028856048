"""The conformance suite of backends: the contract of `ferrodist.backends.base` as runnable checks, for implementers.

::

    @pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
    def test_my_backend(check):
        check(MyBackend.create_group, 3)
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ferrodist.testing.conformance.backend import arguments, deadlines, failures, messages, subgroups
from ferrodist.testing.conformance.harness import public_functions, run_checks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ferrodist.testing.conformance.harness import BackendCheck, BackendUnderTest

BACKEND_CHECKS: tuple[BackendCheck, ...] = (
    *(*public_functions(messages), *public_functions(deadlines), *public_functions(arguments)),
    *(*public_functions(failures), *public_functions(subgroups)),
)
"""All checks. Each takes a factory or a runner, and a world size, and raises when its rule is broken."""


def check_backend(backend: BackendUnderTest, world_sizes: Iterable[int] = (2, 3, 4)) -> None:
    """Run all checks on a backend.

    Args:
        backend: ``factory(world_size)`` that returns the handles of a fresh group whose ranks will be threads; or an
            object with ``run(world_size, fn)``, see `RankRunner`, for ranks that are forked processes.
        world_sizes: The group sizes to check; checks that need three ranks take three where 2 is asked for.

    Raises:
        AssertionError: Rules are broken; all of them are listed, and the first failure is the cause.
    """
    run_checks(
        "backend",
        [
            (f"{check.__name__} (world size {world_size})", check, partial(check, backend, world_size))
            for world_size in world_sizes
            for check in BACKEND_CHECKS
        ],
    )
