"""Private names of torch's compiler.

===================================================  ====================================
`torch._compile._disable_dynamo`                     2.10 to 2.15, else `torch.compiler.disable`
`torch._C._dynamo.eval_frame`                        2.10 to 2.15, else the same
`_torchdynamo_disable`                               2.10 to 2.15
===================================================  ====================================
"""

from __future__ import annotations

import inspect
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

try:
    from torch._compile import _disable_dynamo as disable_dynamo
except ImportError:  # this one loads the compiler at once
    disable_dynamo: Any = torch.compiler.disable  # type: ignore[no-redef]

try:
    from torch._C import _dynamo  # unlike torch._dynamo it is loaded already

    _frames: Any = _dynamo.eval_frame
    _strategy: Any = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
    _set_strategy: Any = _frames.set_code_exec_strategy
except (ImportError, AttributeError):
    _set_strategy = None

__all__ = ["disable_dynamo", "not_compiled", "outside_of_compiler"]

_Kind = TypeVar("_Kind", bound=type)
_Result = TypeVar("_Result")


def outside_of_compiler(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Hide a function from torch.compile, which is slow to load, where something else has loaded it."""

    @wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> _Result:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **keywords)
        disabled: Callable[..., _Result] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*arguments, **keywords)

    return wrapper


def not_compiled(kind: _Kind) -> _Kind:
    """Exclude the methods of a class, and what they call, from compilation.

    `torch.compiler.disable` loads the compiler, which takes seconds, and slows each call down. It is used only if this
    torch has no alternative.
    """
    for name, method in list(vars(kind).items()):
        if not inspect.isfunction(method):
            continue
        if _set_strategy is None:
            setattr(kind, name, torch.compiler.disable(method))  # type: ignore[no-untyped-call]
            continue
        method._torchdynamo_disable = True  # type: ignore[attr-defined] # for its callers
        _set_strategy(method.__code__, _strategy)
    return kind
