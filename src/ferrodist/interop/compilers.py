"""Keeping torch.compile out of the methods that torch's C++ calls while a compiled program runs."""

from __future__ import annotations

import inspect
from typing import TypeVar

from torch._C import _dynamo  # which, unlike torch._dynamo, is loaded already

__all__ = ["not_compiled"]

_Kind = TypeVar("_Kind", bound=type)


def not_compiled(kind: _Kind) -> _Kind:
    """Have compilers look neither into the methods of a class nor into what these call.

    The usual way, `torch.compiler.disable`, loads the compiler, which takes seconds, and slows each call down.
    """
    frames = _dynamo.eval_frame
    skip = frames._FrameAction.SKIP  # noqa: SLF001
    for method in vars(kind).values():
        if inspect.isfunction(method):
            method._torchdynamo_disable = True  # type: ignore[attr-defined] # noqa: SLF001 - for its callers
            frames.set_code_exec_strategy(method.__code__, frames._FrameExecStrategy(skip, skip))  # noqa: SLF001
    return kind
