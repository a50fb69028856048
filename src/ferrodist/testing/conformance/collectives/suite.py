"""The conformance suite of collectives: the contract of backends and engines as runnable checks, for implementers.

::

    @pytest.mark.parametrize("check", COLLECTIVE_CHECKS, ids=lambda check: check.__name__)
    def test_my_collectives(check):
        run_ranks(check, 3, backend=MyBackend.create_group)

A check is a function of one rank's group, which is also the default group; it runs on every rank of any number of
ranks, threads or processes. So it shares nothing with other ranks but the group, and never relies on sleeping.

Results are compared bit for bit with an oracle that shares no arithmetic with ferrodist: `oracle`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ferrodist.testing.conformance.collectives import arguments, call_forms, data_movement, failures, p2p, reductions
from ferrodist.testing.conformance.harness import public_functions, run_checks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.testing.conformance.collectives.oracle import CollectiveCheck

COLLECTIVE_CHECKS: tuple[CollectiveCheck, ...] = (
    *(*public_functions(reductions), *public_functions(data_movement), *public_functions(call_forms)),
    *(*public_functions(p2p), *public_functions(arguments)),
    *(*failures.MISMATCH_CHECKS, *public_functions(failures)),
)
"""All checks. Each takes the group of a rank, which is also the default group, and runs on every rank of a fresh group
of any size; it raises when its rule is broken. On one rank the checks test little, but must pass too."""


def check_collectives(run: Callable[[CollectiveCheck], object]) -> None:
    """Run all checks.

    Args:
        run: ``run(check)`` calls ``check(group)`` on every rank of a fresh group, with the default group set, and
            raises when a rank does: ``lambda check: run_ranks(check, 4, backend=MyBackend.create_group)``.

    Raises:
        AssertionError: Rules are broken; all of them are listed, and the first failure is the cause.
    """
    run_checks("collectives", [(check.__name__, check, partial(run, check)) for check in COLLECTIVE_CHECKS])
