"""Top-k sparsification: only the largest elements of gradients are sent.

After A. F. Aji, K. Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017
(https://arxiv.org/abs/1704.05021), and S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS
2018 (https://arxiv.org/abs/1809.07599), which shows why the unsent elements must be fed back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.all_gather import async_all_gather
from ferrodist.parallel.ddp.comm_hooks.compression import allreduce
from ferrodist.parallel.ddp.comm_hooks.continued import Continued
from ferrodist.parallel.ddp.comm_hooks.error_feedback import ErrorFeedback

if TYPE_CHECKING:
    from ferrodist.collectives.work import PendingCollective
    from ferrodist.parallel.ddp.bucket import GradientBucket

_MAX_ELEMENTS = 1 << 31


class TopK:
    """A communication hook that sends the elements of largest magnitude, and adds the others to the next step's.

    The elements of a bucket compete with each other. Each rank sends its own choice, values and 32-bit positions, to
    all: with p ranks a rank receives p * ratio * (size of an element + 4 bytes) for each element. They are added up in
    rank order, and divided by p. Half-precision and complex gradients are averaged as they are.

    A residual waits while its parameter has no gradient on this rank. In a step whose average is not finite nothing is
    added to it, and it is halved, as a gradient scaler halves its scale then. Otherwise it stays in units of the scale
    at its time: when a scaler doubles its scale, residuals count half.

    One object serves one DDP; it holds as many elements again as there are gradients.

    Args:
        ratio: The share of a bucket's elements that is sent: above 0, at most 1. At least one is.

    Raises:
        TypeError, ValueError: The ratio is not such a number.
        ValueError: By backward, when the object serves another DDP already.
    """

    def __init__(self, ratio: float = 0.01) -> None:
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
            raise TypeError(f"ratio must be a number, not {type(ratio).__name__}")
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1, not {ratio}")
        self.ratio = ratio
        self._residuals = ErrorFeedback(self.describe())

    def describe(self) -> str:
        """The text that ranks compare."""
        return f"TopK(ratio={float(self.ratio)})"

    def __call__(self, bucket: GradientBucket) -> PendingCollective[torch.Tensor]:
        """Start the reduction of a bucket."""
        self._residuals.bind(bucket)
        flat = bucket.tensor
        if flat.dtype not in (torch.float32, torch.float64) or not 0 < flat.numel() < _MAX_ELEMENTS:
            return allreduce(bucket)
        count = max(1, math.ceil(self.ratio * flat.numel()))
        residuals = [
            (gradient, self._residuals.residual(name, gradient))
            for name, gradient in zip(bucket.names, bucket.gradients, strict=True)
            if name not in bucket.absent
        ]
        with torch.no_grad():
            for gradient, residual in residuals:
                gradient.add_(residual)
            indices = flat.abs().topk(count, sorted=False).indices
            values = flat[indices]
            flat[indices] = 0  # now the gradients are the new residuals
            sent = torch.cat([values.view(torch.uint8), indices.to(torch.int32).view(torch.uint8)])
        size = values.numel() * values.element_size()

        def finish(gathered: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                average = torch.zeros_like(flat)
                for part in gathered.view(bucket.group.world_size, -1):
                    # Cloned, since a view as another dtype needs its alignment.
                    selected = part[size:].clone().view(torch.int32), part[:size].clone().view(flat.dtype)
                    average.index_add_(0, *selected)
                average.div_(bucket.group.world_size)
                is_finite = average.isfinite().all()
                for gradient, residual in residuals:
                    if is_finite:
                        residual.copy_(gradient)
                    else:
                        residual.mul_(0.5)
                return average

        return Continued(async_all_gather(sent, group=bucket.group, timeout=bucket.timeout), finish)
