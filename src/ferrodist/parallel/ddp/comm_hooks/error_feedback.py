"""Error feedback: what a lossy hook has not sent is added to the gradients of the next step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ferrodist.parallel.ddp.bucket import GradientBucket


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
        """The residual of a parameter like ``like``; zeros at first, and when shape, dtype or device have changed."""
        found = self._tensors.get(name)
        form = (like.shape, like.dtype, like.device)
        if found is None or (found.shape, found.dtype, found.device) != form:
            found = self._tensors[name] = torch.zeros_like(like)
        return found
