"""Private names of torch's compiler.

===================================================  ====================================
`torch._C._dynamo.eval_frame`                        2.10 to 2.15, else `torch.compiler.disable`
`_torchdynamo_disable`, `_torchdynamo_disable_msg`   2.10 to 2.15
===================================================  ====================================
"""

from __future__ import annotations

import inspect
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

try:
    from torch._C import _dynamo  # unlike torch._dynamo it is loaded already

    _frames: Any = _dynamo.eval_frame
    _strategy: Any = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
    _set_strategy: Any = _frames.set_code_exec_strategy
except (ImportError, AttributeError):
    _set_strategy = None

__all__ = ["not_compiled", "outside_of_compiler"]

_Kind = TypeVar("_Kind", bound=type)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def outside_of_compiler(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Exclude a function, and what it calls, from compilation: the compiler breaks its graph at a call of it.

    `torch.compiler.disable` loads the compiler, which takes seconds, and slows each call down. It is used only if this
    torch has no alternative, and something else has loaded the compiler.
    """
    if _set_strategy is not None:
        function._torchdynamo_disable = True  # type: ignore[attr-defined] # for its callers
        function._torchdynamo_disable_msg = "it communicates between ranks"  # type: ignore[attr-defined]
        _set_strategy(function.__code__, _strategy)
        return function

    @wraps(function)
    def wrapper(*arguments: _Parameters.args, **keywords: _Parameters.kwargs) -> _Result:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **keywords)
        disabled: Callable[_Parameters, _Result] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*arguments, **keywords)

    return wrapper


def not_compiled(kind: _Kind) -> _Kind:
    """Exclude the methods of a class, and what they call, from compilation."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method):
            setattr(kind, name, outside_of_compiler(method))
    return kind
