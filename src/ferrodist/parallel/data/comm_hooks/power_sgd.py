"""Gradients as low-rank matrices.

After T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019 (https://arxiv.org/abs/1905.13727), algorithms 1 (rank-r compression by one step of power
iteration, warm-started) and 2 (error feedback).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.collectives.reductions import async_allreduce
from ferrodist.parallel.data.comm_hooks.compression import allreduce
from ferrodist.parallel.data.comm_hooks.continued import Continued

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.collectives.pending import PendingCollective
    from ferrodist.parallel.data.gradient_bucket import GradientBucket

__all__ = ["PowerSGD"]


class _Matrix(NamedTuple):
    """A gradient that is sent as P @ Q.T."""

    gradient: torch.Tensor  # a view of the bucket, (rows, columns)
    error: torch.Tensor  # what was not sent so far, (rows, columns)
    left: torch.Tensor  # P, (rows, rank)
    right: torch.Tensor  # Q, (columns, rank)


class PowerSGD:
    """A communication hook that sends each matrix as two thin ones, whose product is near it.

    What a step leaves out is added to the next step's gradient (error feedback). A gradient of shape (n, a, b, ...) is
    a matrix of n rows. For n x m elements (n + m) * rank are sent; vectors, and matrices that would not shrink, are
    averaged as they are, and so is everything until ``start_step``. Each bucket takes three messages.

    The ranks compute the averages' product from equal bits. Processors of several kinds may round it differently: where
    hosts differ, call ``broadcast_parameters`` now and then.

    One object serves one DDP; it keeps as many elements again as there are gradients.

    Args:
        rank: Of the thin matrices.
        start_step: Steps (calls for a bucket) that average everything.
        seed: Of the first Q, equal on all ranks.

    Raises:
        TypeError, ValueError: An argument is wrong.
    """

    def __init__(self, rank: int = 4, *, start_step: int = 10, seed: int = 0) -> None:
        for name, value, least in (("rank", rank, 1), ("start_step", start_step, 0), ("seed", seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        self.rank = rank
        self.start_step = start_step
        self.seed = seed
        self._num_steps: dict[int, int] = {}  # of each bucket
        self._errors: dict[str, torch.Tensor] = {}
        self._rights: dict[str, torch.Tensor] = {}

    def __call__(self, bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
        """Start the reduction of a bucket."""
        step = self._num_steps.get(bucket.index, 0)
        self._num_steps[bucket.index] = step + 1
        if step < self.start_step or not bucket.tensor.is_floating_point():
            return allreduce(bucket)
        with torch.no_grad():
            matrices, vectors = self._divide(bucket)
            lefts = [matrix.left for matrix in matrices]
            for matrix in matrices:
                matrix.error.add_(matrix.gradient)  # from here on what is to be sent
                torch.mm(matrix.error, matrix.right, out=matrix.left)
            sent = _join([*lefts, *vectors], bucket.tensor)
        first = async_allreduce(sent, ReduceOp.MEAN, group=bucket.group, out=sent)

        def finish(average: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                _part(average, [*lefts, *vectors])
                return self._finish(bucket, matrices)

        return Continued(first, finish)

    def _finish(self, bucket: GradientBucket, matrices: Sequence[_Matrix]) -> torch.Tensor:
        """Second half of the algorithm: Q, the product, and what it leaves out."""
        rights = [matrix.right for matrix in matrices]
        for matrix in matrices:
            matrix.left.copy_(torch.linalg.qr(matrix.left).Q)
            torch.mm(matrix.error.t(), matrix.left, out=matrix.right)
        if rights:
            sent = _join(rights, bucket.tensor)
            _part(async_allreduce(sent, ReduceOp.MEAN, group=bucket.group, out=sent).wait(), rights)
        for matrix in matrices:
            torch.mm(matrix.left, matrix.right.t(), out=matrix.gradient)
            matrix.error.sub_(matrix.gradient)
        return bucket.tensor

    def _divide(self, bucket: GradientBucket) -> tuple[list[_Matrix], list[torch.Tensor]]:
        """The bucket's gradients that shrink, and the others."""
        matrices: list[_Matrix] = []
        others: list[torch.Tensor] = []
        for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
            rows = gradient.shape[0] if gradient.dim() > 1 else 1
            columns = gradient.numel() // rows if rows else 0
            fits = gradient.is_contiguous() and bucket.tensor.dtype in (torch.float32, torch.float64)
            if fits and (rows + columns) * self.rank < rows * columns:
                flat = gradient.view(rows, columns)
                matrices.append(
                    _Matrix(flat, self._error(name, flat), flat.new_empty(rows, self.rank), self._right(name, flat))
                )
            else:
                others.append(gradient)
        return matrices, others

    def _error(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        found = self._errors.get(name)
        if found is None or found.shape != gradient.shape or found.dtype is not gradient.dtype:
            found = self._errors[name] = torch.zeros_like(gradient)
        return found

    def _right(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        found = self._rights.get(name)
        if found is None or found.shape != (gradient.shape[1], self.rank) or found.dtype is not gradient.dtype:
            generator = torch.Generator().manual_seed(self.seed)
            found = torch.randn(gradient.shape[1], self.rank, generator=generator, dtype=gradient.dtype)
            self._rights[name] = found
        return found


def _join(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Their elements, one after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


def _part(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Give the elements that `_join` joined back."""
    for part, tensor in zip(torch.split(flat, [tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.copy_(part.view(tensor.shape))
