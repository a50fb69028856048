"""Collecting and running the checks of a suite, with a report of all that failed."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from ferrodist.errors import DistributedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType


def public_functions(module: ModuleType) -> tuple[Callable[..., None], ...]:
    """The public functions that a module defines, in order: in modules of checks, the checks."""
    return tuple(
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    )


def run_checks(suite: str, checks: Iterable[tuple[str, Callable[..., object], Callable[[], object]]]) -> None:
    """Make checks, each a name, a function whose docstring is the rule, and a call; AssertionError lists the failed."""
    failures: list[tuple[str, Exception]] = []
    num_checks = 0
    for name, check, call in checks:
        num_checks += 1
        try:
            call()
        except (AssertionError, DistributedError, OSError) as error:
            rule = (inspect.getdoc(check) or "").partition("\n")[0]
            reason = str(error).partition("\n")[0]
            failures.append((f"{name}: {rule}\n    {type(error).__name__}: {reason}", error))
    if failures:
        listed = "\n".join(f"  {text}" for text, _ in failures)
        raise AssertionError(f"{suite}: {len(failures)} of {num_checks} checks failed\n{listed}") from failures[0][1]
