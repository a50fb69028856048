"""What a hook has not sent of the gradients so far, which it adds to those of a later step (error feedback)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ferrodist.parallel.data.gradient_bucket import GradientBucket

__all__ = ["Residuals"]


class Residuals:
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
