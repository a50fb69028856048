"""Calls of collectives and messages as torch's profiler shows them: ``ferrodist:allreduce``, on the thread that calls.

Of an asynchronous one it is the start, by the same name. Functions that small tensors go through in a few microseconds
ask inline whether a profiler is active (`torch.autograd.profiler._is_profiler_enabled`, in some 10 ns), and then call
themselves by `record`; others are decorated by `profiled`, which takes some 100 ns a call.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from torch.autograd import profiler
from typing_extensions import ParamSpec

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["is_recorded", "profiled", "record"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class _Here(threading.local):
    """Whether this thread is in a recorded call: those that it makes are part of it."""

    is_recorded = False


_here = _Here()


def is_recorded() -> bool:
    """Whether this thread is in a recorded call."""
    return _here.is_recorded


def record(function: Callable[..., _Result], *arguments: Any, **options: Any) -> _Result:
    """Call a function so that torch's profiler sees it."""
    _here.is_recorded = True
    try:
        with profiler.record_function(f"ferrodist:{function.__name__.removeprefix('async_')}"):
            return function(*arguments, **options)
    finally:
        _here.is_recorded = False


def profiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Have torch's profiler see the calls of a function."""

    @functools.wraps(function)
    def call(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        if not profiler._is_profiler_enabled or _here.is_recorded:  # noqa: SLF001 - torch asks it so
            return function(*arguments, **options)
        return record(function, *arguments, **options)

    return call
