"""Private names of torch's attention.

==============================================================  =================
`torch.ops.aten._scaled_dot_product_flash_attention_for_cpu`    2.10 to 2.15
`..._flash_attention_for_cpu_backward`                          2.10 to 2.15
==============================================================  =================

Where torch lacks one of them, attention is computed by public operators.
"""

from __future__ import annotations

from typing import Any

import torch

_forward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)

has_cpu_flash_attention = _forward is not None and _backward is not None
"""True if torch has attention on the CPU that gives the log-sum-exp of each query's scores, too."""


def cpu_flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of (B, H, T, D) by (B, H, S, D), none of them 0: the output and the log-sum-exp (B, H, T)."""
    output, log_sum_exp = _forward(query, key, value, 0.0, causal, scale=scale)
    return output, log_sum_exp


def cpu_flash_attention_backward(
    grad: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value; output and log-sum-exp may be those over more keys than these."""
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _backward(
        grad, *inputs, output, log_sum_exp, 0.0, causal, scale=scale
    )
    return grads
