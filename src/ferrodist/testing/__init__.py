"""Tools to test distributed programs, and backends and stores of one's own.

::

    ranks.py        run_ranks; ranks as threads     process_ranks.py   ranks as forked processes
    supervisor.py   the life of a rank, and its timeout and failures
    leaks.py        check_leaks                     pytest_plugin.py   the marker ranks
    conformance/    check_backend and check_store; check_collectives in collectives/suite.py

Names load when they are first used: pytest imports the plugin, and with it this package, at every start.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ferrodist.testing.backend_names import RANKS_BACKENDS as RANKS_BACKENDS
    from ferrodist.testing.backend_names import BackendName as BackendName
    from ferrodist.testing.conformance.backend.suite import BACKEND_CHECKS as BACKEND_CHECKS
    from ferrodist.testing.conformance.backend.suite import check_backend as check_backend
    from ferrodist.testing.conformance.harness import RankRunner as RankRunner
    from ferrodist.testing.conformance.store import STORE_CHECKS as STORE_CHECKS
    from ferrodist.testing.conformance.store import check_store as check_store
    from ferrodist.testing.leaks import check_leaks as check_leaks
    from ferrodist.testing.ranks import run_ranks as run_ranks

_MODULE_OF = {
    "BACKEND_CHECKS": "conformance.backend.suite",
    "RANKS_BACKENDS": "backend_names",
    "STORE_CHECKS": "conformance.store",
    "BackendName": "backend_names",
    "RankRunner": "conformance.harness",
    "check_backend": "conformance.backend.suite",
    "check_leaks": "leaks",
    "check_store": "conformance.store",
    "run_ranks": "ranks",
}

__all__ = [*_MODULE_OF]  # noqa: PLE0604 - names that __getattr__ resolves


if not TYPE_CHECKING:  # type checkers reject missing names

    def __getattr__(name: str) -> Any:
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
