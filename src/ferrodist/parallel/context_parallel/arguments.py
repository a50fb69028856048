"""Arguments of attention over a sharded sequence: checked on each rank, and compared between ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ferrodist.arguments import check_bool, check_int, check_type
from ferrodist.collectives.arguments import check_tensor
from ferrodist.parallel.context_parallel.agreement import Call, compare_calls
from ferrodist.parallel.context_parallel.layout import check_lengths, check_local
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend

NO_TENSOR_PARALLELISM = (
    "tensor parallelism of the attention's inputs is not supported together with context parallelism. Shard the"
    " sequence only, or pass to_local()"
)
"""Advice for attention over DTensors."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query (B, H, T_local, D), key (B, H/G, S_local, D) and value (B, H/G, S_local, E)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionArguments:
    """Checked arguments of a call, but for its tensors: backward has those that autograd saves, and may drop."""

    key_shape: torch.Size
    value_shape: torch.Size
    causal: bool
    scale: float
    documents: tuple[int, ...] | None  # bounds in the whole sequence; None where position is of no account
    query_lengths: tuple[int, ...]  # of all ranks
    key_lengths: tuple[int, ...]
    group: Backend
    timeout: float


def check_attention(
    operation: str,
    inputs: Inputs,
    *,
    causal: bool,
    scale: float | None,
    cu_seqlens: torch.Tensor | Sequence[int] | None,
    enable_gqa: bool,
    dropout_p: float,
    group: Backend,
    timeout: float,
    num_head_shards: int = 1,
    overlap: bool = True,
) -> tuple[Inputs, AttentionArguments]:
    """Check the arguments of this rank, compare them with those of the others, and return them, tensors first.

    Args:
        operation: The function's name.
        inputs: Query, key and value.
        causal: As of `ring_attention`, as the following five.
        scale: The factor of scores.
        cu_seqlens: Bounds of documents.
        enable_gqa: Whether heads may be grouped.
        dropout_p: Refused unless 0.
        group: The group.
        timeout: Seconds for the comparison.
        num_head_shards: The number of ranks over which heads are divided.
        overlap: As of `ring_attention`; only checked.
    """
    bounds: tuple[int, ...] | None = None
    factor = 1.0

    def describe() -> Call:
        nonlocal inputs, bounds, factor
        check_bool("causal", causal)
        check_bool("enable_gqa", enable_gqa)
        check_bool("overlap", overlap)
        if dropout_p != 0:
            raise ValueError(
                f"dropout_p must be 0, not {dropout_p!r}: {operation} has no dropout, whose mask would have to be the"
                " same however the sequence is divided. Set the model's attention dropout to 0"
            )
        for name, each in zip("qkv", inputs, strict=True):
            check_local(operation, each, name, NO_TENSOR_PARALLELISM)
            check_tensor(each, name)
        inputs = _autocast(inputs)
        _check_inputs(inputs, enable_gqa=enable_gqa, num_head_shards=num_head_shards)
        query, key = inputs[:2]
        factor = _check_scale(scale, query.shape[-1])
        bounds = None if cu_seqlens is None else check_bounds(cu_seqlens)
        if (causal or bounds is not None) and query.shape[2] != key.shape[2]:
            raise ValueError(
                f"{operation} with causal or cu_seqlens takes as many queries as keys, not {query.shape[2]} and"
                f" {key.shape[2]} on this rank"
            )
        records = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
        shapes = ", ".join(
            f"{name} ({x.shape[0]}, {x.shape[1]}, *, {x.shape[3]})" for name, x in zip("qkv", inputs, strict=True)
        )
        text = (
            f"{shapes}, {query.dtype} on {query.device.type}, causal={causal}, scale={factor!r}, cu_seqlens={bounds},"
            f" gradient {'recorded' if records else 'not recorded'}"
        )
        return Call(text, (query.shape[2], key.shape[2]))

    lengths = compare_calls(operation, describe, group, timeout)
    query_lengths, key_lengths = (tuple(each[i] for each in lengths) for i in (0, 1))
    arguments = AttentionArguments(
        key_shape=inputs[1].shape,
        value_shape=inputs[2].shape,
        causal=causal,
        scale=factor,
        documents=_check_documents(operation, bounds, causal=causal, lengths=query_lengths),
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        group=group,
        timeout=timeout,
    )
    return inputs, arguments


def _autocast(inputs: Inputs) -> Inputs:
    """Cast as autocast casts the inputs of torch's attention."""
    device = inputs[0].device.type
    if not torch.is_autocast_enabled(device):
        return inputs
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (x if x.dtype is torch.float64 else x.to(dtype) for x in inputs)
    return query, key, value


def _check_inputs(inputs: Sequence[torch.Tensor], *, enable_gqa: bool, num_head_shards: int) -> None:
    """Raise unless query, key and value fit each other."""
    for name, each in zip("qkv", inputs, strict=True):
        if each.dim() != 4:
            raise ValueError(f"{name} must be of shape (batch, heads, tokens, size of a head), not {tuple(each.shape)}")
        if each.dtype not in _DTYPES:
            raise TypeError(f"{name} must be of a floating dtype of 16, 32 or 64 bits, not {each.dtype}")
        if each.dtype is not inputs[0].dtype or each.device != inputs[0].device:
            raise TypeError(
                f"q, k and v must have one dtype and device: q is {inputs[0].dtype} on {inputs[0].device}, {name}"
                f" {each.dtype} on {each.device}"
            )
    query, key, value = inputs
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"k and v must be alike but for the last dim, not {tuple(key.shape)} and {tuple(value.shape)}")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"q and k must have one batch and size of heads, not {tuple(query.shape)} and {tuple(key.shape)}"
        )
    heads, key_heads = query.shape[1], key.shape[1]
    if key_heads not in {heads, 1} and not enable_gqa:  # one is broadcast, as by torch
        raise ValueError(f"q has {counted(heads, 'head')} and k {key_heads}: pass enable_gqa=True for grouped heads")
    if not key_heads or heads % key_heads:
        raise ValueError(f"the {counted(heads, 'head')} of q can't be grouped by the {key_heads} of k")
    if key_heads % num_head_shards:
        raise ValueError(
            f"Ulysses divides heads over ranks: {counted(num_head_shards, 'rank')} can't share the {key_heads} of k and"
            ' v evenly. Use ring attention (method="ring"), or a number of ranks that divides them'
        )


def _check_scale(scale: float | None, size: int) -> float:
    if scale is None:
        return 1 / math.sqrt(max(size, 1))
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number or None, not {scale!r}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, not {scale!r}")
    return float(scale)


def check_bounds(cu_seqlens: torch.Tensor | Sequence[int]) -> tuple[int, ...]:
    """Return the bounds of documents as integers in ascending order, from 0."""
    check_type(cu_seqlens, Iterable, "cu_seqlens must be integers, as [0, 5, 12] for documents of 5 and 7 tokens")
    values = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else list(cu_seqlens)
    check_type(values, list, "cu_seqlens must have one dim")
    bounds = tuple(check_int(f"cu_seqlens[{i}]", value) for i, value in enumerate(values))
    if len(bounds) < 2 or bounds[0] != 0 or list(bounds) != sorted(bounds):
        raise ValueError(
            "cu_seqlens must be the bounds of documents in ascending order, from 0 to the length of the whole sequence,"
            f" not {list(bounds)}"
        )
    return bounds


def _check_documents(
    operation: str, bounds: tuple[int, ...] | None, *, causal: bool, lengths: Sequence[int]
) -> tuple[int, ...] | None:
    """The bounds of documents, on all ranks alike; one document if a causal sequence has no bounds."""
    if bounds is None and not causal:
        return None
    total = check_lengths(operation, lengths)
    if bounds is not None and bounds[-1] != total:
        raise ValueError(
            f"{operation}: cu_seqlens ends at {bounds[-1]}, and the whole sequence has {counted(total, 'token')}"
        )
    return bounds or (0, total)
