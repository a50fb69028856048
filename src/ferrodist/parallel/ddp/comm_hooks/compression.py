"""Reduce gradients as they are, or in 16 bits.

What is to be done when a collective has ended, as a handle like the collective's own.

What a hook has not sent of the gradients so far, which it adds to those of a later step (error feedback).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

import torch

from ferrodist.collectives.reduce import async_allreduce
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.collectives.work import PendingCollective

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.parallel.ddp.bucket import GradientBucket

_WIDE = (torch.float32, torch.float64)


def allreduce(bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
    """What DDP does without a hook, to compare hooks with."""
    return async_allreduce(bucket.tensor, ReduceOp.MEAN, group=bucket.group, out=bucket.tensor)


def bfloat16_compression(bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
    """Round gradients to bfloat16, which has float32's range and 8 bits: half of float32's bytes.

    Ranks' values are rounded, added up in float32, and their mean is rounded again. Other dtypes than float32 and
    float64 travel as they are.
    """
    return _in(torch.bfloat16, bucket)


def float16_compression(bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
    """Round gradients to float16, which has 11 bits, and infinity from 65520 on; see `bfloat16_compression`."""
    return _in(torch.float16, bucket)


def _in(dtype: torch.dtype, bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
    if bucket.tensor.dtype not in _WIDE:
        return allreduce(bucket)
    small = bucket.tensor.to(dtype)
    return async_allreduce(small, ReduceOp.MEAN, group=bucket.group, out=small)


T = TypeVar("T")
S = TypeVar("S")


class Continued(PendingCollective[T]):
    """A collective whose result is made into another one by the first who waits for it.

    What is made of it may call collectives itself. All ranks then wait for their handles in one order, as DDP does.

    Args:
        first: The collective under way.
        then: ``then(result)`` gives the result.
    """

    def __init__(self, first: PendingCollective[S], then: Callable[[S], T]) -> None:
        super().__init__(first.op_name, first._group_name)  # noqa: SLF001 - of its own base class
        self._lock = threading.Lock()
        self._steps: Callable[[float | None], T] | None = lambda timeout: then(first.wait(timeout))
        self._first = first
        self._results: list[T] = []

    def done(self) -> bool:
        """Whether the collective has ended; `wait` may have work left to do."""
        return self._first.done()

    def wait(self, timeout: float | None = None) -> T:
        """Block until the collective has ended, and give what is made of it; see `PendingCollective.wait`."""
        with self._lock:
            if self._steps is not None:
                self._results.append(self._steps(timeout))
                self._steps = None
        return self._results[0]


class ErrorFeedback:
    """A tensor for each parameter of one model, by the parameter's name; made of zeros when it is first asked for.

    Args:
        owner: How error messages call the hook.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def bind(self, bucket: GradientBucket) -> None:
        """Take note whose gradients these are.

        Raises:
            ValueError: Another model's had such a name.
        """
        for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
            if self._parameters.setdefault(name, parameter) is not parameter:
                raise ValueError(
                    f"{self._owner} was called for parameter {name!r} of two models, whose residuals would mix: pass"
                    " each DDP a hook object of its own"
                )

    def find(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The residual of a parameter, with shape and dtype of ``like``; zeros when they have changed."""
        found = self._tensors.get(name)
        if found is None or found.shape != like.shape or found.dtype is not like.dtype:
            found = self._tensors[name] = torch.zeros_like(like)
        return found
