"""PowerSGD: gradients sent as low-rank matrices.

After T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019 (https://arxiv.org/abs/1905.13727), algorithms 1 (rank-r compression by one step of power
iteration, warm-started) and 2 (error feedback).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ferrodist.arguments import check_int
from ferrodist.collectives.reduce import async_allreduce
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.parallel.ddp.comm_hooks.compression import allreduce
from ferrodist.parallel.ddp.comm_hooks.continued import Continued
from ferrodist.parallel.ddp.comm_hooks.error_feedback import ErrorFeedback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.collectives.work import PendingCollective
    from ferrodist.parallel.ddp.bucket import GradientBucket


class _Matrix(NamedTuple):
    """A gradient that is sent as P @ Q.T."""

    gradient: torch.Tensor  # a view of the bucket, (rows, columns)
    residual: torch.Tensor  # the part not sent so far, (rows, columns)
    is_present: bool  # whether this rank has a gradient
    left: torch.Tensor  # P, (rows, rank)
    right: torch.Tensor  # Q, (columns, rank)


class PowerSGD:
    """A communication hook that sends each matrix as two thin ones, whose product approximates it.

    The part that a step leaves out is added to the next step's gradient (error feedback). A gradient of shape (n, a, b,
    ...) is a matrix of n rows, where n is the outermost dim in memory. For n x m elements (n + m) * rank are sent.
    Vectors, matrices that would not shrink, half-precision and complex gradients are averaged as they are, and so are
    all gradients until ``start_step``. Each bucket with a matrix takes three messages.

    A residual waits while its parameter has no gradient on this rank. In a step whose average is not finite nothing is
    added to it, and it is halved, as a gradient scaler halves its scale then. Otherwise it stays in units of the scale
    at its time: when a scaler doubles its scale, residuals count half.

    The ranks compute the product of the averages from equal bits. CPUs of several kinds may round it differently: where
    hosts differ, call ``broadcast_parameters`` now and then.

    One object serves one DDP; it holds as many elements again as there are gradients.

    Args:
        rank: The rank of the approximation.
        start_step: Number of steps (calls for a bucket) that average everything.
        seed: Seed of the first Q, equal on all ranks.

    Raises:
        TypeError, ValueError: An argument is wrong.
        ValueError: By backward, when the object serves another DDP already.
    """

    def __init__(self, rank: int = 4, *, start_step: int = 10, seed: int = 0) -> None:
        self.rank = check_int("rank", rank, min=1)
        self.start_step = check_int("start_step", start_step, min=0)
        self.seed = check_int("seed", seed, min=0)
        self._num_steps: dict[int, int] = {}  # by bucket index
        self._right_factors: dict[str, torch.Tensor] = {}
        self._residuals = ErrorFeedback(self.describe())

    def describe(self) -> str:
        """The text that ranks compare."""
        return f"PowerSGD(rank={self.rank}, start_step={self.start_step}, seed={self.seed})"

    def __call__(self, bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
        """Start the reduction of a bucket."""
        self._residuals.bind(bucket)
        step = self._num_steps.get(bucket.index, 0)
        self._num_steps[bucket.index] = step + 1
        if step < self.start_step:
            return allreduce(bucket)
        with torch.no_grad():
            matrices, vectors = self._divide(bucket)
            if not matrices:
                return allreduce(bucket)
            lefts = [matrix.left for matrix in matrices]
            for matrix in matrices:
                if matrix.is_present:
                    matrix.gradient.add_(matrix.residual)  # now the gradient is the tensor to send
                torch.mm(matrix.gradient, matrix.right, out=matrix.left)
            sent = _flatten([*lefts, *vectors])
        first = async_allreduce(sent, ReduceOp.MEAN, group=bucket.group, out=sent, timeout=bucket.timeout)

        def finish(average: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                _unflatten_into(average, [*lefts, *vectors])
                _finish(bucket, matrices)
            return bucket.tensor

        return Continued(first, finish)

    def _divide(self, bucket: GradientBucket) -> tuple[list[_Matrix], list[torch.Tensor]]:
        """The bucket's gradients that shrink, and the others."""
        matrices, others = [], []
        for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
            flat = _as_matrix(gradient)
            rows, columns = flat.shape
            if flat.dtype in (torch.float32, torch.float64) and (rows + columns) * self.rank < rows * columns:
                matrices.append(
                    _Matrix(
                        flat,
                        self._residuals.residual(name, flat),
                        name not in bucket.absent,
                        flat.new_empty(rows, self.rank),
                        self._right_factor(name, flat),
                    )
                )
            else:
                others.append(gradient)
        return matrices, others

    def _right_factor(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        found = self._right_factors.get(name)
        form = ((gradient.shape[1], self.rank), gradient.dtype, gradient.device)
        if found is None or (tuple(found.shape), found.dtype, found.device) != form:
            generator = torch.Generator().manual_seed(self.seed)
            found = torch.randn(gradient.shape[1], self.rank, generator=generator, dtype=gradient.dtype, device="cpu")
            found = self._right_factors[name] = found.to(gradient.device)
        return found


def _finish(bucket: GradientBucket, matrices: Sequence[_Matrix]) -> None:
    """Second half of the algorithm: Q, the product, and the residual."""
    for matrix in matrices:
        matrix.left.copy_(torch.linalg.qr(matrix.left).Q)
    rights = [torch.mm(matrix.gradient.t(), matrix.left) for matrix in matrices]
    sent = _flatten(rights)
    average = async_allreduce(sent, ReduceOp.MEAN, group=bucket.group, out=sent, timeout=bucket.timeout).wait()
    _unflatten_into(average, rights)
    for matrix, right in zip(matrices, rights, strict=True):
        product = torch.mm(matrix.left, right.t())
        if product.isfinite().all():
            if matrix.is_present:
                matrix.residual.copy_(matrix.gradient)
            matrix.residual.sub_(product)
        else:
            matrix.residual.mul_(0.5)
        if right.isfinite().all() and right.any():  # zeros would end the power iteration
            # Normalised, or products with it would have the magnitude of squared gradients.
            matrix.right.copy_(right / right.abs().amax())
        matrix.gradient.copy_(product)


def _as_matrix(gradient: torch.Tensor) -> torch.Tensor:
    """View a gradient with its elements in memory order: rows of the outermost dim, or one row."""
    order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
    rows = gradient.shape[order[0]] if len(order) > 1 else 1
    return gradient.permute(order).view(rows, gradient.numel() // rows if rows else 0)


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unflatten_into(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    for part, tensor in zip(torch.split(flat, [tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.copy_(part.view(tensor.shape))
