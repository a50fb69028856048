"""Hooks that reduce gradients as they are or in 16 bits, and the parts of hooks with error feedback."""

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

_COMPRESSED = (torch.float32, torch.float64)


def allreduce(bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
    """Average a bucket as DDP does without a hook, for comparison."""
    return async_allreduce(bucket.tensor, ReduceOp.MEAN, group=bucket.group, out=bucket.tensor)


def bfloat16_compression(bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
    """Round gradients to bfloat16, which has float32's range and 8 bits: half of float32's bytes.

    Ranks' values are rounded, added up in float32, and their mean is rounded again. Dtypes other than float32 and
    float64 are sent as they are.
    """
    return _allreduce_as(torch.bfloat16, bucket)


def float16_compression(bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
    """Round gradients to float16, which has 11 bits, and infinity from 65520 on; see `bfloat16_compression`."""
    return _allreduce_as(torch.float16, bucket)


def _allreduce_as(dtype: torch.dtype, bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
    if bucket.tensor.dtype not in _COMPRESSED:
        return allreduce(bucket)
    rounded = bucket.tensor.to(dtype)
    return async_allreduce(rounded, ReduceOp.MEAN, group=bucket.group, out=rounded)


T = TypeVar("T")
S = TypeVar("S")


class Continued(PendingCollective[T]):
    """A collective followed by a function of its result, which the first waiter calls.

    The function may call collectives itself. All ranks then wait for their handles in one order, as DDP does.

    Args:
        first: The collective under way.
        then: ``then(result)`` returns the final result.
    """

    def __init__(self, first: PendingCollective[S], then: Callable[[S], T]) -> None:
        super().__init__(first.op_name, first._group_name)  # noqa: SLF001 - of its own base class
        self._lock = threading.Lock()
        self._steps: Callable[[float | None], T] | None = lambda timeout: then(first.wait(timeout))
        self._first = first
        self._results: list[T] = []

    def done(self) -> bool:
        """True if the collective has ended; `wait` may have work left to do."""
        return self._first.done()

    def wait(self, timeout: float | None = None) -> T:
        """Block until the collective has ended, and return the final result; see `PendingCollective.wait`."""
        with self._lock:
            if self._steps is not None:
                self._results.append(self._steps(timeout))
                self._steps = None
        return self._results[0]


class ErrorFeedback:
    """Residuals of one model, by parameter names: the part of the gradients that a lossy hook has not sent so far."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def bind(self, bucket: GradientBucket) -> None:
        """Bind the parameters of a bucket."""
        for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
            if self._parameters.setdefault(name, parameter) is not parameter:
                raise ValueError(
                    f"{self._owner} was called for parameter {name!r} of two models, whose residuals would mix: pass"
                    " each DDP a hook object of its own"
                )

    def residual(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The residual of a parameter, shaped like ``like``; zeros at first, and when shape or dtype have changed."""
        found = self._tensors.get(name)
        if found is None or found.shape != like.shape or found.dtype is not like.dtype:
            found = self._tensors[name] = torch.zeros_like(like)
        return found
