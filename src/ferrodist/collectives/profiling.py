"""Calls of collectives and messages as torch's profiler shows them: ``ferrodist:allreduce``, on the thread that calls.

Of an asynchronous one it is the start, by the same name. Functions that small tensors go through in a few microseconds
ask inline whether a profiler is active, and then call themselves by `record`; others are decorated by `profiled`, which
takes several times as long.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from torch.profiler import record_function
from typing_extensions import ParamSpec

from ferrodist.torch_private.profiling import is_profiling

if TYPE_CHECKING:
    from collections.abc import Callable

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
        with record_function(f"ferrodist:{function.__name__.removeprefix('async_')}"):
            return function(*arguments, **options)
    finally:
        _here.is_recorded = False


def profiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Have torch's profiler see the calls of a function."""

    @functools.wraps(function)
    def call(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        if not is_profiling() or _here.is_recorded:
            return function(*arguments, **options)
        return record(function, *arguments, **options)

    return call
