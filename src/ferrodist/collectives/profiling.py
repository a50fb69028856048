"""Collectives and messages in torch's profiler: ``ferrodist:allreduce``, in the calling thread.

An asynchronous call is shown by the same name, while it is started. Functions that take a few microseconds check inline
for an active profiler, and then call themselves through `record`; others are decorated by `profiled`, which takes
several times as long.
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


class _ThreadState(threading.local):
    """The state of a thread: calls inside a recorded call are part of it."""

    is_recorded = False


_thread_state = _ThreadState()


def is_recorded() -> bool:
    """True if this thread is in a recorded call."""
    return _thread_state.is_recorded


def record(function: Callable[..., _Result], *arguments: Any, **options: Any) -> _Result:
    """Call a function and show it in torch's profiler."""
    _thread_state.is_recorded = True
    try:
        with record_function(f"ferrodist:{function.__name__.removeprefix('async_')}"):
            return function(*arguments, **options)
    finally:
        _thread_state.is_recorded = False


def profiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function to be shown in torch's profiler."""

    @functools.wraps(function)
    def call(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        if not is_profiling() or _thread_state.is_recorded:
            return function(*arguments, **options)
        return record(function, *arguments, **options)

    return call
