"""`torch.nn.functional.multi_head_attention_forward` by an attention that is passed in.

Torch leaves a mode for the whole of that function, so that the mode does not see the attention inside of it.

Shapes: L queries, S keys, N batch, E the size of a token, H heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torch.nn.functional import linear

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_REMEDIES = {
    "need_weights": "call the layer with need_weights=False, as no rank has the weights of the whole sequence",
    "key_padding_mask": "pack the sequences into one row, and pass their bounds as cu_seqlens",
    "attn_mask": "leave out the mask, or pass is_causal=True with it if it is the causal one",
    "bias_k": "make the layer without add_bias_kv",
    "add_zero_attn": "make the layer without it",
    "static_k": "leave out static_k and static_v",
}


def multi_head_attention(  # noqa: PLR0917 - torch's signature
    attend: Callable[..., torch.Tensor],
    refuse: Callable[[ValueError], NoReturn],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: torch.Tensor | None,
    in_proj_bias: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    add_zero_attn: bool,  # noqa: FBT001
    dropout_p: float,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    training: bool = True,  # noqa: FBT001, FBT002
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,  # noqa: FBT001, FBT002
    attn_mask: torch.Tensor | None = None,
    use_separate_proj_weight: bool = False,  # noqa: FBT001, FBT002
    q_proj_weight: torch.Tensor | None = None,
    k_proj_weight: torch.Tensor | None = None,
    v_proj_weight: torch.Tensor | None = None,
    static_k: torch.Tensor | None = None,
    static_v: torch.Tensor | None = None,
    average_attn_weights: bool = True,  # noqa: ARG001, FBT001, FBT002 - weights are never given
    is_causal: bool = False,  # noqa: FBT001, FBT002
) -> tuple[torch.Tensor, None]:
    """Project query, key and value, attend by ``attend``, and project the output.

    ``attend`` is called as `torch.nn.functional.scaled_dot_product_attention`. ``refuse`` is called with an error where
    weights are wanted, or tokens are masked or added otherwise than by ``is_causal``, and raises it on all ranks. The
    other arguments are those of torch's function: the query (L, N, E) or (L, E), key and value (S, N, ...) or (S, ...).

    Returns:
        The output, of the query's shape, and None in place of weights.
    """
    wrong = _unsupported(
        need_weights=need_weights,
        key_padding_mask=key_padding_mask is not None,
        attn_mask=attn_mask is not None and not is_causal,
        bias_k=bias_k is not None or bias_v is not None,
        add_zero_attn=add_zero_attn,
        static_k=static_k is not None or static_v is not None,
    )
    if wrong is not None:
        refuse(wrong)
    if query.shape[-1] != embed_dim_to_check or query.dim() not in {2, 3}:
        refuse(ValueError(f"query must be of shape (L, N, {embed_dim_to_check}), not {tuple(query.shape)}"))
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight and in_proj_weight is not None:
        weights = in_proj_weight.chunk(3)
    biases: Any = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    inputs = [x if x.dim() == 3 else x.unsqueeze(1) for x in (query, key, value)]
    projected = (linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True))
    heads = [x.reshape(*x.shape[:2], num_heads, -1).permute(1, 2, 0, 3) for x in projected]  # (N, H, L or S, E / H)
    output = attend(*heads, dropout_p=dropout_p if training else 0.0, is_causal=is_causal)
    output = linear(output.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    return output.reshape(query.shape), None


def _unsupported(**wanted: bool) -> ValueError | None:
    """The error for the first argument in use that attention over ranks has no counterpart for."""
    for name, is_wanted in wanted.items():
        if is_wanted:
            return ValueError(
                f"torch.nn.MultiheadAttention can't be used with {name} inside of context_parallel: {_REMEDIES[name]}"
            )
    return None
