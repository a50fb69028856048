"""Private names of torch's compiler.

===================================================  ====================================
`torch._C._dynamo.eval_frame`                        2.10 to 2.15, else `torch.compiler.disable`
`_dynamo_marked_constant`                            2.10 to 2.15; tensor parallel models are
                                                     compiled with breaks without
`FakeTensor`, `FunctionalTensor`                     2.10 to 2.15, by their names
`_torchdynamo_disable`, `_torchdynamo_disable_msg`   2.10 to 2.15
`_torchdynamo_inline`                                2.10 to 2.15; graphs break at collectives without
`_higher_order_ops.effects`                          2.10 to 2.15; unused collectives leave graphs without
===================================================  ====================================
"""

from __future__ import annotations

import inspect
import sys
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

try:
    from torch._C import _dynamo  # unlike torch._dynamo it is loaded already

    _frames: Any = _dynamo.eval_frame
    _strategy: Any = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
    _set_strategy: Any = _frames.set_code_exec_strategy
except (ImportError, AttributeError):
    _set_strategy = None

__all__ = [
    "allow_in_graphs",
    "find_tracer",
    "has_effects",
    "inlined_as",
    "is_called_by_compiler",
    "is_compiling",
    "is_traced",
    "not_compiled",
    "outside_of_compiler",
    "run_while_tracing",
]

is_compiling: Any = torch.compiler.is_compiling

_COMPILER_FILES = tuple(
    str(Path(torch.__file__).parent / name)
    for name in ("_dynamo", "_functorch", "_subclasses", "_inductor", "fx", "_meta")
)

_Kind = TypeVar("_Kind", bound=type)
_Function = TypeVar("_Function", bound="Callable[..., Any]")
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


def is_traced(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for one of a graph that is traced, and has no elements."""
    return type(tensor) is not torch.Tensor and type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")


def is_called_by_compiler() -> bool:
    """Return whether the compiler has called the function that calls this one."""
    return sys._getframe(2).f_code.co_filename.startswith(_COMPILER_FILES)


def run_while_tracing(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Let the compiler call a function while it traces a call of it, which then has the constant that it returned."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def allow_in_graphs(functions: Sequence[Callable[..., Any]]) -> None:
    """Let graphs contain calls of functions as they are, which later stages of the compiler trace."""
    for function in functions:
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]


def inlined_as(body: Callable[..., Any], function: _Function) -> _Function:
    """Let the compiler trace ``body`` where a program calls the function, which is returned as it is."""
    function._torchdynamo_inline = body  # type: ignore[attr-defined]
    return function


def has_effects(operator: Any) -> None:
    """Let graphs keep all calls of an operator, in their order, whether or not something takes their results."""
    try:
        from torch._higher_order_ops import effects  # noqa: PLC0415 - a part of the compiler

        effects._register_effectful_op(operator, effects._EffectType.ORDERED)
    except (ImportError, AttributeError):
        return


def find_tracer() -> Any:
    """The tracer of the graph that is being made of this thread's operations, or None."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # noqa: PLC0415 - large

    mode = get_proxy_mode()
    return None if mode is None else mode.tracer


def not_compiled(kind: _Kind) -> _Kind:
    """Exclude the methods of a class, and what they call, from compilation."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method):
            setattr(kind, name, outside_of_compiler(method))
        elif isinstance(method, classmethod | staticmethod) and inspect.isfunction(method.__func__):
            setattr(kind, name, type(method)(outside_of_compiler(method.__func__)))
    return kind
