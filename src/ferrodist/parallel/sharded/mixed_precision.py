"""Which dtypes a model computes, sends and keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ferrodist.torch_private.modules import own_buffers
from ferrodist.torch_private.pytree import tree_map

__all__ = ["MixedPrecision"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """Dtypes other than those of the shards, which stay as they are for the optimizer.

    After P. Micikevicius et al., "Mixed Precision Training", ICLR 2018 (https://arxiv.org/abs/1710.03740). They apply
    to floating-point tensors only. None leaves a dtype as it is.

    Args:
        param_dtype: Parameters are gathered, and forward and backward computed, in this.
        reduce_dtype: Gradients are averaged in this; None is ``param_dtype``.
        buffer_dtype: Buffers are converted to this when FSDP is made.
        cast_inputs: Convert the tensors that the model is called with to ``param_dtype``.

    Raises:
        TypeError: A dtype is none, or not a floating-point one.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name} must be a torch.dtype or None, not {type(dtype).__name__}")
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise TypeError(f"{name} must be a floating-point dtype of at least 16 bits, not {dtype}")

    def computed(self, kept: torch.dtype) -> torch.dtype:
        """In which dtype a parameter that is kept in ``kept`` is gathered and used."""
        return self.param_dtype if self.param_dtype is not None and kept.is_floating_point else kept

    def reduced(self, kept: torch.dtype) -> torch.dtype:
        """In which dtype its gradient is averaged."""
        return self.reduce_dtype if self.reduce_dtype is not None and kept.is_floating_point else self.computed(kept)

    def cast(self, inputs: Any) -> Any:
        """Inputs of the model, in any nesting of lists, tuples and dicts, in the dtype in which it computes."""
        dtype = self.param_dtype
        if dtype is None or not self.cast_inputs:
            return inputs
        return tree_map(
            lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, inputs
        )

    def convert_buffers(self, module: torch.nn.Module) -> None:
        """Give the module's floating-point buffers ``buffer_dtype``, in place."""
        if self.buffer_dtype is None:
            return
        for each in module.modules():
            for name, buffer in own_buffers(each).items():
                if buffer is not None and buffer.is_floating_point():
                    own_buffers(each)[name] = buffer.to(self.buffer_dtype)
